"""``oppo train`` on prompts of every kind: files, mixtures, rows of a program; a dry run shows one and its reward."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path

import anyio
import anyio.lowlevel
import pyarrow as pa
import pytest
import tomli_w
from pyarrow import parquet

from oppo import TrainerSettings, resume as go_on, train
from oppo.cli import DONE, FAILED, UNUSABLE, main
from oppo.config.load import load_settings
from oppo.errors import ConfigError, DataError, RunComplete
from oppo.run.checkpoint import CHECKPOINTS, read_state
from tests.config.test_refusals import entries
from tests.hf import tiny
from tests.kit.workplace import furnish, oppo, records, resume, tokenizer, tokenizer_of, weights

QUIET = (
    "run.deterministic=true",
    "run.panel=off",
    "run.trace=0",
    "rewards.0.source=tagged.py:score",
    "run.checkpoint_every=2",
)
MIXED = 'data.prompts=[{path="prompts.jsonl", weight=2}, {path="more.csv", weight=1, column="question"}]'

TAGGED = """
def score(prompts, completions, kind):
    with open("SEEN", "a") as seen:
        seen.writelines(f"{each}\\n" for each in kind)
    return [len(each.split()) / 10 for each in completions]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    furnish(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGES)
    (tmp_path / "tagged.py").write_text(TAGGED.replace("SEEN", str(tmp_path / "seen")))
    rows = [json.loads(line) | {"kind": "json"} for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "more.csv").write_text("question,kind\n" + "".join(f"w{50 + i} w{60 + i},csv\n" for i in range(7)))
    return tmp_path


def seen(folder: Path) -> Counter[str]:
    """Return how many responses were scored of each kind of prompt, and forget them."""
    found = Counter((folder / "seen").read_text().split())
    (folder / "seen").unlink()
    return found


def test_a_mixture_trains_by_its_shares(folder: Path) -> None:
    assert oppo(folder, "", *QUIET, MIXED, "run.steps=6", "step.batch=6", "step.overcommit=2") == DONE
    assert seen(folder) == {"json": 24, "csv": 12}


def test_a_source_that_has_changed_is_named_when_a_run_is_resumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets

    datasets.Dataset.from_dict({"prompt": ["w5 w6", "w7"], "kind": ["set", "set"]}).save_to_disk(folder / "set")
    chosen = (*QUIET, 'data.prompts=["prompts.jsonl", "set"]', "run.steps=2")
    assert oppo(folder, "", *chosen) == DONE
    run = folder / "runs" / "first"
    resolved = load_settings(run / "config.toml").toml()
    assert f'path = "{folder / "set"}"' in resolved
    digests = read_state(run / CHECKPOINTS / "step-000002")["provenance"]["files"]
    assert {"data.prompts[0]", "data.prompts[1]", "rewards.0.source"} <= digests.keys()
    shutil.rmtree(folder / "set")
    datasets.Dataset.from_dict({"prompt": ["w5 w6", "w8"], "kind": ["set", "set"]}).save_to_disk(folder / "set")
    assert main(["resume", str(run), "--set", "run.steps=3"]) == UNUSABLE
    assert f"{folder / 'set'} is not what it was when the run began" in capsys.readouterr().err


@pytest.mark.parametrize(("drop_last", "batches"), [(False, [9] * 6), (True, [9] * 6), (False, [20] * 2 + [14])])
def test_a_run_without_a_number_of_steps_ends_with_its_epochs_of_every_prompt(
    folder: Path, drop_last: bool, batches: list[int]
) -> None:
    chosen = [*QUIET, 'data.prompts=["prompts.jsonl", {path="more.csv", column="question"}]', "data.epochs=2"]
    chosen += ["step.overcommit=0", "trainer.schedule=linear", "trainer.warmup_steps=0.4", f"step.batch={batches[0]}"]
    settings = tomllib.loads((folder / "config.toml").read_text())
    del settings["run"]["steps"]
    (folder / "config.toml").write_text(tomli_w.dumps(settings))
    run = train(folder / "config.toml", [*chosen, f"data.drop_last={str(drop_last).lower()}"]).path
    assert seen(folder) == {"json": 2 * 20, "csv": 2 * 7}
    made = records(folder, "first", "metrics.jsonl")
    assert [step["trained"] for step in made] == batches
    assert load_settings(run / "config.toml").run.steps == len(batches)
    factor = TrainerSettings(schedule="linear", warmup_steps=0.4, total_steps=len(batches)).learning_rate_factor
    assert [step["lr"] for step in made] == pytest.approx([1e-3 * factor(step) for step in range(len(batches))])
    with pytest.raises(RunComplete):
        go_on(run)


