"""``oppo train`` with its trainer in a process of its own: the same run, whoever goes on with it, and no hang."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from oppo.cli import DONE, FAILED
from oppo.run.checkpoint import CHECKPOINTS
from oppo.run.train import FINAL
from tests.forked import Program
from tests.workplace import furnish, oppo, resume, start

EXACT = ("run.deterministic=true", "run.checkpoint_every=1", "run.scorers=thread", "run.panel=off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return furnish(tmp_path_factory.mktemp("trainer"))


def weights(run: Path) -> dict[str, bytes]:
    """Return every tensor of both models, as bytes."""
    return {
        f"{model}/{key}": tensor.tobytes()
        for model in ("actor", "critic")
        for key, tensor in load_file(run / FINAL / model / "model.safetensors").items()
    }


def test_a_process_and_a_thread_go_on_with_each_other_s_checkpoints_to_the_same_weights(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ("run.trainer=thread", "models.share_weights=true")
    there = ("run.trainer=process", "models.share_weights=false")
    final = {}
    for name, begun, then in (("here", here, here), ("returned", there, here), ("left", here, there)):
        run = folder / "runs" / name
        assert oppo(folder, "", *EXACT, f"run.name={name}", "run.steps=2", *begun) == DONE
        assert resume(folder, name, "run.steps=3", *then) == DONE
        events = json.loads((run / "trace.json").read_text())
        assert {"trainer", "saver"} <= {e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        final[name] = weights(run)
    assert final["returned"] == final["left"] == final["here"]
    assert capsys.readouterr().err.count("starting the process of the trainer") == 2


def child_of_begun(process: Program) -> int:
    """Return the number of a run's only child, once two steps are over."""
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def test_a_run_whose_trainer_is_killed_ends_and_says_how_to_go_on(folder: Path) -> None:
    overrides = ("run.name=killed", "run.steps=100000", "run.trainer=process", "run.scorers=thread")
    with start(folder, *overrides, "run.checkpoint_every=1") as process:
        child = child_of_begun(process)
        os.kill(child, signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == FAILED, said
    assert f"the process of 'trainer' (pid {child}) was killed by SIGKILL" in said
    assert "go on from there (oppo resume)" in said
    checkpoints = folder / "runs" / "killed" / CHECKPOINTS
    assert list(checkpoints.glob("step-*"))
    assert not (checkpoints / "final").exists(), "half of an update is nothing that was learned"


IMPATIENT = """
import functools
import oppo.run.observers
oppo.run.observers.StallLimits = functools.partial(oppo.run.observers.StallLimits, grace=0.5)
"""
"""Has a run's watchdog wait less long for what it has cancelled."""


@pytest.mark.deep
def test_a_run_whose_trainer_hangs_ends(folder: Path) -> None:
    overrides = ("run.name=hung", "run.steps=100000", "run.trainer=process", "run.scorers=thread")
    limits = ("run.watchdog_seconds=2", "run.call_timeout=2", "run.checkpoint_every=1")
    with start(folder, *overrides, *limits, before=IMPATIENT) as process:
        child = child_of_begun(process)
        os.kill(child, signal.SIGSTOP)
        _, said = process.communicate(timeout=60)
    assert process.returncode == FAILED, said
    assert "nothing has moved for " in said
    assert "in a call: trainer: " in said
    assert not Path(f"/proc/{child}").exists()
