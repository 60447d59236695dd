"""PPO with steps in flight: which weights each step uses, and how old the tokens are that it trains."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
from hypothesis import assume, example, given, strategies as st

from oppo.admission import AdmitView, CutView, Observation, Overcommit
from oppo.events import Chunk, Defer, Scored, StepReport
from oppo.graph import Graph
from oppo.models import SyncedModel
from oppo.stages import Score, Update
from oppo.testing import FakeCritic, run_virtual
from tests.kit.known import known
from tests.kit.pipelines import Pipeline, Setting, same_batches, settings

pytestmark = pytest.mark.schedules

AHEAD = (1, 2, 3, 4)


def played(setting: Setting, *, proximal: bool = False) -> Pipeline:
    pipeline = Pipeline(setting, proximal=proximal)
    run_virtual(pipeline.run)
    return pipeline


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
