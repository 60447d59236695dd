"""Columns of carried rollouts: not in a checkpoint, but taken from the prompts again, so they may hold anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oppo.app.checkpoint import State

Columns = Mapping[str, object]


def without_columns(run: State) -> State:
    """Return the state of a run whose carried rollouts have no columns."""
    return _with(run, lambda admission: {})


def with_columns(run: State, columns: Callable[[int], Columns]) -> State:
    """Return the state of a run whose carried rollouts have the columns of their prompts, by admission number."""
    return _with(run, columns)


def _with(run: State, columns: Callable[[int], Columns]) -> State:
    generate: Mapping[str, Any] = run["stages"]["generate"]
    units = [
        {**unit, "rollouts": [{**each, "columns": columns(each["admission"])} for each in unit["rollouts"]]}
        for unit in generate["units"]
    ]
    return {**run, "stages": {**run["stages"], "generate": {**generate, "units": units}}}
