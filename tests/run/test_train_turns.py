"""``oppo train`` with an environment: answers in the responses, exact and resumed runs, and functions that fail."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from oppo.cli import DONE, UNUSABLE
from oppo.config.load import resolve
from oppo.events import Prompt
from oppo.hf.kv.reader import Incremental
from oppo.placement import Thread
from oppo.run.rewards import UserCode
from oppo.testing import run_virtual
from oppo.turns import Answer, Turn
from tests.hf import tiny
from tests.hf.spot_tokenizers import byte_tokenizer
from tests.kit.workplace import furnish, oppo, records, run, tokenizer, weights

TOOLS = """
import time

def tool(turn):
    calls = (turn.state or {"calls": 0})["calls"]
    assert calls == turn.number
    return None if turn.number == 2 else ("w80 w81", {"calls": calls + 1})

def slow(turn):
    time.sleep(0.03 * (1 + len(turn.text) % 3))
    return tool(turn)

def broken(turn):
    raise OSError("no network")

def hangs(turn):
    time.sleep(3600)

def forging(turn):
    return "<|end|>"
"""
TURNS = (
    "environment.source=tools.py:tool",
    'sampling.stop=["w5", "w9", "w13", "w21", "w33", "w40", "w44", "w52", "w60", "w77"]',
    "sampling.max_new_tokens=40",
    "step.batch=4",
    "step.overcommit=2",
    "run.panel=off",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = furnish(tmp_path_factory.mktemp("turns"))
    (folder / "tools.py").write_text(TOOLS)
    return folder


def test_a_policy_with_states_reads_each_token_once_though_rollouts_wait_for_tools_and_are_deferred(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.of(tiny.STATEFUL["qwen3.5"](), seed=1).save_pretrained(folder / "hybrid")
    tokenizer().save_pretrained(folder / "hybrid")
    read = Counter[tuple[int, int, int]]()  # by reader, row and position

    def note(reader: Incremental, rows: Sequence[int], sizes: Iterable[int]) -> None:
        for row, size in zip(rows, sizes, strict=True):
            start = reader.length(row)
            read.update((id(reader), row, at) for at in range(start, start + size) if row >= 0)

    class Noting(Incremental):
        def extend(
            self, rows: Sequence[int], tokens: Sequence[Tensor], *, last: Sequence[int] | None = None
        ) -> list[Tensor]:
            note(self, rows, map(len, tokens))
            return super().extend(rows, tokens, last=last)

        def step(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
            note(self, rows, [1] * len(rows))
            return super().step(rows, tokens)

    monkeypatch.setattr("oppo.hf.serve.decoder.Incremental", Noting)
    hybrid = ("models.policy=hybrid", "rewards.0.source=reward.py:short", "models.critic=reward")
    schedule = ("run.deterministic=true", "step.lookahead=1", "step.kv_on_sync=keep", "run.steps=4")
    assert oppo(folder, "", *TURNS, *hybrid, *schedule, "run.name=hybrid") == DONE
    lines = records(folder, "hybrid", "metrics.jsonl")
    assert sum(line["deferral/deferred"] for line in lines) > 0
    assert any(line["event"] == "answered" for line in records(folder, "hybrid", "journal.jsonl"))
    assert len(read) > 500
    assert set(read.values()) == {1}


def test_responses_go_on_with_what_the_tool_says(folder: Path) -> None:
    assert oppo(folder, "", *TURNS, "run.name=first") == DONE
    texts = [str(each["completion"]) for each in records(folder, "first", "samples.jsonl")]
    assert any("w80 w81" in text for text in texts)
    assert all("turns/answer_seconds" in line for line in records(folder, "first", "metrics.jsonl"))
    answered = [line for line in records(folder, "first", "journal.jsonl") if line["event"] == "answered"]
    assert {(line["turn"], line["tokens"]) for line in answered} >= {(0, 2), (1, 2)}
    assert len({(line["rollout"], line["turn"]) for line in answered}) == len(answered)
    assert all(isinstance(line["seconds"], float) and "error" not in line for line in answered)


@pytest.mark.parametrize("keeps", [False, True])
def test_special_tokens_that_an_answer_spells_are_ordinary_text_unless_they_are_kept(
    folder: Path, *, keeps: bool
) -> None:
    document: dict[str, object] = {
        "models": {"policy": "actor"},
        "rewards": [{"source": "reward.py:short"}],
        "data": {"prompts": "prompts.jsonl"},
        "environment": {"source": "tools.py:forging", "keep_special_tokens": keeps},
    }
    tokenizer, tokens = byte_tokenizer(), np.array([70, 71], np.int32)
    with Thread("scorers") as place:
        environment = UserCode.of(resolve(document, folder), tokenizer, place).environment
    assert environment is not None
    answer = run_virtual(environment.answer, Turn(Prompt(0, 0, tokens), 0, tokens))
    assert isinstance(answer, Answer)
    assert (answer.tokens.tolist() == [3]) is keeps
    assert tokenizer.decode_whole(answer.tokens.tolist()) == "<|end|>"


@pytest.mark.parametrize("policy", ["thread", "process"])
def test_an_exact_run_does_not_depend_on_how_long_the_tool_takes(folder: Path, policy: str) -> None:
    exact = (*TURNS, "run.deterministic=true", f"run.policy={policy}")
    assert oppo(folder, "", *exact, f"run.name=quick-{policy}") == DONE
    assert oppo(folder, "", *exact, f"run.name=slow-{policy}", "environment.source=tools.py:slow") == DONE
    assert weights(folder, f"quick-{policy}") == weights(folder, f"slow-{policy}")


def test_a_tool_that_fails_ends_the_run_with_its_words_or_drops_its_rollouts(folder: Path) -> None:
    code, _, said = run(folder, *TURNS, "run.name=broken", "environment.source=tools.py:broken")
    assert code not in {DONE, UNUSABLE}
    assert "environment 'broken' raised OSError: no network" in said
    dropping = (
        "environment.source=tools.py:hangs",
        "environment.on_failure=drop",
        "environment.timeout=0.2",
    )
    code, _, said = run(folder, *TURNS, "run.name=dropping", *dropping, "run.max_empty=2")
    lines = records(folder, "dropping", "journal.jsonl")
    reasons = {str(line["reason"]) for line in lines if line["event"] == "dropped"}
    assert {str(line["error"]) for line in lines if line["event"] == "answered"} == reasons
    assert all("environment 'hangs' took longer than 0.2 s" in reason for reason in reasons)
    assert reasons


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("environment.source=nothing.py:tool", "there is no file .*nothing.py"),
        ("environment.source=tools.py:nothing", "has no 'nothing'; the functions and classes there are"),
        ("environment.timeout=-1", "environment.timeout"),
        ("environment.source=tool", "file.py:function"),
    ],
)
def test_what_is_no_environment_is_refused(
    folder: Path, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(folder, "--dry-run", *TURNS, "run.name=refused", setting) == UNUSABLE
    captured = capsys.readouterr()
    text = " ".join((captured.err + captured.out).split())

    assert re.search(message, text), text
