"""The members of a pool of engines, which serve, are lost and start again, and the rollouts that live on them.

::

    move_in -> begin -> pause -> begin -> pause ...       on one member, a step after the other
    interrupt -> pause -> salvage -> leave -> move_in     that is lost: its tokens are read, and another goes on
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias, TypeVar, cast

import anyio
import anyio.lowlevel
import numpy as np
from anyio.abc import TaskGroup

from oppo.errors import ConfigError, ModelError, ModelLost, ProtocolError, one_line
from oppo.events import Chunk, IntArray, Prompt, Response, ToolTokens
from oppo.limits import UNLIMITED, TurnLimit
from oppo.log import logger
from oppo.models import Decode, Policy, Sampling, VariesSampling, Weights, require_model
from oppo.turns import TurnDecode, turn_so_far

T = TypeVar("T")

Start: TypeAlias = Callable[[int], Awaitable[Policy]]
"""``await start(index)``: starts the engine of a lost member again and returns its policy, with its first weights."""


class Member:
    """An engine of a pool; one that is started again is another member with the same index.

    Attributes:
        serving: it has weights of the pool and takes rollouts.
        version: of the weights that it was given last.
    """

    def __init__(self, index: int, policy: Policy, *, serving: bool) -> None:
        self.index = index
        self.policy = policy
        self.serving = serving
        self.version = policy.version
        self.lost = False
        self.error: Exception | None = None
        self.rollouts: dict[PooledDecode, None] = {}  # an ordered set
        self.loading = anyio.Lock(fast_acquire=True)
        self._drawing: dict[Sampling, Policy] = {}

    async def load(self, weights: Weights) -> None:
        await self.policy.load(weights)
        if self.policy.version != weights.version:
            raise ModelLost(f"it was given version {weights.version}, but has {self.policy.version}")

    @property
    def name(self) -> str:
        return f"member {self.index} ({type(self.policy).__name__})"

    @property
    def free(self) -> int | None:
        found: int | None = getattr(self.policy, "free_kv_tokens", None)
        return found

    def drawing(self, sampling: Sampling | None) -> Policy:
        if sampling is None:
            return self.policy
        if sampling not in self._drawing:
            self._drawing[sampling] = cast("VariesSampling", self.policy).with_sampling(sampling)
        return self._drawing[sampling]


@dataclass(eq=False)
class Round:
    """The state of one decoding of a pool."""

    has_cut: bool = False  # the cut has returned true
    failure: Exception | None = None  # what the cut raised
    left: bool = False  # the context has been left
    over: anyio.Event = field(default_factory=anyio.Event)  # set when nothing of it goes on

    @property
    def stops(self) -> bool:
        return self.has_cut or self.left or self.failure is not None

    def note_loss(self, member: Member) -> None:
        """Decode no longer on a member that was lost."""


class Members:
    """The engines of a pool: which of them serve, with which weights."""

    def __init__(self, policies: Sequence[Policy], start: Start | None, timeout: float) -> None:
        self.all = [Member(index, policy, serving=True) for index, policy in enumerate(_alike(policies))]
        self.version = policies[0].version  # of the weights that every living member has
        self.given = self.version  # the newest that any was given
        self.timeout = timeout
        self.round: Round | None = None
        self.responses = self.tokens = 0  # that have ended, and that they have
        self._tasks: TaskGroup | None = None
        self._start = start
        self._starting: set[int] = set()
        self._pauses = dict.fromkeys(range(len(policies)), 0.0)
        self._weights: Weights | None = None  # while the trainer's tensors are those
        self._reading = 0  # loads of members that were started again
        self._first = True
        self._changed = anyio.Event()

    @property
    def living(self) -> list[Member]:
        return [member for member in self.all if member.serving and not member.lost]

    def note_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def change(self) -> None:
        await self._changed.wait()

    async def load(self, weights: Weights) -> None:
        self._weights, self._first = weights, False
        self.given = weights.version
        members, refused = [member for member in self.all if not member.lost], dict[Member, Exception]()
        async with anyio.create_task_group() as tasks:
            for member in members:
                tasks.start_soon(self._give, member, weights, refused)
        if refused and len(refused) == len(members):
            self.given, self._weights = self.version, None
            raise next(iter(refused.values()))
        for member, error in refused.items():
            self.lose(member, error)
        await self.wait_for_one()
        self.version = weights.version
        for member in self.living:
            self._pauses[member.index] = 0.0
        self.note_change()

    async def _give(self, member: Member, weights: Weights, refused: dict[Member, Exception]) -> None:
        try:
            with limited(self.timeout, f"loading version {weights.version}"):
                async with member.loading:
                    if not (member.serving and member.version == weights.version != self.version):  # twice in a sync
                        await member.load(weights)
        except Exception as error:  # noqa: BLE001 - a member that fails is left out
            if is_refusal(error) and member.policy.version == member.version:
                refused[member] = error
            else:
                self.lose(member, error)
        else:
            member.version, member.serving = weights.version, not member.lost
            self.note_change()

    async def settled(self) -> None:
        self._weights = None
        while self._reading:
            await self.change()

    @property
    def _starves(self) -> bool:
        # No member serves, and those that have come up can only be given weights of a later sync.
        ready = any(not each.lost for each in self.all)
        return ready and not (self.living or self._first or self._weights is not None)

    async def starved(self) -> None:
        while not self._starves:
            await self.change()

    async def wait_for_one(self) -> None:
        with anyio.move_on_after(self.timeout) as scope:
            while not self.living and self._starting:
                until = anyio.current_time() + self.timeout
                scope.deadline = math.inf if self._starves else min(scope.deadline, until)
                await self.change()
        if not self.living:
            causes = "; ".join(f"{each.name}: {one_line(each.error)}" for each in self.all if each.error is not None)
            waited = f" for {self.timeout:g} s" if self._starting else ""
            raise ModelLost(f"no engine of the pool is left{waited}: {causes}")

    def lose(self, member: Member, error: Exception) -> None:
        if member.lost:
            return
        member.lost, member.error = True, error
        starts = self._begin_start(member)
        logger.warning(
            f"{member.name} of the pool is lost: {one_line(error)}; others go on with its "
            f"{len(member.rollouts)} rollouts, and {len(self.living)} of {len(self.all)} members are left"
            f"{', until it has been started again' if starts else ''}"
        )
        if self.round is not None:
            self.round.note_loss(member)
        self.note_change()

    def open(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        for member in self.all:
            if member.lost:
                self._begin_start(member)

    def close(self) -> None:
        self._tasks = None
        self._starting.clear()

    def _begin_start(self, lost: Member) -> bool:
        if self._tasks is None or self._start is None:
            return False
        self._starting.add(lost.index)
        self._tasks.start_soon(self._start_again, lost, self._start, name=f"start {lost.name}")
        return True

    async def _start_again(self, lost: Member, start: Start) -> None:
        index = lost.index
        policy: Policy | None = None
        while policy is None:
            pause = self._pauses[index]
            self._pauses[index] = min(max(1.0, 2 * pause), self.timeout)
            await anyio.sleep(pause)
            try:
                policy = await start(index)
                _alike([*(each.policy for each in self.all if each is not lost), policy], weights=False)
            except Exception as error:  # noqa: BLE001 - tried again
                policy, lost.error = None, error
                logger.once(f"{lost.name} of the pool could not be started again: {one_line(error)}")
        member = self.all[index] = Member(index, policy, serving=False)
        self.note_change()
        while not member.serving and not member.lost:
            if self._weights is not None:
                await self._catch_up(member, self._weights)
            elif self._first and policy.version == self.version:
                member.serving = True
            else:  # until the next load, which is not waited for if no member serves: starved()
                await self.change()
        if member.serving:
            self._starting.discard(index)
            logger.info(f"{member.name} of the pool has been started again, with version {member.version}")
            self.note_change()

    async def _catch_up(self, member: Member, weights: Weights) -> None:
        refused: dict[Member, Exception] = {}
        self._reading += 1
        try:
            await self._give(member, weights, refused)
        finally:
            self._reading -= 1
            self.note_change()
        for error in refused.values():
            self.lose(member, error)

    def room(self, member: Member) -> float:
        """The tokens for which a member has room when its rollouts have ended; less than 0 where it does not say."""
        says = all(each.free is not None for each in self.living)
        free = member.free or 0 if says else 0
        return free - sum(self.needs(each, held=says) for each in member.rollouts)

    def needs(self, rollout: PooledDecode, *, held: bool = False) -> float:
        """The expected tokens of a rollout by its end; ``held``: without those it has."""
        prompt, expected = len(rollout.prompt.tokens), self.tokens / max(1, self.responses)
        has = prompt + rollout.length if held and rollout.begun else 0
        return prompt + max(expected, rollout.length) - has


@contextmanager
def limited(seconds: float, doing: str) -> Iterator[None]:
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise TimeoutError(f"{doing} took more than {seconds:g} s")


def is_refusal(error: Exception) -> bool:
    """Whether every engine would raise the same for these rollouts or weights."""
    return isinstance(error, ModelError | ProtocolError | ValueError) and not isinstance(error, ModelLost)


def _alike(policies: Sequence[Policy], *, weights: bool = True) -> Sequence[Policy]:
    if not policies:
        raise ConfigError("a pool has at least one member; got none: PolicyPool([policy, ...])")
    for policy in policies:
        require_model(policy, "Policy", ("version", "capabilities", "load", "open", "decoding"))
    if len({id(policy) for policy in policies}) < len(policies):
        raise ConfigError("a member of a pool is given twice: give each member an engine of its own")
    for what, name in (("vocabularies", "vocabulary"), ("models", "model_name"), ("versions", "version")):
        found = {index: getattr(policy, name, None) for index, policy in enumerate(policies)}
        known = {index: value for index, value in found.items() if value is not None}
        if len(set(known.values())) > 1 and (weights or name != "version"):
            listed = ", ".join(f"member {index} has {value!r}" for index, value in known.items())
            raise ConfigError(
                f"the members of a pool serve one model with the same weights, and their {what} differ: {listed}; "
                "start each engine with the same model"
            )
    return policies


ALL: Final = 1 << 30  # more tokens than a response has


def ends(chunk: Chunk | ToolTokens) -> bool:
    return chunk.state not in {"live", "cut"}


class PooledDecode:
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
        self.prompt = response.prompt
        self.length = len(response)
        self.begun = 0  # times on its member
        self.turns = turns
        self.newest = int(response.versions[-1]) if len(response) else 0
        self.round: Round | None = None
        self.member: Member | None = None
        self.seat: Decode | None = None
        self.ended = self.reported = self.withheld = self.owed = self.closed = False
        self._members = members
        self._events = response.pieces()
        self._unread: deque[Chunk | ToolTokens] = deque()
        self._live = self._drained = self._astray = self._end_read = self._being_read = False
        self._turn = len(turn_so_far(response))  # tokens
        self._unanswered = False
        self._answer: IntArray | None = None  # until all of it came back
        self._heard = 0  # tokens of it that did
        self._bounds: tuple[TurnLimit, int] = UNLIMITED, 0
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
        # No conversation would answer the turns of a rollout that is owed.
        return self.turns and (self._ending or not self.owed)

    def response(self) -> Prompt | Response:
        return Response.of(self.prompt, self._events) if self._events else self.prompt

    async def read(self, limit: int) -> Chunk | ToolTokens:
        if limit < 1:
            raise ValueError(f"a read takes at least 1 token, not {limit}")
        if self._being_read:
            raise ProtocolError(f"two reads of rollout {self.prompt.rollout} at once: it has one reader")
        self._being_read = True
        try:
            await anyio.lowlevel.checkpoint()
            while (chunk := self._take(limit)) is None:
                if self._ahead:
                    await self._members.change()
                elif self._can_fetch and not self._unread:
                    await self._fetch(limit)
                else:
                    await self._news.wait()
            return chunk
        finally:
            self._being_read = False

    @property
    def _ahead(self) -> bool:
        # The next unread tokens were sampled with weights that other members do not have yet.
        first = self._unread[0] if self._unread else None
        return isinstance(first, Chunk) and bool((first.versions[-1:] > self._members.version).any())

    @property
    def _sits(self) -> bool:
        return self._live and self.member is not None and not self.member.lost

    @property
    def _can_fetch(self) -> bool:
        return self.member is not None and not self.member.lost and not self._drained

    def _take(self, limit: int) -> Chunk | ToolTokens | None:
        rollout = self.prompt.rollout
        if self.closed:
            raise ProtocolError(f"rollout {rollout} was closed, so it cannot be read")
        if self._end_read:
            raise ProtocolError(f"the last chunk of rollout {rollout} has been read; expected no further read")
        if self._unread:
            first = self._unread[0]
            if ends(first) and not self.reported:
                return self._nothing(first.start) if self._over else None
            return None if self._ahead else self._pop(first, limit)
        if self.round is not None and self.round.failure is not None:
            raise self.round.failure
        if not self._over or self._can_fetch:
            return None
        if self._answer is not None and not self._issued and (self.member is None or self.member.lost):
            self._hear(self._answer)  # so that it is part of the response by the cut
            return self._pop(self._unread[0], limit)
        return self._nothing(self.length)

    def _nothing(self, start: int) -> Chunk:
        none = np.zeros(0, np.int32)
        return Chunk(self.prompt.rollout, start, none, none.astype(np.float32), none, state="cut")

    def _pop(self, first: Chunk | ToolTokens, limit: int) -> Chunk | ToolTokens:
        if len(first.tokens) > limit:
            self._unread[0] = first.part(limit)
            return first.part(0, limit)
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
            except Exception as error:  # noqa: BLE001 - a member that raises leaves the pool
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
            chunk = await self._call(partial(seat.read, limit))
            if chunk is not None:
                self._note(chunk)
                self._drained = chunk.state == "cut" and self.begun == begun

    def _note(self, chunk: Chunk | ToolTokens) -> None:
        rollout, member, n = self.prompt.rollout, self.member, len(chunk.tokens)
        newest = int(chunk.versions[-1]) if n and isinstance(chunk, Chunk) else 0
        if (n or ends(chunk)) and (chunk.rollout, chunk.start) != (rollout, self.length) and member is not None:
            told = f"tokens of rollout {chunk.rollout} from {chunk.start} on"
            self._refuse(member, f"it returned {told}; expected tokens of rollout {rollout} from {self.length} on")
            return
        if newest > self._members.given and member is not None:
            self._refuse(member, f"it made tokens of version {newest}, never given")
            return
        if ends(chunk) and not self.reported and not self.withheld and member is not None:
            if not member.lost:
                self._refuse(member, f"rollout {rollout}: its last chunk was readable before cut() was called")
                return
            self.withheld = True
        if n:
            self._append(chunk)
        if n or ends(chunk):
            self._unread.append(chunk)
        if ends(chunk):
            self.ended, self.owed = True, False
            self.wake()
            if member is not None:
                member.rollouts.pop(self, None)
            self._members.responses += 1
            self._members.tokens += self.length

    def _refuse(self, member: Member, words: str) -> None:
        self._astray = True  # the next tokens of its seat do not follow the known ones
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
        heard = ToolTokens(self.prompt.rollout, self.length, given, "cut")
        self._unread.append(heard)
        self._append(heard)
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

    def bound(self, limit: TurnLimit, start: int) -> None:
        self._bounds = limit, start

    def sit(self, seat: Decode) -> None:
        self.seat = seat
        if self.opens_turns and self._answer is None:
            cast("TurnDecode", seat).bound(*self._bounds)

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
        self._unanswered = False  # the next engine gets the answer that is not issued yet
        return True

    def _issue(self) -> None:
        seat = cast("TurnDecode", self.seat)
        if self._answer is not None:
            seat.bound(*self._bounds)
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
                chunk = await self.seat.read(ALL)
                self._note(chunk)
                if chunk.state == "cut" or not len(chunk.tokens):
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
            except Exception as error:  # noqa: BLE001 - a member that raises leaves the pool
                self._members.lose(member, error)
