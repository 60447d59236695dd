"""Every run's reports hold the metrics of pace, overlap and queues, exact in virtual time."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import anyio
import pytest

import oppo
from oppo.admission.chunking import ChunkSize
from oppo.graph import Step
from oppo.simulate.engine import run_virtual
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer, Recorder, fake_per_token, fake_scalar, prompts


def graph(*, chunks: ChunkSize, reading: float = 0.125, updating: float = 4.0) -> oppo.Graph[oppo.StepReport]:
    """Two rollouts a step, of 4 and 8 tokens, a second each; only the reward model takes time to read."""
    return oppo.ppo(
        policy=FakePolicy(lambda prompt: 4 + 4 * (prompt.admission % 2), 1.0),
        reference=FakeScorer(fake_per_token),
        reward=FakeScorer(fake_scalar, reading),
        critic=FakeCritic(),
        trainer=FakeTrainer(updating, publishing=0.5),
        admission=oppo.Overcommit(batch=2),
        chunks=chunks,
    )


async def reports(made: oppo.Graph[oppo.StepReport], steps: int = 2, lookahead: int = 0) -> list[oppo.StepReport]:
    async with made.open(prompts(40), lookahead=lookahead) as run:
        return [report async for report in run.steps(steps)]


def test_a_plain_run_says_how_much_of_the_scoring_was_hidden() -> None:
    whole, streamed = (
        run_virtual(reports, graph(chunks=chunks))[0].metrics for chunks in (oppo.WholeRollout(), oppo.Fixed(2))
    )
    # In all 6 prompt tokens and 12 of the responses. Of the longer response, whole, nothing can be read before its end.
    assert whole["timing_s/decode"] == streamed["timing_s/decode"] == 8.0
    assert whole["timing_s/score"] == streamed["timing_s/score"] == 18 * 0.125
    assert whole["timing_s/score_exposed"] == 8 * 0.125
    assert streamed["timing_s/score_exposed"] == 2 * 0.125, "the last chunk"
    assert whole["overlap/hidden_fraction"] == 1 - 8 / 18
    assert streamed["overlap/hidden_fraction"] == 1 - 2 / 18


def test_its_pace_counts_the_whole_step() -> None:
    (first, second) = run_virtual(reports, graph(chunks=oppo.Fixed(2)))
    for report in (first, second):
        assert report.metrics["timing_s/step"] == report.seconds == 8.0 + 2 * 0.125 + 4.0 + 0.5
        assert report.metrics["throughput/tokens_per_s"] == 12 / report.seconds


def test_where_nothing_takes_time_to_score_there_is_no_fraction_of_it() -> None:
    (report, _) = run_virtual(reports, graph(chunks=oppo.Fixed(2), reading=0.0))
    assert report.metrics["timing_s/score"] == 0.0
    assert "overlap/hidden_fraction" not in report.metrics


def test_with_steps_in_flight_scoring_is_hidden_by_other_steps_too() -> None:
    alone, ahead = (run_virtual(reports, graph(chunks=oppo.WholeRollout(), reading=0.25), 6, n)[2] for n in (0, 1))
    assert alone.metrics["timing_s/score"] == ahead.metrics["timing_s/score"] == 18 * 0.25
    assert alone.metrics["timing_s/score_exposed"] == 8 * 0.25
    assert ahead.metrics["timing_s/score_exposed"] == 0.0, "the next step decodes meanwhile"
    assert ahead.metrics["timing_s/decode"] == 8.0, "its own alone"


def test_its_queues_are_counted() -> None:
    (report, _) = run_virtual(reports, graph(chunks=oppo.Fixed(1), reading=2.0))
    assert report.metrics["queue/generate->reward/peak"] > 1
    assert report.metrics["queue/advantage->update/peak"] == 1
    assert report.metrics["queue/generate->ref_logp/merged"] == 0


def test_gauges_are_read_once_for_each_report() -> None:
    readings = count(1)

    async def main() -> list[float]:
        opened = graph(chunks=oppo.Fixed(2)).open(prompts(9), gauges={"loop/worst_gap_s": lambda: next(readings) / 4})
        async with opened as run:
            return [report.metrics["loop/worst_gap_s"] async for report in run.steps(3)]

    assert run_virtual(main) == [0.25, 0.5, 0.75]


def test_a_line_of_the_run_directory_is_the_report(tmp_path: Path) -> None:
    async def main() -> list[oppo.StepReport]:
        with oppo.RunDirectory(tmp_path / "run", threaded=False) as directory:
            opened = graph(chunks=oppo.Fixed(2)).open(prompts(9), observers=[directory])
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
        async with graph(chunks=oppo.WholeRollout()).open(prompts(9), observers=[recorder]) as run:
            await run.step()

    run_virtual(main)
    work = [(span.track, span.label, span.start, span.end) for span in recorder.spans if span.kind == "work"]
    assert work[-2:] == [("update", "update", 9.0, 13.0), ("update", "publish", 13.0, 13.5)]
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
        with pytest.raises(ValueError, match="no"), step.of("update").working("update", "publish"):
            raise ValueError("no")

    run_virtual(main)
    assert [(span.track, span.label, span.start, span.end) for span in step.work] == [("update", "update", 0.0, 1.0)]
