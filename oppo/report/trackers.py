"""Observers that hand the metrics of each step to a tracker: TensorBoard, Weights & Biases, Trackio or MLflow.

Each needs the extra of its name, such as ``pip install 'oppo[tensorboard]'``, and imports it when it is made.
"""

from __future__ import annotations

import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from functools import partial
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, Self, cast

from oppo.atomic_files import make, put
from oppo.errors import ConfigError, behind, one_line
from oppo.evaluation import Evaluated
from oppo.evaluation.evaluate import BEFORE
from oppo.events import Batch, StepReport
from oppo.observe import Observer
from oppo.report.metrics import scalars
from oppo.report.records import Record, Writer

SAMPLE: Final = ("rollout", "score", "kl", "tokens", "reason", "prompt", "completion")  # the columns of a table
TABLE: Final = "samples"
IDENTITY: Final = "run-id"  # the file with the run's identity in a tracker: a resumed run goes on as the same


class Tracker(Observer, ABC):
    """An observer that hands each step's metrics to a service, under their names in ``metrics.jsonl``.

    A context manager that completes what the service keeps. Arguments that several trackers have:

    - ``path``: the folder, which is made, for what the tracker keeps of the run here: below it, in one of its name.
    - ``name``: of the run.
    - ``project``: of the run; when absent, the service's environment variable, or ``oppo``.
    - ``config``: settings to show with the run, without secrets.

    Attributes:
        kept: what the service keeps, in errors.
        sampled: returns rollouts of a step's batch, as records with the keys of :data:`SAMPLE`; ``None`` shows none.
    """

    kept: ClassVar[str]
    sampled: Callable[[int, Batch], Iterable[Record]] | None = None
    _writer: Writer | None = None

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics after ``step`` steps."""

    @abstractmethod
    def write_samples(self, step: int, samples: Sequence[Record]) -> None:
        """Hand over rollouts of the ``step``-th step, as a table."""

    @abstractmethod
    def _finish(self, *, failed: bool) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        """Complete what the service keeps; ``failed``: the run has ended with an error."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._finish(failed=failed)

    def _submit(self, job: Callable[[], object]) -> None:
        # In a thread: the service may be slow.
        self._writer = self._writer or Writer()
        self._writer.submit(job)

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Hand over rollouts of a batch, and the first evaluation, as one of step 0."""
        del stage, at
        if isinstance(item, Evaluated) and item.step == BEFORE:
            self.write(step, item.metrics)
        elif isinstance(item, Batch) and self.sampled is not None:
            self.write_samples(step + 1, list(self.sampled(step, item)))

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        del channels
        if isinstance(result, StepReport):
            self.write(step + 1, scalars(result))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with behind(error, f"completing {self.kept}"):
            self.close(failed=error is not None)


FLUSH_SECONDS: Final = 1  # between two looks of the writing thread; with 0 it looks without a pause, and computes


class TensorBoard(Tracker):
    """A tracker that writes event files, in a thread of TensorBoard's own, :data:`FLUSH_SECONDS` after each step."""

    kept = "the event file of TensorBoard"

    def __init__(self, path: Path, *, first: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415 - an extra
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415 - an extra

        self._event: Any = Event
        try:
            self._events = EventFileWriter(str(path), flush_secs=FLUSH_SECONDS)
        except OSError as error:
            raise ConfigError(f"the folder {path} cannot be written: {error.strerror or error}") from error
        self._add(step=first + 1, session_log=SessionLog(status=SessionLog.START))

    def _finish(self, *, failed: bool) -> None:
        del failed
        self._events.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 - an extra

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step=step, summary=Summary(value=values))

    def write_samples(self, step: int, samples: Sequence[Record]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # noqa: PLC0415 - an extra
        from tensorboard.compat.proto.tensor_pb2 import TensorProto  # noqa: PLC0415 - an extra
        from tensorboard.compat.proto.types_pb2 import DT_STRING  # noqa: PLC0415 - an extra

        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[_markdown(samples).encode()])
        value = Summary.Value(tag=f"{TABLE}/text_summary", metadata=plugin, tensor=tensor)
        self._add(step=step, summary=Summary(value=[value]))

    def _add(self, **parts: object) -> None:
        self._events.add_event(self._event(wall_time=datetime.now(UTC).timestamp(), **parts))


