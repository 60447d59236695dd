"""Calls of user functions: on the event loop, in threads or in processes; how many overlap, and for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from threading import Timer
from types import TracebackType
from typing import Generic, ParamSpec, Protocol, Self, TypeVar

import anyio

from oppo.errors import ConfigError, ModelError, running_loop
from oppo.numeric import require_real, require_whole
from oppo.observe import silent
from oppo.placement.detached import DisposableProcess, run_detached
from oppo.user_code import UserFunction

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

CONCURRENCY = 64
"""Calls that overlap where nothing is computed here, unless another number is given: those of async functions."""

START_SECONDS = 600.0
"""In which a process of a function must start: it imports what the function's file does."""

BLOCKED_SECONDS = 1.0
"""After its timeout, in which an async function must have ended."""

Refuse = Callable[[str], Exception]
"""Returns the error of a call that took too long or was lost, given what happened to it."""


class CheckedFunction(Protocol[P, R_co]):
    """A user function together with the check of what it returns. Calls in a process need one that can be pickled."""

    @property
    def user(self) -> UserFunction:
        """The function."""

    def call(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Return the result of a sync function, checked."""

    async def answer(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Return the result of an async function, checked."""


class UserCalls(Generic[P, R]):
    """Makes the calls of a user function.

    An async function is called on the event loop. A sync one is called in a thread of its own for each call, in one of
    several processes, or, on a loop of virtual time, inline. A call that takes too long has failed, whatever it returns
    after that. An async function is cancelled, and dropped if it goes on nevertheless; one that blocks the event loop
    is reported. A call in a process is interrupted, and its process is killed if that does not help; the time that the
    process takes to start does not count. Nothing can end a thread, which goes on until the function returns, and keeps
    neither the run nor the process from ending. A call that is cancelled is not waited for either.

    It is an async context manager, which may be entered several times: the function, if it is one too, is open from the
    first time on, and left at the last; processes end then.

    Args:
        what: the function's kind, as in ``reward function``.
        checked: the function.
        concurrency: calls at a time.
        timeout: seconds after which a call has failed; ``None``: never.
        process: call a sync function in processes, as many as calls overlap: it may then hold the interpreter lock or
            crash.
        tell: called with a sentence about a call that blocks the event loop, from another thread.

    Attributes:
        at_work: names the function during a call, for a watchdog; empty otherwise.

    Raises:
        ConfigError: ``concurrency`` or ``timeout`` is out of range.
        OppoError: calls cannot be made in a process: the function is async, or cannot be pickled; the type is the
            function's :attr:`~oppo.user_code.UserFunction.refuse`.
    """

    def __init__(
        self,
        what: str,
        checked: CheckedFunction[P, R],
        *,
        concurrency: int,
        timeout: float | None = None,
        process: bool = False,
        tell: Callable[[str], None] = silent,
    ) -> None:
        if timeout is not None:
            require_real("timeout", timeout, 0, error=ConfigError)
        require_whole("concurrency", concurrency, 1, error=ConfigError)
        user = checked.user
        self.at_work = ""
        self._title = f"{what} {user.name!r}"
        if process and user.is_async:
            raise user.refuse(f"{self._title} is async, and a process of its own is for sync ones: leave that out")
        self._checked = checked
        self._concurrency = concurrency
        self._timeout = math.inf if timeout is None else timeout
        self._tell = tell
        self._limiter: anyio.CapacityLimiter | None = None
        self._calls = 0
        self._users = 0
        try:
            self._processes = [
                DisposableProcess(user.name, checked, timeout=self._timeout)
                for _ in range(concurrency if process else 0)
            ]
        except ModelError as error:
            raise user.refuse(f"{self._title}: {error}") from error
        self._idle = list(self._processes)

    @property
    def concurrent(self) -> bool:
        """Whether calls may overlap."""
        return self._concurrency > 1

    async def make(self, refuse: Refuse, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what the function returns for these arguments; at most ``concurrency`` calls overlap.

        Args:
            refuse: returns the error of a call that took too long, or whose process died.
            args: of the function.
            kwargs: of the function.
        """
        self._limiter = self._limiter or anyio.CapacityLimiter(self._concurrency)
        virtual = getattr(running_loop(), "virtual", False)
        async with self._limiter:
            with self.working():
                if self._processes and not virtual:
                    return await self._made_apart(refuse, *args, **kwargs)
                with self._reported_if_blocked(), anyio.move_on_after(self._timeout) as limit:
                    result = await self._made(virtual, *args, **kwargs)
                    if not self._checked.user.is_async or anyio.current_time() <= limit.deadline:
                        return result
            raise refuse(f"took longer than {self._timeout:g} s")

    async def _made(self, virtual: bool, *args: P.args, **kwargs: P.kwargs) -> R:
        checked = self._checked
        if checked.user.is_async:
            return await checked.answer(*args, **kwargs)
        if virtual:
            return checked.call(*args, **kwargs)
        return await run_detached(f"oppo-{checked.user.name}", partial(checked.call, *args, **kwargs))

    async def _made_apart(self, refuse: Refuse, *args: P.args, **kwargs: P.kwargs) -> R:
        process = self._idle.pop()  # the limiter lets in as many calls as there are processes
        try:
            with anyio.move_on_after(START_SECONDS) as starting:
                await process.start()
            if starting.cancelled_caught:
                raise refuse(f"had no process that started within {START_SECONDS:g} s")
            return await process.call(_call, *args, **kwargs)
        except TimeoutError:
            raise refuse(f"took longer than {self._timeout:g} s") from None
        except ModelError as error:
            raise refuse(f"was lost: {error}") from error
        finally:
            self._idle.append(process)

    @contextmanager
    def _reported_if_blocked(self) -> Iterator[None]:
        """Report an async function that has not ended soon after its timeout: it holds the event loop up."""
        if not self._checked.user.is_async or math.isinf(self._timeout) or getattr(running_loop(), "virtual", False):
            yield
            return
        sentence = (
            f"{self._title} has not ended {BLOCKED_SECONDS:g} s after its timeout of {self._timeout:g} s: it blocks "
            "the event loop, so make it sync, or let it await what takes long"
        )
        alarm = Timer(self._timeout + BLOCKED_SECONDS, self._tell, [sentence])
        alarm.daemon = True
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()

    @contextmanager
    def working(self, how: str = "") -> Iterator[None]:
        """Report the function as at work, for example while it waits for another attempt; calls may overlap."""
        self._calls += 1
        self.at_work = f"{self._title}{how}"
        try:
            yield
        finally:
            self._calls -= 1
            self.at_work = self.at_work if self._calls else ""

    async def __aenter__(self) -> Self:
        if not self._users and isinstance(self._checked.user.function, AbstractAsyncContextManager):
            await self._checked.user.function.__aenter__()
        self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._users -= 1
        if self._users:
            return
        self._limiter = None  # the next run may be on another event loop
        self.close()
        if isinstance(self._checked.user.function, AbstractAsyncContextManager):
            await self._checked.user.function.__aexit__(kind, error, tb)

    def close(self) -> None:
        """Kill the function's processes, if it has some; idempotent."""
        for process in self._processes:
            process.close()


def _call(checked: CheckedFunction[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    return checked.call(*args, **kwargs)
