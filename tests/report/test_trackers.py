"""TensorBoard and Weights & Biases, offline: what a run logs is what its metrics.jsonl holds, resumed runs included."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import oppo
from oppo.errors import ConfigError
from oppo.evaluation import Evaluated
from oppo.evaluation.evaluate import BEFORE
from oppo.events import StepReport
from oppo.observe import Observer
from oppo.report.metrics import scalars
from oppo.report.records import Record
from oppo.report.trackers import IDENTITY, MLflow, TensorBoard, Tracker, Trackio, WeightsAndBiases
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer, fake_per_token, fake_scalar, prompts
from oppo.testing.virtual_time import run_virtual
from tests.report.synthetic import batch, finish, report
from tests.report.tracked import board, history, logs, texts, trackio_history


async def run(*observers: Observer) -> list[StepReport]:
    graph = oppo.ppo(
        policy=FakePolicy(),
        reference=FakeScorer(fake_per_token),
        reward=FakeScorer(fake_scalar, 0.002),
        critic=FakeCritic(),
        trainer=FakeTrainer(0.5),
        admission=oppo.Overcommit(batch=4, overcommit=2),
    )
    async with graph.open(prompts(20), observers=observers) as opened:
        return [each async for each in opened.steps(2)]


def test_the_thread_that_writes_for_tensorboard_looks_for_work_a_few_times_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []

    class Clock:
        @staticmethod
        def time() -> float:
            looked.append(time.time())
            return looked[-1]

    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", Clock)
    with TensorBoard(tmp_path / "board"):
        time.sleep(0.3)
    assert len(looked) < 20


def test_tensorboard_shows_the_metrics_of_each_step_under_their_names(tmp_path: Path) -> None:
    with TensorBoard(tmp_path / "board") as written:
        reports = run_virtual(run, written)
    shown = board(tmp_path / "board")
    assert set(shown) == set(scalars(reports[0])) | set(scalars(reports[1]))
    for each in reports:
        for name, value in scalars(each).items():
            assert shown[name][each.index + 1] == pytest.approx(value), name
    assert {"score", "objective/kl", "overlap/hidden_fraction", "queue/generate->reward/peak"} <= shown.keys()


def test_weights_and_biases_logs_them_too_and_offline_it_asks_nobody(tmp_path: Path) -> None:
    with WeightsAndBiases(tmp_path, name="first", config={"step": {"batch": 4}}, mode="offline") as log:
        reports = run_virtual(run, log)
        assert log.url == ""
    (kept,) = logs(tmp_path)
    assert history(kept) == {each.index + 1: pytest.approx(scalars(each)) for each in reports}
    (begun,) = [record.run for record in kept if record.WhichOneof("record_type") == "run"]
    assert (begun.display_name, begun.project) == ("first", "oppo")
    assert {item.key: json.loads(item.value_json) for item in begun.config.update}["step"] == {"batch": 4}
    (end,) = [record.exit for record in kept if record.WhichOneof("record_type") == "exit"]
    assert end.exit_code == 0


def test_a_resumed_run_goes_on_in_both_and_one_that_failed_is_shown_as_such(tmp_path: Path) -> None:
    for first in (0, 1):
        with (
            suppress(ZeroDivisionError),
            TensorBoard(tmp_path / "board", first=first) as written,
            WeightsAndBiases(tmp_path, name="x", mode="offline") as log,
        ):
            for tracker in (written, log):
                if not first:
                    tracker.on_item(0, "evaluate", Evaluated(BEFORE, 0, {"eval/score": 0.25}), 0.0)
                    tracker.on_item(1, "evaluate", Evaluated(1, 2, {"eval/score": 0.5}), 0.0)
                for step in range(first, first + 3 if first else 2):
                    tracker.on_step(step, report(step, (), 10.0 * first + step), {})
                tracker.on_step(4, report(4, (), float("nan")), {})
            raise ZeroDivisionError
    shown = board(tmp_path / "board")
    assert shown["eval/score"] == {0: 0.25}, "those after the first are in the reports of their steps"
    assert shown["score"] == {1: 0.0, 2: 11.0, 3: 12.0, 4: 13.0}, "step 1 was made again"
    before, after = (history(log) for log in logs(tmp_path))
    assert (before[0]["eval/score"], list(before), list(after)) == (0.25, [0, 1, 2, 5], [2, 3, 4, 5])
    assert "score" not in after[5], "it is not finite"
    records = [record for log in logs(tmp_path) for record in log]
    assert [each.exit.exit_code for each in records if each.WhichOneof("record_type") == "exit"] == [1, 1]
    identities = {each.run.run_id for each in records if each.WhichOneof("record_type") == "run"}
    assert identities == {(tmp_path / "wandb" / IDENTITY).read_text().strip()}


OFFLINE: dict[str, Any] = {"name": "x", "mode": "offline"}


@pytest.mark.parametrize(
    ("variables", "make", "message"),
    [
        ({}, lambda folder: TensorBoard(folder / "file" / "x"), "file/x cannot be written: Not a directory"),
        ({}, lambda folder: WeightsAndBiases(folder / "file" / "x", **OFFLINE), "x cannot be written: Not a directory"),
        (
            {"WANDB_API_KEY": "too-short"},
            lambda folder: WeightsAndBiases(folder, name="x", mode="online"),
            "log in with `wandb login`, or set WANDB_MODE=offline",
        ),
        (
            {"TRACKIO_SERVER_URL": "nowhere"},
            lambda folder: Trackio(folder, name="x"),
            r"Trackio took no run.*TRACKIO_SERVER_URL",
        ),
        ({}, lambda folder: MLflow(folder, name="x"), "MLFLOW_TRACKING_URI, which is not set"),
        (
            {"MLFLOW_TRACKING_URI": "file:///nowhere"},
            lambda folder: MLflow(folder, name="x"),
            "took no run at MLFLOW_TRACKING_URI = 'file:///",
        ),
    ],
)
def test_what_takes_no_run_says_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    make: Callable[[Path], object],
    message: str,
) -> None:
    (tmp_path / "file").write_text("")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


SAMPLES: list[Record] = [
    {"rollout": 3, "score": 0.5, "kl": None, "tokens": 2, "reason": "eos", "prompt": "a | b", "completion": "*c*\nd"}
]
CALLED: Record = {
    "completion": "add 2 3 5 five",
    "parts": [{"by": "policy", "text": "add 2 3"}, {"by": "tool", "text": "5"}, {"by": "policy", "text": "five"}],
}


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow-store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return tmp_path / "mlflow-store"


def test_trackio_logs_the_metrics_of_each_step_and_goes_on_with_the_same_run(tmp_path: Path) -> None:
    project = tmp_path.name
    with Trackio(tmp_path, name="first", project=project, config={"step": {"batch": 4}}) as log:
        reports = run_virtual(run, log)
    assert [(name, step) for name, step, _ in trackio_history(project)] == [("first", 1), ("first", 2)]
    for each, (_, _, logged) in zip(reports, trackio_history(project), strict=True):
        assert logged == pytest.approx(scalars(each))
    with Trackio(tmp_path, name="first", project=project) as log:
        log.on_step(2, report(2, (), 7.0), {})
    assert trackio_history(project)[-1][:2] == ("first", 3)
    assert trackio_history(project)[-1][2]["score"] == 7.0


def test_mlflow_logs_the_metrics_of_each_step_and_goes_on_with_the_same_run(tmp_path: Path, mlflow_store: Path) -> None:
    from mlflow.tracking import MlflowClient

    with MLflow(tmp_path, name="first", config={"step": {"batch": 4}, "run": {"track": ["mlflow"]}}) as log:
        reports = run_virtual(run, log)
    client = MlflowClient(mlflow_store.as_uri(), mlflow_store.as_uri())
    experiment = client.get_experiment_by_name("oppo")
    assert experiment is not None
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.info.status == "FINISHED"
    assert kept.data.params == {"step.batch": "4", "run.track": "['mlflow']"}
    for name, value in scalars(reports[0]).items():
        history = client.get_metric_history(kept.info.run_id, name.replace("->", "."))
        assert {each.step: each.value for each in history}[1] == pytest.approx(value), name
    again = MLflow(tmp_path, name="first")
    again.on_step(2, report(2, (), 7.0), {})
    again.close(failed=True)
    (kept,) = client.search_runs([experiment.experiment_id])
    assert (kept.info.status, kept.data.metrics["score"]) == ("FAILED", 7.0)


def test_every_tracker_shows_samples_as_a_table(tmp_path: Path, mlflow_store: Path) -> None:
    trackers: list[Tracker] = [
        TensorBoard(tmp_path / "board"),
        WeightsAndBiases(tmp_path, name="x", mode="offline"),
        Trackio(tmp_path, name="x", project=tmp_path.name),
        MLflow(tmp_path, name="x"),
    ]
    for tracker in trackers:
        tracker.sampled = lambda step, item: [*SAMPLES, {**SAMPLES[0], **CALLED}]
        tracker.on_item(0, "advantage", batch([finish(3, 5)], [0.5]), 0.0)
        tracker.on_step(0, report(0, (0,), 0.5), {})
        tracker.close()
    head, _, row, called = texts(tmp_path / "board")[1].splitlines()
    assert called.endswith(r"| \[policy\]<br>add 2 3<br>\[tool\]<br>5<br>\[policy\]<br>five |")
    assert head == "| rollout | score | kl | tokens | reason | prompt | completion |"
    assert row == r"| 3 | 0.5 | None | 2 | eos | a \| b | \*c\*<br>d |"
    (file,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/samples*.json")
    row_of_wandb = [3, 0.5, None, 2, "eos", "a | b", "*c*\nd"]
    row_called = [*row_of_wandb[:-1], "[policy]\nadd 2 3\n[tool]\n5\n[policy]\nfive"]
    assert json.loads(file.read_text())["data"] == [row_of_wandb, row_called]
    (logged,) = [each["samples"] for _, _, each in trackio_history(tmp_path.name) if "samples" in each]
    assert isinstance(logged, dict)
    assert [list(each.values()) for each in logged["_value"]] == [row_of_wandb, row_called]
    (artifact,) = mlflow_store.rglob("samples/step-1.json")
    assert json.loads(artifact.read_text())["data"] == [row_of_wandb, row_called]
