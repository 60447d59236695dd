"""Messages of library code, and where they go: to the sinks of a run or a program, or to structlog.

::

    from oppo.log import logger, routed

    logger.warning("the service is away: attempt 2 follows")  # on standard error, or as structlog is configured
    with routed(print):
        ...  # messages of the body, of its tasks and of the threads that work for it are printed instead

Routes belong to the context of a task, as context variables do: two runs in one program do not mix.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Literal, ParamSpec, TypeAlias, TypeVar

from oppo.redact import harmless, redacted

P = ParamSpec("P")
R = TypeVar("R")

Sink: TypeAlias = Callable[[str], None]
"""Called with each message, from any thread."""

Level: TypeAlias = Literal["info", "warning"]


class _Route:
    def __init__(self, sinks: tuple[Sink, ...] = (), onward: _Route | None = None) -> None:
        self._sinks = sinks
        self._onward = onward
        self.said: set[str] = set()

    def end(self, onward: _Route) -> None:
        # A thread may go on after the body: what it logs goes onward.
        self._sinks, self._onward = (), onward

    def send(self, level: Level, message: str) -> None:
        for sink in self._sinks:
            sink(message)
        if self._onward is not None:
            self._onward.send(level, message)


class _Structlog(_Route):
    def send(self, level: Level, message: str) -> None:
        import structlog  # noqa: PLC0415 - `import oppo` should be quick

        if structlog.is_configured():
            getattr(structlog.get_logger("oppo"), level)(redacted(message))
        else:  # by default it would write to standard output
            getattr(structlog.wrap_logger(structlog.PrintLogger(sys.stderr)), level)(harmless(message))


_ROUTE: Final[ContextVar[_Route]] = ContextVar("oppo.log.route", default=_Structlog())  # noqa: B039 - `said` is meant


class Logger:
    """Sends messages where :func:`routed` says; outside of it, to structlog's logger ``oppo``."""

    def info(self, message: str) -> None:
        _ROUTE.get().send("info", message)

    def warning(self, message: str) -> None:
        _ROUTE.get().send("warning", message)

    def once(self, message: str) -> None:
        """Log, unless the same was logged before on this route."""
        route = _ROUTE.get()
        if message not in route.said:
            route.said.add(message)
            route.send("info", message)


logger: Final = Logger()


@contextmanager
def routed(*sinks: Sink, onward: bool = False) -> Iterator[None]:
    """Send the messages of the body to ``sinks``, and with ``onward`` also where they went before; else nowhere else.

    Example:
        >>> messages: list[str] = []
        >>> with routed(messages.append):
        ...     logger.info("loading the policy")
        >>> messages
        ['loading the policy']
    """
    before = _ROUTE.get()
    route = _Route(sinks, before if onward else None)
    token = _ROUTE.set(route)
    try:
        yield
    finally:
        _ROUTE.reset(token)
        route.end(before)


def with_route(work: Callable[P, R]) -> Callable[P, R]:
    """Return ``work`` for another thread: its messages go the way of this code."""
    route = _ROUTE.get()

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _ROUTE.set(route)
        try:
            return work(*args, **kwargs)
        finally:
            _ROUTE.reset(token)

    return run
