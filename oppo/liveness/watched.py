"""The watchdog of a program, in one line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from oppo.errors import running_loop
from oppo.graph import Run
from oppo.liveness.heartbeat import GAP, Heartbeat
from oppo.liveness.limits import CALL_TIMEOUT, NOTICE_SECONDS, StallLimits
from oppo.liveness.watchdog import Vitals, Watchdog

T = TypeVar("T")

SECONDS = 600.0
"""Seconds without a move after which a run is ended."""


class Working(Protocol):
    """Names its call in progress: a place, a :class:`oppo.FunctionReward`, or an :class:`oppo.observe.Reporter`."""

    @property
    def at_work(self) -> str:
        """The call in progress; empty when there is none."""


@asynccontextmanager
async def watched(
    run: Run[T],
    *working: Working,
    seconds: float = SECONDS,
    call_timeout: float = CALL_TIMEOUT,
    notice: float = NOTICE_SECONDS,
    report: Path = Path("hang-report.json"),
    tell: Callable[[str], object] | None = None,
) -> AsyncIterator[None]:
    """Watch a run while the context is open, and end it when nothing moves.

    Its reports have ``loop/worst_gap_s``, the longest that the event loop was blocked, but not in virtual time: what
    measures it wakes every few milliseconds, and time would never jump.

    ``async with graph.open(prompts) as run, watched(run, decoding, scoring, reward): ...``

    Args:
        run: open; no step of it is running.
        working: the places of its models, and its reward function; one of their calls may last ``call_timeout``.
        seconds: without a move, after which the run is ended; 0: never.
        call_timeout: replaces ``seconds`` while a call is in progress, if it is longer; 0: no limit.
        notice: seconds without a move before ``tell`` is called, and again whenever they have doubled.
        report: the file that records what every stage, task and thread was doing when the run is ended.
        tell: called in another thread with a sentence about each stall; by default it is a warning of structlog.

    Raises:
        HangError: nothing had moved for too long.
    """
    warn = tell or structlog.get_logger("oppo").warning
    watchdog = Watchdog(
        StallLimits(seconds, call_timeout=call_timeout, notice=notice, names=("seconds", "call_timeout")),
        report=report,
        vitals=Vitals(calls=lambda: tuple(filter(None, (each.at_work for each in working)))),
        listeners=[lambda stall: warn(stall.sentence())],
    )
    run.listen(watchdog)
    with watchdog:
        async with AsyncExitStack() as stack:
            if not getattr(running_loop(), "virtual", False):
                heartbeat = Heartbeat()
                await stack.enter_async_context(heartbeat.beating())
                run.gauge(GAP, heartbeat.take)
            await stack.enter_async_context(watchdog.guarding(run))
            yield
