"""The example that learns a task of reasoning-gym, on a stand-in for the library, and its committed curve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.reasoning_gym import learn, make_model
from tests import gym_stand_in

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
    monkeypatch.setattr("oppo.gym.find_spec", lambda name: None)
    assert learn.main(["--model", str(tmp_path), "--output", str(tmp_path / "results.json")]) == 2
    assert "pip install 'oppo[reasoning-gym]'" in capsys.readouterr().err


@pytest.mark.deep
def test_the_policy_learns_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gym_stand_in.install(monkeypatch)
    curve = learned(tmp_path, "--set", "run.panel=off")
    first, last = curve[0], curve[-1]
    assert last["right"] > first["right"] + 0.1
    assert last["score"] - last["score_ci95"] > first["score"] + first["score_ci95"]
