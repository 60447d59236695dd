"""Python functions as environments: one that answers turns as text, or tools that the policy calls."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, SupportsFloat, TypeAlias, TypeGuard, TypeVar

import anyio
import numpy as np

from oppo.data.prompts import PrivilegedPrompt
from oppo.errors import ConfigError, DataError, OppoError, one_line, shortened, shown
from oppo.events import Drop, Finish, IntArray, Prompt
from oppo.limits import TurnLimit
from oppo.models import Scorer, Shared, entered
from oppo.returns import TokenRewards
from oppo.scorers import WholeScorer
from oppo.turns import Answer, Environment, EnvironmentState, Turn
from oppo.user_code import CallsFunction, CheckedFunction, UserCalls, UserFunction

if TYPE_CHECKING:
    from oppo.hf.chat import ChatFormat, ChatMessage
    from oppo.hf.tokenizer import HfTokenizer
    from oppo.hf.tool_calls import ToolCall

LONGEST = 250_000  # characters of an answer, which the event loop tokenises: more than a response has room for


class EnvironmentFailure(OppoError):  # noqa: N818 - it says what happened
    """The function of an environment raised, took too long, or returned something that is no answer."""


@dataclass(frozen=True, slots=True)
class TextTurn:
    """A finished turn, as text.

    Attributes:
        prompt: the data's ``prompt`` column if there is one, else the prompt's text.
        text: without special tokens.
        number: of answered turns of the response.
        state: of the last answer; ``None`` at the first turn.
        columns: the data's other columns.
    """

    prompt: object
    text: str
    number: int
    state: EnvironmentState
    columns: Mapping[str, object]


T = TypeVar("T")

EnvironmentFunction: TypeAlias = Callable[[TextTurn], object]
"""``f(turn)``, sync or async: returns the answer as text, ``(text, state)`` or a :class:`TextAnswer`, ``None`` to end
the response, or a ``Drop``."""


@dataclass(frozen=True, slots=True)
class TextAnswer:
    """What a function answers, with what the turn earned.

    Attributes:
        text: that the policy reads next; empty: the response ends with the turn, which then has a reward or a key.
        state: given back with the next turn; JSON values.
        reward: of the turn; ``None``: none. Their sum is the reward ``environment``.
        key: names the state in which the policy took the turn, for ``credit = "state"``; empty: it has no name.
    """

    text: str
    state: EnvironmentState = None
    reward: float | None = None
    key: str = ""


Said: TypeAlias = TextAnswer | Drop | None  # the answer of a function


def is_finite(number: object) -> TypeGuard[SupportsFloat]:
    return not isinstance(number, bool) and isinstance(number, SupportsFloat) and math.isfinite(number)


def earned_by_turns(finish: Finish, rest: float = 0.0) -> float:
    rewards = {number: turn.reward for number, turn in enumerate(finish.answered) if turn.reward is not None}
    return TokenRewards.by_turn(finish, rewards, rest) if rewards else rest


@dataclass(frozen=True)
class CalledEnvironment(CheckedFunction[TextTurn, str, Said]):
    kind: ClassVar[str] = "environment"
    error: ClassVar[type[EnvironmentFailure]] = EnvironmentFailure

    def checked(self, result: object, where: str) -> Said:
        if result is None or isinstance(result, Drop):
            return result
        pair: tuple[Any, ...] = result if isinstance(result, tuple) and len(result) == 2 else (result,)
        answer = result if isinstance(result, TextAnswer) else TextAnswer(*pair)
        text, reward, key = answer.text, answer.reward, answer.key
        if not isinstance(text, str) or not (text or reward is not None or key):
            raise self.failure(
                f"must return a text, a pair of text and state, a TextAnswer, or None; got {shown(result)}", where
            )
        if not isinstance(key, str) or not (reward is None or is_finite(reward)):
            words = f"a finite number or None as the reward of a turn and a text as its key; got {shown(result)}"
            raise self.failure(f"must return {words}", where)
        if len(text) > LONGEST:
            raise self.failure(f"returned {len(text)} characters, more than {LONGEST}: shorten its answer", where)
        try:
            json.dumps(answer.state)
        except Exception as error:  # any kind: the objects are the function's own
            words = f"a state of JSON values, as checkpoints hold it; got {shown(answer.state)}: {one_line(error)}"
            raise self.failure(f"must return {words}", where) from error
        return answer


class FunctionEnvironment(CallsFunction[TextTurn, str, Said]):
    """A function that answers turns, as an :class:`oppo.turns.Environment`.

    Args:
        function: ``f(turn)``, sync or async, or its ``file.py:name``. It takes a :class:`TextTurn`, whose columns are
            copies, and returns the answer as text, or a pair of text and state, or a :class:`TextAnswer`, or ``None``
            to end the response, or :meth:`oppo.Drop.because` of a reason.
        decode: token ids to text, without special tokens.
        encode: text to token ids; :meth:`~oppo.hf.HfTokenizer.encode_exactly` takes all of it for ordinary text.
        on_failure: ``fail`` raises; ``drop`` drops the rollout.
        timeout, concurrency, process: as of :class:`oppo.rewards.FunctionReward`; by default 64 calls may overlap, or 4
            in processes. A call whose rollout is closed is ended likewise.
        prompt_column: the column that is ``prompt``.

    Raises:
        ConfigError: ``timeout`` or ``concurrency`` is out of range.
        EnvironmentFailure: there is no such file or function, or it cannot be called in a process.
    """

    def __init__(
        self,
        function: EnvironmentFunction | str,
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], Sequence[int]],
        *,
        on_failure: Literal["fail", "drop"] = "fail",
        timeout: float | None = None,
        concurrency: int | None = None,
        process: bool = False,
        prompt_column: str = "prompt",
    ) -> None:
        user = UserFunction.of(function, None, EnvironmentFailure)
        user.must_take("environment", "a turn", TextTurn("", "", 0, None, {}))
        self.name = user.name
        self._function = CalledEnvironment(user)
        self._calls = UserCalls(self._function, concurrency=concurrency, timeout=timeout, process=process)
        self._decode = decode
        self._encode = encode
        self._drops = on_failure == "drop"
        self._prompt_column = prompt_column

    @property
    def at_work(self) -> str:
        return self._calls.at_work

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        """Return the function's answer as tokens, ``None`` where it ends the response, or a ``Drop``."""
        where = f"turn {turn.number} of rollout {turn.prompt.rollout}"
        try:
            said = await self._calls.make(self._as_text(turn), where)
            if said is None:
                return None
            if isinstance(said, Drop):
                return replace(said, rollout=turn.prompt.rollout)
            tokens = self._tokens(said.text, where) if said.text else np.zeros(0, np.int32)
            return Answer(tokens, said.state, reward=said.reward, key=said.key)
        except EnvironmentFailure as failure:
            if self._drops:
                return Drop(turn.prompt.rollout, str(failure))
            raise

    @property
    def reward(self) -> Scorer[float | Drop]:
        """The rewards that the function gave with its answers, each at its turn."""
        return WholeScorer(self.earned)

    async def earned(self, finish: Finish) -> float:
        """Return the sum of the rewards of turns.

        Raises:
            EnvironmentFailure: the function answered turns, and gave none a reward.
        """
        if finish.answered and all(turn.reward is None for turn in finish.answered):
            words = "gave no turn a reward, and is the source of one: return TextAnswer(..., reward=...)"
            raise self._function.failure(words, f"rollout {finish.rollout}")
        return earned_by_turns(finish)

    def _as_text(self, turn: Turn) -> TextTurn:
        prompt = turn.prompt
        # Copies, since rollouts of a group, and later epochs, are given the same columns again.
        columns = copy.deepcopy({**prompt.columns})
        asked = columns.pop(self._prompt_column, None) or self._decode(prompt.tokens.tolist())
        return TextTurn(asked, self._decode(turn.tokens.tolist()), turn.number, turn.state, columns)

    def _tokens(self, text: str, where: str) -> IntArray:
        try:
            tokens = np.array(self._encode(text), np.int32)
        except Exception as error:  # any kind: a lone surrogate, for example, in the tokenizer's words
            words = f"returned {shown(text)}, which cannot be tokenised: {one_line(error)}"
            raise self._function.failure(words, where) from error
        if not len(tokens):
            raise self._function.failure(f"returned {shown(text)}, which is no token", where)
        return tokens


