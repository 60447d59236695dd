"""Declarations of settings: the fields of a dataclass, each with a type and its bounds, a default and a description.

A setting is declared once. :func:`validated` checks values from Python by the declaration,
:mod:`oppo.config.load` values from a file.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import types
from collections import abc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from ipaddress import IPv6Address
from numbers import Integral, Real
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    SupportsFloat,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import SplitResult, urlsplit

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AllowInfNan, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

from oppo.errors import ConfigError, OppoError, did_you_mean, shown
from oppo.redact import redacted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic_core import ErrorDetails


T = TypeVar("T")

MOST = 2**31
"""Counts (of steps, rollouts, tokens, bytes) stay below it, as many become an int32."""

WHOLE = range(-(2**63), 2**63)
"""The whole numbers that are accepted: arrays, random generators and files hold 64 bits."""

SEEDS = range(2**63)
"""The seeds that are accepted."""


Fraction: TypeAlias = Annotated[float, Ge(0), Le(1)]
NonNegative: TypeAlias = Annotated[float, Ge(0)]
Positive: TypeAlias = Annotated[float, Gt(0)]
LearningRate: TypeAlias = Annotated[float, Ge(0), Le(0.1)]
"""A larger step of AdamW moves every weight by about as much as it is large, or more."""
AtLeastOne: TypeAlias = Annotated[float, Ge(1)]
Limit: TypeAlias = Annotated[float, Gt(0), AllowInfNan(True)]
"""More than 0; ``inf`` for no limit."""
Threshold: TypeAlias = Annotated[float, Ge(-math.inf), AllowInfNan(True)]
"""A number or an infinity."""
Seconds: TypeAlias = Annotated[float, Ge(0), Lt(MOST)]
Count: TypeAlias = Annotated[int, Ge(0), Lt(MOST)]
PositiveCount: TypeAlias = Annotated[int, Gt(0), Lt(MOST)]
PositiveInteger: TypeAlias = Annotated[int, Gt(0), Lt(WHOLE.stop)]
"""``sys.maxsize`` for no limit."""
Rollouts: TypeAlias = Annotated[int, Gt(0), Le(2**20)]
"""Rollouts that are in memory together."""
Seed: TypeAlias = Annotated[int, Ge(SEEDS.start), Lt(SEEDS.stop)]
Filled: TypeAlias = Annotated[str, MinLen(1)]


@dataclass(frozen=True, slots=True)
class FromList:
    """Marks a tuple that a file spells as a list."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "strict": False}


Resume: TypeAlias = Literal["fixed", "rounding", "free"]
"""Whether a setting may change when a run is resumed: never, where sums may be rounded otherwise, or always."""


def setting(default: T, description: str, *, resume: Resume = "fixed") -> T:
    made: T = field(default=default, metadata={"description": description, "resume": resume})
    return made


def required(description: str) -> Any:
    return field(metadata={"description": description})


@dataclass(frozen=True, slots=True)
class Declared:
    kind: Any
    default: object
    description: str
    resume: Resume


def declared(record: type) -> Mapping[str, Declared]:
    return _declared(record)


@cache
def _declared(record: Any) -> Mapping[str, Declared]:
    kinds, found = _hints(record), {}
    for each in (each for each in fields(record) if each.init):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        told = [vars(base).get("__dataclass_fields__", {}).get(each.name) for base in record.__mro__]
        about: Mapping[str, Any] = next((of.metadata for of in told if of and "description" in of.metadata), {})
        found[each.name] = Declared(
            kinds.get(each.name, Any), default, about.get("description", ""), about.get("resume", "fixed")
        )
    return found


def _hints(record: type) -> dict[str, Any]:
    found = dict[str, Any]()
    for base in reversed(record.__mro__):
        module = getattr(sys.modules.get(base.__module__), "__dict__", {})
        for name, hint in inspect.get_annotations(base).items():
            found.pop(name, None)
            one = type(base.__name__, (), {"__annotations__": {name: hint}})
            with suppress(NameError):  # a user's subclass may import for the type checker alone
                found |= get_type_hints(one, dict(vars(base)), module, include_extras=True)
    return found


def changed(record: DataclassInstance, names: Collection[str]) -> dict[str, object]:
    declarations = declared(type(record))
    given = {name: getattr(record, name) for name in declarations if name in names}
    return {name: value for name, value in given.items() if value != declarations[name].default}


def validated(error: type[Exception] = ValueError) -> Callable[[type[T]], type[T]]:
    """Check instances of a dataclass by the declarations of its fields; stands below ``@dataclass``.

    Numbers are checked by their bounds, also in tuples, and literals by their choices. A field whose
    annotation has names that its module does not import at run time is not checked.

    Example:
        >>> from oppo.models import Sampling
        >>> Sampling(temperature=float("nan"))
        Traceback (most recent call last):
        ...
        ValueError: temperature of Sampling must be a finite number, not nan
    """

    def checks(record: type[T]) -> type[T]:
        own: Callable[[T], None] = getattr(record, "__post_init__", lambda _: None)

        def __post_init__(self: T) -> None:  # noqa: N807 - the name by which a dataclass calls it
            require_declared(self, error)
            own(self)

        setattr(record, "__post_init__", __post_init__)  # noqa: B010 - a class may lack it
        return record

    return checks


def require_declared(record: object, error: type[Exception] = ValueError) -> None:
    """Check the fields of a dataclass that is not :func:`validated`."""
    owner: Any = type(record)
    for name in declared(owner):
        if (validator := _validator(owner, name)) is not None:
            _require(name, getattr(record, name), validator, error, owner=f" of {owner.__name__}")


