"""Classes of environments by TRL's contract: an instance for each response, its methods as tools, and its reward."""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import anyio
import numpy as np

from oppo.environments.functions import (
    OWNER,
    CalledByName,
    EnvironmentFailure,
    ToolResult,
    Tools,
    earned_by_turns,
    is_finite,
)
from oppo.errors import ConfigError, DataError, contained, one_line, shortened, shown
from oppo.events import Chunk, Drop, Finish, Prompt, ToolTokens
from oppo.models import Scorer, Shared
from oppo.rewards.function import DOES_NOT_APPLY
from oppo.scorers import WholeScorer
from oppo.turns import Answer, Turn
from oppo.user_code import UserCalls, UserFunction

if TYPE_CHECKING:
    from oppo.hf.chat import ChatFormat
    from oppo.hf.tool_calls import ToolCall

T = TypeVar("T")


@dataclass(frozen=True)
class CalledOwner(CalledByName[T]):
    @property
    def title(self) -> str:
        return f"{self.user.name}() of the environment"


@dataclass(frozen=True)
class CalledReset(CalledOwner["str | None"]):
    def checked(self, result: object, where: str) -> str | None:
        if result is not None and not isinstance(result, str):
            raise self.failure(
                f"returns text that is added to the prompt or to its last message, or None; got {shown(result)}", where
            )
        return result


@dataclass(frozen=True)
class CalledReward(CalledOwner[float]):
    def checked(self, result: object, where: str) -> float:
        if not is_finite(result):
            raise self.failure(f"must return a finite number; got {shown(result)}", where)
        return float(result)


@dataclass(frozen=True)
class CalledState(CalledOwner[str]):
    def checked(self, result: object, where: str) -> str:
        try:
            return json.dumps(result, sort_keys=True)
        except Exception as error:  # any kind: the objects are the environment's own
            words = f"must return JSON values that are equal in equal states; got {shown(result)}: {one_line(error)}"
            raise self.failure(words, where) from error


@dataclass(slots=True, eq=False)
class _Life:
    # An instance, from the first turn of its rollout until nothing more is asked of that.
    calls: list[Any] = field(default_factory=list)
    owner: Any = None  # before its first use; in a resumed run the calls are made again then
    left: bool = False  # the response is complete
    making: anyio.Lock = field(default_factory=anyio.Lock)


BEGUN: Final = 4096
"""Instances that are kept of rows that were read, each until the first response to its row; others are made again."""

ROUTE = "environment"  # the column that names the environment of a row, where there are several


TURN_REWARD: Final = "get_turn_reward"
TURN_STATE: Final = "get_turn_state"

CALLED: Final[Mapping[str, type[CalledOwner[Any]]]] = {
    "reset": CalledReset,
    "get_reward": CalledReward,
    TURN_REWARD: CalledReward,
    TURN_STATE: CalledState,
}
"""Methods that a run calls itself; the policy does not call them."""

LIFE: Final = frozenset(
    {"aclose", "cleanup", "close", "dispose", "set_up", "setup", "shutdown", "tear_down", "teardown"}
)
"""Methods without arguments that begin or end an instance; the policy does not call them."""


def tools_of(kind: type) -> list[Callable[..., object]]:
    """Return the public methods of a class of environments that the policy may call, without their instance."""
    every = {name: None for base in reversed(kind.__mro__) for name in vars(base)}
    named = [name for name in every if not name.startswith("_") and name not in CALLED]
    found = {name: method_of(kind, name) for name in named}
    called = {name: each for name, each in found.items() if inspect.isfunction(each) or inspect.ismethod(each)}
    return [each for name, each in called.items() if name not in LIFE or inspect.signature(each).parameters]


def method_of(kind: type, name: str) -> Any:
    # A method that needs an instance is bound to a stand-in.
    found = getattr(kind, name)
    is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
    return MethodType(found, OWNER) if inspect.isfunction(found) and not is_static else found


def kind_of(factory: Callable[[], Any]) -> type[Any]:
    if isinstance(factory, type):
        return factory
    with contained(lambda words: ConfigError(f"the factory of environments {shown(factory)} raised {words}")):
        return type(factory())


