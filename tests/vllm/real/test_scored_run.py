"""``oppo train`` with a reward model on an engine of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.vllm.real.conftest import engine_processes
from tests.vllm.real.test_reward import BLOCK, TOLERANCE, saved
from tests.workplace import furnish, oppo, records

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_a_run_scores_on_an_engine_that_ends_with_it_as_on_transformers(tmp_path: Path) -> None:
    before, folder = engine_processes(), furnish(tmp_path)
    saved(folder / "reward", LlamaConfig)  # of Qwen2 transformers would take another tokenizer
    chosen = ("run.panel=off", "run.steps=1", "run.scorers=thread", "step.overcommit=0")
    assert oppo(folder, "", "run.name=plain", *chosen) == 0
    on_vllm = ("rewards.0.engine=vllm", f"rewards.0.vllm.block_size={BLOCK}")
    assert oppo(folder, "", "run.name=vllm", *chosen, *on_vllm) == 0
    (plain,), (engine,) = (records(folder, name, "metrics.jsonl") for name in ("plain", "vllm"))
    assert abs(plain["score"] - engine["score"]) < TOLERANCE
    assert "EngineCore" in (folder / "runs" / "vllm" / "vllm.log").read_text()
    assert engine_processes() == before
