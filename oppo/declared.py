"""Declarations of settings: the fields of a dataclass, each with a type and its bounds, a default and a description.

A setting is declared once. :func:`require_declared` holds values from Python to the declaration, where they come in;
:mod:`oppo.config.load` holds those of a file to it.
"""

from __future__ import annotations

import operator
import re
import types
from collections import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from itertools import product
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from oppo.errors import OppoError, did_you_mean
from oppo.numeric import require_real, require_whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic_core import ErrorDetails


T = TypeVar("T")

MOST = 2**31
"""Counts (of steps, rollouts, tokens, bytes) stay below it, as many become an int32."""

SEEDS = range(2**63)
"""The seeds that are accepted."""


@dataclass(frozen=True, slots=True)
class MayBeInfinite:
    """Marks a number that may be infinite."""


Fraction: TypeAlias = Annotated[float, Ge(0), Le(1)]
NonNegative: TypeAlias = Annotated[float, Ge(0)]
Positive: TypeAlias = Annotated[float, Gt(0)]
LearningRate: TypeAlias = Annotated[float, Ge(0), Le(0.1)]
"""A larger step of AdamW moves every weight by about as much as it is large, or more."""
AtLeastOne: TypeAlias = Annotated[float, Ge(1)]
Limit: TypeAlias = Annotated[float, Gt(0), MayBeInfinite()]
"""More than 0; ``inf`` for no limit."""
Seconds: TypeAlias = Annotated[float, Ge(0), Lt(MOST)]
Count: TypeAlias = Annotated[int, Ge(0), Lt(MOST)]
PositiveCount: TypeAlias = Annotated[int, Gt(0), Lt(MOST)]
Rollouts: TypeAlias = Annotated[int, Gt(0), Le(2**20)]
"""Rollouts that are in memory together."""
Seed: TypeAlias = Annotated[int, Ge(SEEDS.start), Lt(SEEDS.stop)]
Filled: TypeAlias = Annotated[str, MinLen(1)]

_BOUNDS: Final = {
    "ge": (operator.ge, "{} or more"),
    "gt": (operator.gt, "more than {}"),
    "le": (operator.le, "{} or less"),
    "lt": (operator.lt, "less than {}"),
}
"""By the attribute of ``annotated_types``: the comparison, and its words."""


@dataclass(frozen=True, slots=True)
class FromList:
    """Marks a tuple that a file spells as a list."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return the schema of the tuple, which accepts a list too."""
        return {**handler(source), "strict": False}


def setting(default: T, description: str) -> T:
    """Return the field of a dataclass with a default and a description."""
    made: T = field(default=default, metadata={"description": description})
    return made


def required(description: str) -> Any:
    """Return the field of a dataclass without a default, with a description."""
    return field(metadata={"description": description})


@dataclass(frozen=True, slots=True)
class Declared:
    """The declaration of a field.

    Attributes:
        kind: its type, annotations included.
        default: ``MISSING`` if the field is required.
        description: a sentence, or empty.
    """

    kind: Any
    default: object
    description: str


def declared(record: type) -> Mapping[str, Declared]:
    """Return the declarations of a dataclass's arguments, by name."""
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
    """Return a field's description in its class or the nearest base that has one."""
    declarations = [vars(base).get("__dataclass_fields__", {}).get(name) for base in record.__mro__]
    return next((each.metadata["description"] for each in declarations if each and "description" in each.metadata), "")


def changed(record: DataclassInstance, names: Collection[str]) -> dict[str, object]:
    """Return those of the arguments ``names`` of a dataclass that differ from their defaults."""
    declarations = declared(type(record))
    given = {name: getattr(record, name) for name in declarations if name in names}
    return {name: value for name, value in given.items() if value != declarations[name].default}


def require_declared(record: DataclassInstance, *, error: type[Exception] = ValueError) -> None:
    """Require that a dataclass's numbers lie within their bounds and its literals among their choices.

    This checks arguments of type ``int``, ``float`` and ``Literal``, annotated or not, also in unions with ``None`` and
    each other, and tuples of numbers.

    Args:
        record: its module must import the names in its annotations at run time.
        error: raised otherwise.

    Example:
        >>> from oppo.models import Sampling
        >>> Sampling(temperature=float("nan"))
        Traceback (most recent call last):
        ...
        ValueError: temperature of Sampling must be a finite number, not nan
    """
    for name, each in declared(type(record)).items():
        _require(name, getattr(record, name), each.kind, type(record).__name__, error=error)


