"""``--set section.key=value`` on the command line, and defaults that follow another section's setting."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence

from oppo.app.own_algorithm import find
from oppo.declared import SEEDS, declared
from oppo.errors import ConfigError

SEEDED = ("data", "sampling", "trainer", "eval")
"""The sections with a seed of their own; the default is the run's."""

CORRECTION = "truncated"
"""``algorithm.is_correction`` where vLLM decodes and the file names none.

vLLM and the trainer compute the same log-probs with other kernels. Importance weights correct for the difference, and
for stale tokens with it.
"""


def overridden(document: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return a parsed file with ``section.key=value`` overrides; a key may be a table, ``section.key.name.key=value``.

    A new ``run.seed`` replaces the old one in every section that names it: in a resolved file all of them do.

    Raises:
        ConfigError: an override is malformed, or its section is a value in this file.
    """
    changed: dict[str, object] = copy.deepcopy(dict(document))
    parsed = [_parsed(override) for override in overrides]
    if any(place == ["run", "seed"] for place, _, _ in parsed):
        _drop_equal_seeds(changed)
    for (*tables, key), value, override in parsed:
        table = changed
        for depth, name in enumerate(tables, 1):
            inner = table.setdefault(name, {})
            if not isinstance(inner, dict):
                what, where = "section" if depth == 1 else "table", ".".join(tables[:depth])
                raise ConfigError(f"--set {override}: {where!r} is not a {what} of this file but the value {inner!r}")
            table = inner
        table[key] = value
    return changed


def seeded(document: Mapping[str, object]) -> dict[str, object]:
    """Return the document with the run's seed in every section of :data:`SEEDED` that names none."""
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


def with_correction(document: Mapping[str, object]) -> dict[str, object]:
    """Return the document with :data:`CORRECTION` if vLLM decodes and the algorithm has one but names none."""
    filled = dict(document)
    models, step, algorithm = (filled.get(name, {}) for name in ("models", "step", "algorithm"))
    if not isinstance(models, Mapping) or models.get("engine") != "vllm" or not isinstance(algorithm, Mapping):
        return filled
    name = step.get("algorithm", "ppo") if isinstance(step, Mapping) else "ppo"
    kind = find(name)
    if kind is not None and "is_correction" in declared(kind):
        filled["algorithm"] = {"is_correction": CORRECTION, **algorithm}
    return filled


def _drop_equal_seeds(document: Mapping[str, object]) -> None:
    """Remove the run's seed from the sections that name it, so that they follow the run's."""
    seed = _seed(document.get("run"))
    for section in map(document.get, SEEDED):
        if seed is not None and isinstance(section, dict) and _seed(section) == seed:
            del section["seed"]


def _seed(section: object) -> int | None:
    """Return a section's seed; ``None`` without a valid one."""
    seed = section.get("seed") if isinstance(section, Mapping) else None
    return seed if type(seed) is int and seed in SEEDS else None


def _parsed(override: str) -> tuple[list[str], object, str]:
    """Return an override's section, tables and key, its value, and its text."""
    place, equals, text = override.partition("=")
    names = [name.strip() for name in place.split(".")]
    if not equals or len(names) < 2 or not all(names):
        raise ConfigError(f"--set expects section.key=value, such as step.batch=16; got {override!r}")
    return names, _value(text.strip()), override


def _value(text: str) -> object:
    """Return ``text`` as one TOML value, or unchanged if it is no TOML."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text
