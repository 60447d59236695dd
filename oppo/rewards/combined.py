"""Several rewards as one, a weighted sum of functions and models; and the reward that ``file.py:name`` names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, TypeGuard, TypeVar, cast, get_args

import anyio

from oppo import user_code
from oppo.declared import require_real
from oppo.errors import ConfigError, RewardError, SessionsLost, as_itself, contained, shown
from oppo.events import Chunk, Drop, Finish, Prompt, ToolTokens
from oppo.models import RewardFunction, Scorer, Shared, entered
from oppo.placement import Hosted, Hosting, Make
from oppo.returns import NamedScores, TokenRewards, weighted_sum
from oppo.rewards.function import ARGUMENTS, DOES_NOT_APPLY, FunctionReward
from oppo.scheduling import DEFAULT_TIME_SLICE, IN_ORDER, Preempted, Priority
from oppo.scorers import ScorerCapabilities, capabilities_of, prioritised
from oppo.user_code import LoadedFile, UserFunction

Weighted: TypeAlias = tuple[float, "RewardFunction | Scorer[float | Drop] | str"]
"""A weight, and a reward: a function, its ``file.py:name``, or a scorer such as a reward model."""

OnDrop: TypeAlias = Literal["drop", "skip"]
"""When a part drops a rollout: the rollout is dropped, or the part counts as one that does not apply."""

NONE_APPLIES = "none of its rewards applies"  # reason of a drop for a rollout to which no part applies


class Rewards(Shared, Scorer["float | Drop"]):
    """The weighted sum of several rewards.

    A function that returns ``None`` for a rollout does not apply to it and adds nothing; the other weights stay. A
    ``Drop`` (:meth:`oppo.Drop.because`) drops the rollout, or leaves it to the others, as ``on_drop`` says. The mean of
    each part, and the share of the rollouts that it applies to, are the metrics ``rewards/NAME/mean`` and
    ``rewards/NAME/share``.

    Args:
        parts: weight and reward of each, by name.
        decode: token ids to text, without special tokens; needed for functions.
        on_drop: the effect of a ``Drop`` by a part, of all parts or by name.
        options: of the :class:`FunctionReward` of each function; ``process`` is for sync functions.

    Raises:
        ConfigError: there is no part, a weight is no finite number, or a function has no ``decode``.
        RewardError: a function takes no argument that rewards are given.

    Example:
        >>> def short(prompts, completions):
        ...     return [-len(each) for each in completions]
        >>> def polite(prompts, completions):
        ...     return [float("please" in each) for each in completions]
        >>> Rewards({"short": (0.1, short), "polite": (1.0, polite)}, decode=str).names
        ('short', 'polite')
    """

    def __init__(
        self,
        parts: Mapping[str, Weighted],
        decode: Callable[[Sequence[int]], str] | None = None,
        *,
        on_drop: OnDrop | Mapping[str, OnDrop] = "drop",
        **options: Any,
    ) -> None:
        if not parts:
            raise ConfigError("Rewards sums several rewards, and got none: give {name: (weight, reward)}")
        self._on_drop = dict(on_drop) if isinstance(on_drop, Mapping) else dict.fromkeys(parts, on_drop)
        if unknown := sorted(self._on_drop.keys() - parts.keys()):
            raise ConfigError(f"on_drop names {', '.join(unknown)}; the rewards are {', '.join(parts)}")
        for choice in self._on_drop.values():
            if choice not in get_args(OnDrop):
                raise ConfigError(f"on_drop must be one of {', '.join(get_args(OnDrop))}, not {choice!r}")
        self.names = tuple(parts)
        self._parts = [_Part.of(name, given, decode, options) for name, given in parts.items()]
        self._readers = [part for part in self._parts if not part.is_function]
        self._turn = anyio.Lock()
        self._samples: dict[str, list[float]] = {}
        self._said_before: dict[tuple[int, ...], dict[str, Sequence[float | Drop]]] = {}

    @property
    def functions(self) -> list[FunctionReward]:
        return [part.scorer for part in self._parts if isinstance(part.scorer, FunctionReward)]

    @property
    def version(self) -> int:
        return max(part.scorer.version for part in self._parts)

    @property
    def capabilities(self) -> ScorerCapabilities:
        # Calls may overlap if the calls of some part may; the time slice is the shortest of the parts that read.
        parts = [part.capabilities for part in self._parts]
        slices = [part.capabilities.time_slice for part in self._readers]
        return ScorerCapabilities(
            concurrent=any(each.concurrent for each in parts),
            time_slice=min(slices, key=lambda each: each.seconds, default=DEFAULT_TIME_SLICE),
            samples=self._taken,
            extras=self._noted,
            at_work=lambda: ", ".join(filter(None, (each.at_work() for each in parts))),
            close=self.close,
        )

    def _taken(self) -> Mapping[str, Sequence[float]]:
        samples, self._samples = self._samples, {}
        for part in self._parts:
            for name, measured in part.capabilities.samples().items():
                samples.setdefault(name, []).extend(measured)
        return samples

    def _noted(self) -> Mapping[int, Mapping[str, object]]:
        noted: dict[int, dict[str, object]] = {}
        for part in self._parts:
            for rollout, columns in part.capabilities.extras().items():
                noted.setdefault(rollout, {}).update(columns)
        return noted

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None:
        # Raises Preempted where no part has read the events.
        preempted = list[_Part]()

        async def read(part: _Part) -> None:
            try:
                await part.prioritised.extend(events, priority=priority)
            except Preempted:
                preempted.append(part)

        await self._have(read, self._readers)
        if preempted and len(preempted) == len(self._readers):
            raise Preempted
        await self._have(read, preempted)  # the others have read the events; no call is withdrawn twice

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        async def forget(part: _Part) -> None:
            await part.prioritised.forget(rollouts, priority=priority)

        await self._have(forget, self._readers)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> list[float | Drop]:
        """Return the weighted sum of the parts' scores of each rollout, or a ``Drop``.

        Raises:
            SessionsLost: a part has lost its sessions. When the rollouts come again, no function is called again.
        """
        rollouts = tuple(each.rollout for each in finished)
        said = self._said_before.pop(rollouts, {})
        lost = list[SessionsLost]()

        async def ask(part: _Part) -> None:
            try:
                said[part.name] = await part.prioritised.finish(finished, priority=priority)
            except SessionsLost as error:
                lost.append(error)

        await self._have(ask, [part for part in self._parts if part.name not in said])
        if lost:
            self._said_before[rollouts] = {part.name: said[part.name] for part in self._parts if part.is_function}
            raise lost[0]
        return [
            self._sum(each.response.prompt, {name: said[name][at] for name in self.names})
            for at, each in enumerate(finished)
        ]

    async def _have(self, work: Callable[[_Part], Coroutine[Any, Any, None]], parts: Sequence[_Part]) -> None:
        # Parts that take turns begin when it is the turn of all: if one began before another, its urgent call would
        # keep their common place from the call that the other still waits for.
        waiting = [part for part in parts if part.takes_turns]
        with as_itself():
            async with anyio.create_task_group() as tasks:
                for part in parts:
                    if not part.takes_turns:
                        tasks.start_soon(work, part)
                if waiting:
                    async with self._turn, anyio.create_task_group() as turn:
                        for part in waiting:
                            turn.start_soon(work, part)

    def _sum(self, prompt: Prompt, scores: Mapping[str, float | Drop]) -> float | Drop:
        terms: dict[str, tuple[float, float]] = {}
        for part in self._parts:
            score = scores[part.name]
            if (
                isinstance(score, Drop)
                and score.reason != DOES_NOT_APPLY
                and self._on_drop.get(part.name, "drop") == "drop"
            ):
                return Drop(prompt.rollout, f"{part.name}: {score.reason}", score.nonfinite)
        for part in self._parts:
            score = scores[part.name]
            if not isinstance(score, Drop):
                terms[part.name] = part.weight, score
            if prompt.branch:  # a rollout counts once
                continue
            self._samples.setdefault(f"rewards/{part.name}/share", []).append(float(part.name in terms))
            if part.name in terms:
                self._samples.setdefault(f"rewards/{part.name}/mean", []).append(terms[part.name][1])
        if not terms:
            return Drop(prompt.rollout, NONE_APPLIES)
        whole = NamedScores({name: (weight, float(score)) for name, (weight, score) in terms.items()})
        total = weighted_sum(terms.values())
        return TokenRewards(total.rewards, whole.terms) if isinstance(total, TokenRewards) else whole

    async def _open(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(await entered(part.scorer for part in self._parts))

    def close(self) -> None:
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.capabilities.close)


class _Part:
    # Calls of parts that take turns must not overlap; a function waits by itself.
    def __init__(self, name: str, weight: float, scorer: Scorer[float | Drop]) -> None:
        self.name = name
        self.weight = weight
        self.scorer = scorer
        self.prioritised = prioritised(scorer)
        self.capabilities = capabilities_of(scorer)
        self.is_function = isinstance(scorer, FunctionReward)
        self.takes_turns = not (self.capabilities.concurrent or self.is_function)

    @classmethod
    def of(
        cls,
        name: str,
        given: Weighted,
        decode: Callable[[Sequence[int]], str] | None,
        options: Mapping[str, Any],
    ) -> _Part:
        if not (isinstance(given, tuple | list) and len(given) == 2):
            raise ConfigError(f"reward {name!r} must be a weight and a reward, (0.5, function); got {given!r}")
        weight, reward = given
        require_real(f"the weight of reward {name!r}", weight, error=ConfigError)
        if is_scorer(reward):
            return cls(name, weight, cast("Scorer[float | Drop]", reward))
        if decode is None:
            raise ConfigError(
                f"reward {name!r} is a function, which reads text: give Rewards the tokenizer's decode, for example "
                "decode=tokenizer.decode"
            )
        function = UserFunction.of(cast("RewardFunction | str", reward), name, RewardError)
        apart = options.get("process", False) and not function.is_async
        chosen = {**options, "name": name, "process": apart, "optional": True}
        return cls(name, weight, FunctionReward(function.spec or function.function, decode, **chosen))


def is_scorer(reward: object) -> bool:
    return not isinstance(reward, type) and all(hasattr(reward, name) for name in ("extend", "finish", "forget"))


T = TypeVar("T")


def load_reward(
    spec: str,
    decode: Callable[[Sequence[int]], str],
    *,
    place: Hosting | None = None,
    on_drop: OnDrop = "drop",
    process: bool | Literal["sync"] = False,
    **options: Any,
) -> Scorer[float | Drop]:
    """Return the reward that ``file.py:name`` names, as a scorer.

    The name is of a reward function, of a scorer, of a function that makes a scorer, or of a dictionary ``{name:
    (weight, one of these)}``. A function that makes a scorer has an argument ``place``, where the scorer hosts its
    work; it may also have ``decode``. A scorer that is ready works where it wants, beside the run's models.

    Args:
        spec: file and name.
        decode: token ids to text, without special tokens.
        place: for scorers that are made.
        on_drop: of :class:`Rewards`.
        process: call functions in processes of their own, ``sync`` if they are sync; an async function alone is
            refused, and async functions of several rewards are called here.
        options: of each :class:`FunctionReward`.

    Raises:
        ConfigError: a weight is no number.
        RewardError: there is no such file or name, or it names no reward.
    """
    found = user_code.load_object(spec, RewardError)
    if place is not None:
        place = _FilePlace(place, spec.rpartition(":")[0])
    given = {"place": place, "decode": decode}
    if isinstance(found, Mapping):
        parts = {name: _with_scorer(part, f"{spec}[{name!r}]", given) for name, part in found.items()}
        return Rewards(parts, decode, on_drop=on_drop, process=bool(process), **options)
    if _makes_scorer(found):
        found = _made(found, spec, given)
    if not is_scorer(found):
        apart = not user_code.is_async(found) if process == "sync" else process
        return FunctionReward(spec, decode, process=apart, **options)
    return cast("Scorer[float | Drop]", found)


def names_function(spec: str) -> bool:
    found = user_code.load_object(spec, RewardError)
    return not (isinstance(found, Mapping) or _makes_scorer(found) or is_scorer(found))


@dataclass(frozen=True, slots=True)
class _FilePlace:
    # Instances of a file's classes can go there, also if it is another process.
    place: Hosting
    file: str

    def host(self, make: Make[T], *, track: str = "") -> Hosted[T]:
        return self.place.host(partial(_made_after, LoadedFile.of(self.file), make), track=track)


def _made_after(file: LoadedFile, make: Make[T]) -> T:
    del file  # unpickled before what makes the instance, which is of that file
    return make()


def _makes_scorer(found: object) -> TypeGuard[Callable[..., object]]:
    if not callable(found) or is_scorer(found):
        return False
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return "place" in parameters and parameters.keys().isdisjoint(ARGUMENTS)


def _made(make: Callable[..., object], spec: str, given: Mapping[str, object]) -> object:
    if given["place"] is None:
        raise RewardError(f"{spec} makes a scorer in a place, and got none: give load_reward one, place=Thread(...)")
    wanted = inspect.signature(make).parameters
    with contained(lambda words: RewardError(f"{spec} raised {words}")):
        made = make(**{name: value for name, value in given.items() if name in wanted})
    if not is_scorer(made):
        raise RewardError(
            f"{spec} takes a place, so it must return a scorer, with extend, finish and forget; got {shown(made)}"
        )
    return made


def _with_scorer(part: Any, spec: str, given: Mapping[str, object]) -> Any:
    if isinstance(part, tuple | list) and len(part) == 2 and _makes_scorer(part[1]):
        return part[0], _made(part[1], spec, given)
    return part
