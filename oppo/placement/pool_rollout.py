"""A rollout of a pool: all its tokens, and its decode on the member that it lives on, which may be lost.

::

    move_in -> begin -> pause -> begin -> pause ...       on one member, a step after the other
    interrupt -> pause -> salvage -> leave -> move_in     that is lost: what has come of it is read, and another goes on
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar, cast

import anyio
import anyio.lowlevel
import numpy as np

from oppo.errors import ProtocolError
from oppo.events import Chunk, IntArray, Prompt, Response, ToolTokens
from oppo.models import Decode, Piece
from oppo.placement.pool_members import Member, Members, Resident, Round, limited
from oppo.turns import TurnDecode, turn_so_far

T = TypeVar("T")

ALL: Final = 1 << 30
"""More tokens than a response has."""

_NOTHING: Final = Piece(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "cut")


def ends(piece: Piece) -> bool:
    return piece.state not in {"live", "cut"}


def _split(piece: Piece, at: int) -> tuple[Piece, Piece]:
    def part(start: int, stop: int | None) -> Piece:
        s = slice(start, stop)
        return Piece(
            piece.tokens[s],
            piece.logprobs[s],
            piece.versions[s],
            "live" if stop is not None else piece.state,
            piece.support.slice(start, stop),
            piece.from_tool,
            piece.routed_experts.slice(start, stop),
        )

    return part(0, at), part(at, None)


class PooledDecode(Resident):
    """One rollout of a pool, as :class:`oppo.turns.TurnDecode`: all its tokens, and the member that decodes it.

    Attributes:
        newest: version that made the last of its tokens.
        round: of decoding, that it is part of.
        member: where it lives; ``None`` before it is first decoded, and when its member was lost.
        seat: its decode there.
        reported: the cut has been called with it.
        withheld: it has ended after the cut, which is called with it when the pool decodes again.
        owed: it was reported, and its member was lost with its last tokens.
        closed: by its reader.
    """

    def __init__(self, members: Members, response: Response, *, turns: bool) -> None:
        super().__init__(response.prompt, len(response))
        self.turns = turns
        self.newest = int(response.versions[-1]) if len(response) else 0
        self.round: Round | None = None
        self.member: Member | None = None
        self.seat: Decode | None = None
        self.ended = self.reported = self.withheld = self.owed = self.closed = False
        self._members = members
        self._events = response.pieces()
        self._unread: deque[Piece] = deque()
        self._live = self._drained = self._astray = self._end_read = self._being_read = False
        self._turn = len(turn_so_far(response))  # tokens
        self._unanswered = False
        self._answer: IntArray | None = None  # until all of it came back
        self._heard = 0  # tokens of it that did
        self._ending = self._issued = False
        self._news = anyio.Event()
        self._fetching = anyio.Lock(fast_acquire=True)
        self._calls: set[anyio.CancelScope] = set()

    @property
    def order(self) -> tuple[int, int]:
        return self.prompt.admission, self.prompt.stream

    @property
    def decodes(self) -> bool:
        """Whether an engine is to make tokens of it."""
        return not (self.closed or self.ended or self._over or ((self.reported or self.withheld) and not self.owed))

    @property
    def works(self) -> bool:
        """Whether its engine should be making tokens of it now."""
        return self._live and self.decodes and not self._unanswered

    @property
    def _over(self) -> bool:
        return self.round is None or self.round.left or (self.round.stops and not self.owed)

    def is_of(self, members: object) -> bool:
        return self._members is members

    @property
    def opens_turns(self) -> bool:
        # Nobody would answer the turns of one that is owed.
        return self.turns and (self._ending or not self.owed)

    def response(self) -> Prompt | Response:
        return Response.of(self.prompt, self._events) if self._events else self.prompt

    async def read(self, limit: int) -> Piece:
        if limit < 1:
            raise ValueError(f"a read takes at least 1 token, not {limit}")
        if self._being_read:
            raise ProtocolError(f"two reads of rollout {self.prompt.rollout} at once: it has one reader")
        self._being_read = True
        try:
            await anyio.lowlevel.checkpoint()
            while (piece := self._take(limit)) is None:
                if self._ahead:
                    await self._members.change()
                elif self._can_fetch and not self._unread:
                    await self._fetch(limit)
                else:
                    await self._news.wait()
            return piece
        finally:
            self._being_read = False

    @property
    def _ahead(self) -> bool:
        # What is to be read next was made by weights that other members have not got yet.
        first = self._unread[0] if self._unread else _NOTHING
        return not first.from_tool and bool((first.versions[-1:] > self._members.version).any())

    @property
    def _sits(self) -> bool:
        return self._live and self.member is not None and not self.member.lost

    @property
    def _can_fetch(self) -> bool:
        return self.member is not None and not self.member.lost and not self._drained

    def _take(self, limit: int) -> Piece | None:
        rollout = self.prompt.rollout
        if self.closed:
            raise ProtocolError(f"rollout {rollout} was closed, so it cannot be read")
        if self._end_read:
            raise ProtocolError(f"the last piece of rollout {rollout} has been read; expected no further read")
        if self._unread:
            first = self._unread[0]
            if ends(first) and not self.reported:
                return _NOTHING if self._over else None
            return None if self._ahead else self._pop(first, limit)
        if self.round is not None and self.round.failure is not None:
            raise self.round.failure
        if not self._over or self._can_fetch:
            return None
        if self._answer is not None and not self._issued and (self.member is None or self.member.lost):
            self._hear(self._answer)  # so that it is part of the response by the cut
            return self._pop(self._unread[0], limit)
        return _NOTHING

    def _pop(self, first: Piece, limit: int) -> Piece:
        if len(first.tokens) > limit:
            head, self._unread[0] = _split(first, limit)
            return head
        self._unread.popleft()
        self._end_read = ends(first)
        goes_on = self._unread or not self._over or self._can_fetch
        return replace(first, state="live") if first.state == "cut" and goes_on else first

    def wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    def interrupt(self) -> None:
        """Cancel the calls of its member that are in progress: it is lost, or the rollout closed."""
        self.owed = self.reported and not self.ended
        for scope in self._calls:
            scope.cancel()
        self.wake()

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T | None:
        # Of its seat. None: the member was lost.
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await call()
            except Exception as error:  # noqa: BLE001 - what a member raises costs it its place
                if self.member is not None:
                    self._members.lose(self.member, error)
            finally:
                self._calls.discard(scope)
        return None

    async def _fetch(self, limit: int, *, unless: Callable[[], bool] = lambda: False) -> None:
        async with self._fetching:
            seat, begun = self.seat, self.begun
            if seat is None or not self._can_fetch or unless():
                return
            piece = await self._call(partial(seat.read, limit))
            if piece is not None:
                self._note(piece)
                self._drained = piece.state == "cut" and self.begun == begun

    def _note(self, piece: Piece) -> None:
        rollout, member, n = self.prompt.rollout, self.member, len(piece.tokens)
        if n and not piece.from_tool and int(piece.versions[-1]) > self._members.given and member is not None:
            self._refuse(member, f"it made tokens of version {piece.versions[-1]}, never given")
            return
        if ends(piece) and not self.reported and not self.withheld and member is not None:
            if not member.lost:
                self._refuse(member, f"rollout {rollout}: its last piece was readable before cut() was called")
                return
            self.withheld = True
        if n:
            self._append(piece.event(rollout, self.length))
        if n or ends(piece):
            self._unread.append(piece)
        if ends(piece):
            self.ended, self.owed = True, False
            self.wake()
            if member is not None:
                member.rollouts.pop(self, None)
            self._members.responses += 1
            self._members.tokens += self.length

    def _refuse(self, member: Member, words: str) -> None:
        self._astray = True  # what its seat hands over next does not follow what is known
        self._members.lose(member, ProtocolError(words))

    def _append(self, event: Chunk | ToolTokens) -> None:
        n = len(event.tokens)
        self._events.append(event)
        self.length += n
        if isinstance(event, Chunk):
            self.newest = int(event.versions[-1])
            self._turn += n
        else:
            self._turn, self._heard = 0, self._heard + n
            if self._answer is not None and self._heard >= len(self._answer):
                self._answer = None

    def _hear(self, given: IntArray) -> None:
        # Tokens of an answer that no engine will give back.
        zeros = np.zeros(len(given), np.float32)
        self._unread.append(Piece(given, zeros, np.full(len(given), self.newest, np.int32), "cut", from_tool=True))
        self._append(ToolTokens(self.prompt.rollout, self.length, given))
        self._answer = None

    async def turn(self) -> IntArray | None:
        await anyio.lowlevel.checkpoint()
        while not (self.closed or self.ended or self._over):
            news = self._news
            if self._sits and not self._unissued:
                tokens = await self._call(cast("TurnDecode", self.seat).turn)
                if tokens is not None and await self._fetch_turn(len(tokens)):
                    self._unanswered = True
                    return tokens
            await news.wait()
        return None

    async def _fetch_turn(self, tokens: int) -> bool:
        # So that the answer comes after tokens that are known, the answer before it included, wherever it is read.
        def is_known() -> bool:
            return self._answer is None and self._turn >= tokens

        begun = self.begun
        while not is_known() and self._sits and self._can_fetch and self.begun == begun:
            await self._fetch(ALL, unless=is_known)
        return is_known()

    @property
    def _unissued(self) -> bool:
        return (self._answer is not None or self._ending) and not self._issued

    def proceed(self, given: IntArray) -> bool:
        if not self.decodes:
            return False
        self._answer, self._heard, self._issued = given, 0, False
        return self._outcome()

    def finish(self) -> bool:
        if not self.decodes:
            return False
        self._ending, self._issued = True, False
        return self._outcome()

    def _outcome(self) -> bool:
        if self._live:
            self._issue()
        if not self._issued and self._over:
            self._answer, self._ending = None, False
            return False
        self._unanswered = False  # the next engine gets what is not issued yet
        return True

    def _issue(self) -> None:
        seat = cast("TurnDecode", self.seat)
        self._issued = seat.finish() if self._answer is None else seat.proceed(self._answer)

    def begin(self) -> None:
        self._live, self._drained = True, False
        self.begun += 1
        if self._unissued:
            self._issue()
        self.wake()

    def pause(self) -> None:
        self._live = False
        self.wake()

    def move_in(self, member: Member) -> None:
        self.member, self.seat, self.begun = member, None, 0
        self._live, self._drained, self._astray = False, True, False
        member.rollouts[self] = None

    async def salvage(self) -> None:
        """Fetch the tokens that its lost member has handed over."""
        async with self._fetching:
            while self.seat is not None and not (self.ended or self._astray):
                piece = await self.seat.read(ALL)
                self._note(piece)
                if piece.state == "cut" or not len(piece.tokens):
                    return

    def leave(self) -> None:
        """Live on no member; another can go on with it."""
        if self.member is not None:
            self.member.rollouts.pop(self, None)
        self.member = self.seat = None
        self._live = self._issued = False
        self.begun = 0
        self.withheld = self.withheld and self.ended
        self.owed = self.reported and not self.ended
        if self._answer is not None and (self._heard or self.owed):
            self._hear(self._answer[self._heard :])
        self.wake()

    async def aclose(self) -> None:
        if self.closed:
            return
        self.closed = True
        member, seat = self.member, self.seat
        self.interrupt()
        if member is not None:
            member.rollouts.pop(self, None)
        if seat is not None and member is not None and not member.lost:
            try:
                with limited(self._members.timeout, f"closing rollout {self.prompt.rollout}"):
                    await seat.aclose()
            except Exception as error:  # noqa: BLE001 - what a member raises costs it its place
                self._members.lose(member, error)
