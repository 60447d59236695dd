"""A fake actor with a cost model: it decodes all rollouts together, or each at its own pace.

A fake token is a hash of (seed, admission, sample, position); a fake log-prob also depends on the version of the
weights. Code that mixes up rollouts, positions or versions gets other numbers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio
import numpy as np
from anyio.abc import TaskGroup

from oppo.declared import require_declared
from oppo.errors import ProtocolError, as_itself
from oppo.events import FloatArray, IntArray, Prompt, Response
from oppo.models import Capabilities, Cut, Decode, Decoding, FixedDecoding, Piece, PieceState, Weights
from oppo.support import Support
from oppo.testing.fakes import noises, require_seconds

Length: TypeAlias = Callable[[Prompt], int]

StepSeconds: TypeAlias = Callable[[int, int], float]
"""``f(rows, tokens)``: seconds of a decode step, by the number of live rollouts and of tokens in their responses."""


@dataclass(eq=False)
class FakeDecode:
    """A decode of :class:`FakePolicy`."""

    policy: FakePolicy
    prompt: Prompt
    length: int
    made: int = 0
    taken: int = 0
    closed: bool = False
    versions: list[int] = field(default_factory=list)
    _wanted: int = 0
    _grown: anyio.Event = field(default_factory=anyio.Event)

    @property
    def done(self) -> bool:
        """Whether the response is complete."""
        return self.made >= self.length

    def grow(self) -> None:
        """Make one token, with the policy's current weights."""
        self.made += 1
        self.versions.append(self.policy.version)

    def wake(self) -> None:
        """Wake the reader if it has all that it waits for, or if decoding stopped."""
        if self.made >= self._wanted or not self.policy.is_decoding(self):
            self._grown.set()

    async def read(self, limit: int) -> Piece:
        """Return the next tokens; see :class:`oppo.models.Decode`.

        Raises:
            ProtocolError: the decode is closed.
        """
        if self.closed:
            raise ProtocolError(f"rollout {self.prompt.rollout} was given up, so it cannot be read")
        self._wanted = self.taken + limit
        while self.made < self._wanted and self.policy.is_decoding(self):
            self._grown = anyio.Event()
            await self._grown.wait()
        start, answer = self.taken, self.policy.given(self.prompt)
        ends = [end for end in (answer.start, answer.stop) if end > start]  # no piece mixes given and sampled tokens
        self.taken = stop = min(self.made, start + limit, *ends)
        tokens = self.tokens(start, stop)
        return Piece(
            tokens,
            self.logprobs(start, stop),
            np.array(self.versions[start:stop], np.int32),
            self._state(),
            self.policy.support(tokens),
            given=start in answer,
        )

    def _state(self) -> PieceState:
        if self.taken < self.made or (not self.done and self.policy.is_decoding(self)):
            return "live"
        if not self.done:
            return "cut"
        return "length" if self.length >= self.policy.cap else "eos"

    def tokens(self, start: int, stop: int) -> IntArray:
        """Return the tokens at positions ``start .. stop``, int32 [stop - start]."""
        key = (self.policy.seed, self.prompt.admission, self.prompt.sample)
        return (noises(key, range(start, stop)) * 50_000).astype(np.int32)

    def logprobs(self, start: int, stop: int) -> FloatArray:
        """Return the log-probs of the tokens at positions ``start .. stop``, float32 [stop - start]."""
        key = (self.policy.seed, self.prompt.rollout)
        return (-4 * noises(key, range(start, stop), self.versions[start:stop])).astype(np.float32)

    async def aclose(self) -> None:
        """Close the decode."""
        self.closed = True


