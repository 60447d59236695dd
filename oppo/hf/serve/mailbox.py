"""Decodes as their readers see them, on the event loop, and the mailbox that connects them to the decode loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oppo.rollout_buffer import BufferedDecode
from oppo.events import FinishReason, IntArray, Response
from oppo.hf.serve.decoder import DecodeRow, DecodeStep
from oppo.hf.serve.decoder import Signals

if TYPE_CHECKING:
    from oppo.hf.serve.policy import DecodeLoop
    from oppo.hf.serve.policy import HfPolicy


class HfDecode(BufferedDecode):
    """One rollout of an :class:`~oppo.hf.serve.policy.HfPolicy`.

    Readers use ``read`` and ``aclose``, conversations ``turn``, ``proceed`` and ``finish``; the other methods are the
    policy's.

    Attributes:
        key: of its row in the decode loop.
        loop: that decodes it; ``None`` while it is parked.
    """

    def __init__(self, policy: HfPolicy, response: Response, row: DecodeRow, ended: FinishReason | None) -> None:
        super().__init__(response, row.limit, turns=row.turns, ended=ended)
        self.key = row.key
        self.loop: DecodeLoop | None = None
        self._policy = policy
        self._row: DecodeRow | None = row
        self._answer: list[int] = []
        self._mailbox: Mailbox | None = None

    def before_wait(self) -> None:
        """Take what has arrived in the mailbox."""
        if self._mailbox is not None:
            self._mailbox.empty()

    async def aclose(self) -> None:
        """Give up the rollout and free its memory; idempotent. A live row's memory is freed at the next decode step."""
        if self.given_up:
            return
        self.given_up = True
        if self._mailbox is not None:
            self._mailbox.give_up(self)
        self.wake()
        if self.loop is not None and self.unanswered:
            self.loop.note_answer()
        if self._state == "cut":
            await self._policy.forget([self.key])

    def resumable(self, policy: HfPolicy) -> bool:
        """Return whether ``policy`` may decode it."""
        return self._policy is policy and self.usable

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of admission order: admission number and sample."""
        return self.prompt.admission, self.prompt.sample

    def join(self, loop: DecodeLoop) -> None:
        """Become live."""
        self.begin()
        self.loop = loop

    def listen(self, mailbox: Mailbox) -> None:
        """Receive tokens through ``mailbox``."""
        self._mailbox = mailbox

    def pop_row(self) -> list[DecodeRow]:
        """Return the row at the first call, none afterwards: from then on it belongs to the decode loop."""
        row, self._row = self._row, None
        return [] if row is None else [row]

    def pop_given(self) -> list[int]:
        """Return the tokens that the row reads after a turn, and has not read."""
        given, self._answer = self._answer, []
        return given

    def answered(self, given: IntArray) -> None:
        """Keep the answer for the row, and have it join the others."""
        self._answer = [] if self.ending else given.tolist()
        if self.loop is not None:
            self.loop.note_answer()

    def park(self, failure: Exception | None) -> None:
        """Stop being live: parked without a ``failure``, failed for good with one."""
        self.loop = self._mailbox = None
        super().park(failure)


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
            decode.listen(self)

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
