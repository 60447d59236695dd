"""Validates a table of a TOML file as a dataclass: no coercion, no unknown key, every fault reported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, cast

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from oppo.declared import Filled
from oppo.errors import OppoError, did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

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
