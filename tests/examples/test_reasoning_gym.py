"""The example that learns a task of reasoning-gym, on a stand-in for the library, and its committed curve."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest

from examples.reasoning_gym import learn, make_model
from tests.kit import gym_stand_in

EXAMPLE = Path(learn.__file__).parent


def learned(folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Run the example in ``folder``; return the curve that it wrote."""
    names = {"--model": "model", "--runs": "runs", "--output": "results.json"}
    places = [part for option, name in names.items() for part in (option, str(folder / name))]
    assert learn.main([*places, *arguments]) == 0
    curve: list[dict[str, float]] = json.loads((folder / "results.json").read_text(encoding="utf-8"))["curve"]
    return curve


def test_it_writes_the_curve_of_held_out_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gym_stand_in.install(monkeypatch)
    assert make_model.main(["--output", str(tmp_path / "model"), "--steps", "5"]) == 0
    few = ("run.steps=2", "eval.every=1", "step.batch=4", "run.panel=off")
    curve = learned(tmp_path, "--held-out", "16", *(part for each in few for part in ("--set", each)))
    assert [point["updates"] for point in curve] == [0, 1, 2]
    assert capsys.readouterr().out.count("are right") == 3


def test_held_out_questions_are_in_neither_training(monkeypatch: pytest.MonkeyPatch) -> None:
    gym_stand_in.install(monkeypatch)
    rows = learn.held_out(200)
    asked = {row["prompt"] for row in rows}
    assert len(asked) == len(rows) == 200
    for seed in (make_model.SEED, learn.REWARDED):
        assert not asked & {row["prompt"] for row in learn.questions(make_model.ROWS, seed)}


def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("oppo.libraries.find_spec", lambda name: None)
    assert learn.main(["--model", str(tmp_path), "--output", str(tmp_path / "results.json")]) == 2
    assert "pip install 'oppo[reasoning-gym]'" in capsys.readouterr().err


def test_the_committed_curve_is_of_the_committed_settings_and_rises() -> None:
    committed = json.loads((EXAMPLE / "results.json").read_text(encoding="utf-8"))
    settings = tomllib.loads((EXAMPLE / "config.toml").read_text(encoding="utf-8"))
    assert (committed["settings"], committed["set"]) == (settings, [])
    assert committed["task"] == {"name": make_model.TASK, **make_model.CONFIG, "held_out": 256}
    curve = committed["curve"]
    assert [point["updates"] for point in curve] == [*range(0, settings["run"]["steps"] + 1, settings["eval"]["every"])]
    assert curve[-1]["score"] - curve[-1]["score_ci95"] > curve[0]["score"] + curve[0]["score_ci95"]
    shown = [f"{100 * point['right']:.0f}%" for point in curve]
    assert f"| {' | '.join(shown)} |" in (EXAMPLE / "README.md").read_text(encoding="utf-8")


@pytest.mark.deep
def test_the_policy_learns_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gym_stand_in.install(monkeypatch)
    curve = learned(tmp_path, "--held-out", "512", "--set", "run.steps=60", "--set", "run.panel=off")
    first, last = curve[0], curve[-1]
    assert last["score"] - first["score"] > math.hypot(last["score_ci95"], first["score_ci95"])
    assert last["right"] > first["right"]
