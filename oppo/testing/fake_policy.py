"""A fake actor with a cost model, of either style: its readers drive it, or each rollout has a pace of its own.

A fake token is a hash of (seed, admission, sample, position), a fake log-prob also depends on the version of the
weights: code that mixes up rollouts, positions or versions gets other numbers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import anyio
import numpy as np

from oppo.declared import require_declared
from oppo.errors import ProtocolError, as_itself
from oppo.events import IntArray, Prompt, Response
from oppo.models import Capabilities, Cut, Decode, Decoding, FixedDecoding, Piece, PieceState, Weights
from oppo.support import Support
from oppo.testing.dice import noise

Length: TypeAlias = Callable[[Prompt], int]
Style: TypeAlias = Literal["pull", "push"]


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
    _grown: anyio.Event = field(default_factory=anyio.Event)

    @property
    def done(self) -> bool:
        """Whether the response is complete."""
        return self.made >= self.length

    def grow(self) -> None:
        """Make one token, with the policy's present weights."""
        self.made += 1
        self.versions.append(self.policy.version)

    def wake(self) -> None:
        """Let readers look again."""
        self._grown.set()
        self._grown = anyio.Event()

    async def read(self, limit: int) -> Piece:
        """Return the next tokens; see :class:`oppo.models.Decode`.

        Raises:
            ProtocolError: the decode was given up.
        """
        if self.closed:
            raise ProtocolError(f"rollout {self.prompt.rollout} was given up, so it cannot be read")
        while self.made - self.taken < limit and not self.done and self.policy.is_decoding(self):
            if self.policy.style == "pull":
                await self.policy.advance(self)
            else:
                await self._grown.wait()
        start, answer = self.taken, self.policy.given(self.prompt)
        ends = [end for end in (answer.start, answer.stop) if end > start]  # a piece is given as a whole, or not at all
        self.taken = stop = min(self.made, start + limit, *ends)
        tokens = np.array([self._token(p) for p in range(start, stop)], np.int32)
        return Piece(
            tokens,
            np.array([self._logprob(p) for p in range(start, stop)], np.float32),
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

    def _token(self, position: int) -> int:
        return int(noise(self.policy.seed, self.prompt.admission, self.prompt.sample, position) * 50_000)

    def _logprob(self, position: int) -> float:
        return -4 * noise(self.policy.seed, self.prompt.rollout, position, self.versions[position])

    async def aclose(self) -> None:
        """Give the decode up."""
        self.closed = True


@dataclass(eq=False)
class FakePolicy:
    """An actor that makes one token per ``seconds`` and rollout.

    Attributes:
        length: tokens in the response to a prompt, before the cap.
        seconds: of one decode step; in ``push`` style, of one token of the rollout at hand.
        style: ``pull``: nothing is decoded unless somebody reads, and a decode step serves every live rollout.
            ``push``: each rollout is decoded by a task of its own, at its own pace.
        cap: a response of this many tokens ends with reason ``length``.
        vary: the pace of a rollout in ``push`` style, as a factor.
        given: which tokens of a response nobody samples, as if a tool had answered.
        kept: how many ids each token is drawn from, as it were; 0: from all.
        capabilities: which of them it has; it can do all.
    """

    length: Length = lambda prompt: 5 + prompt.admission % 7
    seconds: float = 0.01
    style: Style = "pull"
    cap: int = 1_000_000
    seed: int = 0
    vary: Callable[[Prompt], float] = lambda prompt: 1.0
    given: Callable[[Prompt], range] = lambda prompt: range(0)
    kept: int = 0
    version: int = 0
    decode_steps: int = 0
    capabilities: Capabilities = field(default_factory=Capabilities)

    def __post_init__(self) -> None:
        require_declared(self)
        self._live: dict[FakeDecode, None] = {}  # an ordered set
        self._cut: Cut | None = None
        self._over: anyio.Event | None = None
        self._step: anyio.Event | None = None

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        """Make a decode for each, which goes on after the tokens of a response."""
        return [self._decode(rollout) for rollout in rollouts]

    def _decode(self, rollout: Prompt | Response) -> FakeDecode:
        response = Response.empty(rollout) if isinstance(rollout, Prompt) else rollout
        prompt, made = response.prompt, len(response)
        length = min(self.cap, self.length(prompt))
        return FakeDecode(self, prompt, length, made, made, versions=response.versions.tolist())

    async def load(self, weights: Weights) -> None:
        """Follow the trainer, at once or when decoding ends.

        Raises:
            ProtocolError: something is being decoded, and it is not said to be able to do this.
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
        """Return the decodes, which are open ones of this policy.

        Raises:
            ProtocolError: they are not.
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
            if self.style == "pull":
                yield self._handle(live, lambda decode: None)
            else:
                with as_itself():
                    async with anyio.create_task_group() as pumps:
                        yield self._handle(live, lambda decode: pumps.start_soon(self._pump, decode))
                        pumps.cancel_scope.cancel()
        finally:
            self._over.set()
            self._live, self._cut, self._over = {}, None, None

    def _handle(self, live: list[FakeDecode], start: Callable[[FakeDecode], object]) -> Decoding:
        for decode in live:
            self.join(decode, start)
        if self.capabilities.adds_while_decoding:
            return FakeDecoding(self, start)
        return FixedDecoding(type(self).__name__)

    def join(self, decode: FakeDecode, start: Callable[[FakeDecode], object]) -> None:
        """Decode one more, which ``start`` sets going.

        Raises:
            ProtocolError: the step has been cut.
        """
        if self._cut is None:
            raise ProtocolError(f"rollout {decode.prompt.rollout} was added to a decoding that has been cut")
        if not decode.done:
            self._live[decode] = None
            start(decode)

    def leave(self, decode: FakeDecode) -> None:
        """Decode one no further."""
        self._live.pop(decode, None)
        decode.wake()

    def support(self, tokens: IntArray) -> Support:
        """Return the support of tokens: each and the ``kept - 1`` ids after it."""
        if not self.kept:
            return Support()
        ids = np.add.outer(tokens, np.arange(self.kept, dtype=np.int32)).ravel()
        return Support(ids, np.full(len(tokens), self.kept, np.int32))

    def is_decoding(self, decode: FakeDecode) -> bool:
        """Return whether more tokens of this decode will come in this step."""
        return decode in self._live

    async def advance(self, reader: FakeDecode) -> None:
        """Do one decode step for every live rollout, or wait for the one that another reader does meanwhile."""
        made = reader.made
        while reader.made == made and self.is_decoding(reader):
            if self._step is not None:
                await self._step.wait()
                continue
            self._step = done = anyio.Event()
            try:
                await self._decode_step()
            finally:
                self._step = None
                done.set()

    async def _decode_step(self) -> None:
        await anyio.sleep(self.seconds)
        self.decode_steps += 1
        for decode in self._live:
            decode.grow()
        self._settle([decode for decode in self._live if decode.done])

    async def _pump(self, decode: FakeDecode) -> None:
        while not decode.done:
            await anyio.sleep(self.seconds * self.vary(decode.prompt))
            if not self.is_decoding(decode):
                return
            decode.grow()
            self._settle([decode] if decode.done else [])
            decode.wake()

    def _settle(self, ended: list[FakeDecode]) -> None:
        """Take what has ended out of the live rollouts, and all the others too if that is the cut."""
        if not ended or self._cut is None:
            return
        for decode in ended:
            del self._live[decode]
        if self._cut(sorted(decode.prompt.rollout for decode in ended)):
            parked, self._live, self._cut = self._live, {}, None
            for decode in parked:
                decode.wake()


@dataclass(frozen=True, slots=True, eq=False)
class FakeDecoding:
    """What a :class:`FakePolicy` is decoding, which rollouts can join and leave."""

    policy: FakePolicy
    start: Callable[[FakeDecode], object]

    async def add(self, decodes: Sequence[Decode]) -> None:
        """Decode these as well."""
        for decode in self.policy.mine(decodes):
            self.policy.join(decode, self.start)

    async def park(self, decodes: Sequence[Decode]) -> None:
        """Decode these no further."""
        for decode in self.policy.mine(decodes):
            self.policy.leave(decode)
