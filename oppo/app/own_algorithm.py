"""The algorithm that ``step.algorithm`` names: one of :mod:`oppo.algorithms`, or a class of a file."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass
from functools import cache
from typing import Final, cast

from oppo import user_code
from oppo.algorithms.algorithm import Algorithm
from oppo.algorithms.registry import ALGORITHMS
from oppo.errors import ConfigError

MEMBERS: Final = ("has_critic", "responses", "refers", "corrects", "graph", "loss")
"""What a class of a file must have: the members of :class:`Algorithm`."""


def find(name: object) -> type[Algorithm] | None:
    """Return the algorithm of a name; ``None`` for an unknown one.

    Raises:
        ConfigError: the name is ``file.py:Class``, and the class cannot be loaded or is no algorithm.
    """
    if not isinstance(name, str):
        return None
    return _loaded(name) if user_code.SPEC.match(name) else ALGORITHMS.get(name)


@cache
def _loaded(spec: str) -> type[Algorithm]:
    """Return the class that ``file.py:Class`` names; a file is run once in a process."""

    def refuse(words: str) -> ConfigError:
        return ConfigError(f"step.algorithm: {words}")

    found: object = user_code.load_function(spec, refuse)
    if not (inspect.isclass(found) and is_dataclass(found)):
        raise refuse(
            f"{spec} must be a dataclass, whose fields are the settings of [algorithm], derived from GroupAlgorithm or "
            f"ClippedAlgorithm for example; got {user_code.shown(found)}"
        )
    if lacking := [each for each in MEMBERS if not hasattr(found, each)]:
        raise refuse(
            f"{spec} is no algorithm, since it lacks {', '.join(lacking)}: derive it from GroupAlgorithm or "
            "ClippedAlgorithm, or write what oppo.algorithms.algorithm.Algorithm lists"
        )
    return cast("type[Algorithm]", found)