def _require(name: str, given: object, kind: object, owner: str, *, error: type[Exception]) -> None:
    inner, _ = _parts(kind)
    union = get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (kind,)
    members = [_parts(each) for each in union]
    literals = [choice for each, _ in members if get_origin(each) is Literal for choice in get_args(each)]
    if (given is None and type(None) in union) or (isinstance(given, str) and given in literals):
        return
    if callable(given) and any(get_origin(each) is abc.Callable for each, _ in members):
        return
    numbers = [(each, rules) for each, rules in members if each in (int, float)]
    if numbers:
        _require_number(name, given, *numbers[0], owner, error=error)
    elif literals:
        raise error(f"{name} must be one of {', '.join(map(str, literals))}, not {given!r}")
    elif get_origin(inner) is tuple and (item := _parts(get_args(inner)[0]))[0] in (int, float):
        if not isinstance(given, tuple):
            raise error(f"{name} of {owner} must be a tuple of numbers, not {given!r}")
        for each in given:
            _require_number(name, each, *item, owner, error=error)


def _parts(kind: object) -> tuple[Any, Sequence[object]]:
    """Return a type without its annotations, and these."""
    return (get_args(kind)[0], get_args(kind)[1:]) if get_origin(kind) is Annotated else (kind, ())


def _require_number(
    name: str,
    given: Any,
    kind: type,
    rules: Collection[object],
    owner: str,
    *,
    error: type[Exception],
) -> None:
    if kind is int:
        require_whole(f"{name} of {owner}", given, error=error)
    else:
        require_real(f"{name} of {owner}", given, infinite=MayBeInfinite() in rules, error=error)
    for rule, (attribute, (holds, words)) in product(rules, _BOUNDS.items()):
        bound = getattr(rule, attribute, None)
        if bound is not None and not holds(given, bound):
            raise error(f"{name} must be {words.format(bound)}, not {given}")


Name: TypeAlias = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

_WORDS: Final = {
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-' only, beginning with a letter or a digit",
    "string_too_short": "text that is not empty",
    "string_too_long": "at most 128 characters",
    "string_type": "a string",
    "int_type": "a whole number",
    "int_parsing_size": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a section",
}
"""What was expected, by the kind of fault."""

STRICT: Final = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
"""No unknown key, no coercion, no NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Table:
    """Marks a dataclass that is a table of the file; an ``OppoError`` of its constructor is a fault of the file."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the dataclass, which accepts a table in its place."""
        schema = handler(source)
        cast("dict[str, Any]", handler.resolve_ref_schema(schema))["strict"] = False

        def validated(table: object, validate: core_schema.ValidatorFunctionWrapHandler) -> object:
            try:
                return validate(table)
            except OppoError as error:
                raise ValueError(str(error)) from error

        return core_schema.no_info_wrap_validator_function(validated, schema)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a text that is one of ``choices``, or of another form.

    Attributes:
        form: the other form, in words.
        pattern: which a text of that form matches.
    """

    choices: tuple[str, ...]
    form: str
    pattern: re.Pattern[str]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the text."""
        return core_schema.no_info_after_validator_function(self._require, handler(source))

    def _require(self, text: str) -> str:
        if text not in self.choices and self.pattern.match(text) is None:
            guess = did_you_mean(text, self.choices)
            raise ValueError(f"expected {', '.join(map(repr, self.choices))} or {self.form}, got {text!r}{guess}")
        return text


@dataclass(frozen=True, slots=True)
class TextOrTables:
    """Marks a text in whose place a table of named tables may stand, each a dataclass.

    Attributes:
        kind: the dataclass.
    """

    kind: type[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of either."""
        del source, handler
        table: Any = Annotated[self.kind, Table()]
        text, tables = TypeAdapter[str](Filled), TypeAdapter[Any](dict[Name, table], config=STRICT)

        def validated(given: object) -> object:
            if not isinstance(given, Mapping):
                return text.validate_python(given, strict=True)
            if not given:
                raise ValueError("expected a text, or at least one named table; got none")
            return tables.validate_python(given)

        return core_schema.no_info_plain_validator_function(validated)


@cache
def adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Return the validator of a table whose dataclass is chosen while the file is read."""
    table: Any = Annotated[kind, Table()]
    return TypeAdapter(table | None, config=STRICT)  # that of a dataclass alone takes no config


def expectation(detail: ErrorDetails) -> str:
    """Return what a value should have been, in the terms of a settings file."""
    if (words := _WORDS.get(detail["type"])) is not None:
        return words
    text = detail["msg"].removeprefix("Input should be ")
    return f"a number {text}" if text.startswith(("greater", "less")) else text
