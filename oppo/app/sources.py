"""Where prompts come from: ``data.prompts``, one source or a mixture of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from pydantic import PlainValidator, ValidationError

from oppo.app.paths import resolved
from oppo.app.tables import adapter, expectation
from oppo.data.datasets_library import is_hub_name
from oppo.data.stream import whole_numbers
from oppo.declared import Filled, Positive, declared, required, setting
from oppo.errors import DataError, did_you_mean, shortened

ROWS: Final = "<rows of a program>"
"""The source of a run whose prompts a program gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """One source of prompts."""

    path: Filled = required("a file, a directory that datasets wrote, or a dataset's name at a hub")
    weight: Positive | None = setting(None, "share of the prompts, relative to those of the others")
    column: Filled | None = setting(None, "the column that holds the prompt, where it is another than `data.column`")
    split: Filled = setting("train", "of a dataset with several")
    subset: str = setting("", "of a dataset at a hub: the name of a configuration")

    @property
    def file(self) -> Path | None:
        """The file or directory; ``None`` for a dataset at a hub, and for rows of a program."""
        return None if self.path == ROWS or is_hub_name(self.path) else Path(self.path)

    def within(self, folder: Path) -> PromptSource:
        """Return the source that a settings file in ``folder`` names: paths are absolute afterwards.

        Raises:
            ConfigError: the path cannot be followed.
        """
        is_name = is_hub_name(self.path) and not (folder / self.path).exists()
        return self if is_name or self.path == ROWS else replace(self, path=resolved(self.path, folder))

    def table(self) -> dict[str, object]:
        """Return what a file holds of it: the values that are not defaults."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}


def _sources(value: object) -> str | tuple[PromptSource, ...]:
    """Return the value of a setting for prompts.

    Raises:
        ValueError: it is no source, and no list of sources.
    """
    if isinstance(value, str) and value:
        return value
    if not (isinstance(value, list | tuple) and value):
        raise ValueError(
            "expected a file, a directory or a dataset's name, or a list of such with their weights, got "
            f"{shortened(repr(value), 200)}"
        )
    found = tuple(_source(each, number) for number, each in enumerate(value, 1))
    weights = [each.weight for each in found if each.weight is not None]
    if weights and len(weights) < len(found):
        lacking = next(number for number, each in enumerate(found, 1) if each.weight is None)
        raise ValueError(f"source {lacking} has no weight, and others have one: give each a weight, or none")
    if weights:
        try:
            whole_numbers(weights)
        except DataError as error:
            raise ValueError(str(error)) from error
    return found


def _source(value: object, number: int) -> PromptSource:
    if isinstance(value, PromptSource):
        return value
    if isinstance(value, str):
        value = {"path": value}
    names, table = [each.name for each in fields(PromptSource)], value if isinstance(value, Mapping) else {}
    if not table:
        raise ValueError(f"source {number}: expected text or a table, got {shortened(repr(value), 200)}")
    if unknown := [key for key in table if key not in names]:
        guess = did_you_mean(str(unknown[0]), names)
        raise ValueError(f"source {number}: unknown key {unknown[0]!r}{guess}; the keys are {', '.join(names)}")
    if "path" not in table:
        raise ValueError(f"source {number}: path is missing: {declared(PromptSource)['path'].description}")
    try:
        found: PromptSource = adapter(PromptSource).validate_python(table)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key, got = detail["loc"][0], shortened(repr(detail["input"]), 200)
        raise ValueError(f"source {number}: {key}: expected {expectation(detail)}, got {got}") from error
    return found


def _held_out(value: object) -> str | tuple[PromptSource, ...]:
    """Return the value of a setting for held-out prompts, each of which is answered; empty for none.

    Raises:
        ValueError: it is no source, and no list of sources, or one has a weight.
    """
    if value == "":
        return ""
    found = _sources(value)
    if any(each.weight is not None for each in sources(found)):
        raise ValueError("held-out prompts are answered once each, so that no source has a weight: leave it out")
    return found


Prompts: TypeAlias = Annotated[str | tuple[PromptSource, ...], PlainValidator(_sources)]
"""The value of a setting that names prompts: one source, or several."""


HeldOut: TypeAlias = Annotated[str | tuple[PromptSource, ...], PlainValidator(_held_out)]
"""The value of a setting that names held-out prompts, or none."""


def sources(prompts: str | tuple[PromptSource, ...]) -> tuple[PromptSource, ...]:
    """Return the sources that a setting names."""
    return tuple(named("", prompts).values())


def named(key: str, prompts: str | tuple[PromptSource, ...]) -> dict[str, PromptSource]:
    """Return the sources of a setting, each by its name: ``data.prompts``, or ``data.prompts[0]`` of several."""
    if isinstance(prompts, str):
        return {key: PromptSource(path=prompts)} if prompts else {}
    return {f"{key}[{number}]": each for number, each in enumerate(prompts)}


def within(prompts: str | tuple[PromptSource, ...], folder: Path) -> str | tuple[PromptSource, ...]:
    """Return what a settings file in ``folder`` names, with absolute paths.

    Raises:
        ConfigError: a path cannot be followed.
    """
    if isinstance(prompts, str):
        return PromptSource(path=prompts).within(folder).path if prompts else ""
    return tuple(each.within(folder) for each in prompts)
