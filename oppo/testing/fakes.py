"""Fake models with cost models, for tests in virtual time: no torch, no randomness beyond a seed, exact results.

A fake token is a hash of (seed, admission, sample, position), a fake log-prob or value also depends on the version of
the weights: whoever mixes up rollouts, positions or versions gets other numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeAlias, TypeVar

import anyio
import numpy as np

from oppo.errors import ProtocolError, as_itself
from oppo.events import Batch, Chunk, Finish, FloatArray, Given, IntArray, Prompt, Response
from oppo.models import Cut, Decode, Follower, Piece, PieceState, Trained, Weights
from oppo.numeric import require_numbers
from oppo.support import Support

T = TypeVar("T")

Length: TypeAlias = Callable[[Prompt], int]
Style: TypeAlias = Literal["pull", "push"]


def noise(*key: int) -> float:
    """Return a number in [0, 1) that depends on the key only."""
    return zlib.crc32(np.array(key, np.int64).tobytes()) / 2**32


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

    def __post_init__(self) -> None:
        require_numbers(self)
        self._live: dict[FakeDecode, None] = {}  # an ordered set
        self._cut: Cut | None = None
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
        """Follow the trainer.

        Raises:
            ProtocolError: something is being decoded.
        """
        if self._cut is not None:
            raise ProtocolError("weights were published while the policy was decoding")
        self.version = weights.version

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[None]:
        """Decode while the context is open."""
        mine = [decode for decode in live if isinstance(decode, FakeDecode)]
        closed = [decode.prompt.rollout for decode in mine if decode.closed]
        if len(mine) != len(live) or closed:
            raise ProtocolError(f"only open decodes of this policy can be decoded; closed: {closed}")
        return self._decoding(mine, cut)

    @asynccontextmanager
    async def _decoding(self, live: list[FakeDecode], cut: Cut) -> AsyncIterator[None]:
        self._live, self._cut = dict.fromkeys(decode for decode in live if not decode.done), cut
        try:
            if self.style == "pull":
                yield
            else:
                with as_itself():
                    async with anyio.create_task_group() as pumps:
                        for decode in list(self._live):
                            pumps.start_soon(self._pump, decode)
                        yield
                        pumps.cancel_scope.cancel()
        finally:
            self._live, self._cut = {}, None

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
            parked, self._live = self._live, {}
            for decode in parked:
                decode.wake()


@dataclass(eq=False)
class FakeScorer(Generic[T]):
    """A scorer whose value of a rollout is computed from everything it has read of it, and when.

    Attributes:
        value: what to say of a finished rollout, given the tokens read (prompt and response) and the oldest version of
            the weights that read any of them: who believes a stale session gets the numbers of old weights.
        per_token, per_call: seconds.
    """

    value: Callable[[Finish, tuple[int, ...], int], T]
    per_token: float = 0.0
    per_call: float = 0.0
    version: int = 0
    calls: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        require_numbers(self)
        self.sessions: dict[int, list[int]] = {}
        self._prompt: dict[int, int] = {}
        self._oldest: dict[int, int] = {}

    async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        """Read more of some rollouts.

        Raises:
            ProtocolError: an event does not continue its rollout.
        """
        count = sum(len(event.tokens) for event in events)
        self.calls, self.tokens = self.calls + 1, self.tokens + count
        await anyio.sleep(self.per_call + self.per_token * count)
        for event in events:
            self._read(event)

    def _read(self, event: Prompt | Chunk | Given) -> None:
        if isinstance(event, Prompt):
            self.sessions[event.rollout], self._prompt[event.rollout] = [], len(event.tokens)
            self._oldest[event.rollout] = self.version
        else:
            read = self._session(event.rollout) - self._prompt[event.rollout]
            if event.start != read:
                raise ProtocolError(
                    f"rollout {event.rollout} continues at {event.start}, but {read} tokens have been read"
                )
        self.sessions[event.rollout].extend(event.tokens.tolist())

    def _session(self, rollout: int) -> int:
        """Return how many tokens have been read of a rollout, with its prompt."""
        if rollout not in self.sessions:
            raise ProtocolError(f"rollout {rollout} is unknown: its Prompt must come first")
        return len(self.sessions[rollout])

    async def finish(self, finished: Sequence[Finish]) -> Sequence[T]:
        """Return the value of each rollout and forget its session.

        Raises:
            ProtocolError: what was read of a rollout is not its response.
        """
        await anyio.sleep(self.per_call)
        for event in finished:
            self._session(event.rollout)
        read = [(event, tuple(self.sessions.pop(event.rollout))) for event in finished]
        for event, tokens in read:
            whole = [*event.response.prompt.tokens.tolist(), *event.response.tokens.tolist()]
            if list(tokens) != whole:
                raise ProtocolError(
                    f"rollout {event.rollout}: read {len(tokens)} tokens, the response says {len(whole)}"
                )
        return [self.value(event, tokens, self._oldest[event.rollout]) for event, tokens in read]

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Drop sessions."""
        for rollout in rollouts:
            self.sessions.pop(rollout, None)


def fake_scalar(_event: Finish, tokens: tuple[int, ...], version: int) -> float:
    """Return a score that depends on every token read."""
    return float(np.float32(noise(*tokens, version)))


def fake_per_token(event: Finish, tokens: tuple[int, ...], version: int) -> FloatArray:
    """Return one number for each response token, from the tokens up to it."""
    start = len(event.response.prompt.tokens)
    return np.array([-noise(version, *tokens[: start + k + 1]) for k in range(len(event.response))], np.float32)


class FakeCritic(FakeScorer[FloatArray]):
    """A fake scorer of values that follows the trainer."""

    def __init__(self, *, per_token: float = 0.0, per_call: float = 0.0) -> None:
        super().__init__(fake_per_token, per_token, per_call)

    async def load(self, weights: Weights) -> None:
        """Follow the trainer."""
        self.version = weights.version


@dataclass(eq=False)
class FakeTrainer:
    """A trainer that remembers its batches.

    Attributes:
        seconds: of one update.
        nonfinite: the rollouts whose minibatch is to fail.
    """

    seconds: float = 0.0
    nonfinite: Callable[[int], bool] = lambda rollout: False
    version: int = 0
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_numbers(self)

    async def update(self, batch: Batch) -> Trained:
        """Take the batch; the version is one more afterwards."""
        await anyio.sleep(self.seconds)
        self.batches.append(batch)
        self.version += 1
        return Trained(
            {"loss/fake": float(np.mean(batch.advantages)) if len(batch) else 0.0},
            tuple(rollout for rollout in batch.rollouts if self.nonfinite(rollout)),
        )

    async def publish(self, *followers: Follower) -> None:
        """Give the version to each follower, one after the other; there is no way back from a failure."""
        for follower in followers:
            try:
                await follower.load(Weights(self.version))
            except Exception as error:
                held = ", ".join(f"{type(one).__name__} has version {one.version}" for one in followers)
                error.add_note(f"while publishing version {self.version}: {held}; do not go on from here")
                raise


def prompts(count: int, *, length: int = 3) -> list[Prompt]:
    """Return ``count`` prompts of ``length`` tokens, admission numbers from 0."""
    return [Prompt(n, n, np.arange(n, n + length, dtype=np.int32), group=n) for n in range(count)]
