"""The reward that ``file.py:name`` names: a function, several rewards, a scorer, or a function that makes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, TypeVar, cast

from oppo import user_code
from oppo.errors import RewardError, contained, shown
from oppo.events import Drop
from oppo.models import Scorer
from oppo.observe import Telling, silent
from oppo.placement import Hosted, Hosting, Journal, Recipe
from oppo.rewards.called import RESERVED
from oppo.rewards.combined import OnDrop, Rewards, is_scorer
from oppo.rewards.function import FunctionReward
from oppo.user_code import LoadedFile

T = TypeVar("T")


def load_reward(
    spec: str,
    decode: Callable[[Sequence[int]], str],
    *,
    place: Hosting | None = None,
    on_drop: OnDrop = "drop",
    process: bool | Literal["sync"] = False,
    tell: Callable[[str], None] = silent,
    **options: Any,
) -> Scorer[float | Drop]:
    """Return the reward that ``file.py:name`` names, as a scorer.

    The name is that of a reward function, of a scorer, of a function that makes a scorer, or of a dictionary ``{name:
    (weight, one of these)}``. A function that makes a scorer has an argument ``place``, where the scorer hosts what
    computes; it may also have ``decode`` and ``tell``. A scorer that is ready works where it wants, beside the run's
    models.

    Args:
        spec: file and name.
        decode: token ids to text, without special tokens.
        place: for scorers that are made.
        on_drop: of :class:`Rewards`.
        process: call functions in processes of their own, ``sync`` if they are sync; an async function alone is
            refused, and those of several rewards are called here.
        tell: called with the news of the reward.
        options: of each :class:`FunctionReward`.

    Raises:
        ConfigError: a weight is no number.
        RewardError: there is no such file or name, or it names nothing that is a reward.
    """
    found = user_code.load_object(spec, RewardError)
    if place is not None:
        place = _FilePlace(place, spec.rpartition(":")[0])
    given = {"place": place, "decode": decode, "tell": tell}
    if isinstance(found, Mapping):
        parts = {name: _with_scorer(part, f"{spec}[{name!r}]", given) for name, part in found.items()}
        return Rewards(parts, decode, on_drop=on_drop, process=bool(process), tell=tell, **options)
    if _makes_scorer(found):
        found = _made(found, spec, given)
    if not is_scorer(found):
        apart = not user_code.is_async(found) if process == "sync" else process
        return FunctionReward(spec, decode, process=apart, tell=tell, **options)
    if isinstance(found, Telling):
        found.tell = tell
    return cast("Scorer[float | Drop]", found)


@dataclass(frozen=True, slots=True)
class _FilePlace:
    """A place to which instances of a file's classes can go, also if it is another process."""

    place: Hosting
    file: str

    def host(self, instance: T | Recipe[T], *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Host the instance, after the file."""
        self.place.host(LoadedFile.of(self.file), track=track)
        return self.place.host(instance, track=track, journal=journal)


def _makes_scorer(found: object) -> TypeGuard[Callable[..., object]]:
    """Return whether this is a function that makes a scorer."""
    if not callable(found) or is_scorer(found):
        return False
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return "place" in parameters and not set(RESERVED) & parameters.keys()


def _made(make: Callable[..., object], spec: str, given: Mapping[str, object]) -> object:
    """Return the scorer that a function makes.

    Raises:
        RewardError: it raised, or made something else, or there is no place.
    """
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
    """Return a part of several rewards with the scorer that its function makes."""
    if isinstance(part, tuple | list) and len(part) == 2 and _makes_scorer(part[1]):
        return part[0], _made(part[1], spec, given)
    return part
