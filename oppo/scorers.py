"""The capabilities of scorers, and the sessions of the rollouts that they read."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeAlias, TypeVar, cast

import anyio
import numpy as np

from oppo.errors import ModelError, ProtocolError, as_itself, promised, shown
from oppo.events import NO_COLUMNS, Chunk, Drop, Finish, FloatArray, Prompt, Response, TokenColumns, ToolTokens
from oppo.models import PrioritisedScorer, Scorer, Shared, entered
from oppo.returns import NamedScores, TokenRewards, TopLogprobs
from oppo.scheduling import DEFAULT_TIME_SLICE, IN_ORDER, Priority, TimeSlice, urged

Growth: TypeAlias = Prompt | Chunk | ToolTokens
"""An event that a scorer reads."""

T = TypeVar("T")
E = TypeVar("E", Growth, Finish)


class Unscored:
    """A scorer that reads nothing and gives every rollout the score 0, for algorithms without a score."""

    version = 0

    async def extend(self, events: Sequence[Growth]) -> None:
        """Read nothing."""

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        return [0.0] * len(finished)

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Forget nothing."""


class WholeScorer(Generic[T]):
    """A scorer that reads nothing while responses grow, and is asked for the value of each at its end.

    Args:
        value: returns that; several are awaited at the same time.
        at_work, samples: as of :class:`ScorerCapabilities`.
    """

    version = 0

    def __init__(
        self,
        value: Callable[[Finish], Awaitable[T]],
        at_work: Callable[[], str] = str,
        samples: Callable[[], Mapping[str, Sequence[float]]] = dict,
    ) -> None:
        self._value = value
        self.capabilities = ScorerCapabilities(concurrent=True, at_work=at_work, samples=samples)

    async def extend(self, events: Sequence[Growth]) -> None:
        """Read nothing."""

    async def finish(self, finished: Sequence[Finish]) -> Sequence[T]:
        values: dict[int, T] = {}

        async def ask(each: Finish) -> None:
            values[each.rollout] = await self._value(each)

        with as_itself():
            async with anyio.create_task_group() as tasks:
                for each in finished:
                    tasks.start_soon(ask, each)
        return [values[each.rollout] for each in finished]

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Forget nothing."""


METHODS: Final = ("extend", "finish", "forget")
"""The methods of a scorer that take a priority."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ScorerCapabilities:
    """The optional abilities of a scorer, as its attribute ``capabilities``.

    Whether a scorer takes priorities (:class:`~oppo.models.PrioritisedScorer`) is known from its signatures.

    Attributes:
        concurrent: calls may overlap: calls for rollouts that finish later, while those for earlier ones go on. Read
            once, before the first step.
        time_slice: how long a call that nothing waits for should last. Read once, before the first step.
        samples: returns what the scorer measured of each rollout since the last call, by metric; the mean over a step
            is the metric of that step.
        extras: returns what the scorer noted of rollouts since the last call, as JSON values by name, by rollout; the
            samples of a run show it.
        at_work: returns the names of the calls in progress, for a watchdog; empty without one.
        close: ends what the scorer has started; idempotent.
    """

    concurrent: bool = False
    time_slice: TimeSlice = DEFAULT_TIME_SLICE
    samples: Callable[[], Mapping[str, Sequence[float]]] = dict
    extras: Callable[[], Mapping[int, Mapping[str, object]]] = dict
    at_work: Callable[[], str] = str
    close: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True)
class Extras:
    """Notes of a scorer on rollouts, for the observers of a run: JSON values by name, by rollout."""

    values: Mapping[int, Mapping[str, object]]


def capabilities_of(scorer: object) -> ScorerCapabilities:
    """Return a scorer's capabilities: the defaults if it has none."""
    found = getattr(scorer, "capabilities", None)
    if found is None:
        return ScorerCapabilities()
    if not isinstance(found, ScorerCapabilities):
        raise ProtocolError(
            f"the capabilities of a scorer are an oppo.scorers.ScorerCapabilities; {type(scorer).__name__} has "
            f"{type(found).__name__}"
        )
    return found


