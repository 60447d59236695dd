"""A pool of engines is a policy: its members decode side by side, and others go on with the rollouts of a lost one.

::

    open        a rollout gets its home when it is first decoded: the member with the most room
    decoding    each member decodes its own rollouts; whichever cut returns true stops all of them
    load        all members get the weights at once; the version moves when every living one has them
    a loss      the tokens that came of the member stay, and its rollouts are opened on others with them
    a start     a lost member is started again beside everything else, gets the weights, and takes rollouts
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import groupby
from typing import Final, Self, cast, get_args

import anyio
from anyio.abc import TaskGroup

from oppo.errors import ConfigError, ModelLost, ProtocolError, as_itself, running_loop
from oppo.events import Prompt, Response
from oppo.log import logger
from oppo.models import (
    Capabilities,
    Cut,
    Decode,
    Decoding,
    FixedDecoding,
    Loads,
    Policy,
    ReportsProgress,
    Resumes,
    Sampling,
    ServesByReference,
    Weights,
    require_count,
)
from oppo.placement.pool_members import Member, Members, PooledDecode, Round, Start, is_refusal
from oppo.turns import MultiTurnPolicy

RESCUE: Final = 5.0
"""Seconds in which a lost member should stop to decode, and those in which tokens that it has handed over are read."""

_CROWDED: Final = (
    "the engines of the pool have less room in their KV caches than its rollouts need by their ends, so they will "
    "preempt some: decode fewer at once (step.overcommit, step.batch), or add engines"
)


async def _rescue(rollouts: Sequence[PooledDecode]) -> None:
    # Whatever a lost member still raises is of no interest.
    async def rescue(rollout: PooledDecode) -> None:
        with suppress(Exception):
            await rollout.salvage()
        if rollout.seat is not None:
            with suppress(Exception):
                await rollout.seat.aclose()

    if rollouts:
        with anyio.move_on_after(RESCUE):
            async with anyio.create_task_group() as tasks:
                for rollout in rollouts:
                    tasks.start_soon(rescue, rollout)
        for rollout in rollouts:
            rollout.leave()


def _mine(members: Members, decodes: Sequence[Decode]) -> list[PooledDecode]:
    mine = [each for each in decodes if isinstance(each, PooledDecode) and each.is_of(members)]
    closed = [each.prompt.rollout for each in mine if each.closed]
    if closed or len(mine) < len(decodes):
        raise ProtocolError(
            f"expected open decodes of this pool; {len(decodes) - len(mine)} are of others, closed: {closed}"
        )
    return mine


class _Session:
    def __init__(self, member: Member) -> None:
        self.member = member
        self.rollouts: dict[PooledDecode, None] = {}
        self.lost = False
        self.scope: anyio.CancelScope | None = None
        self._news = anyio.Event()

    def due(self) -> list[PooledDecode]:
        return [each for each in self.rollouts if each.member is self.member and each.decodes]

    def wake(self) -> None:
        self._news.set()

    async def news(self, until: float = math.inf) -> None:
        self._news = anyio.Event()
        with anyio.CancelScope(deadline=until):
            await self._news.wait()


class _PooledDecoding(Round):
    def __init__(self, members: Members, sampling: Sampling | None, cut: Cut) -> None:
        super().__init__()
        self._members = members
        self._sampling = sampling
        self._cut = cut
        self._tasks: TaskGroup | None = None
        self._loop = running_loop()
        self._lock = threading.Lock()
        self._rollouts: dict[int, PooledDecode] = {}
        self._sessions: dict[Member, _Session] = {}
        self._placing: set[anyio.CancelScope] = set()
        self._refused: Exception | None = None

    @asynccontextmanager
    async def running(self, rollouts: Sequence[PooledDecode]) -> AsyncIterator[None]:
        async with anyio.create_task_group() as self._tasks:
            await self._enter(rollouts)
            try:
                yield
            finally:
                self.left = True
                for scope in self._placing:
                    scope.cancel()
                self._wake()

    def stop(self) -> None:
        with self._lock:
            self.has_cut = True
        self._wake()

    async def add(self, decodes: Sequence[Decode]) -> None:
        rollouts = _mine(self._members, decodes)
        if self.left:
            raise ProtocolError(f"{len(rollouts)} rollouts were added to a decoding that has ended")
        if not self.has_cut:
            await self._enter(rollouts)

    async def _enter(self, rollouts: Sequence[PooledDecode]) -> None:
        # What ended in an overrun is reported; the others are decoded where they live, or where there is most room.
        for rollout in rollouts:
            rollout.round = self
            self._rollouts[rollout.prompt.rollout] = rollout
        await _rescue([each for each in rollouts if each.member is not None and each.member.lost])
        self._report([each for each in rollouts if each.withheld])
        for rollout in rollouts:
            if rollout.member is not None:
                self._assign(rollout, rollout.member)
        await self._place([each for each in rollouts if each.member is None and each.decodes])

    def _assign(self, rollout: PooledDecode, member: Member) -> None:
        if member not in self._sessions and self._tasks is not None:
            session = self._sessions[member] = _Session(member)
            self._tasks.start_soon(self._serve, session, name=f"decode on {member.name}")
        self._sessions[member].rollouts[rollout] = None
        self._sessions[member].wake()

    async def _place(self, rollouts: Sequence[PooledDecode]) -> None:
        with anyio.CancelScope() as scope:
            self._placing.add(scope)
            try:
                rooms: dict[Member, float] = {}
                for _, group in groupby(rollouts, lambda each: each.prompt.admission):
                    waiting = [list(group)]
                    while waiting:
                        waiting += await self._house(waiting.pop(), rooms)
            finally:
                self._placing.discard(scope)

    async def _house(self, group: Sequence[PooledDecode], rooms: dict[Member, float]) -> list[list[PooledDecode]]:
        # Gives the rollouts of a prompt a home; returns them in parts where no member has room for all of them.
        while part := [each for each in group if each.decodes]:
            able = [member for member in self._members.living if self._can_take(member, part)]
            if not able:
                await self._wait_for(part)
                rooms.clear()
                continue
            for member in able:
                if member not in rooms:
                    rooms[member] = self._members.room(member)
            best = max(able, key=lambda member: rooms[member])
            needed = sum(map(self._members.needs, part)) - (len(part) - 1) * len(part[0].prompt.tokens)
            if best.free is not None and needed > rooms[best]:
                if len(part) > 1:
                    return [[each] for each in reversed(part)]
                logger.once(_CROWDED)
            rooms[best] -= needed
            for rollout in part:
                rollout.move_in(best)
                self._assign(rollout, best)
            break
        return []

    def _can_take(self, member: Member, part: Sequence[PooledDecode]) -> bool:
        begun = any(each.length for each in part)
        resumes = not begun or member.drawing(self._sampling).capabilities.resumes != "refused"
        return resumes and all(each.newest <= member.version for each in part)

    async def _wait_for(self, part: Sequence[PooledDecode]) -> None:
        if not self._members.living:
            await self._members.wait_for_one()
        elif all(each.newest <= self._members.version for each in part):
            raise ModelLost(
                f"rollouts {[each.prompt.rollout for each in part]} are half-written, their member was lost, and the "
                "others cannot go on with responses (capabilities.resumes)"
            )
        else:
            await self._members.change()  # the weights that made their last tokens are on the way to the others

    async def _serve(self, session: _Session) -> None:
        while not self.left and not session.member.lost:
            if due := session.due():
                await self._decode(session, due)
            else:
                await session.news()
        if not self.left:
            rollouts = [each for each in session.rollouts if each.member is session.member]
            await _rescue(rollouts)
            self._report([each for each in rollouts if each.withheld])
            await self._place([each for each in rollouts if each.decodes])

    async def _decode(self, session: _Session, due: list[PooledDecode]) -> None:
        member, patience = session.member, self._members.timeout
        policy, inside = member.drawing(self._sampling), dict.fromkeys(due)
        with anyio.CancelScope(deadline=anyio.current_time() + patience) as scope:
            session.scope = scope
            try:
                seats = await self._seats(policy, due)
                async with policy.decoding(seats, partial(self._finished, session)) as decoding:
                    await self._go_on(session, inside, decoding, scope)
                    scope.deadline = anyio.current_time() + (RESCUE if member.lost else patience)
            except Exception as error:  # what a member raises costs it its place
                if error is self._refused:
                    raise
                self._members.lose(member, error)
        if scope.cancelled_caught:
            self._members.lose(member, TimeoutError(f"it did not begin or stop to decode within {patience:g} s"))
        session.scope = None
        for rollout in inside:
            if rollout.member is member:
                rollout.pause()

    async def _seats(self, policy: Policy, rollouts: Sequence[PooledDecode]) -> list[Decode]:
        new = [each for each in rollouts if each.seat is None]
        for turns, each in groupby(sorted(new, key=lambda each: each.opens_turns), lambda each: each.opens_turns):
            opened, open_ = list(each), cast("MultiTurnPolicy", policy).open_turns if turns else policy.open
            try:
                seats = await open_([rollout.response() for rollout in opened])
            except Exception as error:
                self._refused = error if is_refusal(error) else None
                raise
            require_count(seats, len(opened), "open() of a member")
            for rollout, seat in zip(opened, seats, strict=True):
                rollout.sit(seat)
                if rollout.closed:
                    await seat.aclose()
        return [each.seat for each in rollouts if each.seat is not None and not each.closed]

    async def _go_on(
        self, session: _Session, inside: dict[PooledDecode, None], decoding: Decoding, scope: anyio.CancelScope
    ) -> None:
        # Until the round stops this member, or it must begin again with rollouts that cannot join.
        policy, timeout = session.member.drawing(self._sampling), self._members.timeout
        can, progress, due_at = policy.capabilities, -1, anyio.current_time() + timeout
        scope.deadline = math.inf
        for rollout in inside:
            rollout.begin()
        while not (self.left or session.member.lost or self.failure is not None):
            due = session.due()
            if self.has_cut and not due:
                return
            joining = [each for each in due if each not in inside]
            if joining and not can.adds_while_decoding:
                return
            if joining:
                scope.deadline = anyio.current_time() + timeout
                await decoding.add(await self._seats(policy, joining))
                scope.deadline = math.inf
                inside |= dict.fromkeys(joining)
                for rollout in joining:
                    rollout.begin()
                continue
            await session.news(due_at if can.reports_progress else math.inf)
            if can.reports_progress and anyio.current_time() >= due_at:
                before, progress = progress, cast("ReportsProgress", session.member.policy).progress
                due_at += timeout
                if before == progress and any(each.works for each in session.rollouts):
                    self._members.lose(session.member, TimeoutError(f"it made no progress for {timeout:g} s"))

    def _finished(self, session: _Session, finished: Sequence[int]) -> bool:
        # The cut of one member, called in any thread.
        with self._lock:
            if session.lost:
                return True
            stops = self._report_to_cut([self._rollouts[each] for each in finished])
        return stops and not any(each.owed for each in list(session.rollouts))

    def _report(self, withheld: Sequence[PooledDecode]) -> None:
        with self._lock:
            self._report_to_cut(sorted(withheld, key=lambda each: each.order))

    def _report_to_cut(self, finished: Sequence[PooledDecode]) -> bool:
        fresh = [each for each in finished if not each.reported and not each.closed]
        stopped = self.stops
        for rollout in fresh:
            rollout.reported, rollout.withheld = not stopped, stopped
        if fresh and not stopped:
            try:
                self.has_cut = self._cut([each.prompt.rollout for each in fresh])
            except Exception as error:  # noqa: BLE001 - no member is to blame: the round raises it
                self.failure = error
        self._loop.call_soon_threadsafe(self._wake, fresh)
        return self.stops

    def _wake(self, fresh: Sequence[PooledDecode] = ()) -> None:
        for session in self._sessions.values() if self.stops else ():
            session.wake()
        for rollout in self._rollouts.values() if self.stops else fresh:
            rollout.wake()

    def note_loss(self, member: Member) -> None:
        if session := self._sessions.get(member):
            with self._lock:
                session.lost = True
            if session.scope is not None:
                session.scope.deadline = min(session.scope.deadline, anyio.current_time() + RESCUE)
            session.wake()
        for rollout in self._rollouts.values():
            if rollout.member is member:
                rollout.interrupt()

    def close(self) -> None:
        for rollout in self._rollouts.values():
            if rollout.round is self:
                rollout.round = None
            rollout.pause()
        self.over.set()


class PolicyPool:
    """Several engines of one model as one policy.

    New rollouts go to the member with the most room, the samples of a prompt to one member where they fit. A rollout
    stays on its member, across turns and steps. Room is the attribute ``free_kv_tokens`` of an engine's policy; where
    one has none, the member with the fewest tokens in its rollouts has the most room.

    A member that raises, or takes longer than ``timeout``, is left out, and others go on with its rollouts from the
    tokens that came of it. As an async context manager, which :class:`oppo.Generate` opens for a run, a pool starts
    lost members again, by ``start``, with pauses that grow up to ``timeout``.

    Its capabilities are those that all members have.

    Args:
        policies: at least one, each with an engine of its own, of the same model. Their ``vocabulary``, the upper bound
            of token ids, and ``model_name`` are compared where they have them.
        start: starts the engine of a lost member again and returns its policy, with the weights that its model began
            with; ``None``: lost members stay lost.
        timeout: seconds that a member has to take weights, to begin or stop to decode, to open or close rollouts, and,
            if it reports progress, to make some; and that a pool without living members waits for one.

    Raises:
        ConfigError: there is no member, one is given twice, or their models, vocabularies or versions differ.

    Example:
        >>> from oppo.testing import FakePolicy
        >>> pool = PolicyPool([FakePolicy(), FakePolicy()])
        >>> pool.version, pool.capabilities.turns
        (0, True)
    """

    def __init__(self, policies: Sequence[Policy], *, start: Start | None = None, timeout: float = 300.0) -> None:
        if timeout <= 0:
            raise ConfigError(f"the timeout of a pool is a number of seconds above 0; got {timeout}")
        self._members = Members(policies, start, timeout)
        self._sampling: Sampling | None = None
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        if self._sampling is None:  # one that draws otherwise is opened with the pool that it is of
            if self._tasks is not None:
                raise ProtocolError("the pool is open already: it belongs to one run at a time")
            self._tasks = await anyio.create_task_group().__aenter__()
            self._members.open(self._tasks)
        return self

    async def __aexit__(self, *error: object) -> None:
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            self._members.close()
            tasks.cancel_scope.cancel()
            await tasks.__aexit__(None, None, None)

    @property
    def version(self) -> int:
        """Version of the weights that every living member has."""
        return self._members.version

    @property
    def capabilities(self) -> Capabilities:
        found = [member.drawing(self._sampling).capabilities for member in self._members.all]
        resuming, loading = get_args(Resumes).index, get_args(Loads).index  # the least capable first
        return Capabilities(
            supports=all(each.supports for each in found),
            resumes=min((each.resumes for each in found), key=resuming),
            defers=min((each.defers for each in found), key=resuming),
            adds_while_decoding=all(each.adds_while_decoding for each in found),
            loads_while_decoding=min((each.loads_while_decoding for each in found), key=loading),
            turns=all(each.turns for each in found),
            varies_sampling=all(each.varies_sampling for each in found),
            reports_progress=all(each.reports_progress for each in found),
        )

    @property
    def progress(self) -> int:
        return sum(cast("ReportsProgress", member.policy).progress for member in self._members.all)

    @property
    def free_kv_tokens(self) -> int | None:
        """Tokens for which the members' KV caches have room; ``None`` if one does not say."""
        found = [member.free for member in self._members.living]
        return None if None in found else sum(each or 0 for each in found)

    @property
    def living(self) -> tuple[Policy, ...]:
        return tuple(member.policy for member in self._members.living)

    @property
    def sync_metrics(self) -> Mapping[str, float]:
        """The number of members with the weights of the last sync, and the metrics of these."""
        found = {"sync/members": float(len(self.living))}
        for policy in self.living:
            found |= getattr(policy, "sync_metrics", {})
        return found

    def with_sampling(self, sampling: Sampling) -> PolicyPool:
        other = copy.copy(self)
        other._sampling, other._tasks = sampling, None  # noqa: SLF001 - its own
        return other

    async def open(self, rollouts: Sequence[Prompt | Response]) -> list[PooledDecode]:
        """Return a decode for each; a member opens it when it is first decoded."""
        return self._opened(rollouts, turns=False)

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> list[PooledDecode]:
        return self._opened(rollouts, turns=True)

    def _opened(self, rollouts: Sequence[Prompt | Response], *, turns: bool) -> list[PooledDecode]:
        responses = [each if isinstance(each, Response) else Response.empty(each) for each in rollouts]
        return [PooledDecode(self._members, response, turns=turns) for response in responses]

    @asynccontextmanager
    async def decoding(self, live: Sequence[Decode], cut: Cut) -> AsyncIterator[Decoding]:
        """Decode ``live``, and rollouts that join, until each has ended or ``cut`` returns true.

        Members call ``cut`` one at a time; once it has returned true, rollouts that end before the others have stopped
        are reported first at the next decoding.

        Raises:
            ProtocolError: a decode is of another policy, or was closed; or the pool decodes already.
            ModelLost: no member is left.
            Exception: whatever ``cut`` raised, or every member would raise for a rollout.
        """
        members = self._members
        if members.round is not None:
            raise ProtocolError("the pool is decoding already: leave that context before opening another")
        rollouts, adds = _mine(members, live), self.capabilities.adds_while_decoding
        round_ = members.round = _PooledDecoding(members, self._sampling, cut)
        try:
            with as_itself():
                async with round_.running(rollouts):
                    yield round_ if adds else FixedDecoding(type(self).__name__)
        finally:
            members.round = None
            round_.close()
        if round_.failure is not None:
            raise round_.failure

    async def load(self, weights: Weights) -> None:
        """Give all members the weights at once; a member without them in the end is left out.

        Tokens of the new weights, which a member may make before the others have them, are read when the version has
        moved. While no member serves, weights are given at any time.

        Raises:
            ProtocolError: the pool is decoding, and a member cannot load weights meanwhile.
            ModelError: every member refuses these weights; the old ones are served.
            ModelLost: no member is left.
        """
        loads = self.capabilities.loads_while_decoding
        while (round_ := self._members.round) and self.living and loads != "between decode steps":
            if loads == "refused":
                raise ProtocolError("weights were synced while the pool decoded, and a member cannot load them then")
            await round_.over.wait()
        await self._members.load(weights)

    async def settled(self) -> None:
        """Wait until no member reads the trainer's tensors, and have none read them before the next :meth:`load`."""
        await self._members.settled()

    async def starved(self) -> None:
        """Wait until no member serves, and the restarted members need the weights of a later :meth:`load`."""
        await self._members.starved()

    def serves(self, weights: Weights) -> bool:
        return any(isinstance(each, ServesByReference) and each.serves(weights) for each in self.living)

    def tensors(self) -> frozenset[int]:
        found = [each.tensors() for each in self.living if isinstance(each, ServesByReference)]
        return frozenset().union(*found)