@pytest.mark.parametrize(
    ("chosen", "advice"),
    [
        (["data.drop_last=true", "run.steps=2"], "leave data.drop_last out"),
        (["data.epochs=1"], "set run.steps, and leave"),
    ],
)
def test_rows_that_are_not_counted_have_no_epochs(folder: Path, chosen: list[str], advice: str) -> None:
    settings = tomllib.loads((folder / "config.toml").read_text())
    del settings["run"]["steps"], settings["data"]["prompts"]
    (folder / "config.toml").write_text(tomli_w.dumps(settings))
    with pytest.raises(ConfigError, match=f"rows that come one by one are not counted, and end once: {advice}"):
        train(folder / "config.toml", [*QUIET, *chosen], prompts=iter([{"prompt": "w1 w2"}]))


NONE = entries("""
[] | data.prompts: expected a file, a directory or a dataset's name, or a list of such with their weights
7 | data.prompts: expected a file, a directory or a dataset's name, or a list of such
[{path="a.jsonl",weigth=1}] | source 1: unknown key 'weigth' (did you mean 'weight'?); the keys are path,
["a.jsonl",{weight=1}] | source 2: path is missing: a file, a directory that datasets wrote, a dataset
[{path="a.jsonl",weight=0}] | source 1: weight: expected more than 0, got 0
[{path="a.jsonl",weight=1},"b.jsonl"] | source 2 has no weight, and others have one: give each a weight
[{path="a.jsonl",weight=0.33333},{path="b.csv",weight=1}] | are as 33333 to 100000: give rounder ones
["a.jsonl",3] | source 2: expected text or a table, got 3
somebody/prompts | 'somebody/prompts' is no file or directory here, and as a dataset of a hub it could not
./somebody/prompts | there is no prompt file
""")


