"""A run's end tells the truth, whatever a reward, a signal or a child does, and whatever fails that sees the run."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from oppo import train
from oppo.cli import DONE, FAILED, INTERRUPTED, UNUSABLE
from oppo.config.load import load_settings
from oppo.hf.lora import merged
from oppo.liveness.signals import Stopped
from oppo.log import logger
from oppo.observe import Observer, Span
from oppo.report.trackers import TensorBoard
from oppo.run.checkpoint import CHECKPOINTS
from oppo.run.observers import EVENTS
from oppo.run.train import FINAL, prepare, run
from tests.kit.workplace import furnish, oppo, records, resume, start
from tests.report.tracked import board, history, logs, texts, trackio_history

MISCHIEF = """
import asyncio, os, sys, threading, time
from pathlib import Path

calls, flaps = [], []  # a file is run once in a process

async def hedged(prompts, completions):
    calls.append(1)
    if len(calls) > 2:
        task = asyncio.ensure_future(asyncio.sleep(10))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task)
    return [1.0 for _ in completions]

def leaving(prompts, completions):
    sys.exit(0)

def exiting(prompts, completions):
    os._exit(0)

async def exiting_on_the_loop(prompts, completions):
    os._exit(0)

def forking(prompts, completions):
    child = os.fork()
    if not child:
        os._exit(0)
    return [float(os.waitpid(child, 0)[1])] * len(completions)

def exiting_beside(prompts, completions):
    threading.Thread(target=lambda: os._exit(0)).start()
    time.sleep(60)

def flapping(prompts, completions):
    flaps.append(1)
    if len(flaps) == 1:
        raise ConnectionError("the judge is away")
    return [1.0 for _ in completions]

async def blocking(prompts, completions):
    Path(os.environ["MARK"]).touch()
    time.sleep(3600)

