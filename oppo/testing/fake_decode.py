"""A response that a fake actor writes: what of it is made, read and given."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
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
    from oppo.testing.lane import Lane


class FakeDecode:
    """A decode of :class:`FakePolicy`.

    Args:
        policy: decodes it.
        prompt: of the rollout.
        length: tokens in the whole response.
        made: tokens that it has from the start.
        versions: of the weights that made these.

    Attributes:
        lane: that decodes it.
        parked: tokens when its lane stopped decoding it.
        taken: tokens read.
        ends: the lengths of the response at which its turns end; an answer moves those after it.
        answers: what was given after turns, by its position.
        waiting: a turn has ended, and nothing has come of it yet.
        closed: it was given up.
        filled: the position up to which there are keys and values; the prompt's positions are below 0.
        loads: the load of the policy's weights that computed these; -1 before.
    """

    def __init__(
        self, policy: FakePolicy, prompt: Prompt, length: int, made: int = 0, versions: Iterable[int] = ()
    ) -> None:
        self.policy = policy
        self.prompt = prompt
        self.length = length
        self.lane: Lane[FakeDecode] | None = None
        self.parked = self.taken = made
        self.ends: list[int] = []
        self.answers: dict[int, IntArray] = {}
        self.waiting = False
        self.closed = False
        self.filled = 0
        self.loads = -1
        self._runs: list[tuple[int, int]] = []  # from this token on, this version
        self._at_home = False
        self._full = False
        self._wanted = 0
        self._grown = anyio.Event()
        self._turned = anyio.Event()
        for position, version in enumerate(versions):
            self._made_by(version, position)

    @property
    def made(self) -> int:
        """The number of tokens by now."""
        return self.parked if self.lane is None else self.lane.made(self)

    @property
    def done(self) -> bool:
        """Whether the response is complete."""
        return self.made >= self.length and not self.waiting

    def due(self) -> int:
        """Return the number of tokens at which it ends, reaches a turn, or has what its reader waits for."""
        made = self.made
        turns = [end for end in self.ends if made < end < self.length]
        wanted = [self._wanted] if self._wanted > made else []
        return max(made + 1, min([self.length, *turns, *wanted]))

    def settle_in(self, lane: Lane[FakeDecode]) -> None:
        """Be decoded by this lane from now on."""
        self.lane = lane
        lane.homes += 1
        self._at_home = True

    def move_out(self) -> None:
        """Leave the place in its lane to others; idempotent."""
        if self.lane is not None and self._at_home:
            self.lane.homes -= 1
            self._at_home = False

    def join(self) -> None:
        """Be decoded, with the policy's present weights."""
        self.follow(self.policy.version)
        if self.lane is not None:
            self.lane.join(self)

    def leave(self) -> None:
        """Be decoded no longer; idempotent."""
        if self.lane is not None and self in self.lane:
            self.lane.leave(self)
            self.filled = max(self.filled, self.parked - 1)

    def unread(self, load: int, *, again: bool) -> tuple[int, int]:
        """Return the positions to read before it is decoded on, and note them as read.

        Args:
            load: number of the weights that read them.
            again: what other weights have read is read again.
        """
        if self.loads < 0 or (again and self.loads != load):
            self.filled = -len(self.prompt.tokens)
        elif self.lane is not None and self in self.lane:
            self.filled = max(self.filled, self.made - 1)
        start, stop = self.filled, max(self.made - 1, 0)
        self.loads, self.filled = load, self.made
        return start, stop

    def follow(self, version: int) -> None:
        """Make the next tokens with weights of this version."""
        self._made_by(version, self.made)

    def _made_by(self, version: int, position: int) -> None:
        if self._runs and self._runs[-1][0] == position:
            self._runs.pop()
        if not self._runs or self._runs[-1][1] != version:
            self._runs.append((position, version))

    def reach(self) -> bool:
        """Wait for an answer if a turn has ended; return whether one has."""
        self.waiting = self.made in self.ends and self.made < self.length
        return self.waiting

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
        self.parked += len(given)
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
            if self.lane is not None and self in self.lane:
                self.lane.expect(self)
            await self._grown.wait()
        start, answers = self.taken, self._given()
        borders = [end for answer in answers for end in (answer.start, answer.stop) if end > start]
        self.taken = stop = min(self.made, start + limit, *borders)  # no piece mixes given and sampled tokens
        tokens = self.tokens(start, stop)
        return Piece(
            tokens,
            self.logprobs(start, stop),
            self.versions(start, stop),
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
        return (-4 * noises(key, range(start, stop), self.versions(start, stop).tolist())).astype(np.float32)

    def versions(self, start: int, stop: int) -> IntArray:
        """Return the versions of the tokens at positions ``start .. stop``, int32 [stop - start]."""
        found = np.empty(stop - start, np.int32)
        first = max(0, bisect_right(self._runs, start, key=lambda run: run[0]) - 1)
        for at, version in self._runs[first:]:
            found[max(0, at - start) :] = version
        return found

    async def aclose(self) -> None:
        """Close the decode."""
        self.closed = True
        self.move_out()