class EnvironmentClass(Tools):
    """A class with an instance for each response, by TRL's contract, as an environment and as a reward.

    ``reset(**row)`` begins, once for each instance, and returns the text that is added to the prompt's last message, or
    ``None``. Public methods are tools, called one after the other. ``get_reward()``, if there is one, is the reward of
    the response (:attr:`reward`), which its last token earns.

    Beyond that contract, ``get_turn_reward()`` is the reward of a turn, asked for once after its calls and added to
    that of the response; and ``get_turn_state()`` is the state in which the policy takes a turn, as JSON values, asked
    for before its calls, for ``credit = "state"``.

    Responses to one prompt have instances of their own, to which ``reset`` must say the same of the same row. An
    instance may hold anything, and lives as long as its rollout; a resumed run makes its calls again on a new one: the
    same calls must lead to the same state. A context manager is left once, when its response is complete, before
    ``get_reward()``; it is another instance than the one that its row was read with.

    Args:
        factory: the class, or a function without arguments that returns an instance.
        chat: as of :class:`Tools`; its tokenizer shows :func:`tools_of` the class.
        options: as of :class:`Tools`, without ``process``.

    Attributes:
        gives_reward: whether the class has ``get_reward`` or ``get_turn_reward``.
        routed: whether the column ``environment`` is no argument of ``reset``.

    Raises:
        ConfigError: the class has no ``reset``, which is not async, or no method besides.
    """

    def __init__(self, factory: Callable[[], Any], chat: ChatFormat, **options: Any) -> None:
        kind = kind_of(factory)
        if not callable(getattr(kind, "reset", None)) or inspect.iscoroutinefunction(kind.reset):
            raise ConfigError(
                f"{kind.__name__} is no class of environments: it needs reset(self, **row), which is sync"
            )
        if options.get("process"):
            raise ConfigError("instances of an environment are objects of this process: leave process out")
        super().__init__(tools_of(kind), chat, **options)
        self.name = kind.__name__
        self._factory = factory
        self._reset = CalledReset(UserFunction.of(method_of(kind, "reset"), "reset", EnvironmentFailure))
        self._lives: dict[int, _Life] = {}
        self._begun = deque[tuple[str, Any]](maxlen=BEGUN)
        self._column: str | None = None
        self._is_left = issubclass(kind, AbstractContextManager)
        self.routed = False
        for name, called in CALLED.items():
            if getattr(kind, name, None) is not None:
                user = UserFunction.of(method_of(kind, name), name, EnvironmentFailure)
                self._calls[name] = UserCalls(called(user), timeout=options.get("timeout"))
        self.gives_reward = bool({"get_reward", TURN_REWARD} & self._calls.keys())

    def begun(self, row: Mapping[str, object], column: str = "prompt") -> dict[str, object]:
        """Return a row whose prompt ends with the text of ``reset()``; the first response to it has that instance.

        Without a prompt the row has an empty message of a user.

        Raises:
            EnvironmentFailure: ``reset()`` raised, took too long, or returned something else.
            DataError: the prompt is no text and has no message.
        """
        self._column = column
        owner = self._factory()
        try:
            said = self._calls["reset"].make_here({"self": owner, **self._row(row)}, "reading a row")
        finally:
            self._exit(owner)
        prompt = row.get(column, [{"role": "user", "content": ""}])
        found = {**row, column: _with_observation(prompt, said) if said else prompt}
        if not self._is_left:
            self._begun.append((_content(found), owner))
        return found

    def rows(self, rows: Iterable[Mapping[str, object]], column: str = "prompt") -> Iterator[dict[str, object]]:
        for row in rows:
            yield self.begun(row, column)

    def _row(self, columns: Mapping[str, object]) -> dict[str, object]:
        return {
            name: value for name, value in copy.deepcopy({**columns}).items() if not (self.routed and name == ROUTE)
        }

    @cached_property
    def reward(self) -> Scorer[float | Drop]:
        """The reward that the environment gives."""
        if not self.gives_reward:
            raise ConfigError(f"{self.name} has no method get_reward(), so that it gives no reward")
        return WholeScorer(self.earned, lambda: self.at_work)

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        known: Any = turn.state or {"calls": []}
        life = self._lives.get(turn.prompt.rollout)
        if life is None or not turn.number or len(life.calls) != len(known["calls"]):  # it begins, or was resumed
            self.release(turn.prompt)
            life = self._lives[turn.prompt.rollout] = _Life([*known["calls"]])
        made: list[ToolCall] = []
        answer: Answer | Drop | None = None
        try:
            owner = await self._owner(life, turn.prompt)
            key = await self._asked(TURN_STATE, owner, turn.prompt)
            answer = key if isinstance(key, Drop) else await self._answered(turn, owner, made)
            if isinstance(answer, Answer):
                reward = await self._asked(TURN_REWARD, owner, turn.prompt)
                answer = reward if isinstance(reward, Drop) else replace(answer, reward=reward, key=key or "")
            elif answer is None and key:
                answer = Answer(np.zeros(0, np.int32), key=key)
        finally:
            if not isinstance(answer, Answer) or not len(answer.tokens):
                self._leave(life)
        life.calls += ([call.name, call.arguments] for call in made)
        if isinstance(answer, Answer) and answer.reward is not None:
            life.calls.append([TURN_REWARD, None])
        return replace(answer, state={"calls": [*life.calls]}) if isinstance(answer, Answer) else answer

    async def _asked(self, name: str, owner: object, prompt: Prompt) -> Any:
        # The result of a method that a class may lack: then None.
        if name not in self._calls:
            return None
        try:
            return await self._calls[name].make({"self": owner}, f"rollout {prompt.rollout}")
        except EnvironmentFailure as failure:
            if self._on_failure == "drop":
                return Drop(prompt.rollout, str(failure))
            raise

    def forget(self, prompt: Prompt, state: Any) -> None:
        """Leave the instance of a rollout whose response has ended; its reward may still be asked for."""
        if prompt.rollout not in self._lives and state is not None:
            self._lives[prompt.rollout] = _Life(state["calls"])
        if (life := self._lives.get(prompt.rollout)) is not None:
            self._leave(life)

    def release(self, prompt: Prompt) -> None:
        if (life := self._lives.pop(prompt.rollout, None)) is not None:
            self._leave(life)

    async def earned(self, finish: Finish) -> float | Drop:
        try:
            owner = await self.instance(finish)
        except EnvironmentFailure as failure:
            if self._on_failure == "drop":
                return Drop(finish.rollout, str(failure))
            raise
        rest = await self._asked("get_reward", owner, finish.response.prompt)
        return rest if isinstance(rest, Drop) else earned_by_turns(finish, rest or 0.0)

    async def instance(self, finish: Finish) -> object:
        """Return the instance of a complete response, the same to all callers."""
        if (life := self._lives.get(finish.rollout)) is None:
            life = self._lives[finish.rollout] = _Life()
            for turn, answer in pairwise(finish.response.pieces()):
                if isinstance(turn, Chunk) and isinstance(answer, ToolTokens):
                    calls = self.chat.parse(turn.tokens.tolist()).tool_calls
                    life.calls += ([call.name, call.arguments] for call in calls)
                    life.calls += [[TURN_REWARD, None]] if TURN_REWARD in self._calls else []
        owner = await self._owner(life, finish.response.prompt)
        self._leave(life)
        return owner

    async def _owner(self, life: _Life, prompt: Prompt) -> object:
        async with life.making:  # of a resumed run several rewards may ask
            if life.owner is None:
                life.owner = await self._made(prompt, life.calls)
        return life.owner

    async def _made(self, prompt: Prompt, calls: Sequence[tuple[str, Mapping[str, object] | None]]) -> object:
        key = _content(prompt.columns) if self._begun else ""
        at = next((at for at, (content, _) in enumerate(self._begun) if content == key), None)
        owner = self._factory() if at is None else self._begun[at][1]
        if at is not None:
            del self._begun[at]
        where = f"rollout {prompt.rollout}"
        try:
            if at is None:
                said = await self._calls["reset"].make({"self": owner, **self._row(prompt.columns)}, where)
                self._check_said(said, prompt, where)
            for name, arguments in calls:
                result = ToolResult(name)
                if arguments is None:
                    await self._asked(name, owner, prompt)
                elif self._understood(name, arguments, result):
                    await self._call(name, arguments, result, where, {"self": owner})
        except BaseException:
            self._exit(owner)
            raise
        return owner

    def _leave(self, life: _Life) -> None:
        if life.owner is not None and not life.left:
            life.left = True
            self._exit(life.owner)

    def _exit(self, owner: Any) -> None:
        if self._is_left:
            with contained(lambda words: EnvironmentFailure(f"__exit__() of the environment raised {words}")):
                owner.__exit__(None, None, None)

    def _check_said(self, said: str | None, prompt: Prompt, where: str) -> None:
        shown_to_it = None if self._column is None else prompt.columns.get(self._column)
        last = shown_to_it[-1].get("content") if isinstance(shown_to_it, list) else shown_to_it
        last = (last[-1].get("text", "") if last else "") if isinstance(last, list) else last
        if said and isinstance(last, str) and not last.endswith(said):
            raise self._reset.failure(
                f"said {shortened(repr(said), 80)}, and of the same row before what the prompt ends with, "
                f"{shortened(repr(last[-len(said) :]), 80)}: what it says must depend on the row alone, so seed what "
                "is random by a column",
                where,
            )

    async def _open(self, stack: AsyncExitStack) -> None:
        stack.callback(self._leave_all)
        await super()._open(stack)

    def _leave_all(self) -> None:
        while self._lives:
            self._leave(self._lives.popitem()[1])


