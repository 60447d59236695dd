"""An observer that writes the metrics of each step for TensorBoard.

It needs the extra ``tensorboard``: ``pip install 'oppo[tensorboard]'``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from oppo.errors import ConfigError, behind
from oppo.evaluation import Evaluated
from oppo.evaluation.evaluate import BEFORE
from oppo.events import StepReport
from oppo.observe import Observer, Span
from oppo.report.metrics import scalars


class TensorBoard(Observer):
    """An observer that writes each step's metrics as scalars, under their names in ``metrics.jsonl``.

    A context manager that completes the file. A thread of TensorBoard's own writes it, at once after each step.

    Args:
        path: the folder of event files, which is made: ``tensorboard --logdir PATH`` shows it.
        first: the step with which the run begins or goes on; of what an earlier process wrote, TensorBoard discards
            this step and later ones.

    Raises:
        ConfigError: the folder cannot be written.

    Example:
        >>> with TensorBoard(Path("runs/first/tensorboard")) as board:  # doctest: +SKIP
        ...     async with graph.open(prompts, observers=[board]) as run:
        ...         ...
    """

    def __init__(self, path: Path, *, first: int = 0) -> None:
        try:
            self._writer = EventFileWriter(str(path), flush_secs=0)
        except OSError as error:
            raise ConfigError(f"the folder {path} cannot be written: {error.strerror or error}") from error
        self._add(Event(step=first + 1, session_log=SessionLog(status=SessionLog.START)))

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Write the first evaluation, as one of step 0; leave other items to the run directory."""
        del stage, at
        if isinstance(item, Evaluated) and item.step == BEFORE:
            self._write(step, item.metrics)

    def on_span(self, span: Span) -> None:
        pass

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        del channels
        if isinstance(result, StepReport):
            self._write(step + 1, scalars(result))

    def close(self, *, failed: bool = False) -> None:
        """Complete the file, which is the same where the run has failed.

        Raises:
            OSError: it could not be written.
        """
        del failed
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with behind(error, "completing the event file of TensorBoard"):
            self.close()

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(Event(step=step, summary=Summary(value=values)))

    def _add(self, event: Event) -> None:
        event.wall_time = datetime.now(UTC).timestamp()
        self._writer.add_event(event)
