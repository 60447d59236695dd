"""``oppo bench``: from what was asked for to runs of the ladder, shown and written."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.console import Console

from oppo.bench.directory import cache_directory, files_of
from oppo.bench.ladder import Ladder, Plan, Tell, entries, run, seating
from oppo.bench.modes import MODES
from oppo.bench.plot import plot, require_matplotlib
from oppo.bench.show import render
from oppo.bench.teach import Progress
from oppo.bench.workloads import ACTORS_ON_A_GPU, SMOKE, WORKLOADS, Layout, Workload, on_gpu
from oppo.errors import ConfigError

LAYOUTS = ("split", "shared")
WIDTH = 150
"""Columns where the output is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for, as it was written.

    Attributes:
        workloads, layouts, modes: names with commas between them; ``all``.
        json, picture: where results are written.
        actor: on a GPU, the size of the actor.
        cache: where workloads are kept.
    """

    workloads: str
    layouts: str
    modes: str
    plan: Plan
    json: Path | None = None
    picture: Path | None = None
    actor: str = "0.5b"
    cache: Path | None = None


def bench(request: Request, console: Console, tell: Tell) -> list[Ladder]:
    """Run every workload in every layout, show each when it is done, and write what was asked for.

    Raises:
        ConfigError: a name is unknown, or something that was asked for is not installed.
        ModelLost: a contestant ended.
    """
    if request.plan.steps < 1 or request.plan.rounds < 1:
        raise ConfigError(
            f"at least one step and one round are needed, not {request.plan.steps} x {request.plan.rounds}"
        )
    standard = [name for name in WORKLOADS if name != SMOKE.name]
    workloads = [WORKLOADS[name] for name in chosen("workload", request.workloads, WORKLOADS, standard)]
    layouts = chosen("layout", request.layouts, LAYOUTS, LAYOUTS)
    modes = chosen("mode", request.modes, MODES, tuple(MODES))
    if request.picture is not None:
        require_matplotlib()
    if request.plan.device != "cpu":
        workloads = [sized(each, request.actor) for each in workloads]
    ladders: list[Ladder] = []
    for workload in workloads:
        files = files_of(workload, request.cache or cache_directory(), _progress(tell))
        for layout in (cast("Layout", name) for name in layouts):
            for line in seating(layout, modes):
                tell(f"{workload.name}, {layout}: {line}")
            ladder = run(files, layout, entries(files, modes, layout, request.plan.device), request.plan, tell)
            console.print(render(ladder), soft_wrap=False, highlight=False)
            ladders.append(ladder)
            write(ladders, request)  # after each: what was measured is kept if the next one fails
    return ladders


def write(ladders: Sequence[Ladder], request: Request) -> None:
    """Write the results so far: an object for one run, a list of them for several."""
    if request.json is not None:
        results = [ladder.as_json() for ladder in ladders]
        text = json.dumps(results[0] if len(results) == 1 else results, indent=2)
        request.json.parent.mkdir(parents=True, exist_ok=True)
        request.json.write_text(text + "\n", encoding="utf-8")
    if request.picture is not None:
        request.picture.parent.mkdir(parents=True, exist_ok=True)
        plot(ladders, request.picture)


def chosen(what: str, told: str, known: Collection[str], everything: Sequence[str]) -> list[str]:
    """Return the names in ``told``, in its order.

    Raises:
        ConfigError: one is unknown.
    """
    names = [name.strip() for name in told.split(",") if name.strip()]
    if names == ["all"]:
        return list(everything)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no {what} {unknown[0]!r}; expected all, or some of {', '.join(known)}")
    if not names:
        raise ConfigError(f"no {what} is named; expected all, or some of {', '.join(known)}")
    return list(dict.fromkeys(names))


def sized(workload: Workload, actor: str) -> Workload:
    """Return the workload for a GPU.

    Raises:
        ConfigError: there is no actor of this size.
    """
    if actor not in ACTORS_ON_A_GPU:
        raise ConfigError(f"there is no actor {actor!r} for a GPU; expected one of {', '.join(ACTORS_ON_A_GPU)}")
    return on_gpu(workload, actor)


def _progress(tell: Tell, part: float = 0.1) -> Progress:
    """Return what tells of the making of a workload: at its beginning, and after each tenth of it."""
    told: dict[str, float] = {}

    def progress(words: str, done: float) -> None:
        key = words.partition(",")[0]
        if done >= told.get(key, 0.0):
            told[key] = done + part
            tell(f"{words} ({done:.0%})")

    return progress
