"""The GSM8K example: its prompts, and some steps of its settings on generated questions."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from examples.gsm8k import learn
from oppo.cli import DONE
from tests.hf import tiny
from tests.kit.workplace import tokenizer_of

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.mark.parametrize("line", ["{", '{"question": "?"}', '{"question": "?", "answer": "7"}', "[]"])
def test_a_line_that_is_none_of_the_file_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.jsonl").write_text(line)
    with pytest.raises(SystemExit, match=r"train\.jsonl:1: expected"):
        list(learn.rows(tmp_path / "train.jsonl"))


def generated(file: Path, first: int, count: int) -> Path:
    lines = [
        {"question": f"Ann has {a} pens and buys {a % 3} more .", "answer": f"{a} + {a % 3}\n#### {a + a % 3}"}
        for a in range(first, first + count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_some_steps_of_its_settings_report_accuracy_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["<pad>", "<s>", "</s>", "####", "Ann", "has", "pens", "and", "buys", "more", ".", *map(str, range(60))]
    tokens = tokenizer_of([*words, *(f"w{i}" for i in range(tiny.VOCABULARY - len(words)))])
    tokens.chat_template = TEMPLATE
    tokens.save_pretrained(tmp_path / "model")
    tiny.causal("llama", seed=1).save_pretrained(tmp_path / "model")
    few = {
        "models.policy": tmp_path / "model",
        "run.directory": tmp_path / "runs",
        "run.steps": 2,
        "run.cores": 1,
        "run.panel": "off",
        "run.checkpoint_every": 0,
        "step.batch": 8,
        "sampling.max_new_tokens": 8,
    }
    files = [generated(tmp_path / "train.jsonl", 3, 20), generated(tmp_path / "test.jsonl", 30, 6)]
    arguments = [*map(str, files), "--folder", str(tmp_path / "data")]
    assert (
        learn.main([*arguments, *(part for key, value in few.items() for part in ("--set", f"{key}={value}"))]) == DONE
    )
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said[-2:]] == ["strict", "flexible"]
    written = json.loads((tmp_path / "runs" / "gsm8k" / "metrics.jsonl").read_text().splitlines()[0])
    assert written["objective/scores"] == written["rewards/strict/mean"]
    assert {"rewards/flexible/mean", "val/explained_variance"} <= written.keys()


def test_the_settings_are_those_of_the_run_that_it_repeats() -> None:
    settings = tomllib.loads((Path(learn.__file__).parent / "config.toml").read_text())
    batch, minibatches = settings["step"]["batch"], settings["trainer"]["minibatches"]
    assert (batch, batch // minibatches, settings["run"]["steps"]) == (256, 64, 15 * (7_473 // batch))