@pytest.mark.parametrize(("prompts", "message"), NONE)
def test_what_is_no_source_is_an_error(
    folder: Path, prompts: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(folder, "", f"data.prompts={prompts}") == UNUSABLE
    said = capsys.readouterr().err
    assert message in " ".join(said.split())
    assert "loading" not in said


def test_rows_of_a_program_are_served_like_a_file_and_the_run_goes_on_with_the_same(folder: Path) -> None:
    given = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    chosen = [*QUIET, "step.overcommit=0"]  # the last step of a run takes nothing for a later one
    train(folder / "config.toml", [*chosen, "run.name=file", "run.steps=4"])
    run = train(folder / "config.toml", [*chosen, "run.name=rows"], prompts=given).path
    with pytest.raises(ConfigError, match=r"its prompts are rows of a program: .* oppo.resume\(directory"):
        go_on(run, ["run.steps=4"])
    with pytest.raises(DataError, match=r"what data.prompts names is not what it was when the run began"):
        go_on(run, ["run.steps=4"], prompts=given[1:])
    go_on(run, ["run.steps=4"], prompts=given)
    assert weights(folder, "rows") == weights(folder, "file")
    assert main(["resume", str(run), "--set", "run.steps=5"]) == UNUSABLE


async def coming(given: list[dict[str, object]]) -> AsyncIterator[dict[str, object]]:
    for row in given:
        await anyio.lowlevel.checkpoint()
        yield row


@pytest.mark.parametrize(("lookahead", "extra"), [(0, 0), (1, 2)])
def test_rows_that_come_one_by_one_end_the_run_with_their_end_and_are_resumed(
    folder: Path, lookahead: int, extra: int
) -> None:
    given = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    chosen = [*QUIET, "data.max_prompt_tokens=20", f"step.lookahead={lookahead}", f"step.overcommit={extra}"]
    whole = train(folder / "config.toml", [*chosen, "run.name=whole", "run.steps=100"], prompts=coming(given))
    assert whole.made == 5
    assert (whole.path / CHECKPOINTS / "step-000005").is_dir(), "the last step has a checkpoint, though none was due"
    trained = [each["rollout"] for each in records(folder, "whole", "journal.jsonl") if each["event"] == "trained"]
    assert sorted(trained) == list(range(20))
    noted = [each for each in records(folder, "whole", "log.jsonl") if each["event"] == "data ended"]
    assert [(each["steps"], each["wanted"]) for each in noted] == [(5, 100)]

    def synchronous() -> Iterator[dict[str, object]]:
        yield from given

    parts = train(folder / "config.toml", [*chosen, "run.name=parts", "run.steps=2"], prompts=synchronous())
    assert read_state(parts.path / CHECKPOINTS / "step-000002")["prompts"]["rows"] >= 8
    go_on(parts.path, ["run.steps=100"], prompts=coming(given))
    if not extra:
        assert weights(folder, "parts") == weights(folder, "whole")
    trained = [each["rollout"] for each in records(folder, "parts", "journal.jsonl") if each["event"] == "trained"]
    assert sorted(trained) == list(range(20))


CHECKED = """
from datetime import date
from decimal import Decimal

def score(prompts, completions, day, price, raw, pairs, tree):
    for each in zip(day, price, raw, pairs, tree):
        assert [type(value) for value in each] == [date, Decimal, bytes, list, dict], each
        assert type(each[3][0]) is tuple, each
        assert "$array" in each[4]
    return [0.1 for _ in completions]
"""


def test_columns_of_any_type_come_back_with_a_deferred_rollout_as_they_were(tmp_path: Path) -> None:
    folder = furnish(tmp_path)
    (folder / "checked.py").write_text(CHECKED)
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().split("\n") if line]
    n = len(prompts)
    table = {
        "prompt": prompts,
        "day": [date(2026, 1, 2)] * n,
        "price": [Decimal("1.50")] * n,
        "raw": [b"\xff\x00"] * n,
        "pairs": pa.array([[("a", 1)]] * n, pa.map_(pa.string(), pa.int64())),
        "tree": [{"$array": 1}] * n,
    }
    parquet.write_table(pa.table(table), folder / "prompts.parquet")
    data = ("rewards.0.source=checked.py:score", "data.prompts=prompts.parquet", "run.checkpoint_every=1")
    assert oppo(folder, "", *data) == DONE
    assert records(folder, "first", "metrics.jsonl")[0]["deferred"], "something was deferred"
    shutil.rmtree(folder / "runs" / "first" / "checkpoints" / "step-000002")
    assert resume(folder, "first", "run.steps=4") == DONE
    assert len(records(folder, "first", "metrics.jsonl")) == 4


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

def tool(turn):
    return None if turn.number else "w80 w81"
"""


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
    assert lines[3].startswith("a response to it, of at most 32 tokens, which ended by '")
    assert lines[5].startswith(f"the reward {folder / 'judges.py'}:known scores it 1; a second response: 1; in 0.0")


def test_what_a_reward_takes_and_its_parts_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = tried(folder, capsys, "rewards.0.source=judges.py:slow", 'sampling.stop_strings=["w77"]')
    assert "or with the text 'w77'" in said
    assert re.search(r"judges.py:slow scores it 1; a second response: 1; in \d+\.\d{3} s$", said.strip())
    said = tried(folder, capsys, "rewards.0.source=judges.py:several")
    assert re.search(r"scores it 2 \(long/share 1, .*\); a second response: 2; in .* s$", said.strip())


def test_special_tokens_are_kept_for_rewards_and_environments_that_ask_for_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    special = tokenizer()
    special.add_special_tokens({"additional_special_tokens": [f"w{number}" for number in range(30, 50)]})
    special.save_pretrained(folder / "actor")
    judged = ("rewards.0.source=judges.py:words", "environment.source=judges.py:counting_tool")
    longest = (*judged, "sampling.min_new_tokens=12")
    plain = tried(folder, capsys, *longest)
    assert "judges.py:words scores it 12" not in plain
    assert "the environment answers 'I do not know.' with\n    w60" in plain  # all of it is unknown, a special token
    kept = ("rewards.0.keep_special_tokens=true", "environment.keep_special_tokens=true")
    whole = tried(folder, capsys, *longest, *kept)
    assert "judges.py:words scores it 12; a second response: 12; in " in whole
    assert "the environment answers 'I do not know.' with\n    w64" in whole


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
