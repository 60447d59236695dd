"""The calls of the decode loop: another one whenever a turn was answered, until the step is cut or its context is left.

::

    decode what is ready -> a turn ends: its row is parked -> the answer comes: the call returns, the next has the row
    decode what is ready -> a rollout joins: the call returns with its rows parked -> the next call has its row too
    decode what is ready -> weights come: the call returns with its rows parked -> they are loaded -> the next call

Without turns, joins and new weights there is one call. Where every rollout waits for an answer there is none, so the
model's place is free. In exact mode decoding waits with each turn, weights wait for its end, and no rollout joins.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from oppo.hf.serve.policy import HfDecode, Mailbox
from oppo.hf.serve.decoder import PolicyCore
from oppo.models import Cut
from oppo.placement import Callback, Hosted


class DecodeLoop:
    """Decodes rollouts until the cut returns true or :meth:`stop` is called; in exact mode, until each has ended.

    Args:
        core: where the model lives.
        decodes: of rollouts that have not ended; they are live from now on.
        cut: called with the rollouts that ended together.
        exact: wait with all rollouts while a turn is unanswered.
    """

    def __init__(self, core: Hosted[PolicyCore], decodes: Sequence[HfDecode], cut: Cut, *, exact: bool) -> None:
        self.decodes = list(decodes)
        self._core = core
        self._cut = cut
        self._exact = exact
        self._over = False
        self._mailbox: Mailbox | None = None
        self._news = anyio.Event()
        self._call = anyio.Lock(fast_acquire=True)  # fair: who waits comes before the next call
        self._ended = anyio.Event()
        for decode in decodes:
            decode.join(self)

    def stop(self) -> None:
        """Stop after the decode step in progress."""
        self._over = True
        self._interrupt()
        self._news.set()

    def note_answer(self) -> None:
        """Have a rollout that was added, answered or given up join or leave at the next decode step."""
        if not self._exact:
            self._interrupt()
        self._news.set()

    def add(self, decodes: Sequence[HfDecode]) -> None:
        """Decode these as well, from the next call on; once decoding is over they stay parked."""
        if not self._over:
            for decode in decodes:
                decode.join(self)
            self.decodes += decodes
            self.note_answer()

    def _interrupt(self) -> None:
        """Have the call in progress return after its decode step; the rows that have not ended are parked."""
        if self._mailbox is not None:
            self._mailbox.signals.stop()

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[None]:
        """Keep the model from decoding, between two decode steps; in exact mode, wait for the end of all."""
        if self._exact:
            await self._ended.wait()
        self._interrupt()
        async with self._call:
            yield

    async def run(self) -> None:
        """Decode until the end.

        Raises:
            Exception: whatever ended a call.
        """
        try:
            await self._run()
        finally:
            self._over = True
            self._ended.set()

    async def _run(self) -> None:
        while not self._over:
            await self._end_finished()
            async with self._call:
                open_ = [decode for decode in self.decodes if decode.live and not decode.given_up]
                if self._over or (self._exact and not open_):
                    return
                if any(decode.ending for decode in open_):  # an answer that came meanwhile
                    continue
                ready = [decode for decode in open_ if not decode.unanswered]
                if ready and not (self._exact and len(ready) < len(open_)):
                    await self._decode(ready)
                    continue
                self._news = anyio.Event()
            await self._news.wait()

    async def _end_finished(self) -> None:
        """Report the responses that end with their turn, in admission order."""
        ended = [each for each in self.decodes if each.ending and not each.given_up]
        if ended:
            ended.sort(key=lambda each: each.order)
            self._cutting([decode.prompt.rollout for decode in ended])
            for decode in ended:
                decode.end()
            await self._core.call("forget", PolicyCore.forget, [decode.key for decode in ended])

    async def _decode(self, ready: Sequence[HfDecode]) -> None:
        new = [row for decode in ready for row in decode.pop_row()]
        rows = {decode.key: decode.pop_given() for decode in ready}
        mailbox = self._mailbox = Mailbox(ready)
        cut, deliver = Callback(self._cutting), Callback(mailbox.deliver, oneway=True)
        try:
            await self._core.call("decode", PolicyCore.run, new, rows, cut, mailbox.signals, deliver)
        finally:
            mailbox.empty()
            self._mailbox = None

    def _cutting(self, finished: Sequence[int]) -> bool:
        """Report rollouts; called on the event loop, in the model's thread, or by who waits for the model's child."""
        cutting = self._cut(finished)
        self._over = self._over or cutting
        return cutting
