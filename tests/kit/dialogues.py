"""Conversations with any policy that has turns: an answer after each of some turns, then the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
import numpy as np

from oppo.events import Chunk, IntArray, Prompt, Response, ToolTokens
from oppo.turns import MultiTurnPolicy, TurnDecode

ANSWER = np.array([17, 19, 18, 16, 20], np.int32)

Seconds = Callable[[int, int], float]
"""``f(k, turn)``: how long the answer to a turn of the k-th rollout takes."""


def at_once(k: int, turn: int) -> float:
    """Return 0."""
    return 0.0


def turns_answered(response: Response) -> int:
    """Return how many turns of a response were answered."""
    return sum(isinstance(each, ToolTokens) for each in response.pieces())


@dataclass
class Dialogue:
    """What was read and heard of some decodes.

    Attributes:
        turns: how many of each rollout are answered; it ends with the next.
        heard: the turns of each rollout, in order.
        told: what the cut was told.
        cut_after: so many ends.
    """

    decodes: Sequence[TurnDecode]
    asked: Sequence[Prompt]
    turns: int = 2
    seconds: Seconds = at_once
    cut_after: int = 1_000_000
    limit: int = 7
    pieces: list[list[Chunk | ToolTokens]] = field(default_factory=list)
    heard: list[list[IntArray]] = field(default_factory=list)
    told: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pieces = [[] for _ in self.decodes]
        self.heard = [[] for _ in self.decodes]

    def cut(self, finished: Sequence[int]) -> bool:
        self.told.append(list(finished))
        return sum(map(len, self.told)) >= self.cut_after

    @property
    def live(self) -> list[int]:
        return [k for k, pieces in enumerate(self.pieces) if not pieces or pieces[-1].state in {"live", "cut"}]

    async def step(self, policy: MultiTurnPolicy) -> None:
        """Decode, read and answer until the cut, or the end of every response."""
        live = self.live
        decodes = [self.decodes[k] for k in live]
        async with policy.decoding(decodes, self.cut), anyio.create_task_group() as conversations:
            async with anyio.create_task_group() as readers:
                for k in live:
                    readers.start_soon(self.read, k)
                    conversations.start_soon(self.converse, k)
            conversations.cancel_scope.cancel()

    async def read(self, k: int) -> None:
        state = "live"
        while state == "live":
            piece = await self.decodes[k].read(self.limit)
            self.pieces[k].append(piece)
            state = piece.state

    async def converse(self, k: int) -> None:
        decode, turns = self.decodes[k], self.heard[k]
        while (tokens := await decode.turn()) is not None:
            await anyio.sleep(self.seconds(k, len(turns)))
            if not (decode.proceed(ANSWER) if len(turns) < self.turns else decode.finish()):
                return
            turns.append(tokens)

    def tokens(self) -> list[list[int]]:
        return [response.tokens.tolist() for response in self.responses()]

    def states(self) -> list[str]:
        return [pieces[-1].state for pieces in self.pieces]

    def responses(self) -> list[Response]:
        """Return what was read of each."""
        return [Response.of(asked, pieces) for asked, pieces in zip(self.asked, self.pieces, strict=True)]


async def dialogue(
    policy: MultiTurnPolicy, asked: Sequence[Prompt], seconds: Seconds = at_once, cuts: Sequence[int] = ()
) -> Dialogue:
    """Return what rollouts with two answers came to; steps are cut when so many have ended."""
    talk = Dialogue(await policy.open_turns(asked), asked, seconds=seconds)
    for talk.cut_after in cuts:
        await talk.step(policy)
    talk.cut_after = 1_000_000
    while talk.live:
        await talk.step(policy)
    return talk
