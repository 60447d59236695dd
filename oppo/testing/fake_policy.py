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
import anyio.lowlevel
import numpy as np
from anyio.abc import TaskGroup

from oppo.declared import require_declared
from oppo.errors import ProtocolError, as_itself
from oppo.events import FloatArray, Given, IntArray, Prompt, Response
from oppo.models import Capabilities, Cut, Decode, Decoding, FixedDecoding, Piece, PieceState, Weights
from oppo.support import Support
from oppo.testing.fakes import noises, require_seconds

Length: TypeAlias = Callable[[Prompt], int]

StepSeconds: TypeAlias = Callable[[int, int], float]
"""``f(rows, tokens)``: seconds of a decode step, by the number of live rollouts and of tokens in their responses."""


@dataclass(eq=False)
class FakeDecode:
    """A decode of :class:`FakePolicy`.

    Attributes:
        ends: the lengths of the response at which its turns end; an answer moves those after it.
        answers: what was given after turns, by its position.
        waiting: a turn has ended, and nothing has come of it yet.
    """

    policy: FakePolicy
    prompt: Prompt
    length: int
    made: int = 0
    taken: int = 0
    closed: bool = False
    versions: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    answers: dict[int, IntArray] = field(default_factory=dict)
    waiting: bool = False
    _full: bool = False
    _wanted: int = 0
    _grown: anyio.Event = field(default_factory=anyio.Event)
    _turned: anyio.Event = field(default_factory=anyio.Event)

    @property
    def done(self) -> bool:
        """Whether the response is complete."""
        return self.made >= self.length and not self.waiting

    def grow(self) -> None:
        """Make one token, with the policy's current weights."""
        self.made += 1
        self.versions.append(self.policy.version)
        self.waiting = self.made in self.ends and self.made < self.length

    async def turn(self) -> IntArray | None:
        """Return the tokens of the turn once it has ended; see :class:`oppo.turns.TurnDecode`."""
        await anyio.lowlevel.checkpoint()
        while self.policy.is_decoding(self) and not self.waiting:
            self._turned = anyio.Event()
            await self._turned.wait()
        start = max((at + len(given) for at, given in self.answers.items()), default=0)
        return self.tokens(start, self.made) if self.waiting and self.policy.is_decoding(self) else None

    def proceed(self, given: IntArray) -> bool:
        """Go on after a turn; see :class:`oppo.turns.TurnDecode`."""
        if not self.policy.is_decoding(self):
            return False
        if self.made + len(given) >= self.policy.cap:
            self._full = True
            return self.finish()
        self.answers[self.made] = given
        self.ends = [end + len(given) for end in self.ends if end > self.made]
        self.length = min(self.policy.cap, self.length + len(given))
        self.made += len(given)
        self.versions += [self.versions[-1]] * len(given)
        self.waiting = False
        self.policy.rejoin(self)
        return True

    def finish(self) -> bool:
        """End the response with its turn; see :class:`oppo.turns.TurnDecode`."""
        if not self.policy.is_decoding(self):
            return False
        self.length, self.waiting = self.made, False
        self.policy.end(self)
        return True

    def wake(self) -> None:
        """Wake the reader if it has all that it waits for, or if decoding stopped."""
        if self.made >= self._wanted or not self.policy.is_decoding(self) or self._at_turn():
            self._grown.set()
        if self.waiting or not self.policy.is_decoding(self):
            self._turned.set()

    def _at_turn(self) -> bool:
        """Whether there is something to read before a turn goes on, or of an answer."""
        return self.made > self.taken and (
            self.waiting or any(at + len(given) > self.taken for at, given in self.answers.items())
        )

    async def read(self, limit: int) -> Piece:
        """Return the next tokens; see :class:`oppo.models.Decode`.

        Raises:
            ProtocolError: the decode is closed.
        """
        if self.closed:
            raise ProtocolError(f"rollout {self.prompt.rollout} was given up, so it cannot be read")
        self._wanted = self.taken + limit
        while self.made < self._wanted and self.policy.is_decoding(self) and not self._at_turn():
            self._grown = anyio.Event()
            await self._grown.wait()
        start, answers = self.taken, self._given()
        borders = [end for answer in answers for end in (answer.start, answer.stop) if end > start]
        self.taken = stop = min(self.made, start + limit, *borders)  # no piece mixes given and sampled tokens
        tokens = self.tokens(start, stop)
        return Piece(
            tokens,
            self.logprobs(start, stop),
            np.array(self.versions[start:stop], np.int32),
            self._state(),
            self.policy.support(tokens),
            given=any(start in answer for answer in answers),
        )

    def _given(self) -> list[range]:
        """Return the positions that were given."""
        return [self.policy.given(self.prompt), *(range(at, at + len(each)) for at, each in self.answers.items())]

    def _state(self) -> PieceState:
        if self.taken < self.made or (not self.done and self.policy.is_decoding(self)):
            return "live"
        if not self.done:
            return "cut"
        return "length" if self._full or self.length >= self.policy.cap else "eos"

    def tokens(self, start: int, stop: int) -> IntArray:
        """Return the tokens at positions ``start .. stop``, int32 [stop - start]."""
        key = (self.policy.seed, self.prompt.admission, self.prompt.sample)
        tokens = (noises(key, range(start, stop)) * 50_000).astype(np.int32)
        for at, given in self.answers.items():
            here = slice(max(at, start), min(at + len(given), stop))
            if here.start < here.stop:
                tokens[here.start - start : here.stop - start] = given[here.start - at : here.stop - at]
        return tokens

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
        turns: the lengths at which turns of a response end, answers not counted, and which are not its end.
        holds: decoding waits while a turn is unanswered, as that of an exact engine does.
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
    turns: Callable[[Prompt], Sequence[int]] = lambda prompt: ()
    holds: bool = False
    kept: int = 0
    version: int = 0
    tokens: int = 0
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(turns=True))

    def __post_init__(self) -> None:
        require_declared(self)
        require_seconds("seconds of FakePolicy", self.seconds)
        self._live: dict[FakeDecode, None] = {}  # an ordered set
        self._waiting: dict[FakeDecode, None] = {}
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

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        """Make a decode with turns for each."""
        decodes = await self.open(rollouts)
        for decode, rollout in zip(decodes, rollouts, strict=True):
            response = rollout if isinstance(rollout, Response) else Response.empty(rollout)
            decode.ends = sorted(self.turns(response.prompt))
            for piece in response.pieces():
                if isinstance(piece, Given):
                    decode.answers[piece.start] = piece.tokens
                    decode.length = min(self.cap, decode.length + len(piece.tokens))
                    decode.ends = [end + len(piece.tokens) for end in decode.ends if end > piece.start]
            decode.waiting = decode.made in decode.ends and decode.made < decode.length
        return decodes

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
            self._live, self._waiting, self._cut, self._over, self._loops = {}, {}, None, None, None

    async def add(self, decodes: Sequence[Decode]) -> None:
        """Decode these as well, from the next decode step on.

        Raises:
            ProtocolError: the step has been cut.
        """
        for decode in self.mine(decodes):
            if self._cut is None or self._loops is None:
                raise ProtocolError(f"rollout {decode.prompt.rollout} was added to a decoding that has been cut")
            if decode.waiting:
                self._waiting[decode] = None
            elif not decode.done:
                self._live[decode] = None
            if self.pace is not None:
                self._loops.start_soon(self.decode_apart, decode, self.pace(decode.prompt))
        if self.pace is None and self._loops is not None:
            self._loops.start_soon(self.decode_together)

    def rejoin(self, decode: FakeDecode) -> None:
        """Decode on after a turn was answered."""
        self._waiting.pop(decode, None)
        self._live[decode] = None
        decode.wake()
        self._go_on(decode)

    def end(self, decode: FakeDecode) -> None:
        """End a response whose turn was its last."""
        self._waiting.pop(decode, None)
        self._live[decode] = None
        self._end([decode])
        decode.wake()
        self._go_on(decode)

    def _go_on(self, decode: FakeDecode) -> None:
        if self._loops is not None and self.pace is not None:
            self._loops.start_soon(self.decode_apart, decode, self.pace(decode.prompt))
        elif self._loops is not None:
            self._loops.start_soon(self.decode_together)

    async def park(self, decodes: Sequence[Decode]) -> None:
        """Stop decoding these."""
        for decode in self.mine(decodes):
            self._live.pop(decode, None)
            self._waiting.pop(decode, None)
            decode.wake()

    def support(self, tokens: IntArray) -> Support:
        """Return the support of tokens: each token and the ``kept - 1`` ids after it."""
        if not self.kept:
            return Support()
        ids = np.add.outer(tokens, np.arange(self.kept, dtype=np.int32)).ravel()
        return Support(ids, np.full(len(tokens), self.kept, np.int32))

    def is_decoding(self, decode: FakeDecode) -> bool:
        """Return whether more tokens of this decode will come in this step."""
        return decode in self._live or decode in self._waiting

    async def decode_together(self) -> None:
        """Make decode steps until no rollout is live; return at once if another task does."""
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._live and not (self.holds and self._waiting):
                rows = list(self._live)
                await anyio.sleep(self._seconds(rows))
                self.advance([row for row in rows if row in self._live])
        finally:
            self._stepping = False

    async def decode_apart(self, decode: FakeDecode, pace: float) -> None:
        """Make the tokens of one rollout until it is done or no longer live."""
        while decode in self._live:
            await anyio.sleep(pace * self._seconds([decode]))
            if decode in self._live:
                self.advance([decode])

    def _seconds(self, rows: Collection[FakeDecode]) -> float:
        return self.seconds(len(rows), sum(row.made for row in rows)) if callable(self.seconds) else self.seconds

    def advance(self, rows: Sequence[FakeDecode]) -> None:
        """Make one token of each of these live rollouts."""
        self.tokens += len(rows)
        for decode in rows:
            decode.grow()
            if decode.waiting:
                del self._live[decode]
                self._waiting[decode] = None
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
            parked = [*self._live, *self._waiting]
            self._live, self._waiting, self._cut = {}, {}, None
            for decode in parked:
                decode.wake()
