"""What sees a run: messages, each shown once and logged, and trackers, which a run does not need."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from oppo.cli import DONE, UNUSABLE
from oppo.config.load import load
from oppo.log import logger
from oppo.observe import Observer, Span
from oppo.report.trackers import TensorBoard
from oppo.run.observers import EVENTS
from oppo.run.train import prepare, run
from tests.kit.workplace import oppo, records, resume
from tests.report.tracked import board, history, logs, texts, trackio_history


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
    settings = load(folder / "config.toml", [f"run.panel={panel}", f"run.name={panel}", "run.scorers=thread"])
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


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def numbers(line: Mapping[str, object]) -> dict[str, object]:
    """Return what a tracker shows of a line of metrics.jsonl."""
    return {name: value for name, value in line.items() if name != "step" and value is not None}


def test_a_run_and_what_resumes_it_are_shown_as_one_in_both(folder: Path) -> None:
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


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
@pytest.mark.parametrize("command", ["", "--dry-run"])
def test_what_is_not_installed_is_said_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    monkeypatch.setattr("oppo.libraries.find_spec", lambda module: None)
    assert oppo(folder, command, f'run.track=["{name}"]', "run.name=missing") == UNUSABLE
    said = capsys.readouterr().err
    assert f"run.track = ['{name}'] needs {name}, which is not installed: pip install 'oppo[{name}]'" in said
    assert not (folder / "runs" / "missing").exists()


def test_an_unknown_tracker_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert oppo(folder, "", 'run.track=["wandbb"]') == UNUSABLE
    assert "tensorboard" in capsys.readouterr().err
