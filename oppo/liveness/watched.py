"""The watchdog of a program, in one line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from oppo.graph import Run
from oppo.liveness.watchdog import CALL_TIMEOUT, NOTICE_SECONDS, Stall, Watchdog

T = TypeVar("T")

SECONDS = 600.0
"""For so long nothing may move in a run."""


class Working(Protocol):
    """Something that says what it is at work on: a place, or a :class:`oppo.FunctionReward`."""

    at_work: str


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
    """Watch a run while the context is open, and end it when nothing moves in it.

    ``async with graph.open(prompts) as run, watched(run, decoding, scoring, reward): ...``

    Args:
        run: open; no step of it is running.
        working: the places of its models, and its reward function: one call of them may last ``call_timeout``.
        seconds: without a move for so long, the run is ended; 0: never.
        call_timeout: the limit instead while a call is at work, where it is longer; 0: none.
        notice: seconds without a move after which ``tell`` is called, and again whenever they have doubled.
        report: the file that says, when the run is ended, what every stage, task and thread was doing.
        tell: called, from another thread, with a sentence about who waits for whom; a warning of structlog otherwise.

    Raises:
        HangError: nothing had moved for too long.
    """

    def say(stall: Stall) -> None:
        (tell or structlog.get_logger("oppo").warning)(stall.sentence())

    watchdog = Watchdog(
        seconds,
        report=report,
        notice=notice,
        listeners=[say],
        calls=lambda: tuple(filter(None, (each.at_work for each in working))),
        call_timeout=call_timeout,
        names=("seconds", "call_timeout"),
    )
    run.listen(watchdog)
    with watchdog:
        async with watchdog.guarding(run):
            yield