def _markdown(samples: Sequence[Record]) -> str:
    def cell(value: object) -> str:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        return re.sub(r"([\\|`*_{}\[\]<>#~])", r"\\\1", text).replace("\n", "<br>")

    rows = [[cell(each) for each in row] for row in _rows(samples)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (SAMPLE, ["---"] * len(SAMPLE), *rows))


class WeightsAndBiases(Tracker):
    """A tracker that logs to Weights & Biases.

    The environment variables of wandb choose where to: ``WANDB_API_KEY``, ``WANDB_ENTITY``, ``WANDB_MODE=offline``. A
    resumed run leaves out steps that are there. Neither the standard output nor the state of the git repository is
    sent.
    """

    kept = "the run of Weights & Biases"

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        project: str | None = None,
        config: Mapping[str, object] | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        import wandb  # noqa: PLC0415 - an extra

        self._table = partial(wandb.Table, columns=list(SAMPLE), allow_mixed_types=True)
        chosen = mode or os.environ.get("WANDB_MODE")  # wandb reads it once in a process
        mode = "offline" if chosen == "offline" else "online" if chosen == "online" else None
        try:
            identity = _identity(path / "wandb", secrets.token_hex(8))
            self._run = wandb.init(
                project=project or os.environ.get("WANDB_PROJECT", "oppo"),
                name=name,
                dir=path,
                id=identity,
                mode=mode,
                resume=None if mode == "offline" else "allow",
                config=dict(config or {}),
                settings=wandb.Settings(console="off", disable_git=True, silent=True, reinit="create_new"),
            )
        except OSError as error:
            raise ConfigError(f"the folder {path} cannot be written: {error.strerror or error}") from error
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases took no run ({type(error).__name__}: {error}): log in with `wandb login`, or set "
                "WANDB_MODE=offline and `wandb sync` it later"
            ) from error
        self.url = self._run.url or ""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._submit(partial(self._run.log, dict(metrics), step=step))

    def write_samples(self, step: int, samples: Sequence[Record]) -> None:
        rows = _rows(samples)
        self._submit(lambda: self._run.log({TABLE: self._table(data=rows)}, step=step))

    def _finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _rows(samples: Sequence[Record]) -> list[list[object]]:
    return [[_marked(each) if name == "completion" else each.get(name) for name in SAMPLE] for each in samples]


def _marked(sample: Record) -> object:
    # The completion; one in which tools speak too has a line with the speaker before each part.
    parts = cast("list[Record]", sample.get("parts", ()))
    return "\n".join(f"[{each['by']}]\n{each['text']}" for each in parts) or sample.get("completion")


def _identity(folder: Path, new: str = "") -> str:
    # The run's in the service; where it has none, the new one is kept.
    file = folder / IDENTITY
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    if new:
        make(folder)
        put(file, [new + "\n"])
    return new


