"""The members of a pool of engines: which of them serve, with which weights, and who was lost or is started again."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import anyio
from anyio.abc import TaskGroup

from oppo.errors import ConfigError, ModelError, ModelLost, ProtocolError, one_line
from oppo.events import Prompt
from oppo.log import logger
from oppo.models import Policy, Sampling, VariesSampling, Weights, require_model

Start: TypeAlias = Callable[[int], Awaitable[Policy]]
"""``await start(index)``: starts the engine of a lost member again and returns its policy, with its first weights."""


class Resident:
    """A rollout with ``length`` tokens so far, which was ``begun`` so many times on its member."""

    def __init__(self, prompt: Prompt, length: int) -> None:
        self.prompt = prompt
        self.length = length
        self.begun = 0


class Member:
    """An engine of a pool; one that is started again is another member with the same index.

    Attributes:
        serving: it has weights of the pool and takes rollouts.
        version: of the weights that it was given last.
        rollouts: those that live here.
    """

    def __init__(self, index: int, policy: Policy, *, serving: bool) -> None:
        self.index = index
        self.policy = policy
        self.serving = serving
        self.version = policy.version
        self.lost = False
        self.error: Exception | None = None
        self.rollouts: dict[Resident, None] = {}  # an ordered set
        self.loading = anyio.Lock(fast_acquire=True)
        self._drawing: dict[Sampling, Policy] = {}

    async def load(self, weights: Weights) -> None:
        """Give its policy the weights."""
        await self.policy.load(weights)
        if self.policy.version != weights.version:
            raise ModelLost(f"it was given version {weights.version}, but has {self.policy.version}")

    @property
    def name(self) -> str:
        return f"member {self.index} ({type(self.policy).__name__})"

    @property
    def free(self) -> int | None:
        """Tokens for which its engine has room, where it says so."""
        found: int | None = getattr(self.policy, "free_kv_tokens", None)
        return found

    def drawing(self, sampling: Sampling | None) -> Policy:
        """Return its policy, or the one on the same engine that draws so."""
        if sampling is None:
            return self.policy
        if sampling not in self._drawing:
            self._drawing[sampling] = cast("VariesSampling", self.policy).with_sampling(sampling)
        return self._drawing[sampling]


@dataclass(eq=False)
class Round(ABC):
    """The state of one decoding of a pool.

    Attributes:
        has_cut: the cut has returned true.
        failure: what the cut raised.
        left: the context has been left.
        over: set when nothing of it goes on.
    """

    has_cut: bool = field(default=False, init=False)
    failure: Exception | None = field(default=None, init=False)
    left: bool = field(default=False, init=False)
    over: anyio.Event = field(default_factory=anyio.Event, init=False)

    @property
    def stops(self) -> bool:
        return self.has_cut or self.left or self.failure is not None

    @abstractmethod
    def note_loss(self, member: Member) -> None:
        """Decode no longer on a member that was lost."""


class Members:
    """The engines of a pool: which of them serve, with which weights.

    Attributes:
        version: of the weights that every living member has.
        given: the newest version that any was given.
        responses, tokens: that have ended, and that they have.
    """

    def __init__(self, policies: Sequence[Policy], start: Start | None, timeout: float) -> None:
        self.all = [Member(index, policy, serving=True) for index, policy in enumerate(_alike(policies))]
        self.version = self.given = policies[0].version
        self.timeout = timeout
        self.round: Round | None = None
        self.responses = self.tokens = 0
        self._tasks: TaskGroup | None = None
        self._start = start
        self._starting: set[int] = set()
        self._pauses = dict.fromkeys(range(len(policies)), 0.0)
        self._weights: Weights | None = None  # while the trainer's tensors are those
        self._reading = 0  # loads of members that were started again
        self._first = True
        self._changed = anyio.Event()

    @property
    def is_open(self) -> bool:
        return self._tasks is not None

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

    def needs(self, rollout: Resident, *, held: bool = False) -> float:
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
