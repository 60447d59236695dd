"""The metrics of a step, and what controllers observe of it: from spans and whole graphs in virtual time."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import cast

import anyio
import numpy as np
import pytest

import oppo
from oppo.admission import AdmitView, CutView, Observation, Overcommit, Scoring, Stretch
from oppo.admission.chunking import ChunkSize, Fixed, WholeRollout
from oppo.events import Batch, Chunk, Defer, Finish, FinishReason, Prompt, Response, StepReport
from oppo.graph import Step
from oppo.models import Decode, Passes
from oppo.observe import Span
from oppo.report import RunDirectory
from oppo.stages import GAE
from oppo.stages.batch import ScoredRollout, ScoredRollouts
from oppo.stages.ledger import InFlightRollout
from oppo.stages.metrics import (
    WINDOW,
    Decoded,
    DecodeMeter,
    Grown,
    LengthBias,
    ScorerAnswer,
    ScorerReading,
    observation,
    stretches,
    utilisation,
)
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    Recorder,
    fake_per_token,
    fake_scalar,
    prompts,
    run_virtual,
)
from tests.kit.pipelines import Pipeline, Setting


def in_flight(rollout: int, unit: int, length: int = 0, reason: FinishReason | None = None) -> InFlightRollout:
    prompt = Prompt(rollout, unit, np.zeros(1, np.int32), group=unit)
    return InFlightRollout(prompt, cast("Decode", None), length=length, reason=reason)


def test_lengths_are_those_of_units_and_gains_those_of_rollouts() -> None:
    rollouts = [in_flight(0, 0, 30), in_flight(1, 0, 90, "eos"), in_flight(2, 1), in_flight(3, 1)]
    rollouts.append(in_flight(4, 2, 7, "eos"))
    meter = DecodeMeter(rollouts)
    for number, length, reason in ((0, 50, "stop"), (2, 20, "length"), (3, 15, None)):
        rollouts[number].length, rollouts[number].reason = length, reason  # type: ignore[assignment]  # a FinishReason
    grown = meter.decoded().grown
    assert [(each.start, each.stop) for each in grown] == [(30, 50), (0, 20), (0, 15)]
    assert replace(meter.decoded(), grown=()) == Decoded(20, 55, rows=3, finished=(90,), capped=0, deferred=(20,))


def test_seconds_are_told_apart_by_the_cut_and_by_what_was_waited_for() -> None:
    step = Step(4, 1, 0.0)
    step.of("generate").record(Decoded(decode_steps=9))
    step.record(Span("generate", "decode", 2.0, 10.0, role="decode"))
    for start, end in ((1.0, 3.0), (9.0, 11.0), (11.0, 12.0)):
        step.record(Span("reward", "extend", start, end, role="score"))
    for tokens in (40, 8):
        step.of("reward").record(ScorerReading(tokens))
    step.of("reward").record(ScorerAnswer(11.0, 12.0, 2))
    step.record(Span("reward", "extend", 12.0, 40.0, role="score"))  # deferred rollouts, meanwhile: nobody waits for it
    step.of("reward").record(ScorerReading(99))
    step.record(Span("ref_logp", "finish", 10.0, 15.0, role="score"))
    step.of("ref_logp").record(ScorerAnswer(10.0, 15.0, 2))
    seen = observation(StepReport(4, 5, (), (), (), 0.25, 20.0, {}), step)
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
    assert first.deferred == (9,)
    assert first.decode_seconds == pytest.approx(0.09)
    assert second.tokens == sum(second.finished) + sum(second.deferred) - 9
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


def test_a_score_that_is_not_finite_is_none_in_the_journal() -> None:
    seen = observation(StepReport(0, 1, (), (), (), math.inf, 1.0, {}), Step(0, 1, 0.0))
    assert json.loads(json.dumps(seen.as_json(), allow_nan=False))["score"] is None


def test_what_overcommit_decided_is_among_the_metrics() -> None:
    pipeline = Pipeline(Setting(extra=2))
    run_virtual(pipeline.run)
    assert [step.metrics["deferral/overcommit"] for step in pipeline.reports] == [2.0, 2.0, 2.0]


def test_what_was_seen_survives_as_json() -> None:
    for seen in watched(Setting(extra=2))[1]:
        assert seen.stretches
        assert Observation.from_json(json.loads(json.dumps(seen.as_json()))) == seen
    assert np.isnan(Observation.from_json(Observation(3).as_json()).score)


def test_stretches_say_what_was_decoded_between_the_ends_of_rollouts() -> None:
    """Lengths 4, 2, 6 and 9 after prompts of 10 tokens, a second a decode step and row; the last one is deferred."""
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


STEPS, BATCH = 100, 16
EXTRA = (16, pytest.param(4, marks=pytest.mark.deep))


def batch(lengths: dict[int, int], deferred: Sequence[int] = ()) -> Batch:
    """A batch of rollouts, by their number, of these lengths."""
    rows = []
    for rollout, length in lengths.items():
        prompt = Prompt(rollout, rollout, np.arange(3, dtype=np.int32), group=rollout)
        ints, floats = np.zeros(length, np.int32), np.zeros(length, np.float32)
        response = Response.empty(prompt).then(Chunk(rollout, 0, ints, floats, ints))
        rows.append(ScoredRollout(Finish(rollout, response, "eos"), floats, 0.0, floats))
    return GAE().batch_of(ScoredRollouts(rows, deferred=[Defer(rollout, 1) for rollout in deferred]))


def test_a_long_response_that_is_deferred_is_missing_until_it_is_trained() -> None:
    lengths = LengthBias()
    assert lengths.after(batch({1: 4, 2: 6}, deferred=[0])) is None, "nothing below the oldest in flight is known"
    assert lengths.after(batch({0: 40, 3: 6}, deferred=[4])) == 1
    assert lengths.after(batch({5: 8, 6: 8}, deferred=[4])) == (72 / 6) / (56 / 4)
    assert lengths.after(batch({4: 40, 7: 8})) == 1


def test_what_is_known_of_lengths_goes_into_a_checkpoint_and_back() -> None:
    one, other = LengthBias(), LengthBias()
    one.after(batch({1: 4, 2: 6}, deferred=[0]))
    other.load_state_dict(one.state_dict())
    later = batch({0: 40, 3: 6, 5: 2}, deferred=[4])
    assert one.after(later) == other.after(later)
    assert one.state_dict() == other.state_dict()


@functools.cache
def simulated(extra: int) -> Pipeline:
    drawn = np.random.default_rng(3).lognormal(2.3, 0.9, 2 * STEPS * BATCH)
    setting = Setting(
        lengths=tuple(int(length) for length in drawn.clip(1, 120)),
        batch=BATCH,
        extra=extra,
        max_deferrals=3,
        steps=STEPS,
        prompts=2 * STEPS * BATCH,
    )
    pipeline = Pipeline(setting)
    run_virtual(pipeline.run)
    return pipeline


def lengths_of(batches: Sequence[Batch]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.diff(batch.offsets) for batch in batches])


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """The statistic of Kolmogorov and Smirnov: the largest difference of two empirical distributions."""
    points = np.union1d(one, other)
    shares = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.parametrize("extra", EXTRA)
def test_over_a_long_run_the_lengths_trained_are_those_generated(extra: int) -> None:
    pipeline = simulated(extra)
    taken = sorted(pipeline.tap.story())
    generated = [pipeline.setting.lengths[rollout] for rollout in taken]
    trained = lengths_of(pipeline.batches).tolist()
    assert sorted(trained) == sorted(generated), "no length was discarded"
    half = len(pipeline.batches) // 2
    late = lengths_of(pipeline.batches[half:]).tolist()
    critical = 1.36 * np.sqrt(1 / len(late) + 1 / len(pipeline.setting.lengths))  # 5%, two samples
    assert distance(late, pipeline.setting.lengths) < critical


@pytest.mark.parametrize("extra", EXTRA)
def test_nothing_starves_and_the_bias_of_the_first_steps_is_made_good(extra: int) -> None:
    pipeline = simulated(extra)
    assert max(report.metrics["staleness/max"] for report in pipeline.reports) <= pipeline.setting.max_deferrals
    assert sum(report.metrics["deferral/trained_late"] > 0 for report in pipeline.reports) > STEPS / 2
    first = lengths_of(pipeline.batches[:1]).mean()
    assert first < 0.8 * np.mean(pipeline.setting.lengths[: BATCH + extra]), "the first batch is one of short responses"
    bias = [report.metrics["deferral/length_bias"] for report in pipeline.reports[WINDOW:]]
    assert abs(float(np.mean(bias)) - 1) < 0.02
    assert 0.85 < min(bias) <= max(bias) < 1.15


def graph(*, chunks: ChunkSize, reading: float = 0.125, updating: float = 4.0) -> oppo.Graph[oppo.StepReport]:
    """Two rollouts a step, of 4 and 8 tokens, a second each; only the reward model takes time to read."""
    return oppo.ppo(
        policy=FakePolicy(lambda prompt: 4 + 4 * (prompt.admission % 2), 1.0),
        reference=FakeScorer(fake_per_token),
        reward=FakeScorer(fake_scalar, reading),
        critic=FakeCritic(),
        trainer=FakeTrainer(updating, syncing=0.5),
        admission=oppo.Overcommit(batch=2),
        chunks=chunks,
    )


async def reports(made: oppo.Graph[oppo.StepReport], steps: int = 2, lookahead: int = 0) -> list[oppo.StepReport]:
    async with made.open(prompts(40), lookahead=lookahead) as run:
        return [report async for report in run.steps(steps)]


def test_a_plain_run_says_how_much_of_the_scoring_was_hidden() -> None:
    whole, streamed = (run_virtual(reports, graph(chunks=chunks))[0].metrics for chunks in (WholeRollout(), Fixed(2)))
    # In all 6 prompt tokens and 12 of the responses. Of the longer response, whole, nothing can be read before its end.
    assert whole["timing_s/decode"] == streamed["timing_s/decode"] == 8.0
    assert whole["timing_s/score"] == streamed["timing_s/score"] == 18 * 0.125
    assert whole["timing_s/score_exposed"] == 8 * 0.125
    assert streamed["timing_s/score_exposed"] == 2 * 0.125, "the last chunk"
    assert whole["overlap/hidden_fraction"] == 1 - 8 / 18
    assert streamed["overlap/hidden_fraction"] == 1 - 2 / 18


def test_its_pace_counts_the_whole_step() -> None:
    (first, second) = run_virtual(reports, graph(chunks=Fixed(2)))
    for report in (first, second):
        assert report.metrics["timing_s/step"] == report.seconds == 8.0 + 2 * 0.125 + 4.0 + 0.5
        assert report.metrics["throughput/tokens_per_s"] == 12 / report.seconds


def test_with_steps_in_flight_scoring_is_hidden_by_other_steps_too() -> None:
    alone, ahead = (run_virtual(reports, graph(chunks=WholeRollout(), reading=0.25), 6, n)[2] for n in (0, 1))
    assert alone.metrics["timing_s/score"] == ahead.metrics["timing_s/score"] == 18 * 0.25
    assert alone.metrics["timing_s/score_exposed"] == 8 * 0.25
    assert ahead.metrics["timing_s/score_exposed"] == 0.0, "the next step decodes meanwhile"
    assert ahead.metrics["timing_s/decode"] == 8.0, "its own alone"


def test_its_queues_are_counted() -> None:
    (report, _) = run_virtual(reports, graph(chunks=Fixed(1), reading=2.0))
    assert report.metrics["queue/generate->reward/peak"] > 1
    assert report.metrics["queue/advantage->update/peak"] == 1
    assert report.metrics["queue/generate->ref_logp/merged"] == 0


def test_gauges_are_read_once_for_each_report() -> None:
    readings = count(1)

    async def main() -> list[float]:
        opened = graph(chunks=Fixed(2)).open(prompts(9), gauges={"loop/worst_gap_s": lambda: next(readings) / 4})
        async with opened as run:
            return [report.metrics["loop/worst_gap_s"] async for report in run.steps(3)]

    assert run_virtual(main) == [0.25, 0.5, 0.75]


def test_a_line_of_the_run_directory_is_the_report(tmp_path: Path) -> None:
    async def main() -> list[oppo.StepReport]:
        with RunDirectory(tmp_path / "run", threaded=False) as directory:
            opened = graph(chunks=Fixed(2)).open(prompts(9), observers=[directory])
            async with opened as run:
                return [report async for report in run.steps(3)]

    made = run_virtual(main)
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    counts = {"step", "version", "score", "seconds", "trained", "deferred", "dropped"}
    assert [{name: line[name] for name in line if name not in counts} for line in written] == [
        report.metrics for report in made
    ]


def test_observers_get_the_work_of_the_stages() -> None:
    recorder = Recorder()

    async def main() -> None:
        async with graph(chunks=WholeRollout()).open(prompts(9), observers=[recorder]) as run:
            await run.step()

    run_virtual(main)
    work = [(span.track, span.label, span.start, span.end) for span in recorder.spans if span.kind == "work"]
    assert work[-2:] == [("update", "update", 9.0, 13.0), ("update", "weight_sync", 13.0, 13.5)]
    assert ("generate", "decode", 0.0, 8.0) in work
    assert [each for each in work if each[0] == "reward"][-2:] == [
        ("reward", "extend", 8.0, 9.0),
        ("reward", "finish", 9.0, 9.0),
    ]


def test_work_that_fails_is_not_noted() -> None:
    step = Step(0, 1, started=0.0)

    async def main() -> None:
        with step.of("update").working("update"):
            await anyio.sleep(1)
        with pytest.raises(ValueError, match="no"), step.of("update").working("update", "weight_sync"):
            raise ValueError("no")

    run_virtual(main)
    assert [(span.track, span.label, span.start, span.end) for span in step.work] == [("update", "update", 0.0, 1.0)]


def test_a_share_of_the_peak_is_what_tokens_needed_over_what_devices_can_do_while_their_stages_work() -> None:
    step = Step(0, 1, 0.0).of("update")
    for track, role, start, end in (
        ("generate", "decode", 0.0, 4.0),
        ("reward", "score", 1.0, 3.0),
        ("ref_logp", "score", 2.0, 5.0),
        ("value", "score", 0.0, 90.0),
        ("update", "update", 5.0, 7.0),
    ):
        step.of(track).record(Span(track, role, start, end, role=role))  # type: ignore[arg-type] # a role
    step.record(Span("update", "weight_sync", 7.0, 9.0, role="update"))
    # A new response of 3 tokens to 4, one that goes on after 6 and gets 2, one that got none.
    step.of("generate").record(Decoded(grown=(Grown(4, 0, 3, 4.0), Grown(4, 2, 4, 4.0), Grown(4, 1, 1, 4.0))))
    step.of("reward").record(ScorerReading(10, pairs=50.0))
    step.of("ref_logp").record(ScorerReading(6, pairs=8.0))
    trained = batch({0: 5, 1: 2})
    found = utilisation(
        step,
        trained,
        {
            "generate": Passes(token=0.10, pair=0.01),
            "reward": Passes(token=0.02, pair=0.01),
            "ref_logp": Passes(token=0.05),
            "update": Passes(token=0.30, pair=0.02),
            "proximal": Passes(token=9.0),
        },
    )
    decoded = 6 * 0.10 + 0.01 * 6**2 / 2 + 2 * 0.10 + 0.01 * (7**2 - 5**2) / 2
    rows = (3 + 5 - 1, 3 + 2 - 1)
    assert found == pytest.approx(
        {
            "perf/mfu/decode": decoded / 4,
            "perf/mfu/score": (10 * 0.02 + 50 * 0.01 + 6 * 0.05) / 4,
            "perf/mfu/update": sum(0.30 * row + 0.02 * row**2 / 2 for row in rows) / 2,
        }
    )
    assert utilisation(step, trained, {}) == {}


def test_a_call_of_a_scorer_has_read_each_token_with_those_before_it() -> None:
    passes = Passes(token=1.0, pair=1.0)
    pipeline = Pipeline(Setting(steps=3, extra=0, reward=0.01, reference=0.02, critic=0.03, update=0.5))
    graph = pipeline.graph()
    ideal = dict.fromkeys(graph.nodes, passes)
    pipeline.graph = lambda: graph.replace(update=replace(graph.stage("update", oppo.Update), ideal=ideal))  # type: ignore[method-assign] # the same, but for one stage
    run_virtual(pipeline.run)
    for report, trained in zip(pipeline.reports, pipeline.batches, strict=True):
        update = report.metrics["perf/mfu/update"] * report.metrics["timing_s/update"]
        rows = np.array([len(each.prompt.tokens) + len(each) for each in trained.responses], float)
        assert update == pytest.approx(passes.whole(rows - 1))
        scored = report.metrics["perf/mfu/score"] * report.metrics["timing_s/score"]
        assert scored == pytest.approx(3 * passes.whole(rows))
