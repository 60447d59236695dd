"""PPO with units that join while others are decoded: how many are in flight, and that each is trained once."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import anyio
import numpy as np
import pytest
from hypothesis import example, given

from oppo.admission import AdmitView, CutView, Observation, RefillView
from oppo.admission.chunking import Fixed
from oppo.events import Defer, Finish, Prompt, Support
from oppo.testing import FakePolicy, prompts, run_virtual
from oppo.testing.fake_policy import FakeDecode
from tests.invariants.test_ppo import assert_grammatical
from tests.kit.known import known
from tests.kit.pipelines import Pipeline, Setting, motions

LENGTHS = (5, 9, 3, 30, 12, 7, 22, 4, 40, 6, 18)
KEPT = Setting(LENGTHS, batch=6, extra=6, steps=6, refill=True)


@dataclass(eq=False)
class Counted(FakePolicy):
    """Notes the rollouts of each decode step, each token of which is read at once."""

    rows: list[int] = field(default_factory=list)

    def attend(self, rows: Sequence[FakeDecode]) -> None:
        self.rows.append(len(rows))
        super().attend(rows)


def played(setting: Setting) -> Pipeline:
    pipeline = Pipeline(setting)
    run_virtual(pipeline.run)
    return pipeline


@pytest.mark.schedules
@given(motions())
@example(KEPT)
@example(replace(KEPT, lookahead=2, in_flight=True, update=0.5))
@example(replace(KEPT, extra=1, samples=2, paces=(0.5, 3.0)))
@example(replace(KEPT, prompts=7))
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
