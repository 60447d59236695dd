"""Reward functions: plain Python as a scorer, and never a silent zero.

A function is called for rollouts that finish together, or for each alone, with what it asks for by name, as TRL calls
one: ``f(prompts, completions, **columns)``. It returns one finite number for each, or a :class:`~oppo.Drop` with its
reason (:meth:`oppo.Drop.because`). Anything else is a failure, with a chosen consequence: the run stops with a
:class:`~oppo.errors.RewardError` that names the rollout, or the function is called again, or the rollout is dropped.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import index
from typing import Any, ClassVar, Final, Literal, Self, SupportsFloat, SupportsIndex, TypeAlias, TypeVar, cast

import anyio
import numpy as np

from oppo import user_code
from oppo.errors import RewardError, counted, enumerated, one_line, shown
from oppo.events import Chunk, Drop, Finish, Prompt, ToolTokens
from oppo.log import logger
from oppo.models import RewardFunction, Scorer
from oppo.placement.place import Closing
from oppo.returns import TokenRewards
from oppo.scorers import ScorerCapabilities, WholeScorer
from oppo.user_code import CallsFunction, CheckedFunction, UserCalls, UserFunction

K = TypeVar("K")

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"  # the text of bytes that are no character


@dataclass(frozen=True, slots=True)
class ByCharacter:
    """Rewards by the position of a character in the completion: the token that completes it is rewarded.

    A negative position counts from the end.

    Example:
        >>> def steps(prompts, completions):
        ...     return [ByCharacter({at: 0.1 for at, c in enumerate(text) if c == ";"}) for text in completions]
        >>> steps(["2+2"], ["4;"])
        [ByCharacter(rewards={1: 0.1})]
    """

    rewards: Mapping[int, float]


class ByTurn(float):
    """Rewards of the turns of a response, each earned by the last token of its turn; as a number, their sum.

    Args:
        rewards: of the first turns, in order; or by the number of a turn, from 0, or from the end: -1 is the last.

    Example:
        >>> def moves(prompts, completions, boards):
        ...     return [ByTurn([0.1 * legal(board) for board in each]) for each in boards]
        >>> ByTurn([0.5, 1.0]).rewards
        {0: 0.5, 1: 1.0}
    """

    __slots__ = ("rewards",)

    rewards: Mapping[int, float]

    def __new__(cls, rewards: Mapping[int, float] | Sequence[float]) -> Self:
        named = _by_position(rewards if isinstance(rewards, Mapping) else dict(enumerate(rewards)))
        score = super().__new__(cls, sum(named.values()))
        score.rewards = named
        return score

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self.rewards,)

    def __repr__(self) -> str:
        return f"ByTurn({self.rewards})"


Placed: TypeAlias = TokenRewards | ByCharacter | ByTurn | Mapping[int, float]
"""Rewards by token, by the position of a character, by turn, or by the position of a token."""


def is_placed(item: object) -> bool:
    one_row = isinstance(item, np.ndarray) and item.ndim == 1
    return one_row or isinstance(item, TokenRewards | ByCharacter | ByTurn | Mapping | list | tuple)


def placed(item: object) -> Placed:
    if isinstance(item, ByCharacter):
        return ByCharacter(_by_position(item.rewards))
    if isinstance(item, ByTurn):
        return item
    if isinstance(item, Mapping):
        return _by_position(item)
    rewards = item.rewards if isinstance(item, TokenRewards) else cast("Sequence[object]", item)
    return TokenRewards([_number(reward) for reward in rewards])


def token_rewards(rewards: Placed, finish: Finish, decode: Callable[[Sequence[int]], str]) -> TokenRewards:
    response = finish.response
    if isinstance(rewards, ByTurn):
        return TokenRewards.by_turn(finish, rewards.rewards)
    if isinstance(rewards, ByCharacter):
        rewards = _by_token(rewards.rewards, response.tokens.tolist(), decode)
    if isinstance(rewards, Mapping):
        return TokenRewards.at(len(response), rewards)
    if len(rewards.rewards) != len(response):
        given, made = counted(len(rewards.rewards), "reward"), counted(len(response), "token")
        raise ValueError(f"got {given} for a completion of {made}, each of which a list rewards: its score is a number")
    return rewards


def _by_token(
    rewards: Mapping[int, float], tokens: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> dict[int, float]:
    # The token of a character is the one from which on the decoded text has all up to it. Texts are compared, not their
    # lengths: the first tokens of a character decode to replacement characters, in some vocabularies to one each.
    text = decode(tokens)
    partial = set[int]() if text.isascii() else {token for token in set(tokens) if REPLACEMENT in decode([token])}
    ends = [count for count, token in enumerate(tokens, 1) if token in partial]
    by_token: dict[int, float] = {}
    for position, reward in rewards.items():
        at = position + len(text) if position < 0 else position
        if not 0 <= at < len(text):
            raise ValueError(f"there is no character {position} in a completion of {len(text)} characters")
        token = _completing(text, at, tokens, ends, decode)
        by_token[token] = by_token.get(token, 0.0) + reward
    return by_token


def _completing(
    text: str, at: int, tokens: Sequence[int], ends: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> int:
    def has(count: int) -> bool:
        return decode(tokens[:count]).startswith(text[: at + 1])

    count = 1 + bisect_left(range(1, len(tokens)), True, key=has)
    # A decoder of bytes may take a character back while the one behind it is incomplete: all bytes of a run are read
    # as one. Where an incomplete character leaves this one alone, it is in no such run.
    lost = False
    for end in ends[bisect_right(ends, count) :]:
        if not has(end):
            lost, count = True, end + 1
        elif lost and not has(count):  # complete characters behind the run do not bring it back, this token does
            lost, count = False, end
        elif not text.startswith(decode(tokens[:end])):
            break
    return count - 1


def _by_position(rewards: Mapping[K, object]) -> dict[int, float]:
    if not all(isinstance(position, SupportsIndex) for position in rewards):
        raise ValueError("a position must be a whole number")
    return {index(cast("SupportsIndex", position)): _number(reward) for position, reward in rewards.items()}


def _number(item: object) -> float:
    number = float(item) if isinstance(item, SupportsFloat) and not isinstance(item, complex) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"{shown(item)} is no finite number")
    return number


ARGUMENTS: Final = (
    *("prompts", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric", "environments"),
)
"""The arguments of a reward function that are no columns, by TRL's names."""

