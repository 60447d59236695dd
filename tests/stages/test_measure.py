"""What controllers are told of a step: from spans and flights, and through a whole graph in virtual time."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import pytest

from oppo.admission import AdmitView, CutView, Observation, Overcommit, Scoring, Stretch
from oppo.events import FinishReason, Prompt, StepReport
from oppo.graph import Step
from oppo.models import Decode
from oppo.observe import Span
from oppo.stages.ledger import InFlightRollout
from oppo.stages.metrics import Decoded, DecodeMeter, Grown, ScorerAnswer, ScorerReading, observation, stretches
from oppo.testing import FakePolicy, run_virtual
from tests.pipelines import Pipeline, Setting


def in_flight(rollout: int, unit: int, length: int = 0, reason: FinishReason | None = None) -> InFlightRollout:
    prompt = Prompt(rollout, unit, np.zeros(1, np.int32), group=unit)
    return InFlightRollout(prompt, cast("Decode", None), length=length, reason=reason)


def report(seconds: float, **metrics: float) -> StepReport:
    named = {name.replace("_per_", "/"): value for name, value in metrics.items()}
    return StepReport(4, 5, (), (), (), 0.25, seconds, named)


def test_lengths_are_those_of_units_and_gains_those_of_rollouts() -> None:
    rollouts = [in_flight(0, 0, 30), in_flight(1, 0, 90, "eos"), in_flight(2, 1), in_flight(3, 1)]
    rollouts.append(in_flight(4, 2, 7, "eos"))
    meter = DecodeMeter(rollouts)
    for number, length, reason in ((0, 50, "stop"), (2, 20, "length"), (3, 15, None)):
        rollouts[number].length, rollouts[number].reason = length, reason  # type: ignore[assignment]  # a FinishReason
    grown = meter.decoded().grown
    assert [(each.start, each.stop) for each in grown] == [(30, 50), (0, 20), (0, 15)]
    assert replace(meter.decoded(), grown=()) == Decoded(20, 55, rows=3, finished=(90,), capped=0, parked=(20,))


def test_seconds_are_told_apart_by_the_cut_and_by_what_was_waited_for() -> None:
    step = Step(4, 1, 0.0)
    step.of("generate").record(Decoded(decode_steps=9))
    step.record(Span("generate", "decode", 2.0, 10.0, role="decode"))
    for start, end in ((1.0, 3.0), (9.0, 11.0), (11.0, 12.0)):
        step.record(Span("reward", "extend", start, end, role="score"))
    for tokens in (40, 8):
        step.of("reward").record(ScorerReading(tokens))
    step.of("reward").record(ScorerAnswer(11.0, 12.0, 2))
    step.record(Span("reward", "extend", 12.0, 40.0, role="score"))  # parked rollouts, meanwhile: nobody waits for it
    step.of("reward").record(ScorerReading(99))
    step.record(Span("ref_logp", "finish", 10.0, 15.0, role="score"))
    step.of("ref_logp").record(ScorerAnswer(10.0, 15.0, 2))
    seen = observation(report(20.0, mismatch_per_kl=0.5), step)
    assert seen == Observation(
        step=4,
        seconds=20.0,
        decode_seconds=8.0,
        decode_steps=9,
        scoring=(
            Scoring("ref_logp", 0.0, 5.0, answered=2, answering=5.0),
            Scoring("reward", 3.0, 2.0, spare=28.0, calls=3, tokens=147, answered=2, answering=1.0),
        ),
        rest_seconds=7.0,
        score=0.25,
        mismatch_kl=0.5,
    )


@dataclass
class Watching:
    """Overcommit that keeps what it is told."""

    batch: int
    extra: int
    max_deferrals: int = 2
    seen: list[Observation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rule = Overcommit(self.batch, self.extra, self.max_deferrals)

    def admit(self, view: AdmitView) -> int:
        return self._rule.admit(view)

    def cut(self, view: CutView) -> bool:
        return self._rule.cut(view)

    def observe(self, seen: Observation) -> None:
        self.seen.append(seen)


def watched(setting: Setting) -> tuple[Pipeline, list[Observation]]:
    pipeline = Pipeline(setting)
    watching = Watching(setting.batch, setting.extra)
    pipeline.generate.admission = watching
    pipeline.generate.__post_init__()
    run_virtual(pipeline.run)
    return pipeline, watching.seen


def test_a_run_tells_what_happened_to_the_second() -> None:
    setting = Setting(lengths=(5, 9, 3, 30, 8), batch=4, extra=1, steps=2, reward=0.002, per_call=0.001, update=0.5)
    pipeline, (first, second) = watched(setting)
    assert (first.decode_steps, first.tokens) == (9, 5 + 9 + 3 + 9 + 8)
    assert first.finished == (5, 9, 3, 8)
    assert first.parked == (9,)
    assert first.decode_seconds == pytest.approx(0.09)
    assert second.tokens == sum(second.finished) + sum(second.parked) - 9
    for seen, step in zip((first, second), pipeline.reports, strict=True):
        assert [each.stage for each in seen.scoring] == ["ref_logp", "reward", "value"]
        assert seen.seconds == step.seconds
        assert seen.rest_seconds == pytest.approx(0.5)
        assert seen.score == step.score
        slowest = max(each.after for each in seen.scoring)
        assert seen.seconds == pytest.approx(seen.decode_seconds + slowest + seen.rest_seconds)


@dataclass
class Noting:
    """A chunk size that keeps what it is told."""

    seen: list[Observation] = field(default_factory=list)

    def size(self) -> int:
        return 4

    def observe(self, seen: Observation) -> None:
        self.seen.append(seen)


def test_what_the_journal_says_of_a_step_is_told_instead_of_what_it_measures_now() -> None:
    setting = Setting(extra=2, steps=3)
    _, measured = watched(setting)
    before = {1: Observation(1, seconds=77.0, score=0.5)}
    admission, chunks = Watching(setting.batch, setting.extra), Noting()
    pipeline = Pipeline(replace(setting, chunks=chunks), admission=admission, replay=before)
    run_virtual(pipeline.run)
    assert admission.seen == chunks.seen == [measured[0], before[1], measured[2]]
    told = [item for _, stage, item in pipeline.tap.items if stage == "generate" and isinstance(item, Observation)]
    assert told == [measured[0], measured[2]], "what is in the journal is not written there again"


@pytest.mark.parametrize("kl", [math.inf, math.nan])
def test_a_measure_that_is_not_finite_was_not_measured(kl: float) -> None:
    report = StepReport(0, 1, (), (), (), math.inf, 1.0, {"mismatch/kl": kl, "mismatch/ess": 0.5})
    seen = observation(report, Step(0, 1, 0.0))
    assert (seen.mismatch_kl, seen.effective_samples) == (None, 0.5)
    assert json.loads(json.dumps(seen.as_json(), allow_nan=False))["score"] is None


def test_what_overcommit_decided_is_among_the_metrics() -> None:
    pipeline = Pipeline(Setting(extra=2))
    run_virtual(pipeline.run)
    assert [step.metrics["deferral/extra"] for step in pipeline.reports] == [2.0, 2.0, 2.0]


def test_what_was_seen_survives_as_json() -> None:
    for seen in watched(Setting(extra=2))[1]:
        assert seen.stretches
        assert Observation.from_json(json.loads(json.dumps(seen.as_json()))) == seen
    older = {name: value for name, value in Observation(3).as_json().items() if name not in {"lookahead", "stretches"}}
    nothing = Observation.from_json(older)
    assert nothing.step == 3
    assert np.isnan(nothing.score)


def test_stretches_say_what_was_decoded_between_the_ends_of_rollouts() -> None:
    """Lengths 4, 2, 6 and 9 of prompts of 10 tokens, a second for each decode step and row; the last one is parked."""
    rollouts = [
        Grown(10, 0, 4, 5 + 4 + 4 + 3 + 3),
        Grown(10, 3, 5, 5 + 8.0),
        Grown(10, 0, 6, 5 + 14 + 4),
        Grown(10, 0, 9, math.nan),
    ]
    assert stretches(rollouts, 5.0, 26.0) == (
        Stretch(8.0, 2, 8, 3 * (10 + 11) + (13 + 14), opened=30, resumed=13, ended=1),
        Stretch(6.0, 2, 6, 3 * (12 + 13), ended=1),
        Stretch(4.0, 2, 4, 2 * (14 + 15), ended=1),
        Stretch(3.0, 3, 3, 16 + 17 + 18),
    )


def test_what_joins_a_phase_counts_from_the_decode_step_in_which_it_did() -> None:
    rollouts = [Grown(10, 0, 2, 4.0), Grown(10, 0, 6, 12.0), Grown(20, 0, 3, 10.0, joined=2)]
    assert stretches(rollouts, 0.0, 12.0) == (
        Stretch(4.0, 2, 4, 2 * (10 + 11), opened=20, ended=1),
        Stretch(6.0, 3, 6, (12 + 13 + 14) + (20 + 21 + 22), opened=20, ended=1),
        Stretch(2.0, 1, 1, 15, ended=1),
    )


def test_stretches_are_few_and_never_run_backwards() -> None:
    many = [Grown(1, 0, length, 0.01 * length) for length in range(1, 101)]
    found = stretches(many, 0.0, 1.0)
    assert 4 <= len(found) <= 8
    assert (sum(each.steps for each in found), sum(each.tokens for each in found)) == (100, 5050)
    assert sum(each.context for each in found) == sum(range(1, 101)) + sum(n * (n - 1) // 2 for n in range(1, 101))
    late = [Grown(1, 0, 5, 9.0), Grown(1, 0, 8, 3.0), Grown(1, 0, 9, 10.0)]
    assert [each.seconds for each in stretches(late, 0.0, 10.0)] == [9.0, 1.0]
    assert stretches([], 0.0, 1.0) == stretches([Grown(1, 3, 3, 0.0)], 0.0, 1.0) == ()


def test_the_stretches_of_a_run_are_what_its_decode_steps_cost() -> None:
    def cost(rows: int, tokens: int) -> float:
        return 1.0 + 0.25 * rows + tokens / 64

    pipeline = Pipeline(Setting(lengths=(5, 9, 3, 30, 8), batch=4, extra=1, steps=2))
    pipeline.generate.policy = FakePolicy(pipeline.setting.length, cost)
    run_virtual(pipeline.run)
    for seen in (item for _, _, item in pipeline.tap.items if isinstance(item, Observation)):
        for each in seen.stretches:
            prompts = 3 * each.tokens  # of 3 tokens each
            assert each.seconds == each.steps + 0.25 * each.tokens + (each.context - prompts) / 64
