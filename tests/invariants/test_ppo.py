"""The invariants of overlap, over whole PPO graphs of fakes in virtual time under random schedules."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import anyio
import numpy as np
import pytest
from hypothesis import assume, example, given, settings as hypothesis_settings, strategies as st

from oppo.admission import AdmitView, CutView, Observation, Overcommit, RefillView
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.events import Chunk, Defer, Finish, Prompt, Response, RolloutEvent, Scored, StepReport, Support, rollout_of
from oppo.graph import Graph
from oppo.models import Cut, Decode, Decoding, SyncedModel
from oppo.stages import Score, Update
from oppo.stages.dynamic_sampling import REJECTED
from oppo.stages.ledger import InFlightRollout
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    fake_per_token,
    fake_scalar,
    prompts,
    run_virtual,
)
from oppo.testing.fake_policy import FakeDecode
from tests.kit.known import known
from tests.kit.pipelines import Pipeline, Setting, motions, on_policy, same_batches, settings
from tests.stages.test_dynamic_sampling import CARRIED, Selected, every_third

pytestmark = pytest.mark.schedules

T = TypeVar("T")

SCHEDULES = int(os.environ["OPPO_SCHEDULES"])
"""As many as are asked for, not a share of them."""


def played(setting: Setting, *, proximal: bool = False) -> Pipeline:
    pipeline = Pipeline(setting, proximal=proximal)
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


AHEAD = (1, 2, 3, 4)


@given(settings(lookaheads=AHEAD))
def test_a_step_is_decoded_with_the_weights_of_the_step_as_far_back_as_the_lookahead(setting: Setting) -> None:
    """Never newer ones, however early they are there."""
    pipeline = played(setting)
    written = {
        (step, int(version))
        for step, stage, item in pipeline.tap.items
        if stage == "generate" and hasattr(item, "versions")
        for version in item.versions
    }
    assert written <= {(step, max(0, step - setting.lookahead)) for step in range(setting.steps)}


@given(settings(lookaheads=(0, *AHEAD)))
@example(Setting(lookahead=1))
@example(Setting(lookahead=1, extra=2))
def test_late_are_the_responses_that_were_deferred_whatever_the_staleness_of_the_others(setting: Setting) -> None:
    pipeline = played(setting)
    story = pipeline.tap.story()
    for batch, report in zip(pipeline.batches, pipeline.reports, strict=True):
        carried = [any(isinstance(event, Defer) for event in story[rollout]) for rollout in batch.rollouts]
        if carried:
            assert report.metrics["deferral/trained_late"] == sum(carried) / len(carried)


@dataclass
class Speeds:
    """Seconds of every stage: of a decode step, of a token that a scorer reads, of a call, an update, a weight sync."""

    decode: float = 0.01
    reference: float = 0.0
    reward: float = 0.0
    critic: float = 0.0
    proximal: float = 0.0
    per_call: float = 0.0
    update: float = 0.0
    weight_sync: float = 0.0


@st.composite
def speeds(draw: st.DrawFn) -> Speeds:
    seconds = {each.name: draw(st.sampled_from([0.0, 0.004, 0.3, 5.0])) for each in fields(Speeds)}
    return Speeds(**seconds)


@dataclass
class Timed(Pipeline):
    """A graph whose proximal log-probs depend on the version that recomputes them, as its values do on theirs."""

    speeds: Speeds = field(default_factory=Speeds)
    proximal: bool = True

    def __post_init__(self) -> None:
        seconds = self.speeds
        names = ("reference", "reward", "critic", "per_call", "update")
        self.setting = replace(self.setting, **{name: getattr(seconds, name) for name in names})
        super().__post_init__()
        self.policy.seconds, self.trainer.syncing = seconds.decode, seconds.weight_sync
        self.again = FakeCritic(per_token=seconds.proximal, per_call=seconds.per_call)

    def graph(self) -> Graph[StepReport]:
        synced: list[SyncedModel] = [self.policy, self.critic, self.again]
        return (
            super()
            .graph()
            .replace(
                proximal=Score(self.again, after="update"),
                update=Update(self.trainer, synced=synced, after=("generate", "value")),
            )
        )

    def versions(self) -> dict[str, set[tuple[int, int]]]:
        """Return the versions with which a stage has worked in each step."""
        found: dict[str, set[tuple[int, int]]] = {"generate": set(), "value": set(), "proximal": set()}
        for step, stage, item in self.tap.items:
            if isinstance(item, Chunk):
                found[stage].update((step, int(version)) for version in item.versions)
            elif isinstance(item, Scored) and stage in found:
                found[stage].add((step, item.version))
        return found


@given(settings(lookaheads=(0, *AHEAD)), speeds())
@example(Setting(extra=2, lookahead=2, steps=5), Speeds(reward=0.3, update=5.0))
@example(Setting(extra=2, lookahead=1, steps=5), Speeds(decode=5.0, proximal=0.3, weight_sync=5.0))
def test_how_fast_the_stages_are_changes_no_bit_and_no_version(setting: Setting, seconds: Speeds) -> None:
    setting = replace(setting, paces=())  # which decide, of the rollouts that are decoded, which are the first
    one, other = Timed(setting), Timed(replace(setting, capacity=16), speeds=seconds)
    for pipeline in (one, other):
        run_virtual(pipeline.run)
        before = {(step, max(0, step - setting.lookahead)) for step in range(setting.steps)}
        assert pipeline.versions()["generate"] | pipeline.versions()["value"] <= before
        assert pipeline.versions()["proximal"] <= {(step, step) for step in range(setting.steps)}
    assert same_batches(one.batches, other.batches)
    assert all(
        np.array_equal(known(a.proximal), known(b.proximal)) for a, b in zip(one.batches, other.batches, strict=True)
    )


@given(settings(prompts=(7, 1_000), lookaheads=AHEAD), st.integers(0, 3))
@example(Setting(steps=6, lookahead=1), 2)
def test_a_drain_that_nobody_planned_makes_the_run_that_was_told_to_drain_there(setting: Setting, after: int) -> None:
    setting = replace(setting, steps=6)

    async def drained(pipeline: Pipeline, told: int | None) -> int | None:
        source, last = pipeline.prompts(), None
        async with pipeline.graph().open(source, observers=[pipeline.tap], lookahead=setting.lookahead) as run:
            async for report in run.steps(setting.steps, drain_after=lambda index: index == told):
                if told is None and report.index == after and run.alive:
                    last = run.alive[-1]
                    run.drain()
        return last

    asked, told, plain = (Pipeline(setting) for _ in range(3))
    last = run_virtual(drained, asked, None)
    run_virtual(drained, told, last)
    assert same_batches(asked.batches, told.batches)
    if last is not None and last + 1 < len(told.batches):
        run_virtual(drained, plain, -1)
        assert not same_batches(asked.batches, plain.batches), "the step after it begins with newer weights"


@given(settings(lookaheads=AHEAD))
@example(Setting(lengths=(1,), batch=1, steps=3, capacity=1, lookahead=2))
@example(Setting(lengths=(1,), batch=1, steps=6, capacity=1, lookahead=4))
def test_proximal_log_probs_wait_for_the_weights_that_are_about_to_be_updated(setting: Setting) -> None:
    assume(setting.steps > 1)
    pipeline = played(setting, proximal=True)
    ends: dict[str, dict[int, float]] = {"update": {}, "proximal": {}}
    for span in pipeline.tap.spans:
        if span.track in ends and span.step is not None:
            ends[span.track][span.step] = span.end
    updated, proximal = ends["update"], ends["proximal"]
    for step in range(1, setting.steps):
        if step in proximal and step - 1 in updated:
            assert proximal[step] >= updated[step - 1]
    assert all(len(known(batch.proximal)) == len(batch.tokens) for batch in pipeline.batches)


@dataclass
class Noting:
    """Overcommit that notes how many steps it has observed at each admission."""

    inner: Overcommit
    observed: int = 0
    at_admission: list[int] = field(default_factory=list)

    @property
    def batch(self) -> int:
        return self.inner.batch

    @property
    def max_deferrals(self) -> int:
        return self.inner.max_deferrals

    def admit(self, view: AdmitView) -> int:
        self.at_admission.append(self.observed)
        return self.inner.admit(view)

    def cut(self, view: CutView) -> bool:
        return self.inner.cut(view)

    def observe(self, seen: Observation) -> None:
        self.observed += 1


@given(settings(lookaheads=AHEAD))
def test_controllers_know_the_same_steps_at_an_admission_whatever_the_speed(setting: Setting) -> None:
    admission = Noting(Overcommit(setting.batch, setting.extra, setting.max_deferrals))
    pipeline = Pipeline(setting, admission=admission)
    run_virtual(pipeline.run)
    known_steps = admission.at_admission[: len(pipeline.reports)]
    assert known_steps == [max(0, step - setting.lookahead) for step in range(len(known_steps))]


def test_seconds_of_steps_in_flight_add_up_to_the_time_of_the_run() -> None:
    setting = Setting(lengths=(20,), steps=6, lookahead=1, update=0.5, reward=0.001)
    reports = played(setting).reports
    seconds = [report.seconds for report in reports]
    assert seconds[2:] == pytest.approx([0.5] * 4, abs=0.05), "training takes longest, and alone decides"
    alone = [report.seconds for report in played(replace(setting, lookahead=0)).reports]
    assert sum(seconds) < 0.8 * sum(alone)


LENGTHS = (5, 9, 3, 30, 12, 7, 22, 4, 40, 6, 18)
KEPT = Setting(LENGTHS, batch=6, extra=6, steps=6, refill=True)


@dataclass(eq=False)
class Counted(FakePolicy):
    """Notes the rollouts of each decode step, each token of which is read at once."""

    rows: list[int] = field(default_factory=list)

    def attend(self, rows: Sequence[FakeDecode]) -> None:
        self.rows.append(len(rows))
        super().attend(rows)


@hypothesis_settings(max_examples=2 * SCHEDULES)
@given(motions())
@example(KEPT)
@example(replace(KEPT, lookahead=2, in_flight=True, update=0.5))
@example(replace(KEPT, extra=1, samples=2, paces=(0.5, 3.0)))
@example(replace(KEPT, prompts=7))
@example(Setting(extra=2))
@example(Setting(extra=2, paces=(1.0,), samples=2))
def test_every_prompt_is_trained_once_in_full_batches_that_are_fresh_enough(setting: Setting) -> None:
    pipeline = played(setting)
    story = pipeline.tap.story()
    trained = [rollout for batch in pipeline.batches for rollout in batch.rollouts]
    assert sorted(trained) == sorted(story) == list(range(len(trained)))
    sizes = [len(batch) for batch in pipeline.batches]
    assert all(size == setting.batch * setting.samples for size in sizes[:-1])
    assert sum(sizes) == min(setting.prompts, setting.steps * setting.batch) * setting.samples
    for step, (batch, report) in enumerate(zip(pipeline.batches, pipeline.reports, strict=True)):
        assert len(report.deferred) <= setting.most_carried
        assert (step - batch.versions[batch.sampled]).max(initial=0) <= setting.max_deferrals + setting.lookahead
        for response in batch.responses:
            made = FakeDecode(pipeline.policy, response.prompt, setting.length(response.prompt))
            assert response.tokens.tolist() == made.tokens(0, made.length).tolist()
            support = pipeline.policy.support(response.tokens)
            assert response.extra[Support].ids.tolist() == support.ids.tolist()
            assert response.extra[Support].counts.tolist() == support.counts.tolist()
    for events in story.values():
        assert_grammatical(events)
        assert sum(isinstance(event, Defer) for event in events) <= setting.max_deferrals


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_place_is_empty_for_one_decode_step_only(lookahead: int) -> None:
    setting = replace(KEPT, steps=12, lookahead=lookahead, chunks=Fixed(1))
    pipeline = Pipeline(setting)
    policy = Counted(setting.length, 0.01, capabilities=setting.capabilities)
    pipeline.policy = policy
    pipeline.generate = replace(pipeline.generate, policy=policy)
    run_virtual(pipeline.run)
    rows = policy.rows[: int(0.8 * len(policy.rows))]  # near the end no more can be trained
    assert max(rows) == setting.extra
    ended = sum(1 for events in pipeline.tap.story().values() if isinstance(events[-1], Finish))
    assert sum(setting.extra - each for each in rows) <= ended
    waiting = played(replace(setting, refill=False, extra=0))  # as many rows, in steps that wait for all of them
    steps = sum(item.decode_steps for _, _, item in waiting.tap.items if isinstance(item, Observation))
    assert len(policy.rows) < 0.65 * steps


def test_decode_steps_are_counted_over_those_that_followed_one_another() -> None:
    pipeline = Pipeline(replace(KEPT, extra=1, batch=3, steps=2))
    run_virtual(pipeline.run)
    seen = [item for _, _, item in pipeline.tap.items if isinstance(item, Observation)]
    assert [each.decode_steps for each in seen] == [sum(LENGTHS[:3]), sum(LENGTHS[3:6])]
    assert [each.decode_steps for each in seen] == [each.tokens for each in seen]
    assert [each.decode_seconds for each in seen] == pytest.approx([0.17, 0.49])


async def test_prompts_that_come_slowly_are_neither_lost_nor_waited_for_by_what_decodes() -> None:
    async def slowly() -> AsyncIterator[Prompt]:
        for number, prompt in enumerate(prompts(30)):
            await anyio.sleep(0.0 if number < 6 else 0.15)
            yield prompt

    pipeline = Pipeline(replace(KEPT, steps=5))
    async with pipeline.graph().open(slowly(), observers=[pipeline.tap]) as run:
        reports = [report async for report in run.steps(5)]
    trained = [rollout for report in reports for rollout in report.trained]
    assert Counter(trained) == Counter(range(30))
    unwritten = [event for events in pipeline.tap.story().values() for event in events[1:2] if isinstance(event, Defer)]
    assert unwritten, "what was read of the prompts by the cut is deferred, unwritten"


class Nothing:
    """An admission that lets everything join late."""

    batch = 2
    max_deferrals = 1

    def __init__(self) -> None:
        self.views: list[RefillView] = []

    def admit(self, view: AdmitView) -> int:
        return 1

    def refill(self, view: RefillView) -> int:
        self.views.append(view)
        return 1 if view.placed + view.unplaced < 3 else 0

    def cut(self, view: CutView) -> bool:
        return view.placed >= self.batch and not view.overdue

    def observe(self, seen: Observation) -> None:
        pass


def test_an_admission_of_ones_own_is_asked_at_the_start_and_at_each_end() -> None:
    admission = Nothing()
    pipeline = Pipeline(replace(KEPT, lengths=(3,), steps=2, batch=2, extra=1), admission=admission)
    run_virtual(pipeline.run)
    assert admission.views[0] == RefillView(placed=0, decoding=1, unplaced=1)
    assert [len(batch) for batch in pipeline.batches] == [2, 2]
    ends = [item for _, stage, item in pipeline.tap.items if stage == "generate" and isinstance(item, Finish)]
    assert len(ends) == 4
    assert np.isfinite(known(pipeline.batches[0].advantages)).all()


ALL = replace(CARRIED, lookahead=2, refill=True, in_flight=True, extra=4, update=0.5)


@hypothesis_settings(max_examples=SCHEDULES)
@given(motions(), st.booleans())
@example(ALL, True)
@example(ALL, False)
@example(replace(ALL, extra=1, max_deferrals=1, lookahead=3), True)
@example(replace(ALL, prompts=7, steps=4), True)
@example(replace(CARRIED, lookahead=1, refill=True, extra=1, prompts=7), True)
@example(CARRIED, True)
@example(replace(CARRIED, prompts=7), True)
@example(replace(CARRIED, lookahead=2), True)
def test_no_token_is_older_than_deferral_and_lookahead_allow(setting: Setting, rejects: bool) -> None:
    setting = replace(setting, samples=setting.samples + rejects)
    pipeline = Selected(setting, proximal=True) if rejects else Pipeline(setting)
    run_virtual(pipeline.run)
    ended: Counter[int] = Counter()
    for step, (batch, report) in enumerate(zip(pipeline.batches, pipeline.reports, strict=True)):
        staleness = step - batch.versions[batch.sampled]
        assert 0 <= staleness.min(initial=0) <= staleness.max(initial=0) <= setting.max_deferrals + setting.lookahead
        assert report.metrics.get("staleness/max", 0) == staleness.max(initial=0)
        assert len(batch) <= setting.batch * setting.samples
        assert len(batch.deferred) <= setting.most_carried
        assert max((event.age for event in batch.deferred), default=0) <= setting.max_deferrals
        if rejects:
            assert all(every_third(group) for group in batch.scores.reshape(-1, setting.samples))
        assert {drop.reason for drop in batch.dropped} <= {REJECTED}
        ended.update([*batch.rollouts, *(drop.rollout for drop in batch.dropped)])
    assert max(ended.values(), default=1) == 1, "none is trained or rejected twice"
    carried = {event.rollout for event in pipeline.batches[-1].deferred} if pipeline.batches else set[int]()
    assert sorted({*ended, *carried}) == list(range(len(ended) + len(carried))), "none is left out"
    full = [len(batch) == setting.batch * setting.samples for batch in pipeline.batches]
    assert all(full[:-1]) or rejects
    assert all(full) or len({*ended, *carried}) == setting.prompts * setting.samples, "or the data has ended"
