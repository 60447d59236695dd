"""How a table of a file becomes a dataclass: no coercion, no unknown key, and every fault of it told."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, cast

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from oppo.errors import OppoError

STRICT: Final = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
"""No unknown key, no coercion, no number that is none."""


@dataclass(frozen=True, slots=True)
class Table:
    """Marks a dataclass that is a table of the file; what it refuses is a fault of the file."""

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
    """Marks a text that is one of several."""

    choices: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of a literal."""
        del source, handler
        return core_schema.literal_schema(list(self.choices))


@cache
def adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Return what checks a table that is a dataclass chosen while a file is read."""
    table: Any = Annotated[kind, Table()]
    return TypeAdapter(table | None, config=STRICT)  # that of a dataclass alone takes no config
