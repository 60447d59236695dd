"""The trackers that ``run.track`` names: observers of a run that survives their failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Protocol

from oppo.config.sections import Tracker
from oppo.config.settings import Settings
from oppo.libraries import require
from oppo.log import logger
from oppo.observe import Expendable, Observer

EVENTS: Final = "tensorboard"
"""The folder of TensorBoard's event files, in the run directory."""


class Closing(Observer, Protocol):
    """An observer that is completed."""

    def close(self, *, failed: bool = False) -> None:
        """Complete what it has written of a run that has ended or failed."""


def require_trackers(names: Sequence[Tracker]) -> None:
    """Check that the packages of some trackers are installed.

    Raises:
        ConfigError: one is not; names the extra to install.
    """
    for name in names:
        require(name, f"run.track = [{name!r}]")


@contextmanager
def tracking(settings: Settings, first: int) -> Iterator[Sequence[Observer]]:
    """Give the trackers of a run, and complete them.

    Args:
        first: the step with which the run begins or goes on.

    Raises:
        ConfigError: a tracker cannot begin.
    """
    with ExitStack() as stack:
        names = dict.fromkeys(settings.run.track)
        trackers = [stack.enter_context(_completed(name, settings, first)) for name in names]
        yield [Expendable(tracker) for tracker in trackers]


@contextmanager
def _completed(name: Tracker, settings: Settings, first: int) -> Iterator[Closing]:
    tracker, failed = _begun(name, settings, first), True
    try:
        yield tracker
        failed = False
    finally:
        try:
            tracker.close(failed=failed)
        except Exception as error:  # noqa: BLE001 - the boundary around what a run does not need
            logger.warning(f"{type(tracker).__name__} could not be completed: {type(error).__name__}: {error}")


def _begun(name: Tracker, settings: Settings, first: int) -> Closing:
    path: Path = settings.run_directory
    if name == "tensorboard":
        from oppo.report.tensorboard import TensorBoard  # noqa: PLC0415 - an extra

        return TensorBoard(path / EVENTS, first=first)
    from oppo.report.weights_and_biases import WeightsAndBiases  # noqa: PLC0415 - an extra

    tracker = WeightsAndBiases(path, name=settings.run.name, config=settings.tables())
    if tracker.url:
        logger.info(f"the run is at {tracker.url}")
    return tracker
