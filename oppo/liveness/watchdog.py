"""The watchdog: a thread that notices when a run has stopped moving, reports it, and at last ends the run.

::

    nothing has moved for    notice       2 notice, 4 notice, ...    seconds              + grace    + grace
                             listeners    listeners again            report, cancelled    free       last resort

It is a thread because the event loop itself may hang. A move is an item sent, a span of a model, a step, or any change
of ``progress()``. One long call of a model or a reward function looks like a hang: the report of a stall names it, and
it may last ``call_timeout``. So may the end of a cancelled run, while something moves or models are being saved.

Code that holds the interpreter lock stops every thread, this one too. A timer of the operating system ends such a
process (:class:`LastWord`), if the program has a last resort.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import anyio

from oppo.atomic_files import opened
from oppo.declared import require_real
from oppo.errors import HangError, as_itself, note_others, one_line, place_among, running_loop
from oppo.events import Chunk, Defer, Drop, Finish, Prompt, StepReport, ToolTokens
from oppo.graph import Run, Snapshot
from oppo.log import logger, with_route
from oppo.models import Scorer
from oppo.observe import Observer, Span, now
from oppo.redact import redacted_values
from oppo.scorers import capabilities_of
from oppo.user_code import UNBLOCK

NOTICE_SECONDS = 30.0  # seconds without a move before a stall is reported, and again whenever they have doubled
CALL_TIMEOUT = 3600.0  # seconds that one call may last while nothing else moves
GRACE_SECONDS = 30.0  # seconds without a move or a save after which a cancelled run is ended by force


ANSWER_SECONDS = 1.0  # seconds in which an event loop that is not blocked runs a scheduled callback
PART_SECONDS = 10.0  # seconds in which a part of the watchdog returns, such as a listener
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StallLimits:
    """The limits of a stall, in seconds.

    Attributes:
        seconds: without a move, after which the run is ended; 0: never, stalls are only reported.
        call_timeout: replaces ``seconds`` while a call is in progress, if it is longer; 0 sets no limit.
        notice: without a move, after which a stall is reported.
        grace: without a move or a save, after which a cancelled run is ended by force.
        names: of the settings for ``seconds`` and ``call_timeout``, for the error.

    Raises:
        ValueError: one is no number, or less than 0.
    """

    seconds: float
    _: KW_ONLY
    call_timeout: float = CALL_TIMEOUT
    notice: float = NOTICE_SECONDS
    grace: float = GRACE_SECONDS
    names: tuple[str, str] = ("run.watchdog_seconds", "run.call_timeout")

    def __post_init__(self) -> None:
        values = (self.seconds, self.call_timeout, self.notice, self.grace)
        for name, value in zip((*self.names, "notice", "grace"), values, strict=True):
            require_real(name, value, 0, infinite=True)

    def end(self, *, calling: bool) -> tuple[str, float]:
        """Return the name of the setting that limits a stall, and its seconds; ``calling``: a call is in progress."""
        if calling and self.seconds and (not self.call_timeout or self.call_timeout > self.seconds):
            return self.names[1], self.call_timeout or math.inf
        return self.names[0], self.seconds or math.inf


Part: TypeAlias = Callable[[], object]


class Parts:
    """Calls the parts of a watchdog in threads: one that raises or hangs does not keep it from ending the run."""

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        self._hanging: dict[str, threading.Thread] = {}

    def call(self, name: str, part: Callable[[], T], default: T) -> T:
        """Return the result of a part, or ``default`` if it has failed or hangs, now or still from an earlier call."""
        found = [default]

        def answer() -> None:
            try:
                found.append(part())
            except BaseException as error:  # noqa: BLE001 - the run is ended all the same
                self.faults[name] = one_line(error)

        if (hanging := self._hanging.get(name)) is not None and hanging.is_alive():
            return default
        thread = threading.Thread(target=answer, name=f"oppo-watchdog: {name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many threads
            answer()
            return found[-1]
        thread.join(PART_SECONDS)
        if thread.is_alive():
            self._hanging[name] = thread
            self.faults[name] = f"it has not returned within {PART_SECONDS:g} s"
        return found[-1]


def _steps(snapshots: Sequence[Snapshot]) -> object:
    return [
        {
            "step": snapshot.step,
            "summary": snapshot.message(),
            "at_work": list(snapshot.working),
            "waits": [asdict(wait) for wait in snapshot.waits],
            "channels": snapshot.channels,
            "table": snapshot.table.splitlines(),
        }
        for snapshot in snapshots
    ]


def _tasks(loop: asyncio.AbstractEventLoop | None) -> object:
    tasks = asyncio.all_tasks(loop) if loop is not None else ()
    return [{"name": task.get_name(), "stack": list(islice(await_chain(task.get_coro()), DEEPEST))} for task in tasks]


def _threads() -> list[dict[str, object]]:
    frames = sorted(thread_frames(), key=itemgetter(0))
    return [{"name": name, "stack": traceback.format_stack(frame)} for name, frame in frames]


DEEPEST = 200  # calls of a task that are reported: an object may answer for ever that it awaits another


def await_chain(awaited: object) -> Iterator[str]:
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if isinstance(frame, FrameType):
            yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None) or _driven(awaited)


def _driven(awaited: object) -> object:
    # Code of a user is driven step by step (`oppo.errors.awaited`), so the interpreter does not know what it awaits.
    frame = getattr(awaited, "gi_frame", None)
    return frame.f_locals.get("call") if isinstance(frame, FrameType) else None


def thread_frames() -> Iterator[tuple[str, FrameType]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for identity, frame in sys._current_frames().items():  # noqa: SLF001 - documented, for exactly this
        yield names.get(identity, str(identity)), frame


STANDARD_ERROR = 2  # the file descriptor, whatever `sys.stderr` is
CPU_SECONDS = 10.0  # the least processor seconds for each core before the timer runs down


class LastWord:
    """A timer of the operating system that ends the process with all tracebacks unless it is wound up."""

    # Processor time, so a suspended process is not ended; no interpreter lock is needed.

    def __init__(self, seconds: float) -> None:
        self._seconds = max(seconds, CPU_SECONDS * (os.cpu_count() or 1))

    def wind_up(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __enter__(self) -> Self:
        faulthandler.register(signal.SIGPROF, file=STANDARD_ERROR, all_threads=True, chain=True)
        self.wind_up()
        return self

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.unregister(signal.SIGPROF)


def held_at(thread: int) -> str:
    stack = traceback.extract_stack(sys._current_frames().get(thread))  # noqa: SLF001 - as above
    begun = max((at for at, frame in enumerate(stack) if frame.filename == asyncio.events.__file__), default=0)
    return place_among(stack[begun:], foreign=True)


PERIOD = 0.005  # seconds between two beats
GAP = "loop/worst_gap_s"  # the metric of the worst delay in a step
HELD = 1.0  # seconds of a delay above which the code that held the event loop is logged


class Heartbeat:
    """Beats on the event loop every ``period`` seconds and keeps the worst delay, which shows code that blocks it.

    Another thread calls :meth:`look` at least twice in ``HELD`` seconds, to see which code that is.
    """

    def __init__(
        self,
        period: float = PERIOD,
        *,
        clock: Callable[[], float] = now,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._period = period
        self._clock = clock
        self._sleep = sleep
        self._beat = clock()
        self._worst = 0.0
        self._thread = 0
        self._seen, self._culprit = "", ""

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        self._thread = threading.get_ident()
        with as_itself():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._beat_forever, name="heartbeat")
                yield
                tasks.cancel_scope.cancel()

    def take(self) -> float:
        """Return the worst delay since the last call in seconds, an overdue beat included, and reset it.

        Of one above ``HELD`` the code that held the loop is logged.
        """
        self._note()
        worst, self._worst = self._worst, 0.0
        if worst > HELD:
            held = self._culprit or " by code that no thread could look at, or this machine stood still"
            logger.warning(f"the event loop was blocked for {worst:.1f} s{held}: {UNBLOCK}")
        return worst

    def look(self) -> None:
        """Note which code holds the loop if a beat is overdue; from any thread."""
        beat = self._beat
        if self._late() >= HELD / 2 and (held := held_at(self._thread)) and beat == self._beat:
            self._seen = held

    async def _beat_forever(self) -> None:
        self._beat = self._clock()
        while True:
            await self._sleep(self._period)
            self._note()

    def _note(self) -> None:
        late = self._late()
        if late > self._worst:
            self._worst, self._culprit = late, self._seen
        self._beat, self._seen = self._clock(), ""

    def _late(self) -> float:
        return max(0.0, self._clock() - self._beat - self._period)


RolloutState: TypeAlias = Literal["in flight", "deferred", "finished"]


@dataclass(frozen=True, slots=True)
class Stall:
    """Nothing has moved for ``seconds`` while ``calls`` are at work; ``final`` if the run is ended.

    ``snapshots`` are of the steps that are alive, the oldest first; ``blocked`` says where the event loop is if it does
    not run.
    """

    seconds: float
    snapshots: Sequence[Snapshot] = ()
    final: bool = False
    calls: tuple[str, ...] = ()
    blocked: str = ""

    def message(self) -> str:
        steps = [f"in step {each.step} {each.message() or 'no stage is at work'}" for each in self.snapshots]
        state = "; ".join(steps) or "between two steps"
        calls = f"; in a call: {', '.join(self.calls)}" if self.calls else ""
        blocked = f"; the event loop is blocked{self.blocked}: {UNBLOCK}" if self.blocked else ""
        return f"nothing has moved for {self.seconds:.0f} s: {state}{calls}{blocked}"


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
    then by the last resort. A part of the watchdog that raises or hangs, such as a listener, is named in the report and
    in the notes of the error.

    Args:
        limits: of a stall.
        report: the path of ``hang-report.json``.
        vitals: of the run's models.
        listeners: called with each stall, in the watchdog's thread.
        last_resort: called in that thread when nothing else has ended the run, ``call_timeout`` after its cancellation
            at the latest: only the end of the process ends a thread that never returns. If it fails, the process ends.
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
        self._heartbeat: Heartbeat | None = None
        self._run: Run[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._scope: anyio.CancelScope | None = None
        self._hang: HangError | None = None
        self._over = threading.Event()
        self._parts = Parts()
        self._last_word = LastWord(limits.seconds) if limits.seconds and last_resort is not None else None
        self._thread = threading.Thread(target=self._watch, name="oppo-watchdog", daemon=True)

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        del step, stage, at
        self._moves += 1
        if isinstance(item, Prompt | Chunk | ToolTokens):
            self._rollouts[item.rollout] = "in flight"
        elif isinstance(item, Defer):
            self._rollouts[item.rollout] = "deferred"
        elif isinstance(item, Finish):
            self._rollouts[item.rollout] = "finished"
        elif isinstance(item, Drop):
            self._rollouts.pop(item.rollout, None)

    def on_span(self, span: Span) -> None:
        # Safe to call from any thread, so it may listen to models too.
        del span
        self._moves += 1

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        del step, channels
        self._moves += 1
        if isinstance(result, StepReport):
            for rollout in (*result.trained, *(drop.rollout for drop in result.dropped)):
                self._rollouts.pop(rollout, None)

    @asynccontextmanager
    async def guarding(self, run: Run[Any] | None = None, heartbeat: Heartbeat | None = None) -> AsyncIterator[None]:
        """Watch while the context is open; ``run`` is open already, or named later by :meth:`watch`.

        The watchdog looks for ``heartbeat`` which code blocks the event loop.

        Raises:
            HangError: nothing had moved for too long, so the body was cancelled.
        """
        self._loop, self._loop_thread = running_loop(), threading.get_ident()
        self._run, self._heartbeat = run, heartbeat
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

    def watch(self, run: Run[Any]) -> None:
        self._run = run

    def look(self) -> Stall | None:
        call, at = self._parts.call, self._clock()
        seen = (self._moves, self._progress())
        if not self._guarding or seen != self._seen:
            self._seen, self._since, self._due = seen, at, self._limits.notice
            return None
        still, no_calls = at - self._since, tuple[str, ...]()
        calls = call("the calls in progress", self._vitals.calls, no_calls)
        _, limit = self._limits.end(calling=bool(calls))
        final = still >= limit
        if not final and still < self._due:
            return None
        self._due *= 2
        snapshots: Sequence[Snapshot] = ()
        if self._run is not None:
            snapshots = call("the steps", self._run.snapshots, snapshots)
        return Stall(still, snapshots, final=final, calls=calls)

    def _progress(self) -> object:
        return self._parts.call("the progress of models", self._vitals.progress, None)

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
        pause = min(HELD / 2, limits.notice / 4, *([limits.seconds / 4] if limits.seconds else []))
        while not self._over.wait(pause):
            self._wind_up()
            if self._heartbeat is not None:
                self._parts.call("the heartbeat", self._heartbeat.look, None)
            stall = self.look()
            if stall is None:
                continue
            stall = replace(stall, blocked=self._parts.call("the event loop", self._blocked, ""))
            for listener in self._listeners:
                name = f"the listener {getattr(listener, '__qualname__', type(listener).__name__)}"
                self._parts.call(name, partial(listener, stall), None)
            if stall.final:
                self._end(stall)
                return

    def _blocked(self) -> str:
        ran = threading.Event()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(ran.set)
        if self._loop is None or ran.wait(ANSWER_SECONDS):
            return ""
        return held_at(self._loop_thread)

    def _wind_up(self) -> None:
        if self._last_word is not None:
            self._last_word.wind_up()

    def _end(self, stall: Stall) -> None:
        call, faults = self._parts.call, self._parts.faults
        said = call("the message", stall.message, f"nothing has moved for {stall.seconds:.0f} s")
        self._hang = hang = HangError(f"{said} ({self._write_report(stall)})")
        for name, fault in faults.items():
            hang.add_note(f"the watchdog could not have {name}: {fault}")
        if self._loop is not None and self._scope is not None:
            call("the cancellation", partial(self._loop.call_soon_threadsafe, self._scope.cancel), None)
        until = self._clock() + (self._limits.call_timeout or math.inf)
        remedies: list[tuple[str, Part]] = [("what frees the run", self._vitals.free)]
        if self._last_resort is not None:
            remedies.append((LAST_RESORT, partial(self._last_resort, hang)))
        while remedies and not self._over.wait(self._limits.grace):
            self._wind_up()
            before, self._seen = self._seen, (self._moves, self._progress())
            still = self._seen == before and not call("whether models are being saved", self._vitals.saving, False)
            if still or self._clock() >= until:
                call(*remedies.pop(0), None)
        if LAST_RESORT in faults:
            os._exit(1)

    def _write_report(self, stall: Stall) -> str:
        sections: dict[str, Part] = {
            "steps": partial(_steps, stall.snapshots),
            "rollouts": self._rollouts_by_state,
            "tasks": partial(_tasks, self._loop),
            "threads": _threads,
        }
        call = self._parts.call
        told = {name: call(f"the report's {name}", each, None) for name, each in sections.items()}
        report = {"still_for_seconds": round(stall.seconds, 3), **told, "failed": self._parts.faults}

        def write() -> str:
            text = json.dumps(redacted_values(report), indent=1, default=str)
            try:
                with opened(self._report, "w") as file:
                    file.write(text + "\n")
            except OSError as error:
                return f"{self._report} could not be written: {error.strerror or error}"
            name, limit = self._limits.end(calling=bool(stall.calls))
            return f"see {self._report}; {name} = {limit:g} is the limit, 0 sets none"

        return call("the report", write, f"{self._report} could not be written")

    def _rollouts_by_state(self) -> Mapping[str, list[int]]:
        rollouts: dict[str, list[int]] = {"in flight": [], "deferred": [], "finished": []}
        for rollout, state in sorted(self._rollouts.copy().items()):
            rollouts[state].append(rollout)
        return rollouts


LAST_RESORT = "the last resort"

SECONDS = 600.0  # seconds without a move after which a run is ended


@runtime_checkable
class Working(Protocol):
    """Names its call in progress: a place, or an :class:`oppo.observe.Reporter`."""

    @property
    def at_work(self) -> str:
        """The call in progress; empty when there is none."""


@asynccontextmanager
async def watched(
    run: Run[T],
    *working: Working | Scorer[Any],
    seconds: float = SECONDS,
    call_timeout: float = CALL_TIMEOUT,
    notice: float = NOTICE_SECONDS,
    report: Path = Path("hang-report.json"),
) -> AsyncIterator[None]:
    """Watch a run while the context is open, and end it when nothing moves.

    Its reports have ``loop/worst_gap_s``, the longest time that the event loop was blocked, but not in virtual time.

    ``async with graph.open(prompts) as run, watched(run, decoding, scoring, reward): ...``

    Args:
        run: open; no step of it is running.
        working: the places of its models, and scorers whose capabilities name their calls, such as reward functions;
            one of their calls may last ``call_timeout``.
        seconds: without a move, after which the run is ended; 0: never.
        call_timeout: replaces ``seconds`` while a call is in progress, if it is longer; 0: no limit.
        notice: seconds without a move before a warning is logged, and again whenever they have doubled.
        report: the file for the state of every stage, task and thread when the run is ended.

    Raises:
        HangError: nothing had moved for too long.
    """
    warn = with_route(logger.warning)
    watchdog = Watchdog(
        StallLimits(seconds, call_timeout=call_timeout, notice=notice, names=("seconds", "call_timeout")),
        report=report,
        vitals=Vitals(calls=lambda: tuple(filter(None, map(_call_of, working)))),
        listeners=[lambda stall: warn(stall.message())],
    )
    run.listen(watchdog)
    with watchdog:
        async with AsyncExitStack() as stack:
            heartbeat = None
            if not getattr(running_loop(), "virtual", False):
                heartbeat = Heartbeat()
                await stack.enter_async_context(heartbeat.beating())
                run.gauge(GAP, heartbeat.take)
            await stack.enter_async_context(watchdog.guarding(run, heartbeat))
            yield


def _call_of(working: Working | Scorer[Any]) -> str:
    return working.at_work if isinstance(working, Working) else capabilities_of(working).at_work()
