"""Decodes as their readers see them, on the event loop, and the mailbox that connects them to the decode loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import numpy as np

from oppo.errors import ProtocolError
from oppo.hf.serve.decoding import DecodeRow, DecodeStep
from oppo.hf.serve.signals import Signals
from oppo.models import Piece, PieceState
from oppo.support import Support

if TYPE_CHECKING:
    from oppo.hf.serve.policy import HfPolicy


class HfDecode:
    """One rollout of an :class:`~oppo.hf.serve.policy.HfPolicy`; it buffers the rollout's tokens until they are read.

    It lives on the event loop. Readers use ``read`` and ``aclose``; the other methods are the policy's.

    Attributes:
        key: of its row in the decode loop.
        enough: length of the response, in tokens, at which the waiting reader continues. The thread of the decode loop
            reads it too.
        given_up: its reader has closed it.
    """

    def __init__(self, policy: HfPolicy, row: DecodeRow) -> None:
        self.prompt = row.prompt
        self.key = row.key
        self.enough = 0
        self.given_up = False
        self._policy = policy
        self._row: DecodeRow | None = row
        self._mailbox: Mailbox | None = None
        self._taken = len(row.tokens)
        self._unread: list[tuple[int, float, int, Support]] = []
        self._state: PieceState = "cut"
        self._failure: Exception | None = None
        self._readiness: anyio.Event | None = None

    @property
    def live(self) -> bool:
        """Whether it is being decoded."""
        return self._state == "live"

    @property
    def ended(self) -> bool:
        """Whether the response is complete."""
        return self._state not in ("live", "cut")

    @property
    def received(self) -> int:
        """Length in tokens of the response as far as it has arrived here, read or not."""
        return self._taken + len(self._unread)

    async def read(self, limit: int) -> Piece:
        """Return the next ``limit`` tokens, or fewer at the end of the response or at the cut.

        Outside of :meth:`HfPolicy.decoding` it does not wait. Cancel-safe: a cancelled read has taken nothing.

        Raises:
            ProtocolError: another read is waiting, the rollout was given up, or its last piece has been read.
            ValueError: ``limit`` is less than 1.
            Exception: whatever ended the decode loop.
        """
        if limit < 1:
            raise ValueError(f"a read takes at least 1 token, not {limit}")
        await anyio.lowlevel.checkpoint()
        if self._readiness is not None:
            raise ProtocolError(f"two reads of rollout {self.prompt.rollout} at once: it has one reader")
        self.enough = self._taken + limit
        if self._mailbox is not None:
            self._mailbox.empty()
        while not self._readable():
            self._readiness = anyio.Event()
            try:
                await self._readiness.wait()
            finally:
                self._readiness = None
        return self._take(limit)

    async def aclose(self) -> None:
        """Give up the rollout and free its memory; idempotent. A live row's memory is freed at the next decode step."""
        if self.given_up:
            return
        self.given_up = True
        if self._mailbox is not None:
            self._mailbox.give_up(self)
        self._wake()
        if self._state == "cut":
            await self._policy.forget([self.key])

    def resumable(self, policy: HfPolicy) -> bool:
        """Return whether ``policy`` may decode it."""
        return self._policy is policy and not self.given_up and self._failure is None

    def resume(self, mailbox: Mailbox) -> None:
        """Become live: tokens arrive through ``mailbox``."""
        self._state, self._mailbox = "live", mailbox

    def pop_row(self) -> list[DecodeRow]:
        """Return the row at the first call, none afterwards: from then on it belongs to the decode loop."""
        row, self._row = self._row, None
        return [] if row is None else [row]

    def put(self, token: int, logprob: float, version: int, support: Support, state: PieceState) -> None:
        """Append a token to those that can be read."""
        self._unread.append((token, logprob, version, support))
        self._state = state
        if self._readable():
            self._wake()

    def park(self, failure: Exception | None) -> None:
        """Stop being live: parked without a ``failure``, failed for good with one."""
        self._mailbox = None
        if self.live:
            self._state, self._failure = "cut", failure
            self._wake()

    def _readable(self) -> bool:
        return not self.live or self.given_up or self.received >= self.enough

    def _wake(self) -> None:
        if self._readiness is not None:
            self._readiness.set()

    def _take(self, limit: int) -> Piece:
        rollout = self.prompt.rollout
        if self.given_up:
            raise ProtocolError(f"rollout {rollout} was given up, so it cannot be read")
        if not self._unread and self._failure is not None:
            raise self._failure
        if not self._unread and self.ended:
            raise ProtocolError(f"the last piece of rollout {rollout} has been read; expected no further read")
        taken, self._unread = self._unread[:limit], self._unread[limit:]
        self._taken += len(taken)
        tokens, logprobs, versions, supports = zip(*taken, strict=True) if taken else ((), (), (), ())
        continues = bool(self._unread) or self._failure is not None
        return Piece(
            np.array(tokens, np.int32),
            np.array(logprobs, np.float32),
            np.array(versions, np.int32),
            "live" if continues else self._state,
            Support.concatenate((support, 1) for support in supports),
        )


class Mailbox:
    """Carries decode steps to the live decodes, and their readers' signals to the decode loop.

    It wakes the event loop only when a reader has enough tokens or a response ends, not at every decode step. A reader
    first sets ``enough``, then calls :meth:`empty`, then waits: earlier tokens are handed out then, and later ones are
    compared with ``enough``.

    Attributes:
        signals: to the decode loop, whose rows are numbered as ``decodes`` are.
    """

    def __init__(self, decodes: Sequence[HfDecode]) -> None:
        self.signals = Signals.of(len(decodes))
        self._loop = asyncio.get_running_loop()
        self._decodes = {decode.key: decode for decode in decodes}
        self._lengths = {decode.key: decode.received for decode in decodes}
        self._steps: deque[DecodeStep] = deque()
        for decode in decodes:
            decode.resume(self)

    def give_up(self, decode: HfDecode) -> None:
        """Have the decode loop drop the row of ``decode``."""
        self.signals.give_up(list(self._decodes).index(decode.key))

    def deliver(self, step: DecodeStep) -> None:
        """Take a decode step; called in the model's thread, or in the thread that waits for the model's process."""
        self._steps.append(step)
        for key in step.keys:
            self._lengths[key] += 1
        if any(step.reasons) or any(self._lengths[key] >= self._decodes[key].enough for key in step.keys):
            self._loop.call_soon_threadsafe(self.empty)

    def empty(self) -> None:
        """Hand all tokens out to their decodes; called on the event loop."""
        while self._steps:
            step = self._steps.popleft()
            supports = step.support.split(len(step.keys))
            columns = zip(step.keys, step.tokens.tolist(), step.logprobs.tolist(), supports, step.reasons, strict=True)
            for key, token, logprob, support, reason in columns:
                self._decodes[key].put(token, logprob, step.version, support, reason or "live")
