"""The watchdog: a thread that notices when a run has stopped moving, reports it, and at last ends the run.

::

    nothing has moved for    notice       2 notice, 4 notice, ...    seconds              + grace    + grace
                             listeners    listeners again            report, cancelled    free       last resort

It is a thread because the event loop itself may hang. A move is an item sent, a span of a model, a step, or any change
of ``progress()``. One long call of a model or a reward function looks like a hang: the report of a stall names it, and
it may last ``call_timeout``. So may the end of a cancelled run, while something moves or models are being saved.

Code that holds the interpreter lock stops every thread, this one too. A timer of the operating system ends such a
process (:class:`~oppo.liveness.last_word.LastWord`), if the program has a last resort.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, TypeAlias

import anyio

from oppo.durable import opened
from oppo.errors import HangError, note_others, running_loop
from oppo.events import Chunk, Defer, Drop, Finish, Given, Prompt, StepReport
from oppo.graph import Snapshot
from oppo.liveness.hang import hang_report
from oppo.liveness.last_word import LastWord
from oppo.liveness.limits import StallLimits
from oppo.observe import Observer, Span, now
from oppo.redact import redacted_values

RolloutState: TypeAlias = Literal["in flight", "parked", "finished"]


class Watched(Protocol):
    """A run, such as :class:`oppo.graph.Run`."""

    def snapshots(self) -> Sequence[Snapshot]:
        """Return which stage waits for which in each step that is alive, the oldest first; none between steps."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Nothing has moved for ``seconds`` while ``calls`` are at work; ``final`` if the run is ended.

    ``snapshots`` are of the steps that are alive, the oldest first.
    """

    seconds: float
    snapshots: Sequence[Snapshot] = ()
    final: bool = False
    calls: tuple[str, ...] = ()

    def sentence(self) -> str:
        """Return the stall in words."""
        steps = [f"in step {each.step} {each.sentence() or 'no stage is at work'}" for each in self.snapshots]
        state = "; ".join(steps) or "between two steps"
        calls = f"; in a call: {', '.join(self.calls)}" if self.calls else ""
        return f"nothing has moved for {self.seconds:.0f} s: {state}{calls}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """The signs of life of a run's models, called from the watchdog's thread.

    Attributes:
        progress: returns a value that changes while work sends no items, such as a count of decode steps.
        calls: returns the names of the calls in progress.
        saving: whether models are being saved: a cancelled run has time for that.
        free: ends what can be ended, such as child processes.
    """

    progress: Callable[[], object] = int
    calls: Callable[[], tuple[str, ...]] = tuple
    saving: Callable[[], bool] = bool
    free: Callable[[], object] = int


class Watchdog(Observer):
    """An observer that ends a run in which nothing moves; a context manager around everything it may have to end.

    A cancelled run that has neither moved nor saved for ``grace`` seconds is ended by force: first by ``vitals.free``,
    then by the last resort.

    Args:
        limits: of a stall.
        report: the path of ``hang-report.json``.
        vitals: of the run's models.
        listeners: called with each stall, in the watchdog's thread.
        last_resort: called in that thread when nothing else has ended the run, ``call_timeout`` after its cancellation
            at the latest: only the end of the process ends a thread that never returns.
        clock: seconds.
    """

    def __init__(
        self,
        limits: StallLimits,
        *,
        report: Path,
        vitals: Vitals | None = None,
        listeners: Sequence[Callable[[Stall], object]] = (),
        last_resort: Callable[[HangError], None] | None = None,
        clock: Callable[[], float] = now,
    ) -> None:
        self._limits = limits
        self._report = report
        self._vitals = vitals or Vitals()
        self._listeners = listeners
        self._last_resort = last_resort
        self._clock = clock
        self._moves = 0
        self._seen: tuple[int, object] = (0, None)
        self._since = clock()
        self._due = limits.notice
        self._rollouts: dict[int, RolloutState] = {}
        self._guarding = False
        self._run: Watched | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scope: anyio.CancelScope | None = None
        self._hang: HangError | None = None
        self._over = threading.Event()
        self._last_word = LastWord(limits.seconds) if limits.seconds and last_resort is not None else None
        self._thread = threading.Thread(target=self._watch, name="oppo-watchdog", daemon=True)

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Count a move; keep the rollout's state."""
        del step, stage, at
        self._moves += 1
        if isinstance(item, Prompt | Chunk | Given):
            self._rollouts[item.rollout] = "in flight"
        elif isinstance(item, Defer):
            self._rollouts[item.rollout] = "parked"
        elif isinstance(item, Finish):
            self._rollouts[item.rollout] = "finished"
        elif isinstance(item, Drop):
            self._rollouts.pop(item.rollout, None)

    def on_span(self, span: Span) -> None:
        """Count a move; safe to call from any thread, so it may listen to models too."""
        del span
        self._moves += 1

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Count a move; forget the rollouts that ended."""
        del step, channels
        self._moves += 1
        if isinstance(result, StepReport):
            for rollout in (*result.trained, *(drop.rollout for drop in result.dropped)):
                self._rollouts.pop(rollout, None)

    @asynccontextmanager
    async def guarding(self, run: Watched | None = None) -> AsyncIterator[None]:
        """Watch while the context is open.

        Args:
            run: already open; otherwise :meth:`watch` names it later.

        Raises:
            HangError: nothing had moved for too long, so the body was cancelled.
        """
        self._loop = running_loop()
        self._run = run
        with anyio.CancelScope() as scope:
            self._scope = scope
            self._since, self._due = self._clock(), self._limits.notice
            self._guarding = True
            try:
                yield
            except Exception as error:
                if self._hang is None:
                    raise
                note_others(self._hang, [error])  # of code ended by force
                raise self._hang from error
            finally:
                self._guarding = False
        if self._hang is not None and scope.cancelled_caught:
            raise self._hang

    def watch(self, run: Watched) -> None:
        """Take snapshots of this run from now on."""
        self._run = run

    def look(self) -> Stall | None:
        """Return the stall to report now, if any."""
        at = self._clock()
        seen = (self._moves, self._vitals.progress())
        if not self._guarding or seen != self._seen:
            self._seen, self._since, self._due = seen, at, self._limits.notice
            return None
        still, calls = at - self._since, self._vitals.calls()
        _, limit = self._limits.end(calling=bool(calls))
        final = still >= limit
        if not final and still < self._due:
            return None
        self._due *= 2
        return Stall(still, () if self._run is None else self._run.snapshots(), final=final, calls=calls)

    def __enter__(self) -> Self:
        if self._last_word is not None:
            self._last_word.__enter__()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if self._last_word is not None:
            self._last_word.__exit__(kind, error, tb)

    def _watch(self) -> None:
        limits = self._limits
        pause = min(1.0, limits.notice / 4, *([limits.seconds / 4] if limits.seconds else []))
        while not self._over.wait(pause):
            self._wind_up()
            stall = self.look()
            if stall is None:
                continue
            for listener in self._listeners:
                with suppress(Exception):  # the log's disk may be full: the run is ended all the same
                    listener(stall)
            if stall.final:
                self._end(stall)
                return

    def _wind_up(self) -> None:
        if self._last_word is not None:
            self._last_word.wind_up()

    def _end(self, stall: Stall) -> None:
        """Write the report, cancel the run, and end it by force if it does not end."""
        self._hang = hang = HangError(f"{stall.sentence()} ({self._write_report(stall)})")
        if self._loop is not None and self._scope is not None:
            self._loop.call_soon_threadsafe(self._scope.cancel)
        until = self._clock() + self._limits.longest_cancellation
        remedies: list[Callable[[], object]] = [self._vitals.free]
        if self._last_resort is not None:
            remedies.append(partial(self._last_resort, hang))
        while remedies and not self._over.wait(self._limits.grace):
            self._wind_up()
            before, self._seen = self._seen, (self._moves, self._vitals.progress())
            still = self._seen == before and not self._vitals.saving()
            if still or self._clock() >= until:
                remedies.pop(0)()

    def _write_report(self, stall: Stall) -> str:
        rollouts: dict[str, list[int]] = {"in flight": [], "parked": [], "finished": []}
        for rollout, state in sorted(self._rollouts.copy().items()):
            rollouts[state].append(rollout)
        report = hang_report(stall.seconds, stall.snapshots, rollouts, self._loop)
        try:
            with opened(self._report, "w") as file:
                file.write(json.dumps(redacted_values(report), indent=1) + "\n")
        except OSError as error:
            return f"{self._report} could not be written: {error.strerror or error}"
        name, limit = self._limits.end(calling=bool(stall.calls))
        return f"see {self._report}; {name} = {limit:g} is the limit, 0 sets none"
