"""A run's end tells the truth, whatever a reward does, wherever it is shown, and whoever hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from oppo import train
from oppo.cli import DONE, FAILED, INTERRUPTED, UNUSABLE
from oppo.observe import Observer, Span
from oppo.run.train import FINAL
from oppo.signals import Stopped
from tests.kit.workplace import furnish, oppo, records, resume, start

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


IMPATIENT = """
import functools
import oppo.run.observers
oppo.run.observers.StallLimits = functools.partial(oppo.run.observers.StallLimits, grace=0.5)
"""
"""Has a run's watchdog wait less long for what it has cancelled."""


@pytest.mark.deep
def test_what_was_learned_is_saved_though_the_scorers_process_hangs(folder: Path) -> None:
    overrides = ("run.name=hung", "run.steps=100000", "run.scorers=process", "run.cores=2")
    limits = ("run.watchdog_seconds=6", "run.call_timeout=6", "run.checkpoint_every=0")  # busy machines stall too
    with start(folder, *overrides, *limits, before=IMPATIENT) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGSTOP)
        _, output = process.communicate(timeout=60)
    run = folder / "runs" / "hung"
    assert process.returncode == FAILED, output
    assert "nothing has moved for " in output
    assert not Path(f"/proc/{child}").exists()
    AutoModelForCausalLM.from_pretrained(run / FINAL / "actor")
    assert json.loads((run / "summary.json").read_text())["steps"] >= 2
