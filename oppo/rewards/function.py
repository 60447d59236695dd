"""Reward functions: plain Python as a scorer, and never a silent zero.

A function is called for rollouts that finish together, or for each alone, as ``f(prompts, completions, **columns)``,
and returns one finite number for each, or a :class:`~oppo.Drop` with its reason (:meth:`oppo.Drop.because`). Anything
else is a failure, with a chosen consequence: the run stops with a :class:`~oppo.errors.RewardError` that names the
rollout, or the function is called again, or the rollout is dropped.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias, cast

import anyio

from oppo.errors import RewardError, as_itself
from oppo.events import Chunk, Drop, Finish, Given, Prompt
from oppo.models import RewardFunction, Scorer
from oppo.numeric import require_real
from oppo.observe import Telling, silent
from oppo.rewards.called import RESERVED, CalledFunction, ReturnedScore, RewardFailure, parameters_of
from oppo.rewards.per_token import Placed, is_placed, token_rewards
from oppo.user_calls import CONCURRENCY, UserCalls
from oppo.user_code import UserFunction

OnFailure: TypeAlias = Literal["fail", "drop", "retry"]
"""The consequence of a failure: the run stops; the rollout is dropped; the function is called again, then it stops."""

PAUSES = (1.0, 5.0, 25.0)
"""Seconds before each further attempt: a restarting service is back within half a minute."""

COMPLETION_IDS: Final = "completion_ids"
"""The argument by which a function asks for the token ids of the completions, as rewards at tokens need them."""

DOES_NOT_APPLY = "the reward does not apply"
"""Reason of a drop for a rollout for which an optional function returned ``None``."""

_Work: TypeAlias = Callable[[Sequence[Finish]], Awaitable[list[float | Drop]]]


class FunctionReward(Scorer[float | Drop]):
    """A Python function as the reward; it reads whole responses only, so it has nothing to prefill.

    Any error of the function counts as its failure, ``sys.exit()`` and a ``CancelledError`` of its own included.

    Args:
        function: ``f(prompts, completions, **columns)``, sync or async, or its ``file.py:name``; every argument is a
            list with one item for each rollout. ``prompts`` holds the data's ``prompt`` column if there is one, else
            the prompt's text; ``columns`` are copies of the data's other columns: those that the function names, or all
            if it takes ``**``; an argument ``completion_ids`` is given the token ids. For each rollout it returns a
            number, or rewards at places in the response: one for each token, a mapping from positions of tokens, or a
            :class:`ByCharacter`. A sync function runs in a thread of its own, or inline on a loop of virtual time. One
            that never returns keeps neither a cancelled run nor the process from ending. Calls of an async function
            overlap, so a step waits for the slowest and not for their sum.
        decode: token ids to text, without special tokens.
        name: the function's name in errors.
        prompt_column: the column passed as ``prompts``.
        on_failure: ``fail`` raises. ``retry`` calls again after each of ``pauses``, then raises. ``drop`` calls again
            for each rollout alone, several at a time, and drops those that still fail, so the drops do not depend on
            which rollouts finished together. A missing column always raises.
        pauses: seconds before each further attempt of ``retry``.
        process: call the function in processes of its own: it may then hold the interpreter lock or crash. It must be
            sync, and importable by name.
        concurrency: how many calls may overlap; by default 64 of an async function and 1 of a sync one. Overlapping
            calls of a sync function are made in as many threads or processes.
        timeout: seconds after which a call has failed; ``None``: never (:class:`oppo.user_calls.UserCalls`).
        each: call the function for each rollout alone.
        optional: ``None`` as a score means that the reward does not apply: the rollout is dropped, or, as a part of
            :class:`Rewards`, scored by the other parts. Otherwise it is a failure.
        tell: called with a sentence about each failure that is tried again, and with the news of a function that is
            :class:`~oppo.observe.Telling`.

    Raises:
        ConfigError: ``concurrency`` or ``timeout`` is out of range.
        RewardError: the function takes no ``prompts`` and ``completions``, or cannot be called in a process.

    Example:
        >>> async def main() -> list[float | Drop]:
        ...     reward = FunctionReward(lambda prompts, completions: [len(c) for c in completions], decode=str)
        ...     return await reward.finish([])
        >>> anyio.run(main)
        []
    """

    def __init__(
        self,
        function: RewardFunction | str,
        decode: Callable[[Sequence[int]], str],
        *,
        name: str | None = None,
        prompt_column: str = "prompt",
        on_failure: OnFailure = "fail",
        pauses: Sequence[float] = PAUSES,
        process: bool = False,
        concurrency: int | None = None,
        timeout: float | None = None,
        each: bool = False,
        optional: bool = False,
        tell: Callable[[str], None] = silent,
    ) -> None:
        user = UserFunction.of(function, name, RewardError)
        parameters = parameters_of(user.function, user.name)
        self.name = user.name
        self._function = CalledFunction(user, optional)
        default = CONCURRENCY if user.is_async else 1
        self._calls = UserCalls(
            "reward function",
            self._function,
            concurrency=default if concurrency is None else concurrency,
            timeout=timeout,
            process=process,
            tell=self._say,
        )
        self._decode = decode
        self._prompt_column = prompt_column
        self._on_failure = on_failure
        self._pauses = tuple(pauses) if on_failure == "retry" else ()
        for pause in self._pauses:
            require_real("a pause", pause, 0)
        self._tell: Callable[[str], None] = silent
        if tell is not silent:
            self.tell = tell
        self._each = each
        kinds = inspect.Parameter
        self._takes_all = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
        named = [p for p in parameters.values() if p.kind in {kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY}]
        self._named = tuple(p.name for p in named if p.name not in {*RESERVED, COMPLETION_IDS})
        self._wants_ids = COMPLETION_IDS in parameters
        self._required = tuple(p.name for p in named if p.name in self._named and p.default is kinds.empty)

    @property
    def tell(self) -> Callable[[str], None]:
        """Called with a sentence about each failure that is tried again, and with the news of the function itself."""
        return self._tell

    @tell.setter
    def tell(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        if isinstance(self._function.user.function, Telling):
            self._function.user.function.tell = tell

    def _say(self, sentence: str) -> None:
        self.tell(sentence)  # whoever listens now

    @property
    def at_work(self) -> str:
        """The function's name during a call and a pause; empty otherwise."""
        return self._calls.at_work

    @property
    def concurrent(self) -> bool:
        """Whether calls may overlap."""
        return self._calls.concurrent

    @property
    def version(self) -> int:
        """Always 0: a function does not change."""
        return 0

    async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        """Read nothing: a function sees whole responses."""

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Do nothing: there are no sessions."""

    async def finish(self, finished: Sequence[Finish]) -> list[float | Drop]:
        """Return the function's score of each rollout, or a ``Drop`` with the reason that there is none.

        Raises:
            RewardError: the function raised, or did not return one finite number for each rollout, and failures are not
                dropped.
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
                self.tell(f"{failure}; attempt {attempt} of {attempts} follows in {pause:g} s")
                with self._calls.working(f", which failed and is called again after {pause:g} s"):
                    await anyio.sleep(pause)
        try:
            return await self._scored(finished)
        except RewardFailure as failure:
            if self._on_failure != "drop":
                if self._pauses:
                    failure.add_note(f"it was the last of {attempts} attempts")
                raise
        return await self._apart(self._or_drop, finished)

    async def _or_drop(self, finished: Sequence[Finish]) -> list[float | Drop]:
        """Return the score of one rollout, or a ``Drop``."""
        try:
            return await self._scored(finished)
        except RewardFailure as failure:
            return [Drop(each.rollout, str(failure)) for each in finished]

    async def _apart(self, work: _Work, finished: Sequence[Finish]) -> list[float | Drop]:
        """Score each rollout alone, all concurrently."""
        scores: dict[int, float | Drop] = {}

        async def score(one: Finish) -> None:
            (scores[one.rollout],) = await work([one])

        with as_itself():
            async with anyio.create_task_group() as tasks:
                for each in finished:
                    tasks.start_soon(score, each)
        return [scores[each.rollout] for each in finished]

    async def _scored(self, finished: Sequence[Finish]) -> list[float | Drop]:
        """Return the score of each rollout, or a ``Drop`` if the function does not apply."""
        scores = await self._attempt(finished)
        return [
            Drop(each.rollout, DOES_NOT_APPLY) if score is None else self._valued(score, each)
            for each, score in zip(finished, scores, strict=True)
        ]

    def _valued(self, score: float | Placed | Drop, finish: Finish) -> float | Drop:
        """Return a score; one that was given at places as the rewards of the response's tokens."""
        if isinstance(score, Drop) or not is_placed(score):
            return cast("float | Drop", score)
        try:
            return token_rewards(cast("Placed", score), finish.response, self._decode)
        except ValueError as error:
            raise self._function.failure(
                f"returned rewards that do not fit the completion: {error}", [finish.rollout]
            ) from error

    async def _attempt(self, finished: Sequence[Finish]) -> list[ReturnedScore]:
        """Return the score of each rollout; raise a ``RewardFailure`` if the function itself is at fault."""
        arguments, rollouts = self._arguments(finished), [each.rollout for each in finished]
        return await self._calls.make(partial(self._failure, rollouts), arguments, rollouts)

    def _failure(self, rollouts: Sequence[int], what: str) -> RewardFailure:
        return self._function.failure(what, rollouts)

    def _arguments(self, finished: Sequence[Finish]) -> dict[str, object]:
        prompts = [each.response.prompt for each in finished]
        columns = self.arguments_of({name for prompt in prompts for name in prompt.columns})
        wanted = columns if self._takes_all else [name for name in columns if name in self._named]
        # Copies, since rollouts of a group, and later epochs, are given the same columns again.
        return {
            "prompts": [
                copy.deepcopy(p.columns.get(self._prompt_column)) or self._decode(p.tokens.tolist()) for p in prompts
            ],
            "completions": [self._decode(each.response.tokens.tolist()) for each in finished],
            **({COMPLETION_IDS: [each.response.tokens.tolist() for each in finished]} if self._wants_ids else {}),
            **{name: [copy.deepcopy(prompt.columns.get(name)) for prompt in prompts] for name in wanted},
        }

    def arguments_of(self, names: Collection[str]) -> list[str]:
        """Return those of the data's columns that are arguments of the function, sorted.

        Raises:
            RewardError: one bears the name of another argument, or one that the function asks for is not there.
        """
        columns = sorted({*names} - {self._prompt_column})
        if clash := [name for name in columns if name in {*RESERVED, *([COMPLETION_IDS] * self._wants_ids)}]:
            raise RewardError(
                f"the data's column {clash[0]!r} bears the name of an argument of reward functions: rename it"
            )
        if missing := [name for name in self._required if name not in columns]:
            raise RewardError(
                f"reward function {self.name!r} asks for {missing[0]!r}, which is no column of the data; "
                f"the columns there are {', '.join(columns) or '(none)'}"
            )
        return columns

    def close(self) -> None:
        """Kill the function's processes, if it has some; idempotent."""
        self._calls.close()

    async def __aenter__(self) -> Self:
        await self._calls.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._calls.__aexit__(kind, error, tb)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