@dataclass(slots=True, eq=False)
class RolloutSession:
    """A reader's session: the part of one rollout that it has received.

    Attributes:
        prompt: tokens of the prompt.
        version: of the weights that read it first.
        received: tokens received, prompt and response together.
    """

    rollout: int
    prompt: int
    version: int = 0
    received: int = 0

    @property
    def response(self) -> int:
        return self.received - self.prompt

    def holds(self, response: Response) -> bool:
        return self.received == len(response.prompt.tokens) + len(response)


S = TypeVar("S", bound=RolloutSession)


class RolloutSessions(dict[int, S], Generic[S]):
    """The sessions of a reader, by rollout; a rollout that is not open raises ``ProtocolError``.

    Args:
        reader: its name, for errors.
        new: returns the session of a prompt, of which nothing is received yet.
        vocabulary: upper bound of the token ids that it knows; ``None``: any.
        longest: tokens of a sequence that it reads at most; ``None``: any number.
        remedy: what helps where a sequence is longer.

    Example:
        >>> import numpy as np
        >>> sessions = RolloutSessions("a reader", lambda prompt: RolloutSession(prompt.rollout, len(prompt.tokens)))
        >>> sessions.receive(Prompt(7, 7, np.array([1, 2, 3], np.int32))).received
        3
    """

    def __init__(
        self,
        reader: str,
        new: Callable[[Prompt], S],
        *,
        vocabulary: int | None = None,
        longest: int | None = None,
        remedy: str = "shorten the prompts or lower max_new_tokens",
    ) -> None:
        super().__init__()
        self._reader = reader
        self._new = new
        self._vocabulary = vocabulary
        self._longest = longest
        self._remedy = remedy

    def __missing__(self, rollout: int) -> S:
        raise ProtocolError(f"rollout {rollout} is unknown to {self._reader}: its Prompt must come first")

    def receive(self, event: Growth, extra: TokenColumns = NO_COLUMNS) -> S:
        """Return the session that an event opens or continues, with the event's tokens counted."""
        rollout, reader = event.rollout, self._reader
        if isinstance(event, Prompt):
            if rollout in self:
                raise ProtocolError(f"rollout {rollout} is open in {reader} already; it came a second time")
            session = self._new(event)
        else:
            session = self[rollout]
            if event.start != session.received - session.prompt:
                raise ProtocolError(
                    f"rollout {rollout}: {reader} expected tokens from {session.response} of the response on, but "
                    f"{type(event).__name__} starts at {event.start}"
                )
        length = session.received + len(event.tokens)
        if self._longest is not None and length > self._longest:
            raise ModelError(
                f"rollout {rollout} has {length} tokens, prompt included, but {reader} reads at most {self._longest}: "
                f"{self._remedy}"
            )
        if self._vocabulary is not None:
            for ids in (event.tokens, *(column.ids for column in extra if column.of_tokens)):
                if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocabulary:
                    raise ModelError(
                        f"rollout {rollout} has token ids from {ids.min()} to {ids.max()}, but the vocabulary of "
                        f"{reader} has {self._vocabulary}: policy and scorers must share a tokenizer"
                    )
        session.received = length
        self[rollout] = session
        return session

    def whole(self, rollout: int, length: int) -> S:
        session = self[rollout]
        if session.response != length:
            raise ProtocolError(
                f"rollout {rollout} finished with {session.prompt + length} tokens, prompt included, but "
                f"{self._reader} was given {session.received}: extend it by the rest first"
            )
        return session

    def forget(self, rollouts: Iterable[int]) -> None:
        for rollout in rollouts:
            self.pop(rollout, None)


def prioritised(scorer: Scorer[T]) -> PrioritisedScorer[T]:
    """Return ``scorer``, or a wrapper that takes the keyword ``priority`` if none of its methods does.

    Raises:
        ProtocolError: some of its methods take the keyword, others do not.
    """
    lacking = [name for name in METHODS if "priority" not in inspect.signature(getattr(scorer, name)).parameters]
    if not lacking:
        return cast("PrioritisedScorer[T]", scorer)
    if len(lacking) < len(METHODS):
        raise ProtocolError(
            f"expected the keyword `priority` in all of {', '.join(METHODS)} or in none: a call without it would wait "
            f"for urgent calls of the same scorer; got {type(scorer).__name__}, which lacks it in "
            f"{', '.join(lacking)}: declare it there too, and hand it to the place"
        )
    return _InOrder(scorer)


CALLED: Final = "{}() of the scorer"


