"""``oppo train --dry-run`` shows a prompt as the policy reads it, what ends a response, and what the reward says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from oppo.cli import DONE, FAILED
from tests.hf import tiny
from tests.kit.workplace import furnish, oppo, tokenizer, tokenizer_of

TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}w90{% endif %}"
)

JUDGES = """
import asyncio, os

calls = []

def known(prompts, completions, goal):
    calls.append(completions)
    assert len(calls) == 1, "called once"
    return [0.25 * len(text) for text in (p if isinstance(p, str) else "chat" for p in prompts)]

def one(prompts, completions):
    return [1.0]

async def slow(prompts, completions):
    await asyncio.sleep(0.2)
    return [1.0 for _ in completions]

several = {
    "long": (0.5, lambda prompts, completions: [4.0, 2.0]),
    "kind": (1.0, lambda prompts, completions: [None, 1.0]),
}

def broken(prompts, completions):
    raise KeyError(os.environ["JUDGE_PASSWORD"])

def words(prompts, completions):
    return [float(len(c.split())) for c in completions]

def counting_tool(turn):
    return f"w{60 + len(turn.text.split())}"

def broken_tool(turn):
    return str(1 / 0)

def tool(turn):
    return None if turn.number else "w80 w81"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    furnish(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGES)
    return tmp_path


def tried(folder: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Return what a dry run shows after the graph; nothing was written."""
    assert oppo(folder, "--dry-run", *overrides) == DONE
    assert not (folder / "runs").exists()
    return capsys.readouterr().out.partition("\n\nprompts: ")[2]


def test_a_prompt_goes_through_the_template_and_the_reward_is_called_once_with_two_responses(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chatting = tokenizer()
    chatting.chat_template = TEMPLATE
    chatting.save_pretrained(folder / "actor")
    chat = [{"role": "w5", "content": "w6 w7"}, {"role": "w8", "content": "w9"}]
    (folder / "chats.jsonl").write_text(json.dumps({"prompt": chat, "goal": 1}) + "\n")
    said = tried(
        folder, capsys, "data.prompts=chats.jsonl", "rewards.0.source=judges.py:known", "sampling.stop=[2, 'w40']"
    )
    lines = said.splitlines()
    assert lines[0] == "1, the longest of 8 tokens; the first is"
    assert lines[1].split() == ["<s>", "w5", "w6", "w7", "<s>", "w8", "w9", "w90"]
    assert lines[2] == "a response ends at 12 tokens, or with one of these: 2 '</s>', 40 'w40'"
    assert lines[3].startswith("a response to it, cut off at 32 tokens at the latest, is (")
    assert lines[5].startswith(
        f"the reward {folder / 'judges.py'}:known says 1, and of a second response it says 1, after 0.0"
    )


def test_what_a_reward_takes_and_its_parts_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = tried(folder, capsys, "rewards.0.source=judges.py:slow", 'sampling.stop_strings=["w77"]')
    assert "or with the text 'w77'" in said
    assert re.search(r"judges.py:slow says 1, and of a second response it says 1, after \d+\.\d{3} s$", said.strip())
    said = tried(folder, capsys, "rewards.0.source=judges.py:several")
    assert re.search(r"says 2 \(long/share 1, .*\), and of a second response it says 2, after .* s$", said.strip())


def test_a_response_with_turns_is_tried_out_with_the_answers_of_its_environment(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = [f"w{number}" for number in range(3, 60)]
    said = tried(folder, capsys, "environment.source=judges.py:tool", f"sampling.stop={json.dumps(stop)}")
    assert "w80 w81" in said


def test_an_environment_is_asked_once_where_no_turn_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longest = "sampling.min_new_tokens=12"
    said = tried(folder, capsys, "environment.source=judges.py:tool", longest)
    assert "the environment answers that with\n    w80 w81" in said
    assert oppo(folder, "--dry-run", "environment.source=judges.py:broken_tool", longest) == FAILED
    assert "environment 'broken_tool' raised ZeroDivisionError" in capsys.readouterr().err


def test_special_tokens_are_kept_for_rewards_and_environments_that_ask_for_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    special = tokenizer()
    special.add_special_tokens({"additional_special_tokens": [f"w{number}" for number in range(30, 50)]})
    special.save_pretrained(folder / "actor")
    judged = ("rewards.0.source=judges.py:words", "environment.source=judges.py:counting_tool")
    longest = (*judged, "sampling.min_new_tokens=12")
    plain = tried(folder, capsys, *longest)
    assert "judges.py:words says 12" not in plain
    assert "answers that with\n    w72" not in plain
    kept = ("rewards.0.keep_special_tokens=true", "environment.keep_special_tokens=true")
    whole = tried(folder, capsys, *longest, *kept)
    assert "judges.py:words says 12, and of a second response it says 12, after" in whole
    assert "answers that with\n    w72" in whole


def test_scores_of_the_wrong_number_show_before_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oppo(folder, "--dry-run", "rewards.0.source=judges.py:one") == FAILED
    assert "must return 2 numbers, one for each completion" in capsys.readouterr().err


def test_a_reward_that_fails_is_shown_as_in_a_run_without_secrets(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_PASSWORD", "correct-horse-battery")
    assert oppo(folder, "--dry-run", "rewards.0.source=judges.py:broken") == FAILED
    said = capsys.readouterr().err
    assert "reward function 'broken' raised KeyError: '***' at" in said
    assert "while a response was tried out, before the run" in said
    assert "correct-horse" not in said
    assert oppo(folder, "--dry-run", "rewards.0.source=judges.py:broken", "rewards.0.on_failure=drop") == DONE
    said = capsys.readouterr().out
    assert "judges.py:broken drops it (" in said
    assert "correct-horse" not in said


def test_what_a_prompt_says_cannot_steer_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    red = "\x1b[31mred"
    names = ["<pad>", "<s>", "</s>", red, *(f"w{number}" for number in range(4, tiny.VOCABULARY))]
    tokenizer_of(names).save_pretrained(folder / "actor")
    (folder / "red.jsonl").write_text(json.dumps({"prompt": f"{red} w5", "goal": 1}) + "\n")
    said = tried(folder, capsys, "data.prompts=red.jsonl", "rewards.0.source=judges.py:known")
    assert "\x1b" not in said
    assert "\\x1b[31mred w5" in said
