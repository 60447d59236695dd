"""The observers of a run: its log, the panel, the trackers, and the watchdog that may end it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from oppo.algorithms.base import Algorithm
from oppo.algorithms.group import GroupAlgorithm
from oppo.config.sections import RunSection, Tracker as TrackerName
from oppo.errors import HangError
from oppo.graph import Run
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


HANG_REPORT = "hang-report.json"  # the report in the directory of a run that was ended because nothing moved


@dataclass(slots=True, eq=False)
class RunObservers:
    console: Console
    log: RunLog
    panel: Panel
    watchdog: Watchdog
    observers: Sequence[Observer]
    begin: Callable[[Run[Any]], None]  # what lasts: the records and trackers, which a state that does not fit leaves
    alive: Callable[[], Sequence[int]] = tuple

    def look_at(self, running: Run[Any]) -> None:
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
    chosen: RunSection,
    assembly: Assembly,
    directory: RunDirectory,
    console: Console,
    own: Sequence[Observer] = (),
    *,
    algorithm: Algorithm,
    config: Mapping[str, Mapping[str, object]],
    first: int,
    last_resort: Callable[[HangError], None] | None = None,
) -> Iterator[RunObservers]:
    with ExitStack() as stack:
        log = stack.enter_context(RunLog(directory.path / "log.jsonl", chosen.name))
        panel = panel_of(chosen, console, assembly.tokenizer.decode)
        # A live panel would be drawn over other output to the terminal, so it shows the messages itself.
        shown = (panel.on_notice,) if panel.is_live else ()
        stack.enter_context(routed(log.notice, *shown, onward=not panel.is_live))
        stack.enter_context(panel)
        last = stack.enter_context(ExitStack())  # trackers, which may take long to end, end after the watchdog
        watchdog = watchdog_of(chosen, assembly, directory, [log.on_stall, panel.on_stall], last_resort)
        stack.enter_context(watchdog)
        assembly.listen(directory.model_span, watchdog.on_span)
        written, others = (with_names(chosen, algorithm, *seen) for seen in ((directory,), own))
        observers = [*written, log, Expendable(panel), watchdog, *others]

        def begin(running: Run[Any]) -> None:
            directory.begin()
            for fault in directory.faults:
                logger.warning(fault)
            decode = assembly.tokenizer.decode
            trackers = last.enter_context(tracking(chosen, directory.path, config, first, decode))
            for each in with_names(chosen, algorithm, *trackers):
                running.listen(each)

        yield RunObservers(console, log, panel, watchdog, observers, begin)


def with_names(run: RunSection, algorithm: Algorithm, *observers: Observer) -> Sequence[Observer]:
    if run.metric_names == "trl" and not isinstance(algorithm, GroupAlgorithm):
        return observers  # within the package metrics have the names of TRL's PPO
    return [Renamed(run.metric_names, *observers)]


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


EVENTS: Final = "tensorboard"  # the folder of TensorBoard's event files, in the run directory


@contextmanager
def tracking(
    run: RunSection, path: Path, config: Mapping[str, Mapping[str, object]], first: int, decode: Detokenize
) -> Iterator[Sequence[Observer]]:
    with ExitStack() as stack:
        trackers = list[Tracker]()
        for name in dict.fromkeys(run.track):
            tracker = _begun(name, path, run.name, config, first)
            stack.push(partial(_complete, tracker))
            trackers.append(tracker)
        for tracker in trackers if run.logged_samples else ():
            tracker.sampled = lambda step, batch: samples(step, batch, run.logged_samples, decode)
        yield [Expendable(tracker) for tracker in trackers]


def _complete(
    tracker: Tracker, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
) -> None:
    del raised, trace
    try:
        tracker.close(failed=kind is not None)
    except Exception as error:  # noqa: BLE001 - the boundary around what a run does not need
        logger.warning(f"{type(tracker).__name__} could not be completed: {type(error).__name__}: {error}")


def _begun(
    name: TrackerName, path: Path, called: str, config: Mapping[str, Mapping[str, object]], first: int
) -> Tracker:
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
