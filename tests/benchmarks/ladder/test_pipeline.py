"""The graph that a contestant runs, in this process: modes, scripted lengths, and what is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch

from benchmarks.ladder import worker
from benchmarks.ladder.directory import Files, files_of, workload_in
from benchmarks.ladder.layout import Seat, Seats
from benchmarks.ladder.modes import MODES
from benchmarks.ladder.pipeline import pipeline
from benchmarks.ladder.record import StepRecord
from benchmarks.ladder.workloads import SMOKE, BenchWorkload, Scorers, on_gpu
from benchmarks.machine import cores_here
from oppo.errors import ConfigError
from oppo.observe import Span
from tests.loop_guard import forwards_off_the_loop

SCRIPTED = replace(SMOKE, name="smoke-scripted", models=replace(SMOKE.models, taught=0))


@pytest.fixture(autouse=True)
def _one_thread_here() -> Iterator[None]:
    torch.set_num_threads(1)
    with forwards_off_the_loop():
        yield


def run(files: Files, mode: str, steps: int, scorers: Scorers = "thread") -> tuple[list[StepRecord], list[Span]]:
    """Return the records of some steps of a mode, and every span of its models."""
    workload = files.workload
    watch, spans = worker.Watch(workload), list[Span]()

    def heard(span: Span) -> None:
        spans.append(span)
        watch.on_work(span)

    seat = Seat(cores_here(), 1)
    work = pipeline(files, MODES[mode], Seats(seat, seat, seat), heard, scorers=scorers)

    async def main() -> list[StepRecord]:
        async with work.graph.open(files.prompts(), observers=[watch], lookahead=work.lookahead) as running:
            return await worker.timed_steps(running, work, watch, steps)

    with closing(work):
        return anyio.run(main), spans


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Scripted lengths, so that no actor has to be taught."""
    return files_of(SCRIPTED, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_full_batches_of_the_announced_lengths(files: Files, mode: str) -> None:
    records, _ = run(files, mode, 2)
    for record in records:
        assert record.samples == SMOKE.batch
        assert record.as_announced == 1.0
        assert record.deferred == (SMOKE.extra if mode in {"overcommit", "fixed"} else 0) or "adaptive" in mode
        assert set(record.busy) == {"actor", "reference", "reward", "critic", "trainer"}
        assert all(seconds > 0 for seconds in record.busy.values())
        assert record.exposed <= record.score
        assert record.score < record.seconds or MODES[mode].lookahead
    if mode in {"serial", "rollout", "chunk"}:
        prompts = files.prompts()
        wanted = [sum(int(str(next(prompts).columns["length"])) for _ in range(SMOKE.batch)) for _ in records]
        assert [record.tokens for record in records] == wanted == [record.decoded for record in records]


@pytest.mark.parametrize("mode", ["serial", "overcommit"])
def test_nothing_is_scored_while_something_is_decoded_where_scoring_is_held_back(files: Files, mode: str) -> None:
    records, spans = run(files, mode, 2)
    decodes = [(span.start, span.end) for span in spans if (span.track, span.label) == ("actor", "decode")]
    for span in spans:
        if span.label in {"extend", "finish"}:
            assert all(span.end <= start or span.start >= end for start, end in decodes)
    # What was parked is read beside the update, which is the scorers' business and not decoding's.
    assert all(record.exposed == pytest.approx(record.score) for record in records if mode == "serial")


def test_scorers_in_a_process_of_their_own_are_recorded_like_those_in_a_thread(files: Files) -> None:
    (record,), spans = run(files, "chunk", 1, scorers="process")
    assert record.as_announced == 1.0
    assert {span.track for span in spans} >= {"actor", "reference", "reward", "critic", "trainer"}
    assert min(record.busy.values()) > 0


def test_a_held_step_scores_the_whole_batch_in_one_call(files: Files) -> None:
    _, spans = run(files, "serial", 1)
    assert [span.label for span in spans if span.track == "reward"].count("finish") == 1


def test_a_rule_needs_no_reward_model(tmp_path: Path) -> None:
    ruled = files_of(replace(SCRIPTED, reward="rule"), tmp_path)
    (record,), _ = run(ruled, "chunk", 1)
    assert record.busy["reward"] == 0.0
    assert record.busy["critic"] > 0.0


def test_a_workload_is_read_back_from_its_directory(files: Files, tmp_path: Path) -> None:
    assert workload_in(files.directory) == files.workload
    with pytest.raises(ConfigError, match="holds no workload"):
        workload_in(tmp_path)


@pytest.mark.parametrize("size", ["0.5b", "1.5b"])
def test_the_workloads_of_a_gpu_are_scripted_and_large(size: str) -> None:
    workload: BenchWorkload = on_gpu(SMOKE, size)
    assert workload.models.scripted
    assert workload.models.dtype == "bfloat16"
    assert workload.batch == 64
    assert workload.models.reward.hidden > workload.models.actor.hidden


def test_where_a_mode_looks_ahead_steps_overlap_and_none_is_in_flight_between_requests(files: Files) -> None:
    workload = files.workload
    watch, seat = worker.Watch(workload), Seat(cores_here(), 1)
    work = pipeline(files, MODES["lookahead"], Seats(seat, seat, seat), watch.on_work, scorers="thread")
    alive: list[int] = []

    async def main() -> list[StepRecord]:
        async with work.graph.open(files.prompts(), observers=[watch], lookahead=work.lookahead) as running:
            records = []
            for _ in range(2):
                records += await worker.timed_steps(running, work, watch, 2)
                alive.append(len(running.alive))
            return records

    with closing(work):
        records = anyio.run(main)
    assert alive == [0, 0]
    assert [record.samples for record in records] == [SMOKE.batch] * 4
    assert all(record.update > 0 for record in records)