def stuck(prompts, completions):
    Path(os.environ["MARK"]).touch()
    time.sleep(3600)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = furnish(tmp_path_factory.mktemp("ends"))
    (folder / "mischief.py").write_text(MISCHIEF)
    (folder / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    return folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hedged", "reward function 'hedged' raised CancelledError at "),
        ("leaving", "reward function 'leaving' raised SystemExit: 0 at "),
        ("exiting", "reward function 'exiting' raised SystemExit: os._exit(0) at "),
        ("exiting_on_the_loop", "reward function 'exiting_on_the_loop' raised SystemExit: os._exit(0) at "),
    ],
)
def test_what_a_reward_does_to_end_a_run_is_a_failure_of_it(
    folder: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(folder, "", f"rewards.0.source=mischief.py:{name}", f"run.name={name}", "run.steps=9") == FAILED
    output = capsys.readouterr().err
    assert message in output
    assert f"{folder / 'mischief.py'}:" in output
    assert "in stage 'reward' of graph 'ppo', step " in output
    assert "Traceback" not in output
    assert json.loads((folder / "runs" / name / "summary.json").read_text())["complete"] is False


def test_a_thread_that_ends_the_program_is_named_and_its_code_is_no_success(folder: Path) -> None:
    with start(folder, "rewards.0.source=mischief.py:exiting_beside", "run.name=beside") as process:
        _, output = process.communicate(timeout=60)
    assert process.returncode == FAILED, output
    assert f"left by an os._exit(0) that nothing asked for at {folder / 'mischief.py'}:" in output


def test_a_process_that_a_reward_forks_ends_as_it_wants_to(folder: Path) -> None:
    assert oppo(folder, "", "rewards.0.source=mischief.py:forking", "run.name=forking", "run.steps=1") == DONE


def test_a_reward_file_that_ends_the_program_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oppo(folder, "", "rewards.0.source=leaving.py:f", "run.name=file") == UNUSABLE
    assert "leaving.py cannot be run: SystemExit: 0 at " in capsys.readouterr().err


def test_a_name_is_free_again_after_a_run_that_made_no_step(folder: Path) -> None:
    assert oppo(folder, "", "rewards.0.source=mischief.py:leaving", "run.name=again", "run.steps=1") == FAILED
    assert oppo(folder, "", "run.name=again", "run.steps=1") == DONE
    assert [each["event"] for each in records(folder, "again", "log.jsonl")].count("begin") == 2


def test_retries_are_in_the_log_and_a_short_watchdog_waits_for_them(folder: Path) -> None:
    overrides = ("rewards.0.source=mischief.py:flapping", "rewards.0.on_failure=retry", "run.watchdog_seconds=0.3")
    assert oppo(folder, "", *overrides, "run.name=flapping", "run.steps=1", "run.scorers=thread") == DONE
    (notice,) = [each for each in records(folder, "flapping", "log.jsonl") if each["event"] == "notice"]
    assert "ConnectionError: the judge is away at " in str(notice["text"])
    assert str(notice["text"]).endswith("; attempt 2 of 4 follows in 1 s")


@pytest.mark.parametrize("reward", ["stuck", "blocking"])
def test_a_second_ctrl_c_ends_a_run_at_once_though_its_reward_never_returns(folder: Path, reward: str) -> None:
    """One that blocks the event loop is interrupted where it is, and no task of the loop is left to complain."""
    mark = folder / f"mark-{reward}"
    overrides = (f"run.name={reward}", f"rewards.0.source=mischief.py:{reward}", "run.scorers=thread")
    with start(folder, *overrides, MARK=str(mark)) as process:
        while not mark.exists() and process.poll() is None:
            threading.Event().wait(0.05)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            threading.Event().wait(0.3)
        _, output = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, output
    assert "interrupted; nothing was saved" in output
    for word in ("Traceback", "never retrieved", "never awaited"):
        assert word not in output


LOADING = """
import time
import oppo.run.loading
def load(*arguments, **options):
    time.sleep(60)
oppo.run.loading.load_causal = load
"""
"""Has a process take its time over loading models."""


def test_a_signal_while_models_are_loaded_ends_a_run_by_its_own_code(folder: Path) -> None:
    with start(folder, "run.name=loading", before=LOADING) as process:
        assert any(line.startswith("loading the policy") for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert output == "interrupted by SIGTERM\n"


class Signalled(Observer):
    """A job scheduler that loses its patience in the last step."""

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Leave it."""

    def on_span(self, span: Span) -> None:
        """Leave it."""

    def on_step(self, step: int, result: object, channels: object) -> None:
        del result, channels
        if step == 1:
            signal.raise_signal(signal.SIGTERM)


def test_a_signal_in_the_last_step_of_a_run_ends_the_program_that_called_it(folder: Path) -> None:
    settings = ["run.name=called", "run.steps=2", "run.panel=off"]
    with pytest.raises(Stopped, match="SIGTERM"):
        train(folder / "config.toml", settings, observers=[Signalled()])
    assert json.loads((folder / "runs" / "called" / "summary.json").read_text())["complete"] is True
    assert (folder / "runs" / "called" / FINAL / "actor").is_dir()


LAST = """
import signal
from oppo.run.train import EmptySteps
after = EmptySteps.after
def signalled(self, report):
    signal.raise_signal(signal.SIGTERM)
    after(self, report)
EmptySteps.after = signalled
"""
"""Has a process be asked to end after its last step."""


def test_a_command_that_is_signalled_in_its_last_step_is_done(folder: Path) -> None:
    with start(folder, "run.name=last", "run.steps=1", "run.checkpoint_every=1", before=LAST) as process:
        _, output = process.communicate(timeout=60)
    assert process.returncode == DONE, output
    assert (folder / "runs" / "last" / FINAL).is_dir()
    assert resume(folder, "last") == DONE, "there is nothing left to do"


SAVING = """
import anyio
from oppo.run.models import Saving
save = Saving.save
async def slowly(self, directory):
    print("saving", flush=True)
    await anyio.sleep(1)
    await save(self, directory)
Saving.save = slowly
"""
"""Has a process take its time over saving the trained models."""


def test_a_second_signal_while_models_are_saved_ends_a_run_by_the_code_of_the_first(folder: Path) -> None:
    with start(folder, "run.name=saving", "run.steps=99", "run.panel=lines", before=SAVING) as process:
        assert any(line.startswith("step 1/") for line in iter(process.stdout.readline, ""))
        process.send_signal(signal.SIGTERM)
        assert any(line == "saving\n" for line in iter(process.stdout.readline, ""))
        process.send_signal(signal.SIGINT)
        _, output = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert f"interrupted by SIGTERM; what was learned is in {folder / 'runs' / 'saving' / FINAL}" in output
    assert AutoModelForCausalLM.from_pretrained(folder / "runs" / "saving" / FINAL / "actor").config.model_type


def test_a_run_outlives_its_display(folder: Path) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "oppo", "train", str(folder / "config.toml"), "--set", "run.name=unseen"]
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(command, stdout=writing, stderr=full, env=os.environ | {"OMP_NUM_THREADS": "1"})
    os.close(writing)
    os.close(reading)
    assert process.wait(120) == DONE
    assert json.loads((folder / "runs" / "unseen" / "summary.json").read_text())["complete"] is True


@pytest.mark.deep
def test_what_was_learned_is_saved_though_the_scorers_process_hangs(folder: Path) -> None:
    overrides = ("run.name=hung", "run.steps=100000", "run.scorers=process", "run.cores=2")
    limits = ("run.watchdog_seconds=6", "run.call_timeout=6", "run.checkpoint_every=0")  # busy machines stall too
    with start(folder, *overrides, *limits, before=IMPATIENT) as process:
        (child,) = process.children()
        os.kill(child, signal.SIGSTOP)
        _, output = process.communicate(timeout=60)
    run = folder / "runs" / "hung"
    assert process.returncode == FAILED, output
    assert "nothing has moved for " in output
    assert not Path(f"/proc/{child}").exists()
    AutoModelForCausalLM.from_pretrained(run / FINAL / "actor")
    assert json.loads((run / "summary.json").read_text())["steps"] >= 2


def test_a_run_whose_trainer_is_killed_ends_and_says_how_to_go_on(folder: Path) -> None:
    overrides = ("run.name=killed", "run.steps=100000", "run.trainer=process", "run.scorers=thread")
    with start(folder, *overrides, "run.checkpoint_every=1") as process:
        (child,) = process.children()
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
    overrides = ("run.name=trainer-hung", "run.steps=100000", "run.trainer=process", "run.scorers=thread")
    limits = ("run.watchdog_seconds=2", "run.call_timeout=2", "run.checkpoint_every=1")
    with start(folder, *overrides, *limits, before=IMPATIENT) as process:
        (child,) = process.children()
        os.kill(child, signal.SIGSTOP)
        _, said = process.communicate(timeout=60)
    assert process.returncode == FAILED, said
    assert "nothing has moved for " in said
    assert "in a call: trainer: " in said
    assert not Path(f"/proc/{child}").exists()


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
    with prepare(load_settings(folder / "config.toml", ["run.scorers=thread", "run.name=cancelled"])) as session:
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


class Talkative(Observer):
    """Logs something after the first step."""

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        pass

    def on_span(self, span: Span) -> None:
        pass

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        if step == 0:
            logger.info("the judge at https://me:canary@host is called again")


@pytest.mark.parametrize("panel", ["live", "lines"])
def test_a_message_is_shown_once_and_logged(folder: Path, panel: str, messages: list[str]) -> None:
    out = io.StringIO()
    settings = load_settings(folder / "config.toml", [f"run.panel={panel}", f"run.name={panel}", "run.scorers=thread"])
    with prepare(settings) as session:
        anyio.run(run, session, Console(file=out, force_terminal=True, width=120), [Talkative()])
        logger.info("the run is over")
    assert messages[-1] == "the run is over"
    notices = [message for message in messages if "the judge" in message]
    shown = "the judge at https://***@host is called again" in out.getvalue()
    assert (len(notices), shown) == ((0, True) if panel == "live" else (1, False))
    assert "canary" not in out.getvalue()
    logged = [line["text"] for line in records(folder, panel, "log.jsonl") if line["event"] == "notice"]
    assert "the judge at https://***@host is called again" in logged


BOTH = 'run.track=["tensorboard", "wandb"]'


def numbers(line: Mapping[str, object]) -> dict[str, object]:
    """Return what a tracker shows of a line of metrics.jsonl."""
    return {name: value for name, value in line.items() if name != "step" and value is not None}


def test_a_run_and_what_resumes_it_are_shown_as_one_in_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert oppo(folder, "", BOTH, "run.name=both", "run.checkpoint_every=1") == DONE
    assert resume(folder, "both", "run.steps=3") == DONE
    path, written = folder / "runs" / "both", records(folder, "both", "metrics.jsonl")
    shown = board(path / EVENTS)
    for line in written:
        for name, value in numbers(line).items():
            assert shown[name][line["step"]] == pytest.approx(value), name
    logged = {step: metrics for log in logs(path) for step, metrics in history(log).items()}
    assert logged == {line["step"]: pytest.approx(numbers(line)) for line in written}
    (config, *_) = [record.run.config for record in logs(path)[0] if record.WhichOneof("record_type") == "run"]
    assert {"run", "step", "trainer"} <= {item.key for item in config.update}


def test_trackers_show_a_few_samples_of_each_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_PROJECT", folder.name)
    assert oppo(folder, "", 'run.track=["tensorboard", "trackio"]', "run.name=tables", "run.logged_samples=2") == DONE
    written = records(folder, "tables", "samples.jsonl")
    shown = texts(folder / "runs" / "tables" / EVENTS)
    assert {step: text.count("\n| ") - 1 for step, text in shown.items()} == {1: 2, 2: 2}
    tables = [each["samples"] for _, _, each in trackio_history(folder.name) if "samples" in each]
    assert len(tables) == 2
    assert all(isinstance(each, dict) and len(each["_value"]) == 2 for each in tables)
    assert all(str(line["completion"]).split()[0] in shown[line["step"]] for line in written if line["completion"])


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_step(self: TensorBoard, step: int, result: object, channels: object) -> None:
        raise OSError("no space left")

    def close(self: TensorBoard, *, failed: bool = False) -> None:
        raise OSError("nor now")

    monkeypatch.setattr(TensorBoard, "on_step", on_step)
    monkeypatch.setattr(TensorBoard, "close", close)
    assert oppo(folder, "", 'run.track=["tensorboard"]', "run.name=failing") == DONE
    assert len(records(folder, "failing", "metrics.jsonl")) == 2
    said = [line.get("text") for line in records(folder, "failing", "log.jsonl")]
    assert "TensorBoard has failed and is left out: OSError: no space left" in said
    assert "TensorBoard could not be completed: OSError: nor now" in said


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_what_is_not_installed_is_said_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr("oppo.libraries.find_spec", lambda module: None)
    assert oppo(folder, "", f'run.track=["{name}"]', "run.name=missing") == UNUSABLE
    said = capsys.readouterr().err
    assert f"run.track = ['{name}'] needs {name}, which is not installed: pip install 'oppo[{name}]'" in said
    assert not (folder / "runs" / "missing").exists()
