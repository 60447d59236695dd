"""The game of two players, run short: each role has its reward, and the model as it was plays where rows name it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from examples.two_players import game
from tests.kit.workplace import read_lines


def test_two_players_train_and_meet_the_model_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "two_players"
    shutil.copytree(Path(game.__file__).parent, folder)
    game.main(folder)
    few = ["run.steps=3", "step.batch=8", "eval.every=3", "eval.samples=2", "run.panel=off"]
    command = [sys.executable, "-m", "oppo", "train", str(folder / "config.toml")]
    subprocess.run([*command, *(f"--set={each}" for each in few)], cwd=tmp_path, check=True, timeout=300)
    (run,) = tmp_path.rglob("metrics.jsonl")
    for step in read_lines(run):
        assert step["rewards/first/mean"] == -step["rewards/second/mean"]
        assert step["agents/conversations"] == 2
        assert "rewards/initial/mean" not in step
        assert -1 < step["objective/baseline/first"] < 1
    for evaluated in read_lines(run.with_name("eval.jsonl")):
        assert evaluated["eval/agents/conversations"] == 1
        assert evaluated["eval/score"] == -evaluated["eval/rewards/initial/mean"]
