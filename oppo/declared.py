"""What the fields of a dataclass declare: a type with its bounds, a default, and a sentence.

A setting is declared once. Here values that come from Python are held to the declaration, where they come in: a NaN, or
half a step, would be met far from there. Those of a file are held to it by :mod:`oppo.app.config`.
"""

from __future__ import annotations

import types
from collections import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt, MinLen

from oppo.numeric import require_range, require_real, require_whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

MOST = 2**31
"""Counts stay below: they are numbers of steps, rollouts, tokens and bytes, and many become an int32."""

SEEDS = range(2**63)
"""What a seed may be."""

Fraction: TypeAlias = Annotated[float, Ge(0), Le(1)]
NonNegative: TypeAlias = Annotated[float, Ge(0)]
Positive: TypeAlias = Annotated[float, Gt(0)]
Seconds: TypeAlias = Annotated[float, Ge(0), Lt(MOST)]
Count: TypeAlias = Annotated[int, Ge(0), Lt(MOST)]
PositiveCount: TypeAlias = Annotated[int, Gt(0), Lt(MOST)]
Seed: TypeAlias = Annotated[int, Ge(SEEDS.start), Lt(SEEDS.stop)]
Filled: TypeAlias = Annotated[str, MinLen(1)]


BOUNDS: Final = {"ge": "at_least", "gt": "above", "le": "at_most", "lt": "below"}
"""What :func:`oppo.numeric.require_range` calls the bounds of a type."""


@dataclass(frozen=True, slots=True)
class FromList:
    """Marks a tuple that is a list in a file."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return the schema of the tuple, which accepts a list too."""
        return {**handler(source), "strict": False}


def setting(default: T, description: str) -> T:
    """Return the field of a dataclass with a default, described by a sentence."""
    made: T = field(default=default, metadata={"description": description})
    return made


def required(description: str) -> Any:
    """Return the field of a dataclass that must be given, described by a sentence."""
    return field(metadata={"description": description})


@dataclass(frozen=True, slots=True)
class Declared:
    """A field as it is declared.

    Attributes:
        kind: its type, with what annotates it.
        default: ``MISSING`` where it must be given.
        description: a sentence; empty where there is none.
    """

    kind: Any
    default: object
    description: str


def declared(record: type) -> Mapping[str, Declared]:
    """Return the arguments of a dataclass, by name."""
    return _declared(record)


@cache
def _declared(record: Any) -> Mapping[str, Declared]:
    kinds = get_type_hints(record, include_extras=True)
    return {
        each.name: Declared(
            kinds[each.name],
            each.default if each.default_factory is MISSING else each.default_factory(),
            _description(record, each.name),
        )
        for each in fields(record)
        if each.init
    }


def _description(record: type, name: str) -> str:
    """Return what a field is described by, in its class or the nearest base that says it."""
    declarations = [vars(base).get("__dataclass_fields__", {}).get(name) for base in record.__mro__]
    said = [each.metadata["description"] for each in declarations if each and "description" in each.metadata]
    return said[0] if said else ""


def require_declared(
    record: DataclassInstance, *, infinite: Collection[str] = (), error: type[Exception] = ValueError
) -> None:
    """Accept a dataclass whose numbers are numbers within their bounds, and whose literals are among the choices.

    Looked at are arguments of type ``int``, ``float`` and ``Literal``, annotated or not, also beside ``None`` and each
    other, and tuples of numbers.

    Args:
        record: of a module whose annotations are imported while it runs.
        infinite: the names of numbers that may be infinite.
        error: what is raised otherwise.

    Example:
        >>> from oppo.models import Sampling
        >>> Sampling(temperature=float("nan"))
        Traceback (most recent call last):
        ...
        ValueError: temperature of Sampling must be a finite number, not nan
    """
    for name, each in declared(type(record)).items():
        _require(name, getattr(record, name), each.kind, type(record).__name__, infinite=name in infinite, error=error)


def bounds(kind: object) -> Iterator[object]:
    """Yield what annotates a type."""
    if get_origin(kind) is Annotated:
        yield from get_args(kind)[1:]


def choices(kind: object) -> tuple[object, ...]:
    """Return the types that a union is made of; a type alone is one."""
    inner = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (kind,)


def _require(name: str, given: object, kind: object, owner: str, *, infinite: bool, error: type[Exception]) -> None:
    every = choices(kind)
    literals = [choice for each in every if get_origin(each) is Literal for choice in get_args(each)]
    if (given is None and type(None) in every) or (isinstance(given, str) and given in literals):
        return
    if callable(given) and any(get_origin(each) is abc.Callable for each in every):
        return
    numbers = [(inner, list(bounds(each))) for each in every if (inner := _inner(each)) in (int, float)]
    if numbers:
        _require_number(name, given, *numbers[0], owner, infinite=infinite, error=error)
    elif literals:
        raise error(f"{name} must be one of {', '.join(map(str, literals))}, not {given!r}")
    elif get_origin(_inner(kind)) is tuple and (inner := _inner(get_args(_inner(kind))[0])) in (int, float):
        if not isinstance(given, tuple):
            raise error(f"{name} of {owner} must be a tuple of numbers, not {given!r}")
        for each in given:
            _require_number(name, each, inner, bounds(get_args(_inner(kind))[0]), owner, infinite=infinite, error=error)


def _inner(kind: object) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _require_number(
    name: str,
    given: Any,
    kind: type,
    rules: Iterable[object],
    owner: str,
    *,
    infinite: bool,
    error: type[Exception],
) -> None:
    if kind is int:
        require_whole(f"{name} of {owner}", given, error=error)
    else:
        require_real(f"{name} of {owner}", given, infinite=infinite, error=error)
    for rule in rules:
        bound = {word: getattr(rule, sign) for sign, word in BOUNDS.items() if hasattr(rule, sign)}
        require_range(name, given, **bound, error=error)
