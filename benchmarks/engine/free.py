"""Models that take no time: what is left of a step when decoding, scoring and training are free is the engine's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import anyio
import anyio.lowlevel
import numpy as np

from oppo.events import Batch, Chunk, Finish, FloatArray, Given, Prompt, Response
from oppo.models import Capabilities, Cut, Decode, Decoding, FixedDecoding, Follower, Piece, Trained, Weights

T = TypeVar("T")

TOKEN: Final = (np.ones(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))
"""A token, its log-prob and its version, made once."""
NOTHING: Final = Piece(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "cut")
"""What is read at the cut."""


def chunks_of(rollout: int, mean: int) -> int:
    """Return how many chunks the response of a rollout has: ``mean`` on average, from half of it to one and a half."""
    return mean - mean // 2 + (rollout * 7) % (2 * (mean // 2) + 1)


@dataclass(eq=False)
class FreeDecode:
    """A response that exists already, one chunk of one token for each decode step."""

    rollout: int
    left: int
    ready: int = 0
    decoding: bool = False
    news: anyio.Event | None = None

    def grow(self) -> None:
        """Make one more chunk readable."""
        self.left -= 1
        self.ready += 1

    def wake(self) -> None:
        """Let the reader look again."""
        if self.news is not None:
            self.news.set()

    async def read(self, limit: int) -> Piece:
        """Return the next token, whatever the limit; see :class:`oppo.models.Decode`."""
        del limit
        while self.decoding and not self.ready:
            self.news = anyio.Event()
            await self.news.wait()
            self.news = None
        if not self.ready:
            return NOTHING
        self.ready -= 1
        return Piece(*TOKEN, "live" if self.ready or self.left else "eos")

    async def aclose(self) -> None:
        """Give the rollout up."""


@dataclass(eq=False)
class FreePolicy:
    """An actor whose decode steps, one chunk for each live rollout, follow one another without a pause.

    Attributes:
        mean: chunks in a response, on average.
        made: chunks made so far.
    """

    mean: int
    made: int = 0
    version: int = 0
    capabilities: Capabilities = field(
        default_factory=lambda: Capabilities(loads_while_decoding="between decode steps")
    )

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FreeDecode]:
        """Make a decode for each rollout; one that goes on from a response has as many chunks less to make."""
        decodes = []
        for rollout in rollouts:
            prompt, made = (rollout.prompt, len(rollout)) if isinstance(rollout, Response) else (rollout, 0)
            decodes.append(FreeDecode(prompt.rollout, chunks_of(prompt.rollout, self.mean) - made))
        return decodes

    async def load(self, weights: Weights) -> None:
        """Follow the trainer."""
        self.version = weights.version

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        """Decode while the context is open."""
        return self._decoding([decode for decode in live if isinstance(decode, FreeDecode)], cut)

    @asynccontextmanager
    async def _decoding(self, live: list[FreeDecode], cut: Cut) -> AsyncIterator[Decoding]:
        for decode in live:
            decode.decoding = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._decode, live, cut, name="decode")
            yield FixedDecoding("FreePolicy")

    async def _decode(self, live: list[FreeDecode], cut: Cut) -> None:
        stopped = False
        while live and not stopped:
            await anyio.lowlevel.checkpoint()
            for decode in live:
                decode.grow()
            self.made += len(live)
            ended = [decode for decode in live if not decode.left]
            stopped = bool(ended) and cut([decode.rollout for decode in ended])
            for decode in live:
                decode.decoding = not stopped and bool(decode.left)
                decode.wake()
            live = [decode for decode in live if decode.left]


@dataclass(eq=False)
class FreeScorer(Generic[T]):
    """A frozen scorer that says the same of every rollout, or of every token."""

    value: T
    version: int = 0

    async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        """Read nothing."""
        del events
        await anyio.lowlevel.checkpoint()

    async def finish(self, finished: Sequence[Finish]) -> Sequence[T]:
        """Return a value for each rollout."""
        await anyio.lowlevel.checkpoint()
        return [self.value] * len(finished)

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Drop nothing."""


class FreeTokenScorer(FreeScorer[FloatArray]):
    """A frozen scorer with one number for each response token."""

    def __init__(self, longest: int) -> None:
        super().__init__(np.zeros(longest, np.float32))

    async def finish(self, finished: Sequence[Finish]) -> Sequence[FloatArray]:
        """Return the numbers of each rollout."""
        await anyio.lowlevel.checkpoint()
        return [self.value[: len(event.response)] for event in finished]


@dataclass(eq=False)
class FreeTrainer:
    """A trainer that only counts its updates."""

    version: int = 0

    async def update(self, batch: Batch) -> Trained:
        """Count one more."""
        del batch
        self.version += 1
        return Trained()

    async def publish(self, *followers: Follower) -> None:
        """Give the version to each follower."""
        for follower in followers:
            await follower.load(Weights(self.version))
