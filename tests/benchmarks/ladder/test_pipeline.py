"""The graph that a contestant runs, in this process: modes, lengths, and what is recorded."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import torch

from benchmarks.harness import cores_here
from benchmarks.ladder import worker
from benchmarks.ladder.contestant import StepRecord
from benchmarks.ladder.directory import Files, files_of
from benchmarks.ladder.pipeline import Seat, Seats, pipeline, seats
from benchmarks.ladder.workloads import MODES, SMOKE, Layout, Scorers
from oppo.observe import Span


def run(files: Files, mode: str, steps: int, scorers: Scorers = "thread") -> tuple[list[StepRecord], list[Span]]:
    workload = files.workload
    watch, spans = worker.Watch(workload), list[Span]()

    def heard(span: Span) -> None:
        spans.append(span)
        watch.on_work(span)

    seat = Seat(cores_here(), 1)
    work = pipeline(files, MODES[mode], Seats(seat, seat, seat), heard, scorers=scorers)

    async def main() -> list[StepRecord]:
        async with work.graph.open(files.prompts(), observers=[watch], lookahead=work.lookahead) as running:
            return await worker.timed_steps(running, work.acting.progress, watch, steps)

    with closing(work):
        return anyio.run(main), spans


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return files_of(SMOKE, tmp_path_factory.mktemp("cache"))


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


@pytest.mark.parametrize("mode", ["serial", "fixed"])
def test_grpo_has_no_critic_and_a_distillation_its_teacher_alone(mode: str, tmp_path: Path) -> None:
    grouped = files_of(replace(SMOKE, name="smoke-groups", samples=2), tmp_path)
    taught = replace(SMOKE, name="smoke-distill", reward="rule", teacher=SMOKE.models.reward)
    for files, scorers in ((grouped, {"reference", "reward"}), (files_of(taught, tmp_path), {"teacher"})):
        records, _ = run(files, mode, 2)
        for record in records:
            assert (record.samples, record.as_announced) == (SMOKE.batch, 1.0)
            assert record.deferred == (SMOKE.extra if mode == "fixed" else 0)
            assert set(record.busy) == {"actor", *scorers, "trainer"}
            assert all(seconds > 0 for seconds in record.busy.values())


@pytest.mark.parametrize("mode", ["serial", "overcommit"])
def test_nothing_is_scored_while_something_is_decoded_where_scoring_is_held_back(files: Files, mode: str) -> None:
    records, spans = run(files, mode, 2)
    decodes = [(span.start, span.end) for span in spans if (span.track, span.label) == ("actor", "decode")]
    for span in spans:
        if span.label in {"extend", "finish"}:
            assert all(span.end <= start or span.start >= end for start, end in decodes)
    if mode == "serial":
        calls = [span for span in spans if (span.track, span.label) == ("reward", "finish")]
        assert len(calls) == len(records), "one for the whole batch"
    # What was deferred is read beside the update, which is the scorers' business and not decoding's.
    assert all(record.exposed == pytest.approx(record.score) for record in records if mode == "serial")


def test_scorers_in_a_process_of_their_own_are_recorded_like_those_in_a_thread(files: Files) -> None:
    (record,), spans = run(files, "chunk", 1, scorers="process")
    assert record.as_announced == 1.0
    assert {span.track for span in spans} >= {"actor", "reference", "reward", "critic", "trainer"}
    assert min(record.busy.values()) > 0


def test_where_a_mode_looks_ahead_steps_overlap_and_none_is_in_flight_between_requests(files: Files) -> None:
    workload = files.workload
    watch, seat = worker.Watch(workload), Seat(cores_here(), 1)
    work = pipeline(files, MODES["lookahead"], Seats(seat, seat, seat), watch.on_work, scorers="thread")
    alive: list[int] = []

    async def main() -> list[StepRecord]:
        async with work.graph.open(files.prompts(), observers=[watch], lookahead=work.lookahead) as running:
            records = []
            for _ in range(2):
                records += await worker.timed_steps(running, work.acting.progress, watch, 2)
                alive.append(len(running.alive))
            return records

    with closing(work):
        records = anyio.run(main)
    assert alive == [0, 0]
    assert [record.samples for record in records] == [SMOKE.batch] * 4
    assert all(record.update > 0 for record in records)


ONE, BOTH = Seat((4,), 1), Seat((4, 5), 1)


@pytest.mark.parametrize(
    ("layout", "cores", "options", "expected"),
    [
        ("split", (4, 5, 6), {"held": False}, Seats(ONE, Seat((5,), 1), ONE)),
        ("split", (4, 5, 6), {"held": True}, Seats(ONE, Seat((5,), 1), ONE)),
        ("split", (4, 5), {"held": False, "apart": True}, Seats(ONE, Seat((5,), 1), Seat((5,), 1))),
        ("shared", (4, 5), {"held": False, "apart": True}, Seats(BOTH, BOTH, BOTH)),
        ("shared", (4, 5), {"held": True}, Seats(BOTH, Seat((4, 5), 2), Seat((4, 5), 2))),
        ("shared", (4, 5), {"held": False}, Seats(BOTH, BOTH, Seat((4, 5), 2))),
        *((layout, (4,), {"held": False}, Seats(ONE, ONE, ONE)) for layout in ("split", "shared")),
    ],
)
def test_the_cores_of_a_layout(
    layout: Layout, cores: tuple[int, ...], options: dict[str, bool], expected: Seats
) -> None:
    assert seats(layout, cores, **options) == expected


def test_a_seat_binds_the_thread_that_takes_it_and_no_other() -> None:
    before, found = cores_here(), list[tuple[tuple[int, ...], int]]()

    def work() -> None:
        Seat(before[:1], 1).take()
        found.append((cores_here(), torch.get_num_threads()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(before[:1], 1)]
    assert cores_here() == before
