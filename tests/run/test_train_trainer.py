"""``oppo train`` with its trainer in any place: the same run, streamed or whole, saved however it ends, and no hang."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path

import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from oppo.cli import DONE, FAILED, INTERRUPTED, main
from oppo.config.load import load
from oppo.hf.lora import merged
from oppo.run.checkpoint import CHECKPOINTS
from oppo.run.train import FINAL, prepare
from tests.kit.forked import Program
from tests.kit.workplace import oppo, records, resume, start, weights

EXACT = ("run.deterministic=true", "run.checkpoint_every=1", "run.scorers=thread", "run.panel=off")


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
        final[name] = weights(folder, name)
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


GROUPS = (
    *("run.panel=off", "step.algorithm=rloo", "algorithm.samples=2", "step.batch=4", "run.steps=3"),
    *("trainer.epochs=1", "rewards.0.source=reward.py:short", "run.checkpoint_every=2"),
)


@pytest.mark.parametrize("trainer", ["thread", "process"])
def test_what_is_streamed_is_the_same_update(folder: Path, trainer: str) -> None:
    chosen = (*GROUPS, f"run.trainer={trainer}")
    streamed, whole = f"streamed-{trainer}", f"whole-{trainer}"
    assert oppo(folder, "", *chosen, "step.stream_updates=true", f"run.name={streamed}") == DONE
    assert oppo(folder, "", *chosen, "models.share_weights=false", f"run.name={whole}") == DONE
    ours, theirs = (records(folder, name, "metrics.jsonl") for name in (streamed, whole))
    for one, other in zip(ours[:1], theirs[:1], strict=True):
        for name in ("objective/scores", "loss/policy_avg", "train/grad_norm", "train/tokens", "train/minibatches"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert [line["version"] for line in ours] == [1, 2, 3]
    assert main(["resume", str(folder / "runs" / streamed), "--set", "run.steps=4"]) == DONE


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.epochs=2", "trainer.epochs = 2"),
        ("trainer.minibatches=2", "trainer.minibatches = 2"),
        ("trainer.router_aux_loss=0.1", "trainer.router_aux_loss = 0.1"),
        ("step.algorithm=ppo", "step.algorithm = 'ppo', whose advantages are not those of a group alone"),
        ("algorithm.score_norm=true", "algorithm.score_norm = true"),
        ("step.algorithm=grpo algorithm.scale_scores=batch", "algorithm.scale_scores = 'batch'"),
        ("algorithm.entropy_coefficient=0.1", "a loss, ClippedLoss, that divides by sizes of several kinds"),
        ("models.share_weights=true", "models.share_weights = true"),
        ("run.deterministic=true", "run.deterministic = true"),
    ],
)
def test_what_cannot_be_streamed_is_refused_before_anything_is_loaded(
    folder: Path, override: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [each for each in GROUPS if "samples" not in each or "ppo" not in override]
    chosen = (*given, "step.stream_updates=true", "models.policy=nowhere", "run.name=refused", *override.split())
    assert oppo(folder, "", *chosen) not in {DONE, FAILED}
    assert said in capsys.readouterr().err


def test_what_was_learned_is_saved_as_a_whole_though_who_waits_for_it_is_cancelled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held(model: PreTrainedModel) -> dict[str, Tensor]:
        begun.set()
        assert go_on.wait(60)
        return merged(model)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            saving = tasks.create_task(session.assembly.saving.save(final))
            assert await asyncio.to_thread(begun.wait, 60)
            saving.cancel()
            go_on.set()
        assert saving.cancelled()

    monkeypatch.setattr("oppo.hf.train.trainer.merged", held)
    final = folder / "elsewhere" / "final"
    (final / "old").mkdir(parents=True)
    with prepare(load(folder / "config.toml", ["run.scorers=thread", "run.name=cancelled"])) as session:
        asyncio.run(main())
    assert [each.name for each in final.parent.iterdir()] == ["final"]
    assert sorted(each.name for each in final.iterdir()) == ["actor", "critic"]
    AutoModelForCausalLM.from_pretrained(final / "actor")
    AutoTokenizer.from_pretrained(final / "actor")


SLOW = """
import pathlib, time
import oppo.hf.train.trainer
merging = oppo.hf.train.trainer.merged
def merged(model):
    pathlib.Path({mark!r}).touch()
    time.sleep(2)
    return merging(model)
oppo.hf.train.trainer.merged = merged
"""
"""Has a process take its time over saving, and leave a mark when it begins to."""


def test_ctrl_c_while_what_was_learned_is_saved_loses_nothing_of_it(folder: Path) -> None:
    mark = folder / "saving"
    with start(folder, "run.name=late", "run.steps=1", before=SLOW.format(mark=str(mark))) as process:
        while not mark.exists() and process.poll() is None:
            threading.Event().wait(0.05)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            threading.Event().wait(0.2)
        _, said = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, said
    final = folder / "runs" / "late" / FINAL
    assert f"interrupted; what was learned is in {final}" in said
    assert not [each for each in final.parent.iterdir() if each.name.startswith(".")]
    AutoModelForCausalLM.from_pretrained(final / "actor")
