"""Whole runs on the real engine: the demo, the example, the ladder's graph, scorers; `make test-vllm`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import anyio
import pytest
from transformers import LlamaConfig

from benchmarks.harness import cores_here
from benchmarks.ladder import worker
from benchmarks.ladder.contestant import StepRecord
from benchmarks.ladder.directory import files_of
from benchmarks.ladder.pipeline import Seat, Seats, pipeline
from benchmarks.ladder.workloads import MODES, SMOKE
from tests.hf import tiny
from tests.kit.workplace import furnish, oppo, records, tokenizer
from tests.vllm.real.conftest import engine_processes, tiny_actor
from tests.vllm.real.program import Program
from tests.vllm.real.rollouts import TOLERANCE
from tests.vllm.real.test_scorers import BLOCK, saved

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_it_trains_and_examines_and_leaves_nothing(tmp_path: Path) -> None:
    with Program(["demo", "--engine", "vllm", "--short"], tmp_path) as program:
        assert program.wait(600) == 0, program.said
        assert program.leaves_nothing()
    gain = re.search(r"gain \+([\d.]+) \+- ([\d.]+)", program.said)
    assert gain is not None, program.said
    assert float(gain[1]) > 2 * float(gain[2]), "the score rises"
    folder = tmp_path / "runs" / "demo-1"
    assert json.loads((folder / "summary.json").read_text())
    assert 'engine = "vllm"' in (folder / "config.toml").read_text()
    assert "EngineCore" in (folder / "vllm.log").read_text()


ROOT = Path(__file__).parents[3]


def test_the_score_rises() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "04_vllm.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    steps = re.findall(r"step \d+: score ([\d.]+), deferred (\[.*?\]), .* mismatch (\S+)", ran.stdout)
    scores = [float(score) for score, _, _ in steps]
    assert scores[0] < 0.6
    assert sum(scores[-2:]) / 2 > 0.85
    assert any(deferred != "[]" for _, deferred, _ in steps)
    assert all(float(mismatch) < 1e-6 for _, _, mismatch in steps)


def test_steps_on_vllm_are_recorded_like_those_on_transformers(tmp_path: Path) -> None:
    files, watch, seat = files_of(SMOKE, tmp_path), worker.Watch(SMOKE), Seat(cores_here(), 1)
    work = pipeline(files, MODES["fixed"], Seats(seat, seat, seat), watch.on_work, scorers="thread", engine="vllm")

    async def main() -> list[StepRecord]:
        async with work.graph.open(files.prompts(), observers=[watch]) as run:
            return await worker.timed_steps(run, work.acting.progress, watch, 3)

    with closing(work):
        records = anyio.run(main)
    for record in records:
        assert (record.samples, record.as_announced, record.deferred) == (SMOKE.batch, 1.0, SMOKE.extra)
        assert record.decoded > 0
        assert all(record.busy[model] > 0 for model in ("actor", "reference", "reward", "critic", "trainer"))


def test_a_run_scores_on_an_engine_that_ends_with_it_as_on_transformers(tmp_path: Path) -> None:
    before, folder = engine_processes(), furnish(tmp_path)
    saved(folder / "reward", LlamaConfig)  # of Qwen2 transformers would take another tokenizer
    tiny_actor(3, vocabulary=tiny.VOCABULARY).save_pretrained(folder / "sft")
    tokenizer().save_pretrained(folder / "sft")
    run = ("run.panel=off", "run.steps=1", "run.scorers=thread", "step.overcommit=0")
    chosen = (*run, "models.reference=sft", "sampling.temperature=0.7")
    assert oppo(folder, "", "run.name=plain", *chosen) == 0
    on_vllm = [f"{key}.engine=vllm" for key in ("rewards.0", "scorers.reference")]
    on_vllm += [f"{key}.vllm.block_size={BLOCK}" for key in ("rewards.0", "scorers.reference")]
    assert oppo(folder, "", "run.name=vllm", *chosen, *on_vllm) == 0
    (plain,), (engine,) = (records(folder, name, "metrics.jsonl") for name in ("plain", "vllm"))
    assert abs(plain["score"] - engine["score"]) < TOLERANCE
    assert plain["objective/kl"] > 1
    assert engine["objective/kl"] == pytest.approx(plain["objective/kl"], rel=TOLERANCE)
    assert "EngineCore" in (folder / "runs" / "vllm" / "vllm.log").read_text()
    assert engine_processes() == before
