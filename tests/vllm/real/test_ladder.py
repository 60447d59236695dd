"""The ladder's graph with its policy on the real engine; `make test-vllm` runs it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from benchmarks.harness import cores_here
from benchmarks.ladder import worker
from benchmarks.ladder.contestant import StepRecord
from benchmarks.ladder.directory import files_of
from benchmarks.ladder.pipeline import Seat, Seats, pipeline
from benchmarks.ladder.workloads import MODES, SMOKE

pytestmark = pytest.mark.vllm


def test_steps_on_vllm_are_recorded_like_those_on_transformers(tmp_path: Path) -> None:
    scripted = replace(SMOKE, name="smoke-scripted", models=replace(SMOKE.models, taught=0))
    files, watch, seat = files_of(scripted, tmp_path), worker.Watch(scripted), Seat(cores_here(), 1)
    work = pipeline(files, MODES["fixed"], Seats(seat, seat, seat), watch.on_work, scorers="thread", engine="vllm")

    async def main() -> list[StepRecord]:
        async with work.graph.open(files.prompts(), observers=[watch]) as run:
            return await worker.timed_steps(run, work, watch, 3)

    with closing(work):
        records = anyio.run(main)
    for record in records:
        assert (record.samples, record.as_announced, record.deferred) == (SMOKE.batch, 1.0, SMOKE.extra)
        assert record.decoded > 0
        assert all(record.busy[model] > 0 for model in ("actor", "reference", "reward", "critic", "trainer"))
