"""The demo end to end, in its short form: what it makes, that it learns, and what it leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from oppo.cli import main
from oppo.config.load import load_settings
from oppo.demo.run import UNMEASURED, Findings, demo
from oppo.demo.schedules import Digests
from oppo.evaluation import Comparison
from oppo.hf import load_causal

FACTS = {
    "eval/score", "eval/response_length", "objective/kl", "seconds", "overlap/hidden_fraction", "deferred_fraction",
    "tokens_identical_to_serial", "actor", "steps",
}  # fmt: skip


def learned(directory: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    assert set(facts) >= FACTS
    scores = facts["eval/score"]
    assert scores["gain"] - scores["gain_ci95"] > 0, "the interval of the gain lies above 0"
    assert scores["last"] - scores["first"] == pytest.approx(scores["gain"], abs=1e-5)
    evaluated = [json.loads(line)["eval/score"] for line in (directory / "eval.jsonl").read_text().splitlines()]
    assert (evaluated[0], evaluated[-1]) == (scores["first"], scores["last"]), "a number has one name in every file"
    assert facts["objective/kl"]["last"] < 20
    assert facts["tokens_identical_to_serial"] is True
    assert 0 < facts["overlap/hidden_fraction"]["mean"] <= 1
    assert 0 <= facts["deferred_fraction"] < 1, "how many, the machine decides"
    return facts


@pytest.mark.deep
def test_a_short_demo_learns_and_leaves_a_run_that_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPPO_CACHE", str(tmp_path / "cache"))
    assert main(["demo", "--short", "--directory", str(tmp_path / "runs")]) == 0
    directory = tmp_path / "runs" / "demo-1"
    facts = learned(directory)
    load_causal(str(facts["actor"]))
    with safe_open(directory / "checkpoints/final/critic/model.safetensors", framework="np") as tensors:
        assert "score.weight" in tensors.keys()  # noqa: SIM118 - it is no mapping
    said = capsys.readouterr().out
    for finding in ("held-out", "KL", "length", "overlap", "deferral", "exactness", "outputs", "again", "time"):
        assert f"\n{finding} " in said
    assert UNMEASURED in " ".join(said.split())
    again = load_settings(directory / "config.toml", [f"run.name=again-{tmp_path.name}"])
    assert again.run.steps == facts["steps"]
    assert again.step.admission == "adaptive"
    steps = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [step["deferral/overcommit"] for step in steps[:3]] == [0, 0, 0], "it only watches at first"
    assert all("deferral/predicted_seconds" in step for step in steps[3:])
    assert max(step["deferral/overcommit"] for step in steps) <= again.step.batch / 4


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_short_demo_learns_whatever_the_seed(seed: int, tmp_path: Path) -> None:
    learned(demo(tmp_path / "runs", short=True, seed=seed, cache=tmp_path / "cache"))


FOUND = Findings(
    scores=Comparison(before=0.0, after=1.5, spread=1.0, gain=1.5, half_width=0.2),
    summary={
        "eval/score": {"first": 0.0, "last": 1.5},
        "eval/response_length": {"first": 30.0, "last": 59.0},
        "objective/kl": {"last": 5.0},
        "overlap/hidden_fraction": {"mean": 0.8},
    },
    deferred_fraction=0.2,
    deferral_steps={1: 90, 2: 5},
    digests=Digests("aa", "ab"),
    directory=Path("runs/demo-1"),
    actor=Path("runs/demo-1/actor"),
    assets=Path("cache"),
    seconds=100.0,
)
LONG = {**FOUND.summary, "eval/response_length": {"first": 30.0, "last": 70.0}}
UNSCORED = {name: each for name, each in FOUND.summary.items() if name != "overlap/hidden_fraction"}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (FOUND, "length     30 tokens before, 59 after, on held-out prompts"),
        (
            replace(FOUND, summary=LONG),
            "length     30 tokens before, 70 after, on held-out prompts; length hack: 2.3 times as long",
        ),
        (FOUND, "exactness  a serial and a streamed run, in deterministic mode, made OTHER tokens: aa and ab"),
        (FOUND, "overlap    80% of the scoring was hidden behind decoding and training"),
        (replace(FOUND, summary=UNSCORED), "overlap    scoring took hardly any time: there was nothing to hide"),
        (replace(FOUND, others=0.04), "time       100 s"),
        (replace(FOUND, others=0.87), "time       100 s; other processes took 87% of the cores"),
        (FOUND, "inputs     policy (actor), reward model (reward) and prompts.jsonl are in cache"),
        (FOUND, "deferral   20.0% of the rollouts were deferred: 90 by 1 step, 5 by 2 steps"),
        (
            replace(FOUND, deferral_steps={}),
            "deferral   nothing was deferred: no number of extra rollouts promised to save more time than it costs",
        ),
    ],
)
def test_what_was_found_is_told_line_by_line(found: Findings, said: str) -> None:
    assert said in found.lines()
    assert found.facts()["tokens_identical_to_serial"] is False