def _content(columns: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps({**columns}, sort_keys=True, default=repr).encode()).hexdigest()


def _with_observation(prompt: object, said: str) -> object:
    if isinstance(prompt, str):
        return prompt + said
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    content = last.get("content") if isinstance(last, Mapping) else None
    if not isinstance(content, str | list):
        raise DataError(
            f"what reset() returns is added to a prompt of text or to its last message; the prompt is {shown(prompt)}"
        )
    more = content + said if isinstance(content, str) else [*content, {"type": "text", "text": said}]
    return [*cast("list[object]", prompt)[:-1], {**cast("Mapping[str, object]", last), "content": more}]


class Environments(Shared):
    """Several classes of environments: the column ``environment`` of a row names the one that it is for, as in TRL.

    Args:
        classes: by name, each with a chat format that shows its own tools.
    """

    def __init__(self, classes: Mapping[str, EnvironmentClass]) -> None:
        if not classes:
            raise ConfigError("expected at least one environment by its name, got none")
        self.classes = dict(classes)
        for each in self.classes.values():
            each.routed = True

    def of(self, columns: Mapping[str, object]) -> EnvironmentClass:
        named = columns.get(ROUTE)
        if not isinstance(named, str) or named not in self.classes:
            raise DataError(
                f"expected one of {', '.join(self.classes)} in the column {ROUTE!r} of each row, got {shown(named)}: "
                "correct the data, or give an environment of that name"
            )
        return self.classes[named]

    def begun(self, row: Mapping[str, object], column: str = "prompt") -> dict[str, object]:
        return self.of(row).begun(row, column)

    @property
    def gives_reward(self) -> bool:
        return any(each.gives_reward for each in self.classes.values())

    @cached_property
    def reward(self) -> Scorer[float | Drop]:
        """The reward of each row's environment; a rollout of one without is dropped, or scored by others."""
        if not self.gives_reward:
            raise ConfigError(
                f"none of {', '.join(self.classes)} has a method get_reward(), so that there is no reward"
            )
        return WholeScorer(self.earned, lambda: self.at_work)

    @property
    def at_work(self) -> str:
        return ", ".join(filter(None, (each.at_work for each in self.classes.values())))

    async def _open(self, stack: AsyncExitStack) -> None:
        for each in self.classes.values():
            await stack.enter_async_context(each)

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        return await self.of(turn.prompt.columns).answer(turn)

    def forget(self, prompt: Prompt, state: object) -> None:
        self.of(prompt.columns).forget(prompt, state)

    def release(self, prompt: Prompt) -> None:
        self.of(prompt.columns).release(prompt)

    async def earned(self, finish: Finish) -> float | Drop:
        found = self.of(finish.response.prompt.columns)
        return await found.earned(finish) if found.gives_reward else Drop(finish.rollout, DOES_NOT_APPLY)

    async def instance(self, finish: Finish) -> object:
        return await self.of(finish.response.prompt.columns).instance(finish)
