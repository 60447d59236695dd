"""Reward functions: plain Python as a scorer, and never a silent zero.

A function is called once for all rollouts that finish together, as ``f(prompts, completions, **columns)``, and returns
one finite number for each. Anything else is a failure, and what becomes of it is chosen by name: the run stops with a
:class:`~oppo.errors.RewardError` that names the rollout, or the function is asked again, or the rollout is dropped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal, SupportsFloat, TypeAlias

import anyio

from oppo.errors import RewardError
from oppo.events import Chunk, Drop, Finish, Given, Prompt
from oppo.models import RewardFunction, Scorer
from oppo.placement.errand import errand

OnFailure: TypeAlias = Literal["fail", "drop", "retry"]
"""What becomes of a failure: the run stops; the rollout is not trained; the function is asked again, then it stops."""

PAUSES = (1.0, 5.0, 25.0)
"""Seconds before each further attempt: a service that is restarted is back within half a minute."""

_RESERVED = ("prompts", "completions")


class RewardFailure(RewardError):  # noqa: N818 - it says what happened
    """A reward function, called as it asks to be, raised or returned something that is no score."""


class FunctionReward(Scorer[float | Drop]):
    """A Python function as the reward; it sees whole responses only, so it has nothing to prefill.

    Args:
        function: ``f(prompts, completions, **columns)``, sync or async; every argument is a list with one item for each
            rollout. ``prompts`` holds the data's own ``prompt`` column where there is one, else the prompt's text;
            ``columns`` are the data's other columns, those that the function names or all if it takes ``**``.
            A sync function runs in a thread of its own, inline on a loop of virtual time. One that never returns keeps
            neither a cancelled run nor the process from ending.
        decode: token ids to text, without special tokens.
        name: the function's name in errors.
        prompt_column: the column handed over as ``prompts``.
        on_failure: ``fail`` raises. ``retry`` calls again after each of ``pauses``, then raises. ``drop`` calls again
            for each rollout alone, and drops those for which it still fails: which ones these are does not depend on
            what they finished together with. A column that is asked for but not there always raises.
        pauses: seconds before each further attempt of ``retry``.

    Attributes:
        at_work: names the function while it is being called; empty otherwise.

    Example:
        >>> async def main() -> list[float | Drop]:
        ...     reward = FunctionReward(lambda prompts, completions: [len(c) for c in completions], decode=str)
        ...     return await reward.finish([])
        >>> anyio.run(main)
        []
    """

    def __init__(
        self,
        function: RewardFunction,
        decode: Callable[[Sequence[int]], str],
        *,
        name: str | None = None,
        prompt_column: str = "prompt",
        on_failure: OnFailure = "fail",
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.at_work = ""
        self._function = function
        self._decode = decode
        self._prompt_column = prompt_column
        self._on_failure = on_failure
        self._pauses = tuple(pauses) if on_failure == "retry" else ()
        parameters = _parameters(function, self.name)
        kinds = inspect.Parameter
        self._takes_all = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
        named = [p for p in parameters.values() if p.kind in {kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY}]
        self._named = tuple(p.name for p in named if p.name not in _RESERVED)
        self._required = tuple(p.name for p in named if p.name in self._named and p.default is kinds.empty)

    @property
    def version(self) -> int:
        """Always 0: a function does not change."""
        return 0

    async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        """Read nothing: a function sees whole responses."""

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Drop nothing: there are no sessions."""

    async def finish(self, finished: Sequence[Finish]) -> list[float | Drop]:
        """Return the function's score of each rollout, or why there is none.

        Raises:
            RewardError: the function raised, or returned something that is not one finite number for each rollout, and
                failures are not dropped.
        """
        if not finished:
            return []
        for pause in self._pauses:
            try:
                return [*await self._attempt(finished)]
            except RewardFailure:
                await anyio.sleep(pause)
        try:
            return [*await self._attempt(finished)]
        except RewardFailure as failure:
            if self._on_failure != "drop":
                if self._pauses:
                    failure.add_note(f"it was the last of {len(self._pauses) + 1} attempts")
                raise
        return [await self._alone(each) for each in finished]

    async def _alone(self, finished: Finish) -> float | Drop:
        """Return the score of one rollout, or a record of why there is none."""
        try:
            (score,) = await self._attempt([finished])
        except RewardFailure as failure:
            return Drop(finished.rollout, str(failure))
        return score

    async def _attempt(self, finished: Sequence[Finish]) -> list[float]:
        """Return the score of each rollout; what the function itself did wrong is raised as a ``RewardFailure``."""
        arguments = self._arguments(finished)
        self.at_work = f"reward function {self.name!r}"
        try:
            result = await self._call(arguments)
        except Exception as error:  # the boundary to the user's code: named, kept as the cause, re-raised
            rollouts = ", ".join(str(each.rollout) for each in finished)
            raise RewardFailure(
                f"reward function {self.name!r} raised {type(error).__name__}: {error} (rollouts {rollouts})"
            ) from error
        finally:
            self.at_work = ""
        return self._scores(result, finished)

    async def _call(self, arguments: Mapping[str, object]) -> object:
        def call() -> object:
            return self._function(**arguments)

        virtual = bool(getattr(asyncio.get_running_loop(), "virtual", False))
        inline = virtual or _is_async(self._function)
        result = call() if inline else await errand(f"oppo-reward-{self.name}", call)
        return await result if isinstance(result, Awaitable) else result

    def _arguments(self, finished: Sequence[Finish]) -> dict[str, object]:
        prompts = [each.response.prompt for each in finished]
        columns = sorted({name for prompt in prompts for name in prompt.columns} - {self._prompt_column})
        if clash := [name for name in columns if name in _RESERVED]:
            raise RewardError(
                f"the data's column {clash[0]!r} bears the name of an argument of reward functions: rename it"
            )
        if missing := [name for name in self._required if name not in columns]:
            raise RewardError(
                f"reward function {self.name!r} asks for {missing[0]!r}, which is no column of the data; "
                f"the columns there are {', '.join(columns) or '(none)'}"
            )
        wanted = columns if self._takes_all else [name for name in columns if name in self._named]
        return {
            "prompts": [p.columns.get(self._prompt_column) or self._decode(p.tokens.tolist()) for p in prompts],
            "completions": [self._decode(each.response.tokens.tolist()) for each in finished],
            **{name: [prompt.columns.get(name) for prompt in prompts] for name in wanted},
        }

    def _scores(self, result: object, finished: Sequence[Finish]) -> list[float]:
        try:
            values: list[object] = list(result)  # type: ignore[call-overload]  # whatever a user's function returned
        except TypeError:
            values = []
            single = True
        else:
            single = isinstance(result, str | bytes | Mapping)
        if single or len(values) != len(finished):
            came = f"{type(result).__name__} {result!r}" if single else f"{len(values)}"
            raise RewardFailure(
                f"reward function {self.name!r} must return {len(finished)} numbers, one for each completion; "
                f"got {came}"
            )
        return [self._score(value, each.rollout) for value, each in zip(values, finished, strict=True)]

    def _score(self, value: object, rollout: int) -> float:
        score = math.nan
        if isinstance(value, SupportsFloat):
            try:
                score = float(value)
            except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several numbers
                score = math.nan
        if not math.isfinite(score):
            raise RewardFailure(
                f"reward function {self.name!r} must return a finite number for each completion; "
                f"for rollout {rollout} it returned {value!r} ({type(value).__name__})"
            )
        return score


