"""A fake actor with a cost model: it decodes all rollouts together, or each at its own pace.

A fake token is a hash of (seed, admission, sample, position); a fake log-prob also depends on the version of the
weights. Code that mixes up rollouts, positions or versions gets other numbers.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import TypeAlias

import anyio
import anyio.lowlevel
import numpy as np
from anyio.abc import TaskGroup

from oppo.declared import NonNegative, validated
from oppo.errors import ProtocolError, as_itself, running_loop
from oppo.events import (
    NO_COLUMNS,
    Chunk,
    ChunkState,
    FloatArray,
    IntArray,
    Prompt,
    Response,
    Support,
    TokenColumns,
    ToolTokens,
)
from oppo.limits import UNLIMITED, TurnLimit
from oppo.models import Capabilities, Cut, Decode, Decoding, FixedDecoding, Weights
from oppo.testing.fakes import noises

__all__ = ["FakeDecode", "FakePolicy", "Length", "StepSeconds"]

Length: TypeAlias = Callable[[Prompt], int]

# `f(rows, tokens)`: seconds of a decode step, by the number of live rollouts and of tokens in their responses
StepSeconds: TypeAlias = Callable[[int, int], float]


@dataclass(eq=False)
class Load:
    # Weights on their way to the lanes that have not adopted them.
    version: int
    lanes: dict[Lane, None] = field(default_factory=dict)
    adopted: anyio.Event = field(default_factory=anyio.Event)


@dataclass(eq=False)
@validated()
class FakePolicy:
    """An actor whose decode step serves every live rollout, or that decodes each at its own pace.

    While its context is open, it also is the :class:`~oppo.models.Decoding` that rollouts join.

    Attributes:
        length: tokens in the response to a prompt, before the cap.
        seconds: of one decode step; with a pace, of one token of a rollout.
        pace: factor of ``seconds`` for a rollout, which is then decoded on its own, as by an engine of requests.
            ``None``: every decode step makes one token of each rollout.
        cap: a response of this many tokens ends with reason ``length``.
        given: the positions of a response that are not sampled but a tool's answer.
        turns: the lengths at which turns of a response end, answers not counted, and which are not its end.
        holds: decoding waits while a turn is unanswered, as a deterministic engine does.
        kept: the number of ids in each token's support; 0: all.
        capabilities: those it claims; it implements all of them.
        replicas: engines, each with rollouts and decode steps of its own; a rollout stays with the one that has the
            fewest when it is first decoded.

    Example:
        >>> a_row_costs = FakePolicy(seconds=lambda rows, tokens: 0.01 + 0.001 * rows)
    """

    length: Length = lambda prompt: 5 + prompt.admission % 7
    seconds: NonNegative | StepSeconds = 0.01
    pace: Callable[[Prompt], float] | None = None
    cap: int = 1_000_000
    seed: int = 0
    given: Callable[[Prompt], range] = lambda prompt: range(0)
    turns: Callable[[Prompt], Sequence[int]] = lambda prompt: ()
    holds: bool = False
    kept: int = 0
    version: int = 0
    replicas: int = 1
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(turns=True))

    def __post_init__(self) -> None:
        self._live: dict[FakeDecode, None] = {}  # an ordered set
        self._waiting: dict[FakeDecode, None] = {}
        self._cut: Cut | None = None
        self._over: anyio.Event | None = None
        self._loops: TaskGroup | None = None
        self.lanes = [Lane(self) for _ in range(self.replicas)]
        self._tokens = 0

    @property
    def tokens(self) -> int:
        for lane in {decode.lane for decode in self._live}:
            if lane is not None:
                lane.settle()
        return self._tokens

    @property
    def held(self) -> bool:
        return self.holds and bool(self._waiting)

    def working(self) -> AbstractContextManager[Job]:
        return nullcontext(Job())

    def step_seconds(self, rows: int, tokens: int) -> float:
        return self.seconds(rows, tokens) if callable(self.seconds) else self.seconds

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        """Make a decode for each; a response goes on after its tokens."""
        return [self._decode(Response.empty(each) if isinstance(each, Prompt) else each) for each in rollouts]

    def _decode(self, response: Response) -> FakeDecode:
        length = min(self.cap, self.length(response.prompt))
        return FakeDecode(self, response.prompt, length, len(response), response.versions.tolist())

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        decodes = await self.open(rollouts)
        for decode, rollout in zip(decodes, rollouts, strict=True):
            response = rollout if isinstance(rollout, Response) else Response.empty(rollout)
            decode.ends = sorted(self.turns(response.prompt))
            for piece in response.pieces():
                if isinstance(piece, ToolTokens):
                    decode.answers[piece.start] = piece.tokens
                    decode.length = min(self.cap, decode.length + len(piece.tokens))
                    decode.ends = [end + len(piece.tokens) for end in decode.ends if end > piece.start]
            decode.waiting = decode.made in decode.ends and decode.made < decode.length
        return decodes

    async def load(self, weights: Weights) -> None:
        """Follow the trainer: between two decode steps, or when decoding ends."""
        if self._over is not None and self.capabilities.loads_while_decoding == "refused":
            raise ProtocolError("weights were synced while the policy was decoding")
        if self._over is not None and self.capabilities.loads_while_decoding == "when decoding ends":
            await self._over.wait()
        load = Load(weights.version)
        load.lanes |= dict.fromkeys([*self.lanes, *(decode.lane for decode in self._live if decode.lane is not None)])
        for lane in list(load.lanes):
            lane.between_steps(partial(self._adopt, load, lane))
        await load.adopted.wait()

    def _adopt(self, load: Load, lane: Lane) -> None:
        del load.lanes[lane]
        self.version = load.version  # the newest that makes tokens
        if not load.lanes:
            load.adopted.set()
        for decode in self._live:
            if decode.lane is lane or not load.lanes:
                decode.follow(load.version)

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        return self._decoding(self.mine(live), cut)

    def mine(self, decodes: Sequence[Decode]) -> list[FakeDecode]:
        """Return the decodes, checked."""
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
                    can = self.capabilities
                    joins = can.adds_while_decoding or can.adds_while_held
                    yield self if joins else FixedDecoding(type(self).__name__)
                    self._loops.cancel_scope.cancel()
        finally:
            self._over.set()
            self.defer([*self._live, *self._waiting])
            self._cut, self._over, self._loops = None, None, None

    async def add(self, decodes: Sequence[Decode]) -> None:
        """Decode these as well, from the next decode step on.

        Those that come after the cut stay paused.
        """
        mine = self.mine(decodes)
        if self._loops is None:
            raise ProtocolError(f"{len(decodes)} rollouts were added to a decoding that has ended")
        decodes_others = self._cut is not None and bool(self._live) and not self.held
        if self.holds and decodes_others and not self.capabilities.adds_while_decoding:
            raise ProtocolError(f"{type(self).__name__} takes others only while an unanswered turn holds all")
        going = [decode for decode in mine if not (decode.waiting or decode.done)] if self._cut is not None else []
        self._waiting |= {decode: None for decode in mine if decode.waiting and self._cut is not None}
        for decode in going:
            self._go_on(decode)
        self._start(going)

    def rejoin(self, decode: FakeDecode) -> None:
        self._waiting.pop(decode, None)
        self._go_on(decode)
        self._start([decode])
        decode.wake()

    def end(self, decode: FakeDecode) -> None:
        self._end([decode])
        decode.wake()
        self._start([decode])

    def _go_on(self, decode: FakeDecode) -> None:
        if decode.lane is None:
            decode.settle_in(self._home() if self.pace is None else Lane(self, self.pace(decode.prompt)))
        self._live[decode] = None
        decode.join()

    def _home(self) -> Lane:
        return min(self.lanes, key=lambda lane: lane.homes)

    def _start(self, decodes: Iterable[FakeDecode]) -> None:
        for lane in self.lanes if self.holds and self.pace is None else dict.fromkeys(each.lane for each in decodes):
            if self._loops is not None and lane is not None:
                self._loops.start_soon(lane.run)

    def stop(self) -> None:
        if self._cut is not None:
            self._cut = None
            self.defer([*self._live, *self._waiting])

    def defer(self, decodes: Sequence[FakeDecode]) -> None:
        for decode in decodes:
            self._remove(decode)
        for decode in decodes:
            decode.wake()

    def _remove(self, decode: FakeDecode) -> None:
        self._live.pop(decode, None)
        self._waiting.pop(decode, None)
        decode.leave()

    def support(self, tokens: IntArray) -> Support:
        """Return the support of tokens: each token and the ``kept - 1`` ids after it."""
        if not self.kept:
            return Support()
        ids = np.add.outer(tokens, np.arange(self.kept, dtype=np.int32)).ravel()
        return Support(ids, np.full(len(tokens), self.kept, np.int32))

    def is_decoding(self, decode: FakeDecode) -> bool:
        return decode in self._live or decode in self._waiting

    def attend(self, rows: Sequence[FakeDecode]) -> None:
        """Handle the events of live rollouts after a decode step: a turn, the end, or tokens that are waited for."""
        ended = []
        for decode in rows:
            if decode.reach():
                self._remove(decode)
                self._waiting[decode] = None
            elif decode.done:
                ended.append(decode)
        self._end(ended)
        for decode in rows:
            decode.wake()

    def _end(self, ended: list[FakeDecode]) -> None:
        if not ended or self._cut is None:
            return
        for decode in ended:
            self._remove(decode)
            decode.move_out()
        if self._cut(sorted(decode.prompt.rollout for decode in ended)):
            self._cut = None
            self.defer([*self._live, *self._waiting])


class FakeDecode:
    def __init__(
        self, policy: FakePolicy, prompt: Prompt, length: int, made: int = 0, versions: Iterable[int] = ()
    ) -> None:
        self.policy = policy
        self.prompt = prompt
        self.length = length
        self.lane: Lane | None = None
        self.paused = self.taken = made  # tokens when its lane stopped decoding it; tokens read
        self.ends: Sequence[int] = ()  # lengths at which its turns end; an answer moves the later ones
        self.answers: dict[int, IntArray] = {}  # tool tokens after turns, by position
        self.waiting = False  # a turn has ended and is unanswered
        self._bounds: tuple[TurnLimit, int] = UNLIMITED, 0
        self.closed = False
        self._runs: list[tuple[int, int]] = []  # from this token on, this version
        self._at_home = False
        self._full = False
        self._wanted = 0
        self._grown: asyncio.Future[None] | None = None
        self._turned: anyio.Event | None = None
        for position, version in enumerate(versions):
            self._made_by(version, position)

    @property
    def made(self) -> int:
        return self.paused if self.lane is None else self.lane.made(self)

    @property
    def done(self) -> bool:
        return self.made >= self.length and not self.waiting

    def due(self) -> int:
        """Return the number of tokens at which it ends, reaches a turn, or satisfies its reader."""
        made, due = self.made, self.length
        for end in (*self.ends, self._wanted):
            if made < end < due:
                due = end
        return max(made + 1, due)

    def settle_in(self, lane: Lane) -> None:
        self.lane = lane
        lane.homes += 1
        self._at_home = True

    def move_out(self) -> None:
        if self.lane is not None and self._at_home:
            self.lane.homes -= 1
            self._at_home = False

    def join(self) -> None:
        self.follow(self.policy.version)
        if self.lane is not None:
            self.lane.join(self)

    def leave(self) -> None:
        if self.lane is not None and self in self.lane:
            self.lane.leave(self)

    def follow(self, version: int) -> None:
        self._made_by(version, self.made)

    def _made_by(self, version: int, position: int) -> None:
        if self._runs and self._runs[-1][0] == position:
            self._runs.pop()
        if not self._runs or self._runs[-1][1] != version:
            self._runs.append((position, version))

    def reach(self) -> bool:
        # Whether a turn has ended, whose answer it then waits for.
        self.waiting = self.made in self.ends and self.made < self.length
        return self.waiting

    async def turn(self) -> IntArray | None:
        await anyio.lowlevel.checkpoint()
        while self.policy.is_decoding(self) and not self.waiting:
            self._turned = anyio.Event()
            await self._turned.wait()
        start = max((at + len(given) for at, given in self.answers.items()), default=0)
        return self.tokens(start, self.made) if self.waiting and self.policy.is_decoding(self) else None

    def bound(self, limit: TurnLimit, start: int) -> None:
        self._bounds = limit, start
        if not self.waiting:
            self._limit_turn()

    def _limit_turn(self) -> None:
        limit, start = self._bounds
        ends = [start + length for length in (limit.tokens, limit.thinking) if length]
        reached = [
            end for end in ends if self.made <= end and limit.reached(self.tokens(start, end).tolist(), end - start)
        ]
        self.ends = sorted({*self.ends, *reached})
        self.waiting = self.made in reached and self.made not in self.answers and self.made < self.length

    def proceed(self, given: IntArray) -> bool:
        if not self.policy.is_decoding(self):
            return False
        if self.made + len(given) >= self.policy.cap:
            self._full = True
            return self.finish()
        self.answers[self.made] = given
        self.ends = [end + len(given) for end in self.ends if end > self.made]
        self.length = min(self.policy.cap, self.length + len(given))
        self.paused += len(given)
        self.waiting = False
        self._limit_turn()
        self.policy.rejoin(self)
        return True

    def finish(self) -> bool:
        if not self.policy.is_decoding(self):
            return False
        self.length, self.waiting = self.made, False
        self.policy.end(self)
        return True

    def wake(self) -> None:
        # Its reader has all that it waits for, or decoding has stopped.
        decoding, grown = self.policy.is_decoding(self), self._grown
        due = grown is not None and not grown.done()
        if grown is not None and due and (not decoding or self.made >= self._wanted or self._at_turn()):
            grown.set_result(None)
        if self._turned is not None and (self.waiting or not decoding):
            self._turned.set()

    def _at_turn(self) -> bool:
        return (self.waiting or any(at + len(given) > self.taken for at, given in self.answers.items())) and (
            self.made > self.taken
        )

    async def read(self, limit: int) -> Chunk | ToolTokens:
        if self.closed:
            raise ProtocolError(f"rollout {self.prompt.rollout} was closed, so it cannot be read")
        self._wanted = self.taken + limit
        while (made := self.made) < self._wanted and self.policy.is_decoding(self) and not self._at_turn():
            self._grown = running_loop().create_future()  # an event holds six objects more, in each live rollout
            if self.lane is not None and self in self.lane:
                self.lane.expect(self)
            await self._grown
        start, stop, answers = self.taken, min(made, self.taken + limit), self._given()
        for answer in answers:  # no chunk mixes tool tokens and sampled ones
            stop = min([stop, *(end for end in (answer.start, answer.stop) if end > start)])
        self.taken = stop
        rollout, tokens, state = self.prompt.rollout, self.tokens(start, stop), self._state(made)
        if any(start in answer for answer in answers):
            return ToolTokens(rollout, start, tokens, state)
        versions = self.versions(start, stop)
        support = self.policy.support(tokens)
        extra = NO_COLUMNS if support.empty else TokenColumns(support)
        return Chunk(rollout, start, tokens, self._logprobs(start, versions), versions, extra, state=state)

    def _given(self) -> list[range]:
        given = self.policy.given(self.prompt)
        return [*([given] if given.stop else []), *(range(at, at + len(each)) for at, each in self.answers.items())]

    def _state(self, made: int) -> ChunkState:
        done = made >= self.length and not self.waiting
        if self.taken < made or (not done and self.policy.is_decoding(self)):
            return "live"
        if not done:
            return "cut"
        return "length" if self._full or self.length >= self.policy.cap else "eos"

    def tokens(self, start: int, stop: int) -> IntArray:
        key = (self.policy.seed, self.prompt.admission, self.prompt.stream)
        tokens = np.array([int(50_000 * each) for each in noises(key, range(start, stop))], np.int32)
        for at, given in self.answers.items():
            here = slice(max(at, start), min(at + len(given), stop))
            if here.start < here.stop:
                tokens[here.start - start : here.stop - start] = given[here.start - at : here.stop - at]
        return tokens

    def logprobs(self, start: int, stop: int) -> FloatArray:
        return self._logprobs(start, self.versions(start, stop))

    def _logprobs(self, start: int, versions: IntArray) -> FloatArray:
        key = (self.policy.seed, self.prompt.rollout)
        positions = range(start, start + len(versions))
        return np.array([-4 * each for each in noises(key, positions, versions.tolist())], np.float32)

    def versions(self, start: int, stop: int) -> IntArray:
        if len(self._runs) == 1:
            return np.array([self._runs[0][1]] * (stop - start), np.int32)  # of few tokens quicker than np.full
        found = np.empty(stop - start, np.int32)
        first = max(0, bisect_right(self._runs, start, key=lambda run: run[0]) - 1)
        for at, version in self._runs[first:]:
            found[max(0, at - start) :] = version
        return found

    async def aclose(self) -> None:
        self.closed = True
        self.move_out()


class Job:
    # The work of a lane. Its position is its progress, in seconds of work: here the time.
    def __init__(self) -> None:
        self._now = running_loop().time  # what anyio.current_time returns, at a tenth of the price
        self._timer: asyncio.TimerHandle | None = None
        self._wake = anyio.Event()
        self._due = False

    @property
    def position(self) -> float:
        return self._now()

    def interrupt(self) -> None:
        self._wake.set()

    async def reach(self, position: float) -> bool:
        self._wake, self._due = anyio.Event(), False
        self._arm(position)
        try:
            await self._wake.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        return self._due

    def _arm(self, position: float) -> None:
        self._timer = running_loop().call_at(position, self._arrive)

    def _arrive(self) -> None:
        self._due = True
        self._wake.set()


@dataclass(slots=True)
class Seat:
    # Its row had `made` tokens when the lane had made `since` decode steps.
    made: int
    since: int
    order: int  # ordinal of its joining, by which rows are attended to


class Lane:
    # One engine, or one of several replicas. Its cost grows with its events, not with the number or length of its rows:
    # decode steps between two in which a row ends, reaches a turn or satisfies its reader are only counted.
    def __init__(self, policy: FakePolicy, pace: float = 1.0) -> None:
        self._policy = policy
        self._pace = pace
        self._seats: dict[FakeDecode, Seat] = {}
        self._agenda: list[tuple[int, int, FakeDecode]] = []  # by decode step, then by order
        self._joined = 0
        self.steps = 0
        self._context = 0  # tokens of all rows after these steps
        self._ends: list[float] = []  # positions at which the next steps end
        self._active = 0  # rows of the first of them
        self._paused = 0.0  # seconds before the next step that has no end yet
        self._planned = 0  # the step with the next event
        self._changes: list[Callable[[], None]] = []  # between this decode step and the next
        self._job: Job | None = None
        self.homes = 0  # rows that have begun here, and not ended

    def __contains__(self, row: object) -> bool:
        return row in self._seats

    def __len__(self) -> int:
        return len(self._seats)

    def made(self, row: FakeDecode) -> int:
        seat = self._seats.get(row)
        if seat is None:
            return row.paused
        self.settle()
        return self._made(seat)

    def join(self, row: FakeDecode) -> None:
        self.settle()
        seat = Seat(row.paused, self.steps + bool(self._ends), self._joined)
        self._joined += 1
        self._seats[row] = seat
        self._context += seat.made
        self._note(row, seat)
        self._replan()

    def leave(self, row: FakeDecode) -> None:
        self.settle()
        seat = self._seats.pop(row)
        row.paused = self._made(seat)
        self._context -= row.paused
        self._active -= seat.since <= self.steps
        self._replan()

    def expect(self, row: FakeDecode) -> None:
        self.settle()
        step = self._note(row, self._seats[row])
        if step < self._planned and self._job is not None:
            self._job.interrupt()

    def pause(self, seconds: float) -> None:
        self.settle()
        self._paused += seconds
        self._replan()

    def between_steps(self, change: Callable[[], None]) -> None:
        if self._job is None:
            change()
            return
        self.settle()
        self._changes.append(change)
        self._replan()

    async def run(self) -> None:
        if self._job is not None:
            return
        with self._policy.working() as job:
            self._job = job
            try:
                while self._seats and not self._policy.held:
                    await self._advance(job)
            finally:
                self.settle()
                self._job, self._ends = None, []
                self._change()

    async def _advance(self, job: Job) -> None:
        # Until the next event, or until the rows or their readers' waits have changed.
        while self._agenda[0][-1] not in self._seats:
            heappop(self._agenda)
        self.settle()
        self._planned = self.steps + 1 if self._changes else self._agenda[0][0]
        if not await job.reach(self._end(self._planned, job)):
            return
        self._count(self._planned - self.steps)
        due: dict[FakeDecode, None] = {}
        while self._agenda and self._agenda[0][0] <= self.steps:
            row = heappop(self._agenda)[-1]
            if row in self._seats:
                due[row] = None
        self._policy.attend(sorted(due, key=lambda row: self._seats[row].order))
        for row in due:
            if row in self._seats:
                self._note(row, self._seats[row])
        self._change()

    def _change(self) -> None:
        changes, self._changes = self._changes, []
        for change in changes:
            change()

    def _note(self, row: FakeDecode, seat: Seat) -> int:
        step = seat.since + row.due() - seat.made
        heappush(self._agenda, (step, self._joined, row))
        self._joined += 1
        return step

    def _made(self, seat: Seat) -> int:
        return seat.made + max(0, self.steps - seat.since)

    def _end(self, step: int, job: Job) -> float:
        if not self._ends:
            self._active = len(self._seats)
        while len(self._ends) < step - self.steps:
            ahead = len(self._ends)
            rows, context = len(self._seats), self._context
            if ahead:
                context += self._active + (ahead - 1) * rows
            begun = self._ends[-1] if ahead else job.position
            self._ends.append(begun + self._paused + self._pace * self._policy.step_seconds(rows, context))
            self._paused = 0.0
        return self._ends[step - self.steps - 1]

    def settle(self) -> None:
        if self._job is None or not self._ends or self.steps + 1 >= self._planned:
            return
        now, steps = self._job.position, 0
        while steps < len(self._ends) and self._ends[steps] < now and self.steps + steps + 1 < self._planned:
            steps += 1
        self._count(steps)

    def _count(self, steps: int) -> None:
        if not steps:
            return
        tokens = self._active + (steps - 1) * len(self._seats)
        del self._ends[:steps]
        self.steps += steps
        self._context += tokens
        self._policy.count(tokens)
        self._active = len(self._seats)

    def _replan(self) -> None:
        # Only the step in progress stands, since the next ones have other rows.
        if self._job is not None and self._ends:
            del self._ends[1:]
            self._job.interrupt()
