"""An observer that writes the metrics of each step for TensorBoard.

It needs the extra ``tensorboard``: ``pip install 'oppo[tensorboard]'``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from oppo.errors import ConfigError
from oppo.report.metrics import Tracker

FLUSH_SECONDS: Final = 1
"""Between two looks of the writing thread for something to flush: with 0 it looks without a pause, and computes."""


class TensorBoard(Tracker):
    """An observer that writes each step's metrics as scalars, under their names in ``metrics.jsonl``.

    A context manager that completes the file. A thread of TensorBoard's own writes it, within :data:`FLUSH_SECONDS` of
    each step.

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

    kept = "the event file of TensorBoard"

    def __init__(self, path: Path, *, first: int = 0) -> None:
        try:
            self._writer = EventFileWriter(str(path), flush_secs=FLUSH_SECONDS)
        except OSError as error:
            raise ConfigError(f"the folder {path} cannot be written: {error.strerror or error}") from error
        self._add(Event(step=first + 1, session_log=SessionLog(status=SessionLog.START)))

    def close(self, *, failed: bool = False) -> None:
        """Complete the file, which is the same where the run has failed.

        Raises:
            OSError: it could not be written.
        """
        del failed
        self._writer.close()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(Event(step=step, summary=Summary(value=values)))

    def _add(self, event: Event) -> None:
        event.wall_time = datetime.now(UTC).timestamp()
        self._writer.add_event(event)