class Trackio(Tracker):
    """A tracker that logs to Trackio.

    Trackio's environment variables choose where to: a folder of this machine (``TRACKIO_DIR``), a Space
    (``TRACKIO_SPACE_ID``) or a server (``TRACKIO_SERVER_URL``). A process has one such run at a time, which is
    Trackio's own limit. A run that is resumed goes on as the same, and repeated steps are there twice. A number is
    added to a name that the project has already.
    """

    kept = "the run of Trackio"

    def __init__(
        self, path: Path, *, name: str, project: str | None = None, config: Mapping[str, object] | None = None
    ) -> None:
        import trackio  # noqa: PLC0415 - an extra

        self._table = partial(trackio.Table, columns=list(SAMPLE))
        try:
            known = _identity(path / "trackio")
            with redirect_stdout(StringIO()):
                self._run: Any = trackio.init(
                    project or os.environ.get("TRACKIO_PROJECT", "oppo"),
                    name=known or name,
                    config=dict(config or {}),
                    resume="allow" if known else "never",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
            _identity(path / "trackio", self._run.name)
        except Exception as error:
            raise ConfigError(
                f"Trackio took no run ({one_line(error)}): look at TRACKIO_SPACE_ID, TRACKIO_SERVER_URL and "
                "TRACKIO_DIR, which say where it keeps runs"
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[Record]) -> None:
        self._run.log({TABLE: self._table(data=_rows(samples))}, step=step)

    def _finish(self, *, failed: bool) -> None:
        del failed  # Trackio shows it alike
        with redirect_stdout(StringIO()):
            self._run.finish()


class MLflow(Tracker):
    """A tracker that logs to MLflow.

    MLflow's environment variables choose where to: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME`` (``oppo`` by
    default), and ``MLFLOW_RUN_ID`` of a run that is there. In names ``->`` is ``.``, since MLflow takes no ``>``. A
    run that is resumed goes on as the same. Settings are its parameters; samples are an artifact for each step,
    ``samples/step-N.json``.
    """

    kept = "the run of MLflow"

    def __init__(self, path: Path, *, name: str, config: Mapping[str, Mapping[str, object]] | None = None) -> None:
        from mlflow.entities import Metric, Param  # noqa: PLC0415 - an extra
        from mlflow.exceptions import MlflowException  # noqa: PLC0415 - an extra
        from mlflow.tracking import MlflowClient  # noqa: PLC0415 - an extra

        if not (uri := os.environ.get("MLFLOW_TRACKING_URI")):
            raise ConfigError(
                "MLflow logs to MLFLOW_TRACKING_URI, which is not set: give a server's address, http://..."
            )
        self._metric: Any = Metric
        try:
            self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            self._id = os.environ.get("MLFLOW_RUN_ID") or _identity(path / "mlflow")
            if self._id:
                self._client.update_run(self._id, status="RUNNING")
            else:
                experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "oppo")
                found = self._client.get_experiment_by_name(experiment)
                of = found.experiment_id if found else self._client.create_experiment(experiment)
                self._id = self._client.create_run(of, run_name=name).info.run_id
                flat = {f"{name}.{key}": each for name, keys in (config or {}).items() for key, each in keys.items()}
                params = [Param(key, str(value)[:MOST_OF_A_PARAMETER]) for key, value in flat.items()]
                for start in range(0, len(params), PARAMETERS_AT_A_TIME):
                    self._client.log_batch(self._id, params=params[start : start + PARAMETERS_AT_A_TIME])
                _identity(path / "mlflow", self._id)
        except (MlflowException, OSError) as error:
            raise ConfigError(f"MLflow took no run at MLFLOW_TRACKING_URI = {uri!r}: {one_line(error)}") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        at = round(datetime.now(UTC).timestamp() * 1000)
        named = {re.sub(r"[^\w\-. :/]", "-", name.replace("->", ".")): value for name, value in metrics.items()}
        values = [self._metric(name, value, at, step) for name, value in named.items()]
        self._submit(lambda: self._client.log_batch(self._id, metrics=values))

    def write_samples(self, step: int, samples: Sequence[Record]) -> None:
        table = {"columns": list(SAMPLE), "data": _rows(samples)}
        self._submit(lambda: self._client.log_dict(self._id, table, f"{TABLE}/step-{step}.json"))

    def _finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


PARAMETERS_AT_A_TIME: Final = 100  # MLflow's limit, of a call
MOST_OF_A_PARAMETER: Final = 6000  # MLflow's limit, in characters
