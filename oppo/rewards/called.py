"""A reward function as it is called, and its results, checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, SupportsFloat, TypeAlias, cast

from oppo import user_code
from oppo.errors import RewardError, awaited, contained, one_line, shown
from oppo.events import Drop
from oppo.models import RewardFunction
from oppo.rewards.per_token import Placed, is_placed, placed
from oppo.user_code import UserFunction

RESERVED: Final = ("prompts", "completions")
"""The arguments of a reward function that are no columns."""

ReturnedScore: TypeAlias = float | Placed | Drop | None
"""A finite number, or several at places of the response; a ``Drop`` by choice; ``None``: the reward does not apply."""


class RewardFailure(RewardError):  # noqa: N818 - it says what happened
    """A reward function raised, or returned something that is no score; the caller was not at fault."""


@dataclass(frozen=True, slots=True)
class CalledFunction:
    """A reward function as it is called, with the check of its scores.

    Attributes:
        optional: whether it may return ``None``.
    """

    user: UserFunction
    optional: bool = False

    def call(self, arguments: Mapping[str, object], rollouts: Sequence[int]) -> list[ReturnedScore]:
        """Call the function; return a score for each rollout.

        Raises:
            RewardFailure: it raised, or returned something else.
        """
        with self._contained(rollouts):
            return self._scores(self.user.function(**arguments), rollouts)

    async def answer(self, arguments: Mapping[str, object], rollouts: Sequence[int]) -> list[ReturnedScore]:
        """Do the same with an async function."""
        with self._contained(rollouts):
            result = self.user.function(**arguments)
            return self._scores(await awaited(result) if isinstance(result, Awaitable) else result, rollouts)

    def failure(self, what: str, rollouts: Sequence[int]) -> RewardFailure:
        """Return an error that names the function and the rollouts."""
        return RewardFailure(f"reward function {self.user.name!r} {what} (rollouts {', '.join(map(str, rollouts))})")

    def _contained(self, rollouts: Sequence[int]) -> AbstractContextManager[None]:
        return contained(lambda words: self.failure(f"raised {words}", rollouts), passing=RewardFailure)

    def _scores(self, result: object, rollouts: Sequence[int]) -> list[ReturnedScore]:
        items, wrong = _items(result, len(rollouts))
        if wrong:
            raise RewardFailure(
                f"reward function {self.user.name!r} must return {len(rollouts)} numbers, one for each completion, "
                f"in a list; got {wrong}"
            )
        return [self._score(item, rollout) for item, rollout in zip(items, rollouts, strict=True)]

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
                f"reward function {self.user.name!r} must return a finite number for each completion; "
                f"for rollout {rollout} it returned {shown(item)}"
            )
        return score

    def _placed(self, item: object, rollout: int) -> Placed:
        try:
            return placed(item)
        except Exception as error:  # any kind: the objects are the function's own
            raise RewardFailure(
                f"reward function {self.user.name!r} must return finite numbers, one for each token or by whole "
                f"positions; for rollout {rollout} it returned {shown(item)}: {one_line(error)}"
            ) from error


def _items(result: object, count: int) -> tuple[Sequence[object], str]:
    """Return the items of a function's result, and what is wrong with it as a whole, or an empty string.

    A generator is read up to one item too many: it may raise, and it may never end.
    """
    ordered = isinstance(result, Iterable) and not isinstance(result, str | bytes | Mapping | AbstractSet)
    if not ordered:
        return (), shown(result)
    items = list(islice(cast("Iterable[object]", result), count + 1))
    return items, "" if len(items) == count else f"{len(items)}" if len(items) < count else f"more than {count}"


def load_function(spec: str) -> RewardFunction:
    """Return the reward function that ``file.py:function`` names; the file is run as a module of its own.

    Raises:
        RewardError: there is no such file or function, the file cannot be run, or the function takes no
            ``prompts`` and ``completions``.
    """
    function = user_code.load_function(spec, RewardError)
    parameters_of(function, spec.rpartition(":")[2])
    return function


def parameters_of(function: Callable[..., object], name: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none of a builtin without a signature.

    Raises:
        RewardError: it takes no ``prompts`` and ``completions``.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature: the call will tell
        return {}
    parameters = signature.parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    lacking = [each for each in RESERVED if each not in parameters]
    if lacking and not takes_all:
        raise RewardError(
            f"reward function {name!r} must take (prompts, completions, **columns); its signature is {name}{signature}"
        )
    return parameters
