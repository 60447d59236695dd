"""Columns of carried rollouts: left out of checkpoints and read from the prompts again, so they may hold any type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oppo.app.checkpoint import State


def with_columns(run: State, columns: Callable[[int], Mapping[str, object]]) -> State:
    """Return a run's state in which each carried rollout has ``columns(admission)``, by its admission number."""
    generate: Mapping[str, Any] = run["stages"]["generate"]
    units = [
        {**unit, "rollouts": [{**each, "columns": columns(each["admission"])} for each in unit["rollouts"]]}
        for unit in generate["units"]
    ]
    return {**run, "stages": {**run["stages"], "generate": {**generate, "units": units}}}