class _InOrder(Generic[T]):
    def __init__(self, scorer: Scorer[T]) -> None:
        self._scorer = scorer

    @property
    def version(self) -> int:
        return self._scorer.version

    async def extend(self, events: Sequence[Growth], *, priority: Priority = IN_ORDER) -> None:
        with urged(priority):
            await promised(self._scorer.extend(events), CALLED.format("extend"))

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[T]:
        with urged(priority):
            return await promised(self._scorer.finish(finished), CALLED.format("finish"))

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        with urged(priority):
            await promised(self._scorer.forget(rollouts), CALLED.format("forget"))


class ByColumn(Shared, Generic[T]):
    """Several scorers as one: each rollout is read by the one that a column of its prompt's row names.

    Args:
        column: of the data.
        scorers: of frozen weights, by the value of the column.
    """

    version = 0

    def __init__(self, column: str, scorers: Mapping[str, Scorer[T]]) -> None:
        self.capabilities = ScorerCapabilities(
            time_slice=min(
                (capabilities_of(each).time_slice for each in scorers.values()), key=lambda each: each.seconds
            ),
        )
        self._column = column
        self._given = tuple(scorers.values())
        self._scorers = {name: prioritised(each) for name, each in scorers.items()}
        self._of: dict[int, str] = {}

    async def _open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(await entered(self._given))

    async def extend(self, events: Sequence[Growth], *, priority: Priority = IN_ORDER) -> None:
        for event in events:
            if isinstance(event, Prompt):
                named = event.columns.get(self._column)
                if not isinstance(named, str) or named not in self._scorers:
                    raise ModelError(
                        f"rollout {event.rollout}: expected one of {', '.join(self._scorers)} in the column "
                        f"{self._column!r} of its prompt, got {shown(named)}: correct the data, or name a model for it"
                    )
                self._of[event.rollout] = named
        for scorer, part in self._parts(events):
            await scorer.extend(part, priority=priority)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[T]:
        values: dict[int, T] = {}
        for scorer, part in self._parts(finished):
            found = await scorer.finish(part, priority=priority)
            values |= {each.rollout: value for each, value in zip(part, found, strict=True)}
        for each in finished:
            self._of.pop(each.rollout, None)
        return [values[each.rollout] for each in finished]

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        for name, scorer in self._scorers.items():
            if part := [each for each in rollouts if self._of.get(each) == name]:
                await scorer.forget(part, priority=priority)
        for rollout in rollouts:
            self._of.pop(rollout, None)

    def _parts(self, events: Sequence[E]) -> Iterator[tuple[PrioritisedScorer[T], list[E]]]:
        for name, scorer in self._scorers.items():
            if part := [event for event in events if self._of[event.rollout] == name]:
                yield scorer, part


SIBLING: Final = "sibling"
"""The column of a :class:`~oppo.events.Prompt` with the tokens of another response to it; ``None``: none passed."""

TAUGHT: Final = "teacher/taught"
"""The metric of :class:`BehindPrompt`: 1 for a rollout with a prompt of the teacher, 0 for one without."""


@dataclass(frozen=True, slots=True)
class Untaught:
    """What a teacher gives that says nothing of a response; ``top_k``: the ids that it lists of others, if any."""

    top_k: int | None = None

    def of(self, tokens: int) -> FloatArray | TopLogprobs:
        """Return what stands for them in a batch: NaN, float32 [tokens], with ids of 0."""
        nan = np.full(tokens, np.nan, np.float32)
        if self.top_k is None:
            return nan
        ids = np.zeros((tokens, self.top_k), np.int32)
        return TopLogprobs(nan, ids, np.full((tokens, self.top_k + 1), np.nan, np.float32))


Lesson: TypeAlias = FloatArray | TopLogprobs | Untaught
"""What a teacher says of a response of n tokens: their log-probs, float32 [n]; with its likeliest ids; or nothing."""


