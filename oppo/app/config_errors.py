"""Errors of a settings file, in sentences: the key, what was expected, what came, the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pydantic import ValidationError

from oppo.algorithms.ppo import PPO
from oppo.algorithms.registry import ALGORITHMS
from oppo.app.sections import StepSection
from oppo.app.settings import Settings, algorithm_of, keys_of
from oppo.declared import Declared, declared
from oppo.errors import ConfigError, shortened
from oppo.redact import holds_secret, redacted

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

SHOWN = 200
"""Characters of a wrong value in its message."""

_WORDS = {
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-' only, beginning with a letter or a digit",
    "string_too_short": "text that is not empty",
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


@dataclass(frozen=True, slots=True)
class Faults:
    """Describes the faults of a file with sections of keys.

    Attributes:
        keys: declarations by section and key.
        sections: all that there can be.
        named: sections whose keys are names of sections of one kind: ``[gpus.NAME]``.
    """

    keys: Mapping[str, Mapping[str, Declared]]
    sections: Sequence[str]
    named: Collection[str] = ()

    def describe(self, error: ValidationError) -> str:
        """Return one line for each wrong setting."""
        grouped: dict[tuple[str, ...], list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            grouped.setdefault(self._place(detail["loc"]), []).append(detail)
        lines = [self._sentence(place, details) for place, details in grouped.items()]
        if len(lines) == 1:
            return lines[0]
        return "\n".join([f"{len(lines)} settings are wrong:", *(f"  {line}" for line in lines)])

    def _place(self, loc: Sequence[int | str]) -> tuple[str, ...]:
        """Return the section and the key of a fault, as far as it has them."""
        parts = [str(part) for part in loc]
        if len(parts) > 1 and parts[0] in self.named:
            parts[:2] = [f"{parts[0]}.{parts[1]}"]
        return tuple(parts[:2])

    def _declared(self, section: str) -> Mapping[str, Declared]:
        return self.keys.get(section.partition(".")[0], {})

    def _sentence(self, place: tuple[str, ...], details: Sequence[ErrorDetails]) -> str:
        detail = details[0]
        if not place:  # a fault between sections, which its message names
            return detail["msg"].removeprefix("Value error, ")
        where = f"[{place[0]}]" if len(place) == 1 else ".".join(place)
        if detail["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
            return self._unknown(place)
        if detail["type"] == "missing":
            return f"{where} is missing: {self._wanted(place)}"
        if detail["type"] == "value_error":
            return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
        if detail["type"] in {"model_type", "dataclass_type"}:
            return f"{where}: expected {self._wanted(place)}, got {shortened(repr(detail['input']), SHOWN)}"
        item = next((f"item {part} to be " for part in detail["loc"][2:] if isinstance(part, int)), "")
        expected = " or ".join(dict.fromkeys(expectation(each) for each in details))
        return f"{where}: expected {item}{expected}, got {shortened(repr(detail['input']), SHOWN)}"

    def _wanted(self, place: tuple[str, ...]) -> str:
        keys = self._declared(place[0])
        return f"a section with the keys {', '.join(keys)}" if len(place) == 1 else keys[place[1]].description

    def _unknown(self, place: tuple[str, ...]) -> str:
        if len(place) == 1:
            kind, home, known = "section", "a configuration", list(self.sections)
        else:
            kind, home, known = "key", f"[{place[0]}]", list(self._declared(place[0]))
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
        guess = self._elsewhere(place) or (f" (did you mean {near[0]!r}?)" if near else "")
        return f"unknown {kind} {'.'.join(place)!r}{guess}; the {kind}s of {home} are {', '.join(known)}"

    def _elsewhere(self, place: tuple[str, ...]) -> str:
        """Return the sections that have the same key."""
        homes = [name for name, keys in self.keys.items() if len(place) > 1 and place[1] in keys]
        return f" (it is a key of {', '.join(f'[{name}]' for name in homes)})" if homes else ""


@dataclass(frozen=True, slots=True)
class SettingsFaults(Faults):
    """Describes the faults of a run's settings.

    Attributes:
        algorithm: the name of the algorithm that declares ``[algorithm]``.
    """

    algorithm: str = ""

    @classmethod
    def of(cls, document: Mapping[str, object]) -> Self:
        """Return the describer for a document and its algorithm."""
        kind, step = algorithm_of(document), document.get("step")
        named = step.get("algorithm") if kind is not None and isinstance(step, Mapping) else None
        return cls(keys_of(kind or PPO), list(Settings.model_fields), algorithm=str(named or StepSection().algorithm))

    def _elsewhere(self, place: tuple[str, ...]) -> str:
        """Return the sections or algorithms that have the same key."""
        homes = super(SettingsFaults, self)._elsewhere(place)
        if homes or len(place) == 1:
            return homes
        others = ", ".join(repr(name) for name, kind in ALGORITHMS.items() if place[1] in declared(kind))
        return f" (it is a key of [algorithm] for {others}, not for {self.algorithm!r})" if others else ""


def require_public(tables: Mapping[str, Mapping[str, object]]) -> None:
    """Check that no setting, by section and key, holds a secret: a run writes its settings into a file.

    Raises:
        ConfigError: a setting holds one.
    """
    for name, section in tables.items():
        for key, value in section.items():
            if any(map(holds_secret, _texts(value))):
                raise ConfigError(
                    f"{name}.{key} holds a secret, got {redacted(str(value))}: a run keeps its settings in a file, so "
                    "give it in the environment, or by a login, and leave it out here"
                )


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a value of a file, those in lists and tables included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def expectation(detail: ErrorDetails) -> str:
    """Return what a value should have been, in the terms of a settings file."""
    if (words := _WORDS.get(detail["type"])) is not None:
        return words
    text = detail["msg"].removeprefix("Input should be ")
    return f"a number {text}" if text.startswith(("greater", "less")) else text
