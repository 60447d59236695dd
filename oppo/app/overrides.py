"""``--set section.key=value``: settings that are changed on the command line, and what follows the run's seed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence

from oppo.declared import SEEDS
from oppo.errors import ConfigError

SEEDED = ("data", "sampling", "trainer")
"""The sections that have a seed of their own: the run's, unless they name another."""


def overridden(document: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return a parsed file with ``section.key=value`` overrides.

    A new ``run.seed`` is that of the sections too which named the old one: in a resolved file all of them do.

    Raises:
        ConfigError: an override is malformed, or its section is none in this file.
    """
    changed: dict[str, object] = {key: _copied(value) for key, value in document.items()}
    parsed = [_parsed(override) for override in overrides]
    if any(place == ("run", "seed") for place, _, _ in parsed):
        _let_follow(changed)
    for (name, key), value, override in parsed:
        section = changed.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(f"--set {override}: {name!r} is not a section of this file but the value {section!r}")
        section[key] = value
    return changed


def seeded(document: Mapping[str, object]) -> dict[str, object]:
    """Return the document with the run's seed in every section that has a seed and names none."""
    filled: dict[str, object] = dict(document)
    if (seed := _seed(document.get("run"))) is None:
        return filled
    for name in SEEDED:
        section = document.get(name, {})
        if isinstance(section, Mapping):
            filled[name] = {"seed": seed, **section}
    if "data" not in document:
        del filled["data"]
    return filled


def _let_follow(document: Mapping[str, object]) -> None:
    """Take the run's seed out of the sections that name it, so that they have that of the run, whatever it will be."""
    seed = _seed(document.get("run"))
    for section in map(document.get, SEEDED):
        if seed is not None and isinstance(section, dict) and _seed(section) == seed:
            del section["seed"]


def _seed(section: object) -> int | None:
    """Return the seed that a section names; ``None``: it names none, or one that will be refused."""
    seed = section.get("seed") if isinstance(section, Mapping) else None
    return seed if type(seed) is int and seed in SEEDS else None


def _copied(value: object) -> object:
    return dict(value) if isinstance(value, dict) else value


def _parsed(override: str) -> tuple[tuple[str, str], object, str]:
    """Return the place and the value of an override, and how it was written."""
    place, equals, text = override.partition("=")
    names = [name.strip() for name in place.split(".")]
    if not equals or len(names) != 2 or not all(names):
        raise ConfigError(f"--set expects section.key=value, such as step.batch=16; got {override!r}")
    return (names[0], names[1]), _value(text.strip()), override


def _value(text: str) -> object:
    """Return ``text`` as one TOML value, or as it stands where it is none."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text
