"""The invariants of overlap, over whole PPO graphs of fakes in virtual time under random schedules."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeVar

import anyio
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.events import Chunk, Defer, Finish, Prompt, Response, RolloutEvent, rollout_of
from oppo.models import Cut, Decode, Decoding
from oppo.stages.ledger import InFlightRollout
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_per_token, fake_scalar, prompts, run_virtual
from oppo.testing.fake_policy import FakeDecode
from tests.kit.known import known
from tests.kit.pipelines import Pipeline, Setting, on_policy, same_batches, settings

pytestmark = pytest.mark.schedules

T = TypeVar("T")


def played(setting: Setting) -> Pipeline:
    pipeline = Pipeline(setting)
    run_virtual(pipeline.run)
    return pipeline


@given(settings())
@example(Setting(extra=2))
def test_a_rollout_is_deferred_once_for_each_step_that_ends_before_it_is_trained(setting: Setting) -> None:
    pipeline = played(setting)
    for rollout, story in pipeline.tap.story().items():
        steps = [
            step for step, stage, item in pipeline.tap.items if stage == "generate" and rollout_of(item) == rollout
        ]
        assert sum(isinstance(event, Defer) for event in story) == steps[-1] - steps[0]
    for step, report in enumerate(pipeline.reports):
        carried = {event.rollout for event in report.deferred}
        later = {r for batch in pipeline.batches[step + 1 :] for r in batch.rollouts}
        assert carried <= later


def assert_grammatical(story: list[RolloutEvent]) -> None:
    assert isinstance(story[0], Prompt)
    assert isinstance(story[-1], Finish)
    chunks = [event for event in story if isinstance(event, Chunk)]
    assert [chunk.start for chunk in chunks] == [sum(len(c.tokens) for c in chunks[:k]) for k in range(len(chunks))]
    assert np.array_equal(np.concatenate([chunk.tokens for chunk in chunks]), story[-1].response.tokens)
    assert bool(np.all(np.diff(story[-1].response.versions) >= 0))
    ages = [event.age for event in story if isinstance(event, Defer)]
    assert ages == list(range(1, len(ages) + 1))
    assert sum(isinstance(event, Prompt | Finish) for event in story) == 2


@given(settings())
def test_scores_are_those_of_the_finished_response_at_the_version_of_its_step(setting: Setting) -> None:
    for step, batch in enumerate(played(setting).batches):
        version = max(0, step - setting.lookahead)
        for response, score, row in zip(batch.responses, batch.scores, batch.rows(), strict=True):
            tokens = (*response.prompt.tokens.tolist(), *response.tokens.tolist())
            finish = Finish(response.prompt.rollout, response, "eos")
            assert score == np.float32(fake_scalar(finish, tokens, 0))
            assert np.array_equal(known(batch.reference)[row], fake_per_token(finish, tokens, 0))
            assert np.array_equal(known(batch.values)[row], fake_per_token(finish, tokens, version)), (
                "a stale critic was believed"
            )


@given(settings())
def test_without_deferral_overlap_changes_time_and_nothing_else(setting: Setting) -> None:
    streamed = replace(setting, extra=0)
    assert same_batches(played(streamed).batches, played(on_policy(streamed)).batches)


@given(settings())
def test_frozen_scorers_read_every_token_once_and_the_critic_replays_at_most_once(setting: Setting) -> None:
    pipeline = played(setting)
    read = sum(len(r.prompt.tokens) + len(r) for batch in pipeline.batches for r in batch.responses)
    assert isinstance(pipeline.reward, FakeScorer)
    assert pipeline.reward.tokens == pipeline.reference.tokens == read
    assert pipeline.critic.tokens <= 2 * read
    assert not pipeline.reward.sessions
    assert not pipeline.critic.sessions


@given(settings(), st.floats(0, 3))
@example(Setting(extra=4), 0.0)
@example(Setting(extra=4), 0.1)
def test_cancelling_from_outside_leaves_nothing_behind(setting: Setting, after: float) -> None:
    async def main() -> None:
        pipeline = Pipeline(setting)
        with anyio.move_on_after(after):
            await pipeline.run()
        assert len(anyio.get_running_tasks()) == 1
        assert pipeline.policy._cut is None, "the policy is not left decoding"

    run_virtual(main)


def test_deferral_shortens_steps_that_wait_for_stragglers() -> None:
    slow = Setting(lengths=(5, 5, 5, 5, 5, 5, 5, 200), batch=4, steps=6)
    waiting = sum(report.seconds for report in played(slow).reports)
    carrying = sum(report.seconds for report in played(replace(slow, extra=2)).reports)
    assert carrying < 0.7 * waiting


def test_a_step_whose_batch_is_full_of_deferred_rollouts_decodes_nothing() -> None:
    tied = played(Setting(lengths=(5,), batch=2, extra=2, steps=3, prompts=6))
    assert [report.seconds for report in tied.reports] == pytest.approx([0.05, 0.0, 0.05])
    for story in tied.tap.story().values():
        assert_grammatical(story)


def test_a_graph_can_be_run_again_with_other_prompts() -> None:
    async def twice() -> None:
        pipeline = Pipeline(Setting(steps=2, extra=2))
        await pipeline.run()
        await pipeline.run()
        assert len(pipeline.reports) == 4

    run_virtual(twice)


def test_the_score_of_a_step_is_the_mean_of_what_was_trained() -> None:
    pipeline = Pipeline(Setting(steps=1))
    pipeline.trainer.nonfinite = lambda rollout: rollout == 2
    run_virtual(pipeline.run)
    (report,), (batch,) = pipeline.reports, pipeline.batches
    assert report.score == pytest.approx(float(np.mean(batch.scores[[0, 1, 3]])))


def test_a_step_of_which_nothing_was_trained_has_no_score() -> None:
    pipeline = Pipeline(Setting(steps=1))
    pipeline.trainer.nonfinite = lambda rollout: True
    run_virtual(pipeline.run)
    assert np.isnan(pipeline.reports[0].score)


def test_steps_asked_for_one_by_one_carry_rollouts_as_steps_asked_for_together_do() -> None:
    setting = Setting(extra=2, steps=4)
    together, apart = played(setting), Pipeline(setting)

    async def one_by_one() -> None:
        async with apart.graph().open(prompts(setting.prompts)) as run:
            for _ in range(setting.steps):
                report = await run.step()
                assert report is not None
                apart.reports.append(report)

    run_virtual(one_by_one)
    carried = [report.deferred for report in apart.reports]
    assert all(len(deferred) == 2 for deferred in carried)
    assert carried[:2] == [report.deferred for report in together.reports][:2], "before an end is in sight"


def test_decoding_does_not_wait_until_the_scorers_have_read_the_prompts() -> None:
    class Clocked(FakePolicy):
        def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
            self.began = anyio.current_time()
            return super().decoding(live, cut)

    pipeline = Pipeline(Setting(batch=32, steps=1, capacity=2, per_call=0.2))
    pipeline.generate.policy = policy = Clocked(pipeline.setting.length, 0.01)
    run_virtual(pipeline.run)
    assert policy.began == 0


def test_closing_gives_up_every_rollout_though_one_of_them_cannot_be() -> None:
    class Clinging(FakePolicy):
        async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
            self.opened = await super().open(rollouts)
            self.opened[0].aclose = refuse  # type: ignore[method-assign]  # the one that cannot be closed
            return self.opened

    async def refuse() -> None:
        raise OSError("stuck")

    async def half_a_step(pipeline: Pipeline) -> None:
        async with pipeline.graph().open(prompts(9)) as run:
            with anyio.move_on_after(0.5):
                await run.step()

    async def main() -> None:
        pipeline = Pipeline(Setting(lengths=(200, 200, 5)))
        pipeline.generate.policy = policy = Clinging(pipeline.setting.length, 0.01)
        with pytest.raises(OSError, match="stuck"):
            await half_a_step(pipeline)
        assert [decode.closed for decode in policy.opened] == [False, True, True, True]
        pipeline.generate.policy = pipeline.policy
        await pipeline.run()
        assert len(pipeline.reports) == 3, "the graph can be opened again"

    run_virtual(main)


def test_rollouts_that_have_ended_leave_memory_without_the_garbage_collector() -> None:
    async def main() -> None:
        graph = ppo(
            policy=FakePolicy(lambda prompt: 4 + prompt.admission % 5),
            reward=FakeScorer(fake_scalar),
            critic=FakeScorer(fake_per_token),
            reference=FakeScorer(fake_per_token),
            trainer=FakeTrainer(),
            admission=Overcommit(24, 8),
            chunks=Fixed(1),
        )
        async with graph.open(prompts(100)) as run:
            gc.collect()
            others = {id(each) for each in gc.get_objects()}

            def made(kind: type[T]) -> list[T]:
                return [each for each in gc.get_objects() if type(each) is kind and id(each) not in others]

            await run.step()
            report = await run.step()
            assert report is not None
            deferred = {event.rollout for event in report.deferred}
            assert {each.prompt.rollout for each in made(InFlightRollout)} == deferred
            assert {chunk.rollout for chunk in made(Chunk)} <= deferred
            assert not made(StopIteration), "of calls that have returned"

    before = gc.isenabled()
    gc.disable()
    try:
        run_virtual(main)
    finally:
        if before:
            gc.enable()