class BehindPrompt(Shared, Generic[T]):
    """A scorer that reads each response behind another prompt than the policy did, with the same tokens of a response.

    It follows the trainer's weights, and keeps state, if ``scorer`` does.

    Args:
        scorer: of per-token results, which are of the response's tokens whatever its prompt.
        prompt: returns the prompt that it reads in place of one of the policy's; ``None``: it does not read this
            rollout, whose value is ``otherwise``.
        otherwise: for example :class:`Untaught`.
    """

    def __init__(self, scorer: Scorer[T], prompt: Callable[[Prompt], Prompt | None], otherwise: T) -> None:
        can = capabilities_of(scorer)
        self.capabilities = replace(can, samples=lambda: {**can.samples(), **self._taught()})
        self.prompt = prompt
        self._given = scorer
        self._scorer = prioritised(scorer)
        self._otherwise = otherwise
        self._prompts: dict[int, Prompt | None] = {}
        self._finished: list[float] = []
        for name in ("load", "serves", "tensors", "copied", "state_dict", "load_state_dict"):
            if hasattr(scorer, name):
                setattr(self, name, getattr(scorer, name))

    async def _open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(await entered([self._given]))

    @property
    def version(self) -> int:
        return self._scorer.version

    async def extend(self, events: Sequence[Growth], *, priority: Priority = IN_ORDER) -> None:
        read = list[Growth]()
        for event in events:
            if isinstance(event, Prompt):
                self._prompts[event.rollout] = self.prompt(event)
            if (prompt := self._prompts[event.rollout]) is not None:
                read.append(prompt if isinstance(event, Prompt) else event)
        if read:
            await self._scorer.extend(read, priority=priority)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[T]:
        prompts = {each.rollout: self._prompts.get(each.rollout) for each in finished}
        read = [
            replace(each, response=replace(each.response, prompt=prompt))
            for each in finished
            if (prompt := prompts[each.rollout]) is not None
        ]
        values = await self._scorer.finish(read, priority=priority) if read else []
        known = {each.rollout: value for each, value in zip(read, values, strict=True)}
        for each in finished:
            self._prompts.pop(each.rollout, None)
            self._finished.append(float(each.rollout in known))
        return [known.get(each.rollout, self._otherwise) for each in finished]

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        if known := [each for each in rollouts if self._prompts.pop(each, None) is not None]:
            await self._scorer.forget(known, priority=priority)

    def _taught(self) -> Mapping[str, Sequence[float]]:
        taught, self._finished = self._finished, []
        return {TAUGHT: taught} if taught else {}


class OfLastSegment(Shared):
    """A reward that scores a rollout in segments by its last one: all segments have that score.

    Each is read while it grows, since it may be the last; to ``scorer`` it is the response of a rollout without
    branches. What earlier segments have of rewards at tokens is their sum.

    Args:
        scorer: of frozen weights.
    """

    def __init__(self, scorer: Scorer[float | Drop]) -> None:
        self.capabilities = capabilities_of(scorer)
        self._given = scorer
        self._scorer = prioritised(scorer)
        self._scores: dict[int, list[float | Drop]] = {}  # for each segment, by the rollout of the first
        self._news = anyio.Event()

    async def _open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(await entered([self._given]))

    @property
    def version(self) -> int:
        return self._scorer.version

    async def extend(self, events: Sequence[Growth], *, priority: Priority = IN_ORDER) -> None:
        read = [replace(event, branch=0) if isinstance(event, Prompt) else event for event in events]
        await self._scorer.extend(read, priority=priority)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[float | Drop]:
        last = [each for each in finished if each.response.prompt.branch + 1 == each.segments]
        if last:
            alone = [_unbranched(each) for each in last]
            for each, score in zip(last, await self._scorer.finish(alone, priority=priority), strict=True):
                self._scores[each.response.prompt.first] = [score] * each.segments
            self._news.set()
            self._news = anyio.Event()
        known = {each.rollout for each in last}
        if earlier := [each.rollout for each in finished if each.rollout not in known]:
            await self._scorer.forget(earlier, priority=priority)
        found = list[float | Drop]()
        for each in finished:
            prompt = each.response.prompt
            while not (left := self._scores.get(prompt.first)):  # a call for the last one goes on
                await self._news.wait()
            score = left.pop()
            if not left:
                del self._scores[prompt.first]
            if isinstance(score, TokenRewards) and each.rollout not in known:
                score = NamedScores(score.terms) if score.terms else float(score)
            found.append(score)
        return found

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        await self._scorer.forget(rollouts, priority=priority)


def _unbranched(finish: Finish) -> Finish:
    response = finish.response
    return replace(finish, response=replace(response, prompt=replace(response.prompt, branch=0)))
