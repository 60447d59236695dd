"""PPO with steps in flight: which weights each step uses, and how old the tokens are that it trains."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import assume, example, given, strategies as st

from oppo.admission import AdmitView, CutView, Observation, Overcommit
from oppo.events import Defer
from oppo.testing import run_virtual
from tests.known import known
from tests.pipelines import Pipeline, Setting, same_batches, settings

pytestmark = pytest.mark.schedules

AHEAD = (1, 2, 3, 4)


def played(setting: Setting, *, proximal: bool = False) -> Pipeline:
    pipeline = Pipeline(setting, proximal=proximal)
    run_virtual(pipeline.run)
    return pipeline


@given(settings(lookaheads=AHEAD))
def test_a_token_is_at_most_as_old_as_deferral_and_lookahead_allow(setting: Setting) -> None:
    pipeline = played(setting)
    for step, (batch, report) in enumerate(zip(pipeline.batches, pipeline.reports, strict=True)):
        lag = step - batch.versions[batch.sampled]
        assert lag.max(initial=0) <= setting.max_deferrals + setting.lookahead
        assert report.metrics.get("staleness/lag_max", 0) == lag.max(initial=0)


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
def test_late_are_the_responses_that_were_carried_whatever_the_lag_of_the_others(setting: Setting) -> None:
    pipeline = played(setting)
    story = pipeline.tap.story()
    for batch, report in zip(pipeline.batches, pipeline.reports, strict=True):
        carried = [any(isinstance(event, Defer) for event in story[rollout]) for rollout in batch.rollouts]
        if carried:
            assert report.metrics["deferral/trained_late"] == sum(carried) / len(carried)


@st.composite
def speeds(draw: st.DrawFn) -> dict[str, float]:
    """Seconds of every stage but decoding, whose pace decides which rollouts are the first."""
    seconds = {name: draw(st.sampled_from([0.0, 0.004, 0.3])) for name in ("reference", "reward", "critic", "per_call")}
    return {**seconds, "update": draw(st.sampled_from([0.0, 0.02, 5.0]))}


@given(settings(lookaheads=AHEAD), speeds())
@example(Setting(extra=2, lookahead=2, steps=5), {"reward": 0.3, "update": 5.0})
def test_how_fast_the_stages_are_changes_no_bit(setting: Setting, seconds: dict[str, float]) -> None:
    setting = replace(setting, paces=())
    other = replace(setting, capacity=16, **seconds)  # type: ignore[arg-type]  # all of these are float
    assert same_batches(played(setting).batches, played(other).batches)


@given(settings(lookaheads=AHEAD))
@example(Setting(lengths=(1,), batch=1, steps=3, capacity=1, lookahead=2))
@example(Setting(lengths=(1,), batch=1, steps=6, capacity=1, lookahead=4))
def test_proximal_log_probs_wait_for_the_weights_that_are_about_to_be_updated(setting: Setting) -> None:
    assume(setting.steps > 1)
    pipeline = played(setting, proximal=True)
    ends: dict[str, dict[int, float]] = {"update": {}, "proximal": {}}
    for span in pipeline.tap.spans:
        if span.track in ends:
            ends[span.track][int(span.details["step"])] = span.end
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