LOGS: Final = frozenset({"log_extra", "log_metric"})

Message: TypeAlias = Mapping[str, object]

ReturnedScore: TypeAlias = float | Placed | Drop | None
"""A finite number, or several at places of the response; a ``Drop`` by choice; ``None``: the reward does not apply."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The progress of a run, by TRL's names.

    Attributes:
        global_step: version of the weights that sampled the newest of the completions.
        max_steps: updates of the run; 0 if not known.
    """

    global_step: int
    max_steps: int = 0


@dataclass(slots=True)
class CallLog:
    count: int
    extras: dict[str, list[object]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Iterable[object]) -> None:
        items = list(values)
        if len(items) != self.count:
            raise ValueError(
                f"log_extra({column!r}, values) takes one value for each of {self.count} completions; got {len(items)}"
            )
        self.extras[str(column)] = [_json(item) for item in items]

    def log_metric(self, name: str, value: SupportsFloat) -> None:
        if not (isinstance(name, str) and name):
            raise ValueError(f"log_metric(name, value) takes a text as the name; got {shown(name)}")
        from oppo.report.metrics import taken  # noqa: PLC0415 - a reward needs no terminal

        if fault := taken(name, f"log_metric({name!r}, value)"):
            raise ValueError(fault)
        self.metrics.setdefault(name, []).append(_number(value))


def _json(item: object) -> object:
    plain = item.item() if isinstance(item, np.generic) else item
    try:
        json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError):
        return str(item)
    return plain