OWNER: Final = object()  # stands for the instance in a method of a class that has none yet


def by_position(
    signature: inspect.Signature, arguments: Mapping[str, object]
) -> tuple[list[object], dict[str, object]]:
    # Positional-only arguments, and the others by name.
    first, others = list[object](), {**arguments}
    for each in signature.parameters.values():
        if each.kind is not each.POSITIONAL_ONLY or (each.name not in others and each.default is each.empty):
            break
        first.append(others.pop(each.name, each.default))
    return first, others


@dataclass(frozen=True)
class CalledByName(CheckedFunction[Mapping[str, object], str, T]):
    # A method gets its instance as `self`.
    error: ClassVar[type[EnvironmentFailure]] = EnvironmentFailure

    def made(self, given: Mapping[str, object]) -> object:
        function, arguments = self.user.function, {**given}
        owner = arguments.pop("self", None)
        if isinstance(function, MethodType) and function.__self__ is OWNER:
            function = MethodType(function.__func__, owner)
        first, others = by_position(inspect.signature(function), arguments)
        return function(*first, **others)


@dataclass(frozen=True)
class CalledTool(CalledByName[str]):
    kind: ClassVar[str] = "tool"

    def checked(self, result: object, where: str) -> str:
        try:
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            text.encode()
        except Exception as error:  # any kind: the objects are the tool's own
            words = f"must return text or JSON values; got {shown(result)}: {one_line(error)}"
            raise self.failure(words, where) from error
        if len(text) > LONGEST:
            raise self.failure(f"returned {len(text)} characters, more than {LONGEST}: shorten its answer", where)
        return text


