"""One decoding on vLLM: a pump for each rollout, and the umpire that reports what finished and obeys the cut.

Pumps take tokens as they come, until a response or a turn of it ends; an answer, or a rollout that joins, starts
another. The umpire waits until a response has ended, lets the other pumps of the same decode step run, and calls the
cut with all of them, in admission order. Where the cut returns true, the engine is paused and drained; what ended by
then is withheld. No task outlives the context.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from oppo.errors import leaves
from oppo.models import Cut, Decode
from oppo.vllm.surface import engine_calls

if TYPE_CHECKING:
    from oppo.vllm.requests import VllmDecode
    from oppo.vllm.policy import VllmPolicy


class DecodingLoop:
    """Decodes rollouts until the cut returns true or its context is left.

    Args:
        policy: has the engine.
        decodes: have not ended, though the engine may have finished some in the overrun of an earlier cut.
        cut: called with the rollouts that ended together.
    """

    def __init__(self, policy: VllmPolicy, decodes: Sequence[VllmDecode], cut: Cut) -> None:
        self._policy = policy
        self._begun = decodes
        self._decodes = list(decodes)  # with those that join
        self._cut: Cut | None = cut
        self._errors: list[Exception] = []
        self._news = anyio.Event()
        self._answered: list[VllmDecode] = []

    @property
    def wants_tokens(self) -> bool:
        """Whether decoding goes on: it was not cut, has not failed, and a rollout is unfinished."""
        return self._cut is not None and any(each.live and not each.idle for each in self._decodes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Decode beside the body, which reads; afterwards every rollout that has not ended is parked.

        Raises:
            Exception: what ended decoding, or the body's own error.
        """
        for decode in self._decodes:
            decode.begin()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, name="decode")
            try:
                yield
            except Exception as error:  # noqa: BLE001 - taken out of the task group, which would wrap it in a group
                self._collect(error)
            finally:
                self._cut = None
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await self._stop()
        self._raise_first()

    async def _run(self) -> None:
        """Report what had finished already, then let the engine work until the end."""
        try:
            await self._policy.prepare()
            self._require_sound()
            await self._policy.submit(self._begun)
            if self._report():
                async with anyio.create_task_group() as pumps:
                    for decode in self._begun:
                        if not decode.idle:
                            pumps.start_soon(self._pump, decode, name=f"pump of rollout {decode.prompt.rollout}")
                    await self._policy.resume()
                    await self._umpire(pumps)
                    pumps.cancel_scope.cancel()
            await self._stop()
        except Exception as error:  # noqa: BLE001 - the boundary to the readers: each of them, and the context, raises it
            self._fail(error)

    async def _pump(self, decode: VllmDecode) -> None:
        """Take the tokens of one rollout as they come, until its end."""
        collector = decode.collector
        try:
            while collector is not None and decode.collector is collector and not decode.idle and not decode.error:
                with engine_calls(self._policy.engine):
                    output = collector.get_nowait() or await collector.get()
                if decode.collector is collector:  # else it was given up
                    self._policy.take(decode, output)
        except Exception as error:  # noqa: BLE001 - raised by the umpire
            decode.error = error
        self.notice()

    def notice(self) -> None:
        """Have the umpire look at the rollouts: one has ended, has failed or was given up."""
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End decoding with an error."""
        self._collect(error)
        self.notice()

    async def add(self, decodes: Sequence[Decode]) -> None:
        """Decode these as well, from the next decode step on; those that come after the cut stay parked.

        Raises:
            ProtocolError: a decode is of another policy, was given up or has failed.
        """
        for decode in self._policy.unfinished(decodes) if self._cut is not None else ():
            decode.begin()
            self._decodes.append(decode)
            self.note_answer(decode)

    def note_answer(self, decode: VllmDecode) -> None:
        """Have a decode that was added, or whose turn was answered, join the others, or end."""
        self._answered.append(decode)
        self.notice()

    async def _umpire(self, pumps: TaskGroup) -> None:
        """Report the responses that end, and go on with those that were answered or added, until the cut."""
        while self._cut is not None:
            await self._news.wait()
            self._news = anyio.Event()
            await anyio.lowlevel.checkpoint()  # the pumps of the same decode step come first
            self._require_sound()
            answered, self._answered = self._answered, []
            over = [each for each in self._decodes if each.idle and each.request]
            await self._policy.abort([*over, *(each for each in answered if each.request)])
            if not self._report():
                return
            for decode in answered:
                if not decode.idle and not decode.given_up:
                    await self._policy.request(decode)
                    pumps.start_soon(self._pump, decode, name=f"pump of rollout {decode.prompt.rollout}")
            if answered:
                await self._policy.resume()

    def _report(self) -> bool:
        """Call the cut with the responses that have ended, in admission order; return whether decoding goes on."""
        ended = sorted((each for each in self._decodes if each.withheld and each.live), key=lambda each: each.order)
        ended = [decode for decode in ended if not decode.given_up]
        if ended and self._cut is not None:
            if self._cut([decode.prompt.rollout for decode in ended]):
                self._cut = None
            for decode in ended:
                decode.release()
        return self._cut is not None

    def _require_sound(self) -> None:
        """Raise what ends decoding: the error of the policy, or of a rollout."""
        self._collect()
        if self._errors:
            raise self._errors[0]

    def _collect(self, *errors: Exception) -> None:
        """Keep errors, those of rollouts included, each once."""
        for error in (*errors, *(each.error for each in self._decodes if not each.given_up)):
            if error is not None and all(error is not each for each in self._errors):
                self._errors.append(error)

    async def _stop(self) -> None:
        """Pause the engine, if it has something to do, and park what has not ended."""
        try:
            if any(decode.request and not decode.idle for decode in self._decodes):
                await self._policy.pause()
        except Exception as error:  # noqa: BLE001 - raised when the context is left
            self._collect(error)
        self._collect()
        for decode in self._decodes:
            decode.park(None)

    def _fail(self, error: Exception) -> None:
        """Let every reader, and the context, raise the error."""
        failure = leaves(error)[0]
        if not isinstance(failure, Exception):
            raise error
        failure.add_note(f"while decoding rollouts {[decode.prompt.rollout for decode in self._decodes]}")
        self._cut = None
        self._errors = [failure, *(each for each in self._errors if each is not failure)]
        for decode in self._decodes:
            decode.park(failure)

    def _raise_first(self) -> None:
        if not self._errors:
            return
        first, *others = self._errors
        for other in (leaf for error in others for leaf in leaves(error)):
            if other is not first:  # readers raise the very error that ended decoding
                first.add_note(f"and then {type(other).__name__}: {other}")
        raise first