def require_whole(name: str, value: object, least: int = WHOLE.start, *, error: type[Exception] = ValueError) -> None:
    _require(name, value, _number(Annotated[int, Ge(least), Lt(WHOLE.stop)]), error)


def require_real(
    name: str,
    value: object,
    least: float = -math.inf,
    *,
    infinite: bool = False,
    error: type[Exception] = ValueError,
) -> None:
    _require(name, value, _number(Annotated[float, Ge(least), AllowInfNan(infinite)]), error)


def require_metrics(name: str, metrics: object, *, error: type[Exception] = ValueError) -> None:
    if not isinstance(metrics, Mapping):
        raise error(f"{name} must be a mapping from names to numbers; got {shown(metrics)}")
    for metric, value in metrics.items():
        number = isinstance(value, SupportsFloat) and not isinstance(value, str | bytes)
        if not (isinstance(metric, str) and number) or len(getattr(value, "shape", "")):
            raise error(f"{name} must map names to numbers; got {shown(metric)}: {shown(value)}")


_PLACE: Final = re.compile(r"([^@]*@)?([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


def split_url(url: str, whose: str) -> SplitResult:
    with suppress(ValueError):  # of brackets, or a port that is too high
        parts = urlsplit(url)
        if "[" in parts.netloc:
            IPv6Address(parts.hostname or "")
        known = parts.scheme in {"http", "https"} and _PLACE.fullmatch(parts.netloc) and parts.port != 0
        if known and url.isprintable() and " " not in url:
            return parts
    raise ConfigError(f"expected the URL of {whose}, such as http://localhost:8000; got {redacted(repr(url))}")


def _require(name: str, given: object, validator: TypeAdapter[Any], error: type[Exception], *, owner: str = "") -> None:
    try:
        validator.validate_python(_plain(given))
    except ValidationError as fault:
        details = fault.errors(include_url=False)
        expected = " or ".join(dict.fromkeys(expectation(each, _IN_PYTHON) for each in details))
        if details[0]["type"] in _WORDS:  # a wrong type: the owner tells which function is called wrongly
            name = f"{name}{owner}"
        raise error(f"{name} must be {expected}, not {details[0]['input']!r}") from None


def _plain(given: object) -> object:
    if isinstance(given, tuple):
        return tuple(map(_plain, given))
    if isinstance(given, bool) or not isinstance(given, Real):
        return given
    return int(given) if isinstance(given, Integral) else float(given)


@cache
def _number(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=STRICT)


@cache
def _validator(record: type, name: str) -> TypeAdapter[Any] | None:
    # None of an argument that holds no number and no literal, or objects too, which the record itself checks
    kind = declared(record)[name].kind
    kinds = set(leaves(kind))
    is_checked = kinds & {int, float, Literal} and kinds <= {int, float, Literal, str, NoneType, abc.Callable}
    return TypeAdapter(_exact(kind), config=STRICT) if is_checked else None


def leaves(kind: Any) -> Iterator[Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from leaves(arguments[0])
    elif origin in (Union, types.UnionType, tuple):
        for each in arguments:
            yield from () if each is Ellipsis else leaves(each)
    else:
        yield origin or kind


def _exact(kind: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        rules = [rule for rule in arguments[1:] if rule != FromList()]
        return Annotated[(_exact(arguments[0]), *rules)] if rules else _exact(arguments[0])
    if origin in (Union, types.UnionType):
        return Union[tuple(map(_exact, arguments))]  # noqa: UP007 - of members that are computed
    if origin is tuple:
        return tuple[tuple(each if each is Ellipsis else _exact(each) for each in arguments)]  # type: ignore[misc]
    return Annotated[int, Ge(WHOLE.start), Lt(WHOLE.stop)] if kind is int else kind


NAME: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
Name: TypeAlias = Annotated[str, Field(max_length=128, pattern=NAME.pattern)]

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
    "callable_type": "a function",
    "dict_type": "a section",
}
"""The expectation that an error of a settings file names, by the kind of fault."""

_IN_PYTHON: Final = {**_WORDS, "tuple_type": "a tuple"}

_BOUNDS: Final = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}

STRICT: Final = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
"""No unknown key, no coercion, no NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Table:
    """Marks a dataclass that is a table of the file; an ``OppoError`` of its constructor is a fault of the file."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
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
    """Marks a text that is one of ``choices``, or of another ``form``, which ``pattern`` matches."""

    choices: tuple[str, ...]
    form: str
    pattern: re.Pattern[str]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._require, handler(source))

    def _require(self, text: str) -> str:
        if text not in self.choices and self.pattern.match(text) is None:
            guess = did_you_mean(text, self.choices)
            expected = " or ".join(filter(None, [", ".join(map(repr, self.choices)), self.form]))
            raise ValueError(f"expected {expected}, got {text!r}{guess}")
        return text


def table_in(document: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


@cache
def adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """The validator of a table whose dataclass is chosen while the file is read, and may have defaults of a user."""
    table: Any = Annotated[kind, Table()]
    config: ConfigDict = {**STRICT, "validate_default": True}
    return TypeAdapter(table | None, config=config)  # the adapter of a dataclass alone takes none


def expectation(detail: ErrorDetails, words: Mapping[str, str] = _WORDS) -> str:
    """Return the words for an expected value, in a settings file or of an argument."""
    for bound, form in _BOUNDS.items():
        if (limit := detail.get("ctx", {}).get(bound)) is not None:
            return (
                "a number" if limit == -math.inf else form.format("2**63" if limit == WHOLE.stop else f"{limit:.10g}")
            )
    return words.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")
