"""A call that calls back, in the actor: requests wait until the driver fetches them, replies until the work reads them.

::

    work      --request-->  Conversation  <--fetch, which waits--   driver      in threads of their own
    work      <---reply---  Conversation  <--------reply---------   driver
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from oppo.placement.wire import Packet

LINGER: Final = 0.005
"""Seconds that a request which nothing waits for may wait for others: fetching each alone would slow the work down."""


class Conversation:
    """The requests of one call, and what comes to it; implements :class:`oppo.placement.worker.Line`."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._requests: list[bytes] = []
        self._replies: deque[bytes] = deque()
        self._notices: dict[int, bytearray] = {}
        self._over = False
        self._waits = False

    def send(self, request: Packet) -> None:
        """Keep a request for the driver."""
        with self._news:
            self._requests.append(request.data)
            if len(self._requests) == 1:  # others are fetched with it
                self._news.notify_all()

    def receive(self) -> Packet:
        """Return the next reply; wait for it."""
        with self._news:
            self._waits = True
            self._news.notify_all()
            self._news.wait_for(lambda: self._replies)
            self._waits = False
            return Packet(self._replies.popleft())

    def has_come(self) -> bool:
        """Return whether a reply is there."""
        return bool(self._replies)

    def end(self) -> None:
        """Note that the call has ended."""
        with self._news:
            self._over = True
            self._news.notify_all()

    def fetch(self, patience: float) -> tuple[list[bytes], bool]:
        """Return the requests that were not fetched before, and whether there will be no more.

        Args:
            patience: seconds in which one of the two should happen.
        """
        with self._news:
            self._news.wait_for(lambda: self._requests or self._over, patience)
            if self._requests:
                self._news.wait_for(lambda: self._waits or self._over, LINGER)
            fetched, self._requests = self._requests, []
            return fetched, self._over

    def reply(self, data: bytes) -> None:
        """Keep a reply for the work."""
        with self._news:
            self._replies.append(data)
            self._news.notify_all()

    def notice(self, number: int, content: bytes) -> bytearray:
        """Return the copy of a notice; unless a write has come before, with this content."""
        with self._news:
            return self._notices.setdefault(number, bytearray(content))

    def note(self, number: int, content: bytes) -> None:
        """Write a notice, as its writer did."""
        with self._news:
            self._notices.setdefault(number, bytearray(content))[:] = content
