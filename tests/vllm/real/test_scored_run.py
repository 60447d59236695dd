"""``oppo train`` with a reward model and a reference, each on an engine of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.hf import tiny
from tests.vllm.real.conftest import engine_processes, tiny_actor
from tests.vllm.real.test_reward import BLOCK, TOLERANCE, saved
from tests.workplace import furnish, oppo, records, tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


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