def text_of(completion: str | Sequence[Message]) -> str:
    """Return the text of a completion; of chat messages, of the last one.

    Example:
        >>> text_of([{"role": "assistant", "content": "4"}])
        '4'
    """
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


class RewardFailure(RewardError):  # noqa: N818 - it says what happened
    """A reward function raised, or returned something that is no score; the caller was not at fault."""

    names_rollouts: ClassVar[bool] = True


class Rollouts(tuple[int, ...]):
    # As errors show them.
    __slots__ = ()

    def __str__(self) -> str:
        return f"rollouts {enumerated(self)}"


@dataclass(frozen=True)
class CalledFunction(CheckedFunction[Mapping[str, object], Rollouts, tuple[list[ReturnedScore], CallLog]]):
    # `logs`: the names of LOGS in its signature.
    kind: ClassVar[str] = "reward function"
    error: ClassVar[type[RewardFailure]] = RewardFailure
    optional: bool = False
    logs: frozenset[str] = frozenset()

    def made(self, given: Mapping[str, object]) -> object:
        count = max((len(each) for each in given.values() if isinstance(each, list)), default=0)
        log = CallLog(count)
        result = self.user.function(**given, **{name: getattr(log, name) for name in self.logs})
        return self._both(result, log) if isinstance(result, Awaitable) else (result, log)

    async def _both(self, result: Awaitable[object], log: CallLog) -> tuple[object, CallLog]:
        return await result, log

    def checked(self, result: object, where: Rollouts) -> tuple[list[ReturnedScore], CallLog]:
        result, log = cast("tuple[object, CallLog]", result)
        items, wrong = _items(result, len(where))
        if wrong:
            raise self.failure(
                f"must return {len(where)} numbers, one for each completion, in a list; got {wrong}", where
            )
        return [self._score(item, rollout) for item, rollout in zip(items, where, strict=True)], log

    def _score(self, item: object, rollout: int) -> ReturnedScore:
        if item is None and self.optional:
            return None
        if isinstance(item, Drop):
            return replace(item, rollout=rollout)
        if is_placed(item):
            return self._placed(item, rollout)
        score = math.nan
        complex_array = getattr(getattr(item, "dtype", None), "kind", "") == "c"
        if isinstance(item, SupportsFloat) and not isinstance(item, complex) and not complex_array:
            with suppress(Exception):  # an array of several numbers, a number too large, or a __float__ that raises
                score = float(item)
        if not math.isfinite(score):
            raise RewardFailure(
                f"{self.title} must return a finite number for each completion; "
                f"for rollout {rollout} it returned {shown(item)}"
            )
        return score

    def _placed(self, item: object, rollout: int) -> Placed:
        try:
            return placed(item)
        except Exception as error:  # any kind: the objects are the function's own
            raise RewardFailure(
                f"{self.title} must return finite numbers, one for each token or by whole "
                f"positions; for rollout {rollout} it returned {shown(item)}: {one_line(error)}"
            ) from error


def _items(result: object, count: int) -> tuple[Sequence[object], str]:
    # The items of a result and the fault of the whole. A generator is read up to one item too many: it may never end.
    ordered = isinstance(result, Iterable) and not isinstance(result, str | bytes | Mapping | AbstractSet)
    if not ordered:
        return (), shown(result)
    result = getattr(result, "detach", lambda: result)()  # of a tensor, which may have a gradient
    if tuple(getattr(result, "shape", ())) == (count, 1):  # what a head of one label gives: a score each
        result = cast("Any", result).reshape(count)
    items = list(islice(cast("Iterable[object]", result), count + 1))
    return items, "" if len(items) == count else f"{len(items)}" if len(items) < count else f"more than {count}"


def load_function(spec: str) -> RewardFunction:
    """Return the reward function that ``file.py:function`` names; the file is run as a module of its own.

    Raises:
        RewardError: there is no such file or function, the file cannot be run, or the function takes none of
            :data:`ARGUMENTS`.
    """
    function = user_code.load_function(spec, RewardError)
    parameters_of(function, spec.rpartition(":")[2])
    return function