def load_function(spec: str) -> RewardFunction:
    """Return the function that ``file.py:function`` names; the file is run as a module of its own.

    Raises:
        RewardError: there is no such file or function, the file cannot be run, or the function takes no
            ``prompts`` and ``completions``.
    """
    text, _, name = spec.rpartition(":")
    path = Path(text)
    if not text or path.suffix != ".py":
        raise RewardError(f"a reward function is named as file.py:function; got {spec!r}")
    if not path.is_file():
        raise RewardError(f"there is no file {path} to take the reward function {name!r} from")
    module = _module(path)
    function: object = getattr(module, name, None)
    if function is None:
        there = [key for key, value in vars(module).items() if inspect.isroutine(value) and not key.startswith("_")]
        raise RewardError(f"{path} has no function {name!r}; the functions there are {', '.join(there) or '(none)'}")
    if not callable(function):
        raise RewardError(f"{spec} is not a function but {function!r} ({type(function).__name__})")
    _parameters(function, name)
    return function


def _module(path: Path) -> ModuleType:
    name = f"oppo_reward_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise RewardError(f"{path} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        found.loader.exec_module(module)
    except Exception as error:  # the boundary to the user's code: named, kept as the cause, re-raised
        del sys.modules[name]
        raise RewardError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _parameters(function: Callable[..., object], name: str) -> Mapping[str, inspect.Parameter]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that does not say what it takes: the call will
        return {}
    parameters = signature.parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    lacking = [each for each in _RESERVED if each not in parameters]
    if lacking and not takes_all:
        raise RewardError(
            f"reward function {name!r} must take (prompts, completions, **columns); its signature is {name}{signature}"
        )
    return parameters


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - asks what calling it does