NO_ROOM: Final = "Error: the result is longer than this conversation has room for"

SUMMING: Final = {"summing": True}  # the state of a conversation that was asked for a summary

OnToolFailure: TypeAlias = Literal["answer", "drop", "fail"]


@dataclass(slots=True)
class ToolResult:
    name: str
    call_id: str = ""
    text: str = ""
    failure: str = ""
    error: EnvironmentFailure | None = None
    seconds: float | None = None

    @property
    def message(self) -> Mapping[str, object]:
        content = f"Error: {self.failure}" if self.failure else self.text
        return {"role": "tool", "name": self.name, "content": content}


REQUEST: Final = (
    "This conversation ends here. You will go on in a new one, which shows the task and your summary, and nothing else "
    "of it. Summarise now, without a call: what was done, what was found, and what is left to do."
)

_TEMPLATE: Final = "{prompt}\n\nYour summary of the work so far:\n{summary}"


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """When tools have the policy summarise its work, and the prompt behind which it goes on.

    Behind the answer with which a response has ``after`` tokens, a user asks for a summary. That is the policy's next
    turn, is trained, and ends the response. The rollout's next segment is a response to its prompt with the summary
    behind it. An answer that leaves no room for a summary is left out; a notice is in its place.

    Attributes:
        after: tokens of a response.
        room: tokens that a response has room for, ``Sampling.max_new_tokens``.
        summary: tokens of a summary at most.
        segments: of a rollout at most; the last one goes on until it ends or has no room.
        longest: tokens of a segment's prompt at most; a rollout with a longer one is dropped.
        request: for a summary, the message of a user.
        prompt_column: of the data, with the prompt.

    Raises:
        ConfigError: a summary would have no room.
    """

    after: int
    room: int
    longest: int
    summary: int = 512
    segments: int = 8
    request: str = REQUEST
    prompt_column: str = "prompt"

    def __post_init__(self) -> None:
        if self.after + self.summary > self.room:
            raise ConfigError(
                f"a summary of {self.summary} tokens behind {self.after} of a response has no room in the {self.room} "
                "of sampling.max_new_tokens: lower environment.compact or environment.summary_tokens"
            )

    def behind(self, prompt: Prompt, summary: str, tokenizer: HfTokenizer) -> IntArray:
        make = PrivilegedPrompt(
            tokenizer=tokenizer, decode=tokenizer.decode, template=_TEMPLATE, prompt_column=self.prompt_column
        )
        found = make(replace(prompt, columns={**prompt.columns, "summary": summary}))
        assert found is not None  # noqa: S101 - the template shows no sibling
        return found.tokens


