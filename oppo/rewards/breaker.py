"""A circuit breaker: a service that fails again and again is left alone, then asked by one call for all that wait.

::

    closed --- some failures in a row ---> open --- its rest is over ---> half open: one call asks, the others wait
       ^                                     ^                                 |
       |                                     +---------- it fails -------------+
       +---------------------- it is answered ---------------------------------+
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from oppo.errors import RewardError


class ServiceFailure(RewardError):  # noqa: N818 - it says what happened
    """A service did not answer, or answered something that is no score, or is left alone."""


class CircuitBreaker:
    """Lets calls through to a service, or refuses them at once while the service is left alone.

    Args:
        name: of the service, in sentences.
        open_after: failed calls in a row after which it is left alone; 0: never.
        rest: seconds for which it is.
        tell: called with a sentence when it is left alone, and when it answers again.
    """

    def __init__(self, name: str, open_after: int, rest: float, tell: Callable[[str], None]) -> None:
        self._name = name
        self._open_after = open_after
        self._rest = rest
        self._tell = tell
        self._failed = 0  # calls in a row
        self._until: float | None = None  # loop time, in seconds, at which it is asked again; None: closed
        self._probe: anyio.Event | None = None  # set when the call that asks for all has come to its end

    @asynccontextmanager
    async def call(self) -> AsyncIterator[bool]:
        """Wait for the outcome of a call that asks for all; then the body is a call, and its outcome counts.

        A :class:`ServiceFailure` is a failure of the service, and so is a cancellation: the body must do nothing but
        wait for the service, and who cancels it has waited for too long.

        Yields:
            Whether this is the call that asks for all.

        Raises:
            ServiceFailure: the service is left alone.
        """
        probe = await self._admitted()
        try:
            yield probe is not None
        except (ServiceFailure, anyio.get_cancelled_exc_class()):
            self._note_failure(probe)
            raise
        else:
            self._note_answer()
        finally:
            if probe is not None:
                self._probe = None
                probe.set()

    async def _admitted(self) -> anyio.Event | None:
        """Return when a call may be made; the event to set after the call that asks for all."""
        while self._until is not None:
            if self._probe is not None:
                await self._probe.wait()
                continue
            left = self._until - anyio.current_time()
            if left > 0:
                raise ServiceFailure(
                    f"{self._name} failed {self._failed} times in a row, and is not asked for another {left:.0f} s"
                )
            self._probe = anyio.Event()
            return self._probe
        return None

    def _note_failure(self, probe: anyio.Event | None) -> None:
        if self._until is not None and probe is None:
            return  # the call was made before the service was left alone
        self._failed += 1
        if self._open_after and self._failed >= self._open_after:
            self._until = anyio.current_time() + self._rest
            self._tell(f"{self._name} failed {self._failed} times in a row, and is left alone for {self._rest:g} s")

    def _note_answer(self) -> None:
        if self._until is not None:
            self._tell(f"{self._name} answers again")
        self._failed, self._until = 0, None
