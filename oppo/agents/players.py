"""Players of frozen roles: models that answer agents beside the policy, and whose tokens are given, never trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import anyio

from oppo.agents.requests import Refusal
from oppo.errors import ModelError, ProtocolError, one_line
from oppo.events import Chunk, Prompt, Response
from oppo.models import Decode, Decoding, Policy


class Player:
    # An engine that lets rollouts join decodes turns side by side, another one (deterministic) each alone.
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._joins = policy.capabilities.adds_while_decoding
        self._engine: Decoding | None = None
        self._live = 0
        self._alone = anyio.Lock()
        self._news = anyio.Event()

    async def serve(self) -> None:
        """Decode as long as turns are asked for, and so forget them once none is."""
        while self._joins:
            await self._until(lambda: self._live > 0)
            with suppress(Exception):  # those that read raise it
                async with self.policy.decoding([], _uncut) as engine:
                    self._engine = engine
                    self._notify()
                    await self._until(lambda: not self._live)
            self._engine = None

    async def turn(self, prompt: Prompt) -> Chunk:
        """Return the answer to a prompt, of at most ``prompt.limit.tokens``, with its state.

        Raises:
            Refusal: the model cannot read the prompt, or is asked to end thinking.
        """
        if prompt.limit.thinking:
            raise Refusal(f"role {prompt.role!r} is frozen, and no budget ends its thinking: leave the budget out")
        try:
            (decode,) = await self.policy.open([prompt])
        except ModelError as error:
            words = f"the model of role {prompt.role!r} cannot answer: {one_line(error)}"
            raise Refusal(words, code="context_length_exceeded") from error
        self._live += 1
        self._notify()
        try:
            if not self._joins:
                async with self._alone, self.policy.decoding([decode], _uncut):
                    return await _read(decode, prompt)
            await self._until(lambda: self._engine is not None)
            assert self._engine is not None  # noqa: S101 - that was waited for
            await self._engine.add([decode])
            return await _read(decode, prompt)
        finally:
            self._live -= 1
            self._notify()
            with anyio.CancelScope(shield=True):
                await decode.aclose()

    def _notify(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def _until(self, there: Callable[[], bool]) -> None:
        while not there():
            await self._news.wait()


def _uncut(finished: Sequence[int]) -> bool:
    del finished
    return False


async def _read(decode: Decode, prompt: Prompt) -> Chunk:
    found, most = Response.empty(prompt), prompt.limit.tokens
    while not most or len(found) < most:
        piece = await decode.read(max(1, most - len(found)) if most else 64)
        found = found.then(piece)
        if piece.state == "cut":
            raise ProtocolError(f"the model of role {prompt.role!r} stopped within a turn")
        if piece.state != "live":
            return Chunk(prompt.rollout, 0, found.tokens, found.logprobs, found.versions, state=piece.state)
    return found.chunk()