@dataclass(eq=False)
class FakePolicy:
    """An actor whose decode step serves every live rollout, or that decodes each at its own pace.

    While its context is open, it also is the :class:`~oppo.models.Decoding` that rollouts join and leave.

    Attributes:
        length: tokens in the response to a prompt, before the cap.
        seconds: of one decode step; with a pace, of one token of a rollout.
        pace: factor of ``seconds`` for a rollout, which is then decoded on its own, as by an engine of requests.
            ``None``: every decode step makes one token of each rollout.
        cap: a response of this many tokens ends with reason ``length``.
        given: the positions of a response that are not sampled but a tool's answer.
        kept: the number of ids in each token's support; 0: all.
        capabilities: those it claims; it implements all of them.
        tokens: made so far.

    Example:
        >>> a_row_costs = FakePolicy(seconds=lambda rows, tokens: 0.01 + 0.001 * rows)
    """

    length: Length = lambda prompt: 5 + prompt.admission % 7
    seconds: float | StepSeconds = 0.01
    pace: Callable[[Prompt], float] | None = None
    cap: int = 1_000_000
    seed: int = 0
    given: Callable[[Prompt], range] = lambda prompt: range(0)
    kept: int = 0
    version: int = 0
    tokens: int = 0
    capabilities: Capabilities = field(default_factory=Capabilities)

    def __post_init__(self) -> None:
        require_declared(self)
        require_seconds("seconds of FakePolicy", self.seconds)
        self._live: dict[FakeDecode, None] = {}  # an ordered set
        self._cut: Cut | None = None
        self._over: anyio.Event | None = None
        self._loops: TaskGroup | None = None
        self._stepping = False

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        """Make a decode for each; that of a response goes on after its tokens."""
        return [self._decode(Response.empty(each) if isinstance(each, Prompt) else each) for each in rollouts]

    def _decode(self, response: Response) -> FakeDecode:
        made, length = len(response), min(self.cap, self.length(response.prompt))
        return FakeDecode(self, response.prompt, length, made, made, versions=response.versions.tolist())

    async def load(self, weights: Weights) -> None:
        """Follow the trainer, at once or when decoding ends.

        Raises:
            ProtocolError: the policy is decoding, and its capabilities exclude loading meanwhile.
        """
        if self._over is not None and self.capabilities.loads_while_decoding == "refused":
            raise ProtocolError("weights were published while the policy was decoding")
        if self._over is not None and self.capabilities.loads_while_decoding == "when decoding ends":
            await self._over.wait()
        self.version = weights.version

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        """Decode while the context is open."""
        return self._decoding(self.mine(live), cut)

    def mine(self, decodes: Sequence[Decode]) -> list[FakeDecode]:
        """Return the decodes, checked.

        Raises:
            ProtocolError: one is closed, or of another policy.
        """
        mine = [decode for decode in decodes if isinstance(decode, FakeDecode)]
        closed = [decode.prompt.rollout for decode in mine if decode.closed]
        if len(mine) != len(decodes) or closed:
            raise ProtocolError(f"only open decodes of this policy can be decoded; closed: {closed}")
        return mine

    @asynccontextmanager
    async def _decoding(self, live: list[FakeDecode], cut: Cut) -> AsyncIterator[Decoding]:
        self._cut, self._over = cut, anyio.Event()
        try:
            with as_itself():
                async with anyio.create_task_group() as self._loops:
                    await self.add(live)
                    yield self if self.capabilities.adds_while_decoding else FixedDecoding(type(self).__name__)
                    self._loops.cancel_scope.cancel()
        finally:
            self._over.set()
            self._live, self._cut, self._over, self._loops = {}, None, None, None

    async def add(self, decodes: Sequence[Decode]) -> None:
        """Decode these as well, from the next decode step on.

        Raises:
            ProtocolError: the step has been cut.
        """
        for decode in self.mine(decodes):
            if self._cut is None or self._loops is None:
                raise ProtocolError(f"rollout {decode.prompt.rollout} was added to a decoding that has been cut")
            if not decode.done:
                self._live[decode] = None
            if self.pace is not None:
                self._loops.start_soon(self.decode_apart, decode, self.pace(decode.prompt))
        if self.pace is None and self._loops is not None:
            self._loops.start_soon(self.decode_together)

    async def park(self, decodes: Sequence[Decode]) -> None:
        """Stop decoding these."""
        for decode in self.mine(decodes):
            self._live.pop(decode, None)
            decode.wake()

    def support(self, tokens: IntArray) -> Support:
        """Return the support of tokens: each token and the ``kept - 1`` ids after it."""
        if not self.kept:
            return Support()
        ids = np.add.outer(tokens, np.arange(self.kept, dtype=np.int32)).ravel()
        return Support(ids, np.full(len(tokens), self.kept, np.int32))

    def is_decoding(self, decode: FakeDecode) -> bool:
        """Return whether more tokens of this decode will come in this step."""
        return decode in self._live

    async def decode_together(self) -> None:
        """Make decode steps until no rollout is live; return at once if another task does."""
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._live:
                await anyio.sleep(self._seconds(self._live))
                self.advance(list(self._live))
        finally:
            self._stepping = False

    async def decode_apart(self, decode: FakeDecode, pace: float) -> None:
        """Make the tokens of one rollout until it is done or no longer live."""
        while self.is_decoding(decode):
            await anyio.sleep(pace * self._seconds([decode]))
            if self.is_decoding(decode):
                self.advance([decode])

    def _seconds(self, rows: Collection[FakeDecode]) -> float:
        return self.seconds(len(rows), sum(row.made for row in rows)) if callable(self.seconds) else self.seconds

    def advance(self, rows: Sequence[FakeDecode]) -> None:
        """Make one token of each of these live rollouts."""
        self.tokens += len(rows)
        for decode in rows:
            decode.grow()
        self._end([decode for decode in rows if decode.done])
        for decode in rows:
            decode.wake()

    def _end(self, ended: list[FakeDecode]) -> None:
        """Remove ended rollouts from the live ones, and all others too if the cut answers true."""
        if not ended or self._cut is None:
            return
        for decode in ended:
            del self._live[decode]
        if self._cut(sorted(decode.prompt.rollout for decode in ended)):
            parked, self._live, self._cut = self._live, {}, None
            for decode in parked:
                decode.wake()