def parameters_of(function: Callable[..., object], name: str) -> tuple[Sequence[inspect.Parameter], bool]:
    # The named parameters, and whether it takes `**`.
    kinds = inspect.Parameter
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature: the call will tell
        return [kinds(each, kinds.KEYWORD_ONLY) for each in ARGUMENTS[:2]], False
    parameters = signature.parameters.values()
    takes_all = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    if not takes_all and signature.parameters.keys().isdisjoint(ARGUMENTS):
        raise RewardError(
            f"reward function {name!r} must take (prompts, completions, **columns); its signature is {name}{signature}"
        )
    return [p for p in parameters if p.kind in {kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY}], takes_all


OnFailure: TypeAlias = Literal["fail", "drop", "retry"]
"""The consequence of a failure: the run stops; the rollout is dropped; the function is called again, then it stops."""

PAUSES = (1.0, 5.0, 25.0)  # seconds before each further attempt: a restarting service is back within half a minute
DOES_NOT_APPLY = "the reward does not apply"
"""Reason of a drop for a rollout for which an optional function returned ``None``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInputs:
    """The sources of arguments of reward functions beside columns.

    Attributes:
        prompt_column: the column passed as ``prompts``.
        conversation: returns a complete response as chat messages, where tools answer in it:
            :meth:`oppo.hf.ChatFormat.conversation`; ``None``: it is one message.
        environments: returns the instance of a rollout: :meth:`oppo.environments.EnvironmentClass.instance`.
        max_steps: of the run, for ``trainer_state``.
    """

    prompt_column: str = "prompt"
    conversation: Callable[[Finish], Sequence[Message]] | None = None
    environments: Callable[[Finish], Awaitable[object]] | None = None
    max_steps: int = 0


_Work: TypeAlias = Callable[[Sequence[Finish]], Awaitable[list[float | Drop]]]


class FunctionReward(
    CallsFunction[Mapping[str, object], Rollouts, tuple[list[ReturnedScore], CallLog]],
    Closing,
    Scorer[float | Drop],
):
    """A Python function as the reward; it reads whole responses only, so it has nothing to prefill.

    Any error of the function counts as its failure, ``sys.exit()`` and a ``CancelledError`` of its own included.

    Args:
        function: ``f(prompts, completions, **columns)``, sync or async, or its ``file.py:name``. It gets the
            :data:`ARGUMENTS` and columns that it names, or all if it takes ``**``: lists with an item for each rollout,
            except state and logs. ``prompts`` are the data's prompts if it has such a column, else texts.
            ``completions`` are texts, or, of prompts that are chat messages, lists of messages, as in TRL;
            ``completion_ids`` their tokens; ``trainer_state`` a :class:`TrainerState`. ``log_extra(column, values)``
            and ``log_metric(name, value)`` log. Columns are copies of the data's. For each rollout it returns a number,
            or rewards at places in the response: one for each token, a mapping from positions of tokens, a
            :class:`ByCharacter`, or a :class:`ByTurn`. A sync function runs in a thread of its own, or inline on a loop
            of virtual time; one that never returns keeps neither a cancelled run nor the process from ending. Calls of
            an async function overlap.
        decode: token ids to text, without special tokens.
        name: of the function in errors.
        on_failure: ``fail`` raises. ``retry`` calls again after each of :data:`PAUSES`, then raises. ``drop`` calls
            again for each rollout alone and drops those that still fail, so the drops do not depend on which rollouts
            finished together. A missing column always raises.
        process: call the function in processes of its own: it may then hold the interpreter lock or crash. It must be
            sync, and importable by name.
        concurrency: calls that may overlap; by default 64 of an async function and 1 of a sync one. Overlapping calls
            of a sync function are made in as many threads or processes.
        timeout: seconds after which a call has failed; ``None``: never (:class:`oppo.user_code.UserCalls`).
        each: call the function for each rollout alone.
        optional: ``None`` as a score means that the reward does not apply: the rollout is dropped, or, as a part of
            :class:`Rewards`, scored by the other parts. Otherwise it is a failure.
        inputs: sources of other arguments.

    Raises:
        ConfigError: ``concurrency`` or ``timeout`` is out of range.
        RewardError: the function takes none of :data:`ARGUMENTS`, or cannot be called in a process.
    """

    version = 0

    def __init__(
        self,
        function: RewardFunction | str,
        decode: Callable[[Sequence[int]], str],
        *,
        name: str | None = None,
        on_failure: OnFailure = "fail",
        process: bool = False,
        concurrency: int | None = None,
        timeout: float | None = None,
        each: bool = False,
        optional: bool = False,
        inputs: RewardInputs = RewardInputs(),
    ) -> None:
        user = UserFunction.of(function, name, RewardError)
        named, self._takes_all = parameters_of(user.function, user.name)
        names = {p.name for p in named}
        self._given = frozenset(each for each in ARGUMENTS if self._takes_all or each in names)
        self._inputs = inputs
        if inputs.environments is None:
            self._given -= {"environments"}
            if any(p.name == "environments" and p.default is inspect.Parameter.empty for p in named):
                raise RewardError(
                    f"reward function {user.name!r} asks for environments, and there are none: give a class of them, "
                    "environment.factory in settings"
                )
        elif process and "environments" in self._given:
            raise RewardError(
                f"reward function {user.name!r} asks for environments, which are objects of this process: leave "
                "process out"
            )
        self._named = names.difference(ARGUMENTS)
        self._required = [p.name for p in named if p.name in self._named and p.default is inspect.Parameter.empty]
        self.name = user.name
        self._function = CalledFunction(user, optional, self._given & LOGS)
        if concurrency is None and not user.is_async:
            concurrency = 1
        self._calls = UserCalls(self._function, concurrency=concurrency, timeout=timeout, process=process)
        self._decode = decode
        self._on_failure = on_failure
        self._pauses = PAUSES if on_failure == "retry" else ()
        self._each = each
        self._samples: dict[str, list[float]] = {}
        self._extras: dict[int, dict[str, object]] = {}

    @property
    def capabilities(self) -> ScorerCapabilities:
        return ScorerCapabilities(
            concurrent=self._calls.concurrent,
            samples=self._measured,
            extras=self._noted,
            at_work=lambda: self._calls.at_work,
            close=self.close,
        )

    def _measured(self) -> Mapping[str, Sequence[float]]:
        samples, self._samples = self._samples, {}
        return samples

    def _noted(self) -> Mapping[int, Mapping[str, object]]:
        extras, self._extras = self._extras, {}
        return extras

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        """Read nothing: a function sees whole responses."""

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Do nothing: there are no sessions."""

    async def finish(self, finished: Sequence[Finish]) -> list[float | Drop]:
        """Return the function's score of each rollout, or a ``Drop`` with its reason.

        Raises:
            RewardError: the function failed, and failures are not dropped.
        """
        if self._each and len(finished) > 1:
            return await self._apart(self.finish, finished)
        return await self._together(finished) if finished else []

    async def _together(self, finished: Sequence[Finish]) -> list[float | Drop]:
        attempts = len(self._pauses) + 1
        for attempt, pause in enumerate(self._pauses, 2):
            try:
                return await self._scored(finished)
            except RewardFailure as failure:
                logger.warning(f"{failure}; attempt {attempt} of {attempts} follows in {pause:g} s")
                with self._calls.working(f", which failed and is called again after {pause:g} s"):
                    await anyio.sleep(pause)
        try:
            return await self._scored(finished)
        except RewardFailure as failure:
            if self._on_failure != "drop":
                choice = "on_failure decides: 'fail' ends the run, 'retry' calls again, 'drop' leaves out what fails"
                failure.add_note(f"it was the last of {attempts} attempts" if self._pauses else choice)
                raise
        return await self._apart(self._or_drop, finished)

    async def _or_drop(self, finished: Sequence[Finish]) -> list[float | Drop]:
        try:
            return await self._scored(finished)
        except RewardFailure as failure:
            return [Drop(each.rollout, str(failure)) for each in finished]

    async def _apart(self, work: _Work, finished: Sequence[Finish]) -> list[float | Drop]:
        async def score(one: Finish) -> float | Drop:
            (found,) = await work([one])
            return found

        return [*await WholeScorer(score).finish(finished)]

    async def _scored(self, finished: Sequence[Finish]) -> list[float | Drop]:
        scores = await self._attempt(finished)
        return [
            Drop(each.rollout, DOES_NOT_APPLY) if score is None else self._valued(score, each)
            for each, score in zip(finished, scores, strict=True)
        ]

    def _valued(self, score: float | Placed | Drop, finish: Finish) -> float | Drop:
        if isinstance(score, Drop) or not is_placed(score):
            return cast("float | Drop", score)
        try:
            return token_rewards(cast("Placed", score), finish, self._decode)
        except ValueError as error:
            raise self._function.failure(
                f"returned rewards that do not fit the completion: {error}", Rollouts([finish.rollout])
            ) from error

    async def _attempt(self, finished: Sequence[Finish]) -> list[ReturnedScore]:
        arguments, rollouts = self._arguments(finished), Rollouts(each.rollout for each in finished)
        if self._inputs.environments is not None and "environments" in self._given:
            arguments["environments"] = [await self._inputs.environments(each) for each in finished]
        scores, log = await self._calls.make(arguments, rollouts)
        for name, values in log.metrics.items():  # weighted by completions, however many finish together
            self._samples.setdefault(name, []).extend(value for value in values for _ in rollouts)
        for column, items in log.extras.items():
            for rollout, item in zip(rollouts, items, strict=True):
                self._extras.setdefault(rollout, {})[column] = item
        return scores

    def _arguments(self, finished: Sequence[Finish]) -> dict[str, object]:
        responses = [each.response for each in finished]
        rows = [each.prompt.columns for each in responses]
        columns = self.arguments_of({name for row in rows for name in row})
        wanted = columns if self._takes_all else [name for name in columns if name in self._named]
        # Copies, since rollouts of a group, and later epochs, are given the same columns again.
        makes: dict[str, Callable[[], object]] = {
            "prompts": lambda: [
                copy.deepcopy(each.prompt.columns.get(self._inputs.prompt_column))
                or self._decode(each.prompt.tokens.tolist())
                for each in responses
            ],
            "completions": lambda: [self._completion(each) for each in finished],
            "completion_ids": lambda: [each.tokens.tolist() for each in responses],
            "trainer_state": lambda: TrainerState(
                max((int(each.versions[-1]) for each in responses if len(each)), default=0), self._inputs.max_steps
            ),
        }
        return {
            **{name: make() for name, make in makes.items() if name in self._given},
            **{name: [copy.deepcopy(row.get(name)) for row in rows] for name in wanted},
        }

    def _completion(self, finish: Finish) -> str | list[Message]:
        response = finish.response
        chat = isinstance(response.prompt.columns.get(self._inputs.prompt_column), list)
        if chat and self._inputs.conversation is not None:
            return [*self._inputs.conversation(finish)]
        text = self._decode(response.tokens.tolist())
        return [{"role": "assistant", "content": text}] if chat else text

    def arguments_of(self, names: Collection[str]) -> list[str]:
        """Return the data's columns that are arguments of the function, sorted.

        Raises:
            RewardError: one bears the name of another argument, or a required one is missing.
        """
        columns = sorted({*names} - {self._inputs.prompt_column})
        if clash := [name for name in columns if name in {*ARGUMENTS[:2], *self._given}]:
            raise RewardError(
                f"the data's column {clash[0]!r} bears the name of an argument of reward functions: rename it"
            )
        if missing := [name for name in self._required if name not in columns]:
            raise RewardError(
                f"reward function {self.name!r} asks for {missing[0]!r}, which is no column of the data; "
                f"the columns there are {', '.join(columns) or '(none)'}"
            )
        return columns
