"""From the decode loop, where the model lives, to the readers on the event loop, when a reader can make use of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from oppo.hf.serve.decoding import DecodeStep
from oppo.models import PieceState
from oppo.support import Support


class Reading(Protocol):
    """A rollout as its reader sees it.

    Attributes:
        key: of its row in the decode loop.
        enough: tokens of the response at which the reader goes on; set on the event loop, looked at from both sides.
    """

    key: int
    enough: int

    @property
    def made(self) -> int:
        """How many tokens of the response it knows of."""

    def put(self, token: int, logprob: float, version: int, support: Support, state: PieceState) -> None:
        """Append a token to what can be read."""


class Mailbox:
    """Holds decode steps until a reader has enough, or a response ends: the event loop is not woken for each.

    A reader first says how much is enough, then calls :meth:`show`, then waits: whatever was made before is shown then,
    and whatever is made later is compared with what it said.
    """

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._loop = asyncio.get_running_loop()
        self._readings = {reading.key: reading for reading in readings}
        self._lengths = {reading.key: reading.made for reading in readings}
        self._made: deque[DecodeStep] = deque()

    def deliver(self, made: DecodeStep) -> None:
        """Take a decode step; called in the model's thread, or in the one that waits for the model's process."""
        self._made.append(made)
        for key in made.keys:
            self._lengths[key] += 1
        if any(made.reasons) or any(self._lengths[key] >= self._readings[key].enough for key in made.keys):
            self._loop.call_soon_threadsafe(self.show)

    def show(self) -> None:
        """Give every reader what was made; called on the event loop."""
        while self._made:
            made = self._made.popleft()
            supports = made.support.split(len(made.keys))
            news = zip(made.keys, made.tokens.tolist(), made.logprobs.tolist(), supports, made.reasons, strict=True)
            for key, token, logprob, support, reason in news:
                self._readings[key].put(token, logprob, made.version, support, reason or "live")
