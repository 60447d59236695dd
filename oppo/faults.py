"""What is wrong with a file of settings, in sentences: the key, what was expected, what came, the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


@dataclass(frozen=True, slots=True)
class Faults:
    """Tells the faults of a file with sections of keys.

    Attributes:
        schema: the model of the whole file; each field is a section, a model of its own.
    """

    schema: type[BaseModel]

    def told(self, error: ValidationError) -> str:
        """Return one line for each setting that is wrong."""
        grouped: dict[tuple[str, ...], list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            grouped.setdefault(tuple(str(part) for part in detail["loc"][:2]), []).append(detail)
        lines = [self._sentence(place, details) for place, details in grouped.items()]
        if len(lines) == 1:
            return lines[0]
        return "\n".join([f"{len(lines)} settings are wrong:", *(f"  {line}" for line in lines)])

    def _sentence(self, place: tuple[str, ...], details: Sequence[ErrorDetails]) -> str:
        detail = details[0]
        if not place:  # it is about several sections, and says which
            return detail["msg"].removeprefix("Value error, ")
        where = f"[{place[0]}]" if len(place) == 1 else ".".join(place)
        if detail["type"] == "extra_forbidden":
            return self._unknown(place)
        if detail["type"] == "missing":
            return f"{where} is missing: {self._wanted(place)}"
        if detail["type"] == "value_error":
            return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
        if detail["type"] in {"model_type", "model_attributes_type"}:
            return f"{where}: expected {self._wanted(place)}, got {detail['input']!r}"
        expected = " or ".join(dict.fromkeys(expectation(each) for each in details))
        return f"{where}: expected {expected}, got {detail['input']!r}"

    def _keys(self, section: str) -> dict[str, str]:
        """Return the keys of a section, each with its description."""
        annotation = self.schema.model_fields[section].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return {}
        return {name: field.description or "a value" for name, field in annotation.model_fields.items()}

    def _wanted(self, place: tuple[str, ...]) -> str:
        if len(place) == 1:
            return f"a section with the keys {listed(self._keys(place[0]))}"
        return self._keys(place[0]).get(place[1], "a value")

    def _unknown(self, place: tuple[str, ...]) -> str:
        if len(place) == 1:
            kind, home, known = "section", "a configuration", list(self.schema.model_fields)
        else:
            kind, home, known = "key", f"[{place[0]}]", list(self._keys(place[0]))
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
        guess = f" (did you mean {near[0]!r}?)" if near else ""
        return f"unknown {kind} {'.'.join(place)!r}{guess}; the {kind}s of {home} are {listed(known)}"


def expectation(detail: ErrorDetails) -> str:
    """Return what a value should have been, in the words of a file of settings."""
    if detail["type"] == "string_pattern_mismatch":
        return "letters, digits, '.', '_' and '-' only, beginning with a letter or a digit"
    text = detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    index = f"item {detail['loc'][2]} to be " if len(detail["loc"]) > 2 and isinstance(detail["loc"][2], int) else ""
    if text.startswith(("greater", "less")):
        return f"{index}a number {text}"
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a string"}
    return index + words.get(text, text)


def listed(names: Iterable[str]) -> str:
    """Return the names, separated by commas."""
    return ", ".join(names)
