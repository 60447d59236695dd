"""Fake models that take the time of a cost model and make whole chunks at once, so that long runs take little."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray

from oppo.errors import ProtocolError, as_itself
from oppo.events import Batch, Chunk, Finish, Given, Prompt, Response
from oppo.models import (
    Capabilities,
    Cut,
    Decode,
    Decoding,
    FixedDecoding,
    Follower,
    Piece,
    PieceState,
    Trained,
    Weights,
)

T = TypeVar("T")


@dataclass(eq=False)
class PacedDecode:
    """A decode of :class:`PacedPolicy`."""

    policy: PacedPolicy
    prompt: Prompt
    length: int
    made: int = 0
    taken: int = 0
    live: bool = False
    _grown: anyio.Event = field(default_factory=anyio.Event)

    def grow(self, tokens: int) -> None:
        """Have ``tokens`` more."""
        self.made += tokens

    def wake(self) -> None:
        """Let the reader look again."""
        self._grown.set()
        self._grown = anyio.Event()

    async def read(self, limit: int) -> Piece:
        """Return the next tokens; see :class:`oppo.models.Decode`."""
        while self.live and self.made - self.taken < limit:
            await self._grown.wait()
        count = min(limit, self.made - self.taken)
        self.taken += count
        zeros = np.zeros(count, np.int32)
        return Piece(zeros, zeros.astype(np.float32), np.full(count, self.policy.version, np.int32), self._state())

    def _state(self) -> PieceState:
        if self.live or self.taken < self.made:
            return "live"
        if self.made < self.length:
            return "cut"
        return "length" if self.length >= self.policy.cap else "eos"

    async def aclose(self) -> None:
        """Give the decode up."""


@dataclass(eq=False)
class PacedPolicy:
    """An actor that decodes in strides: from one moment at which something can be read, or ends, to the next.

    Attributes:
        length: tokens in the response to a prompt.
        seconds: of so many decode steps: ``seconds(rows, context, steps)``.
        stride: how many tokens readers read at a time.
        cap: a response of so many tokens ends with reason ``length``.
    """

    length: Callable[[Prompt], int]
    seconds: Callable[[int, float, int], float]
    stride: int
    cap: int
    version: int = 0
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(resumes=False))

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[PacedDecode]:
        """Make a decode for each rollout; these runs are never resumed, so that all of them are new."""
        prompts = [rollout for rollout in rollouts if isinstance(rollout, Prompt)]
        return [PacedDecode(self, prompt, self.length(prompt)) for prompt in prompts]

    async def load(self, weights: Weights) -> None:
        """Follow the trainer."""
        self.version = weights.version

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        """Decode while the context is open."""
        mine = [decode for decode in live if isinstance(decode, PacedDecode)]
        if len(mine) != len(live):
            raise ProtocolError("only decodes of this policy can be decoded")
        return self._decoding(mine, cut)

    @asynccontextmanager
    async def _decoding(self, rows: list[PacedDecode], cut: Cut) -> AsyncIterator[Decoding]:
        for row in rows:
            row.live = True
        with as_itself():
            async with anyio.create_task_group() as pump:
                pump.start_soon(self._pump, rows, cut)
                yield FixedDecoding("PacedPolicy")
                pump.cancel_scope.cancel()

    async def _pump(self, rows: list[PacedDecode], cut: Cut) -> None:
        clock, count, context = 0, len(rows), float(sum(row.made for row in rows))
        began = {row.prompt.rollout: row.made for row in rows}
        stops = [(min(row.length, row.taken + self.stride) - row.made, row.prompt.rollout, row) for row in rows]
        heapq.heapify(stops)
        while stops:
            steps = stops[0][0] - clock
            await anyio.sleep(self.seconds(count, context, steps))
            clock, context = clock + steps, context + steps * count
            reached = []
            while stops and stops[0][0] == clock:
                reached.append(heapq.heappop(stops)[2])
            ended = []
            for row in reached:
                row.made = began[row.prompt.rollout] + clock
                if row.made >= row.length:
                    row.live = False
                    ended.append(row)
                else:
                    heapq.heappush(stops, (clock + min(self.stride, row.length - row.made), row.prompt.rollout, row))
            if ended and cut(sorted(row.prompt.rollout for row in ended)):
                for _, rollout, row in stops:
                    row.made, row.live = began[rollout] + clock, False
                    row.wake()
                stops = []
            for row in reached:
                row.wake()
            count -= len(ended)
            context -= sum(row.made for row in ended)


@dataclass(eq=False)
class PacedScorer(Generic[T]):
    """A scorer of values that are of no interest.

    Attributes:
        value: of a finished rollout.
        reading: seconds to read positions ``start .. stop`` of a response; the prompt's are 0, 0.
        finishing: seconds to say something of responses of these lengths.
        call: seconds of each call that reads something.
    """

    value: Callable[[Finish], T]
    reading: Callable[[int, int], float] | None = None
    finishing: Callable[[NDArray[np.int64]], float] | None = None
    call: float = 0.0
    version: int = 0

    async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        """Read more of some rollouts."""
        if self.reading is not None:
            spans = [(0, 0) if isinstance(e, Prompt) else (e.start, e.start + len(e.tokens)) for e in events]
            await anyio.sleep(self.call + sum(self.reading(start, stop) for start, stop in spans))

    async def finish(self, finished: Sequence[Finish]) -> Sequence[T]:
        """Return the values."""
        if self.finishing is not None:
            await anyio.sleep(self.finishing(np.array([len(event.response) for event in finished])))
        return [self.value(event) for event in finished]

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Keep no session anyway."""


@dataclass(eq=False)
class PacedTrainer:
    """A trainer that takes time.

    Attributes:
        seconds: of an update on responses of these lengths.
        publishing: seconds until the followers have the weights.
        lags: by step: for each rollout, the versions between its first token and its update.
    """

    seconds: Callable[[NDArray[np.int64]], float]
    publishing: float
    version: int = 0
    lags: list[list[int]] = field(default_factory=list)
    lengths: list[NDArray[np.int64]] = field(default_factory=list)

    async def update(self, batch: Batch) -> Trained:
        """Take the batch."""
        lengths = np.diff(batch.offsets)
        await anyio.sleep(self.seconds(lengths))
        self.lags.append([self.version - int(response.versions[0]) for response in batch.responses])
        self.lengths.append(lengths)
        self.version += 1
        return Trained()

    async def publish(self, *followers: Follower) -> None:
        """Give the version to each follower."""
        await anyio.sleep(self.publishing)
        for follower in followers:
            await follower.load(Weights(self.version))