class Tools(Shared):
    """Functions that the policy calls in its turns, as an :class:`oppo.turns.Environment`.

    A turn without a call ends the response. The calls of a turn overlap, and are answered together.

    Args:
        tools: functions, sync or async, or their ``file.py:name``. Their schemas are made of type hints and of
            docstrings in Google's style.
        chat: reads the calls, and tokenizes the answers; its tokenizer shows these tools, and it knows the role
            ``tool``.
        on_failure: of a call that raises, takes too long, or returns no JSON: ``answer`` shows the policy the error,
            ``drop`` drops the rollout, ``fail`` raises. The policy is always shown the fault of a call that it wrote
            wrongly.
        timeout, concurrency, process: of each tool, as of :class:`FunctionEnvironment`.
        max_turns: after this many answers a turn that calls a tool ends the response; ``None``: no limit.
        column: of a row, with a list of the names of those that it shows the policy, and lets it call; without it, or
            ``None`` in it, all.
        compaction: of work that nears the room of its response; ``None``: it ends there.

    Raises:
        ConfigError: the policy is not shown a tool, two have one name, or a number is out of range.
        EnvironmentFailure: there is no such file or function, or it cannot be called in a process.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., object] | str],
        chat: ChatFormat,
        *,
        on_failure: OnToolFailure = "answer",
        timeout: float | None = None,
        concurrency: int | None = None,
        process: bool = False,
        max_turns: int | None = None,
        column: str = "",
        compaction: Compaction | None = None,
    ) -> None:
        users = [UserFunction.of(tool, None, EnvironmentFailure) for tool in tools]
        self.names = [user.name for user in users]
        if "tool" not in chat.roles:
            raise ConfigError("the chat format was not tried with answers of tools: give it the role 'tool'")
        if missing := [name for name in self.names if name not in chat.tools]:
            raise ConfigError(
                f"the policy is not shown the tool {missing[0]!r}: give it to its tokenizer by chatting()"
            )
        if len(set(self.names)) < len(self.names) or not self.names:
            got = ", ".join(self.names) or "none: of a class, public methods are tools"
            raise ConfigError(f"expected at least one tool, each with a name of its own; got {got}")
        self.signatures = {user.name: inspect.signature(user.function) for user in users}
        for name in self.names:
            wrong, properties = ToolResult(name), chat.tools[name].get("properties")
            if properties is not None and not self._understood(name, properties, wrong):
                raise ConfigError(f"the policy cannot call a tool with all arguments that it is shown: {wrong.failure}")
        self._calls: dict[str, UserCalls[Mapping[str, object], str, Any]] = {
            user.name: UserCalls(CalledTool(user), concurrency=concurrency, timeout=timeout, process=process)
            for user in users
        }
        self.chat = chat
        self._on_failure = on_failure
        self._max_turns = max_turns
        self.column = column
        self._compaction = compaction
        self.max_segments = 1 if compaction is None else compaction.segments
        if compaction is not None and "user" not in chat.roles:
            raise ConfigError("a user asks for summaries: give the chat format the role 'user'")
        self._views: dict[tuple[str, ...], Self] = {}

    def of(self, columns: Mapping[str, object]) -> Self:
        """Return those tools that a row shows the policy, with a chat format that shows these.

        Raises:
            DataError: the column holds no list of their names.
        """
        named = columns.get(self.column) if self.column else None
        if named is None:
            return self
        if not isinstance(named, list | tuple) or any(each not in self.names for each in named):
            raise DataError(
                f"expected a list of some of {', '.join(self.names)} in the column {self.column!r}, got "
                f"{shown(named)}: correct the data, or give the environment that tool"
            )
        names = tuple(name for name in self.names if name in named)
        if (known := self._views.get(names)) is not None:
            return known
        view = self._views[names] = copy.copy(self)
        view.names, view.column, view.chat = [*names], "", self.chat.showing(names)
        view.signatures = {name: self.signatures[name] for name in names}
        return view

    @property
    def at_work(self) -> str:
        return ", ".join(filter(None, (calls.at_work for calls in self._calls.values())))

    async def _open(self, stack: AsyncExitStack) -> None:
        for calls in self._calls.values():
            await stack.enter_async_context(calls)

    def close(self) -> None:
        for calls in self._calls.values():
            calls.close()

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        """Return what tools answer to the calls of a turn, ``None`` if it makes none, or a ``Drop``.

        Behind a summary there is a segment in place of an answer.

        Raises:
            EnvironmentFailure: a tool failed, and failures are raised; or its answer cannot be rendered.
        """
        view = self.of(turn.prompt.columns)
        if view is not self:
            return await view.answer(turn)
        if self._compaction is not None and turn.state == SUMMING:
            return self._segment(turn, self._compaction)
        return await self._answered(turn)

    async def _answered(
        self, turn: Turn, owner: object = None, made: list[ToolCall] | None = None
    ) -> Answer | Drop | None:
        # Calls of an owner's methods are made one after the other, and noted.
        where = f"turn {turn.number} of rollout {turn.prompt.rollout}"
        parsed = self.chat.parse(turn.tokens.tolist())
        results = [ToolResult(call.name, call.id) for call in parsed.tool_calls]
        if parsed.malformed:
            results.append(ToolResult("tool", failure=f"the call cannot be read: {parsed.malformed}"))
        if not results or turn.number == self._max_turns:
            return None
        todo: list[tuple[ToolCall, ToolResult]] = []
        for call, result in zip(parsed.tool_calls, results, strict=False):
            if self._understood(call.name, call.arguments, result):
                todo.append((call, result))
        if owner is not None and made is not None:
            for call, result in todo:
                await self._call(call.name, call.arguments, result, where, {"self": owner})
                made.append(call)
        async with anyio.create_task_group() as group:
            for call, result in todo if owner is None else ():
                group.start_soon(self._call, call.name, call.arguments, result, where, {})
        for result in results:  # a call that the policy wrote wrongly has a failure and no error
            if result.error is not None and self._on_failure == "fail":
                raise result.error
            if result.error is not None and self._on_failure == "drop":
                return Drop(turn.prompt.rollout, result.failure)
        said = [result.message for result in results]
        seconds = [(result.name, result.seconds) for result in results if result.seconds is not None]
        failures = sum(bool(result.failure) for result in results)
        try:
            answer = self._rendered(turn, said, [result.call_id for result in results])
        except ConfigError as error:
            raise EnvironmentFailure(f"the answer of tools cannot be rendered ({where}): {error}") from error
        return replace(answer, calls=len(results), failures=failures, seconds=seconds)

    def _rendered(self, turn: Turn, said: Sequence[ChatMessage], ids: Sequence[str]) -> Answer:
        def rendered(said: Sequence[ChatMessage], *more: ChatMessage) -> IntArray:
            answers = [{**each, "tool_call_id": call_id} for each, call_id in zip(said, ids, strict=True)]
            return np.array(self.chat.answer(turn.tokens.tolist(), [*answers, *more]), np.int32)

        answer, compaction = Answer(rendered(said), said=said), self._compaction
        if compaction is None or turn.prompt.branch + 1 >= compaction.segments:
            return answer
        if turn.length + len(answer.tokens) < compaction.after:
            return answer
        request, limit = {"role": "user", "content": compaction.request}, TurnLimit(compaction.summary)
        for results in said, [{**each, "content": NO_ROOM} for each in said]:
            tokens = rendered(results, request)
            if turn.length + len(tokens) + compaction.summary <= compaction.room:
                return Answer(tokens, SUMMING, said=[*results, request], limit=limit)
        return answer

    def _segment(self, turn: Turn, compaction: Compaction) -> Answer | Drop:
        parsed = self.chat.parse(turn.tokens.tolist())
        tokens = compaction.behind(turn.prompt, parsed.content or parsed.text, self.chat.tokenizer)
        if len(tokens) > compaction.longest:
            size = f"behind it the prompt has {len(tokens)} tokens, more than {compaction.longest}"
            remedy = "raise data.max_prompt_tokens or environment.summary_tokens"
            return Drop(turn.prompt.rollout, f"its summary has no room: {size}: {remedy}")
        return Answer(np.zeros(0, np.int32), segment=tokens)

    def _understood(self, name: str, arguments: Mapping[str, object], result: ToolResult) -> bool:
        if (signature := self.signatures.get(name)) is None:
            result.failure = f"there is no tool {shortened(repr(name), 80)}; the tools are {', '.join(self.names)}"
            return False
        try:
            first, others = by_position(signature, arguments)
            signature.bind(*first, **others)
        except TypeError as error:
            result.failure = f"{name}(): {error}"
        return not result.failure

    async def _call(
        self, name: str, arguments: Mapping[str, object], result: ToolResult, where: str, own: Mapping[str, object]
    ) -> None:
        began = anyio.current_time()
        try:
            result.text = await self._calls[name].make({**arguments, **own}, where)
        except EnvironmentFailure as failure:
            cause, told = failure.__cause__, self._on_failure == "answer"
            result.error, result.failure = failure, one_line(cause) if told and cause is not None else str(failure)
        result.seconds = anyio.current_time() - began


async def first_answer(environment: Environment, prompt: Prompt, turn: IntArray) -> IntArray | None:
    """Return an environment's answer to the first turn of a response: int32 [n], or ``None``."""
    async with await entered([environment]):
        answer = await environment.answer(Turn(prompt, 0, turn))
    return answer.tokens if isinstance(answer, Answer) else None
