"""A rollout of the fake actor: its tokens as they are made, and what its reader has of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import numpy as np

from oppo.errors import ProtocolError
from oppo.events import FloatArray, IntArray, Prompt
from oppo.models import Piece, PieceState
from oppo.testing.fakes import noises

if TYPE_CHECKING:
    from oppo.testing.fake_policy import FakePolicy


@dataclass(eq=False)
class FakeDecode:
    """A decode of :class:`FakePolicy`.

    Attributes:
        ends: the lengths of the response at which its turns end; an answer moves those after it.
        answers: what was given after turns, by its position.
        waiting: a turn has ended, and nothing has come of it yet.
        filled: the position up to which there are keys and values; the prompt's positions are below 0.
        loads: of the policy when these were computed; -1 before.
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
    filled: int = 0
    loads: int = -1
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
