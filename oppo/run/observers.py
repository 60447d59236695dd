"""The observers of a run: its log, the panel, the trackers, and the watchdog that may end it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from oppo.algorithms.group import GroupAlgorithm
from oppo.config.sections import RunSection, Tracker as TrackerName
from oppo.config.settings import Settings
from oppo.errors import HangError
from oppo.graph import Run
from oppo.libraries import require
from oppo.liveness import Stall, StallLimits, Vitals, Watchdog
from oppo.log import logger, routed
from oppo.models import Detokenize
from oppo.observe import Expendable, Observer
from oppo.report import Panel, RunDirectory, RunLog
from oppo.report.metrics import Renamed
from oppo.report.run_dir import samples
from oppo.report.trackers import MLflow, TensorBoard, Tracker, Trackio, WeightsAndBiases

if TYPE_CHECKING:
    from oppo.run.models import Assembly


HANG_REPORT = "hang-report.json"
"""The report in the directory of a run that was ended because nothing moved."""


@dataclass(slots=True, eq=False)
class RunObservers:
    """The observers of a run.

    Attributes:
        observers: all of them, the run directory included.
        alive: returns the steps in flight.
    """

    console: Console
    log: RunLog
    panel: Panel
    watchdog: Watchdog
    observers: Sequence[Observer]
    alive: Callable[[], Sequence[int]] = tuple

    def look_at(self, running: Run[Any]) -> None:
        """Look from now on at which stage waits for which in each step that is alive."""
        self.watchdog.watch(running)
        self.panel.watch(running.snapshots)
        self.alive = lambda: running.alive

    def on_signal(self, by: signal.Signals) -> None:
        alive = self.alive()
        self.log.on_interrupt(by, alive)
        name = "Ctrl-C" if by is signal.SIGINT else by.name
        steps = f"the {len(alive)} steps in flight" if len(alive) > 1 else "this step"
        self.console.out(f"{name}: ending after {steps}, then saving; once more ends the run at once", highlight=False)


@contextmanager
def watching(
    settings: Settings,
    assembly: Assembly,
    directory: RunDirectory,
    console: Console,
    own: Sequence[Observer] = (),
    *,
    first: int,
    last_resort: Callable[[HangError], None] | None = None,
) -> Iterator[RunObservers]:
    """Open the observers of a run, which listen to its models too, and close them at its end.

    Args:
        directory: of the run; the first messages name its damaged records.
        console: shows the panel.
        own: of a program, after the others.
        first: the step with which the run begins or goes on.
        last_resort: as of :class:`oppo.liveness.Watchdog`.
    """
    chosen = settings.run
    with ExitStack() as stack:
        log = stack.enter_context(RunLog(directory.path / "log.jsonl", chosen.name))
        panel = panel_of(chosen, console, assembly.tokenizer.decode)
        # A live panel would be drawn over what is written to the terminal beside it, so it shows the messages itself.
        shown = (panel.on_notice,) if panel.is_live else ()
        stack.enter_context(routed(log.notice, *shown, onward=not panel.is_live))
        trackers = stack.enter_context(tracking(settings, first, assembly.tokenizer.decode))
        for fault in directory.faults:
            logger.warning(fault)
        stack.enter_context(panel)
        watchdog = watchdog_of(chosen, assembly, directory, [log.on_stall, panel.on_stall], last_resort)
        stack.enter_context(watchdog)
        assembly.listen(directory.model_span, watchdog.on_span)
        written, others = (with_names(settings, *each) for each in ((directory,), (*trackers, *own)))
        observers = [*written, log, Expendable(panel), watchdog, *others]
        yield RunObservers(console, log, panel, watchdog, observers)


def with_names(settings: Settings, *observers: Observer) -> Sequence[Observer]:
    names = settings.run.metric_names
    if names == "trl" and not isinstance(settings.algorithm, GroupAlgorithm):
        return observers  # within the package metrics have the names of TRL's PPO
    return [Renamed(names, *observers)]


def panel_of(chosen: RunSection, console: Console, decode: Detokenize) -> Panel:
    shown = Console(quiet=True) if chosen.panel == "off" else console
    live = chosen.panel == "live" or (chosen.panel == "auto" and console.is_terminal)
    return Panel(shown, chosen.steps, live=live, decode=decode)


def watchdog_of(
    chosen: RunSection,
    assembly: Assembly,
    directory: RunDirectory,
    listeners: Sequence[Callable[[Stall], None]],
    last_resort: Callable[[HangError], None] | None,
) -> Watchdog:
    def leave(error: HangError) -> None:
        try:
            directory.abandon()
        finally:
            if last_resort is not None:
                last_resort(error)

    return Watchdog(
        StallLimits(chosen.watchdog_seconds, call_timeout=chosen.call_timeout),
        report=directory.path / HANG_REPORT,
        vitals=Vitals(
            progress=assembly.progress,
            calls=assembly.at_work,
            saving=lambda: assembly.saving.is_saving,
            free=assembly.abort,
        ),
        listeners=listeners,
        last_resort=None if last_resort is None else leave,
    )


EVENTS: Final = "tensorboard"
"""The folder of TensorBoard's event files, in the run directory."""


def require_trackers(names: Sequence[TrackerName]) -> None:
    for name in names:
        require(name, f"run.track = [{name!r}]")


@contextmanager
def tracking(settings: Settings, first: int, decode: Detokenize) -> Iterator[Sequence[Observer]]:
    """Give the trackers of a run, and complete them.

    Args:
        first: the step with which the run begins or goes on.
        decode: token ids to text, for the samples that they show.
    """
    with ExitStack() as stack:
        names = dict.fromkeys(settings.run.track)
        trackers = [stack.enter_context(_completed(name, settings, first)) for name in names]
        count = settings.run.logged_samples
        for tracker in trackers if count else ():
            tracker.sampled = lambda step, batch: samples(step, batch, count, decode)
        yield [Expendable(tracker) for tracker in trackers]


@contextmanager
def _completed(name: TrackerName, settings: Settings, first: int) -> Iterator[Tracker]:
    tracker, failed = _begun(name, settings, first), True
    try:
        yield tracker
        failed = False
    finally:
        try:
            tracker.close(failed=failed)
        except Exception as error:  # noqa: BLE001 - the boundary around what a run does not need
            logger.warning(f"{type(tracker).__name__} could not be completed: {type(error).__name__}: {error}")


def _begun(name: TrackerName, settings: Settings, first: int) -> Tracker:
    path, called, config = settings.run_directory, settings.run.name, settings.tables()
    match name:
        case "tensorboard":
            return TensorBoard(path / EVENTS, first=first)
        case "trackio":
            return Trackio(path, name=called, config=config)
        case "mlflow":
            return MLflow(path, name=called, config=config)
    tracker = WeightsAndBiases(path, name=called, config=config)
    if tracker.url:
        logger.info(f"the run is at {tracker.url}")
    return tracker
