"""From what was asked for to runs of the ladder, shown and written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.ladder.calibration import Calibration, bounds_of, calibrate
from benchmarks.ladder.directory import Files, cache_directory, files_of
from benchmarks.ladder.modes import MODES
from benchmarks.ladder.plot import Results, plot, require_svg
from benchmarks.ladder.rounds import Entry, Ladder, Plan, Tell, entries, run, seating, serial_costs
from benchmarks.ladder.show import render
from benchmarks.ladder.teach import Progress
from benchmarks.ladder.workloads import ACTORS_ON_A_GPU, SMOKE, WORKLOADS, Layout, Workload, on_gpu
from benchmarks.machine import cores_here
from benchmarks.peer.cells import SWEEP, Sweep, choose, command, interpreter
from benchmarks.request import Request
from oppo.errors import ConfigError

LAYOUTS = ("split", "shared")
PEER = "trl"


def bench(request: Request, console: Console, tell: Tell) -> list[Ladder]:
    """Run every workload in every layout, show each when it is done, and write what was asked for.

    Raises:
        ConfigError: a name is unknown, or something that was asked for is not installed.
        ModelLost: a contestant ended.
    """
    modes = chosen("mode", request.modes, MODES, tuple(MODES))
    layouts = layouts_of(request)
    plan = plan_of(request)
    workloads = workloads_of(request)
    if request.peer is not None:
        require_peer(request)
    if request.plot is not None:
        require_svg(request.plot)
    ladders: list[Ladder] = []
    for workload in workloads:
        for layout in layouts:
            files, calibration = made(workload, layout, request, plan, tell)
            for line in seating(layout, modes):
                tell(f"{workload.name}, {layout}: {line}")
            contestants = entries(files, modes, layout, plan)
            contestants += [peer(files)] if request.peer is not None else []
            ladder = run(files, layout, contestants, plan, tell, calibration=calibration)
            console.print(render(ladder), highlight=False)
            ladders.append(ladder)
            write(ladders, request)  # after each: what was measured is kept if the next one fails
    return ladders


def made(
    workload: Workload, layout: Layout, request: Request, plan: Plan, tell: Tell
) -> tuple[Files, Calibration | None]:
    """Return the files of a workload; where it states all shares of a step, its models get the depths that give them.

    Raises:
        ModelError: the actor did not learn to write responses as long as announced.
        ModelLost: the serial contestant ended.
    """
    cache, progress = request.cache or cache_directory(), _progress(tell)
    bounds = bounds_of(workload, layout)
    if not bounds:
        return files_of(workload, cache, progress), None
    calibration = calibrate(
        workload,
        bounds,
        lambda candidate: serial_costs(files_of(candidate, cache, progress), layout, plan),
        lambda sentence: tell(f"{workload.name}, {layout}: {sentence}"),
    )
    return files_of(calibration.chosen.depths.applied(workload), cache, progress), calibration


def plan_of(request: Request) -> Plan:
    """Return how much is run; a GPU does not hold several contestants at once.

    Raises:
        ConfigError: nothing is.
    """
    if request.steps < 1 or request.rounds < 1:
        raise ConfigError(f"at least one step and one round are needed, not {request.steps} x {request.rounds}")
    if request.warm_up < 1:
        raise ConfigError(f"at least one step of warm-up is needed, not {request.warm_up}: a first step is slower")
    device = request.device
    scorers = request.scorers if device == "cpu" else "thread"  # a process cannot be given what is on a GPU
    return Plan(
        steps=request.steps,
        rounds=request.rounds,
        warm_up=request.warm_up,
        device=device,
        scorers=scorers,
        together=device == "cpu",
    )


def layouts_of(request: Request) -> list[Layout]:
    """Return the layouts that are asked for; on a GPU all share it, whatever is asked for."""
    layouts = [cast("Layout", name) for name in chosen("layout", request.layout, LAYOUTS, LAYOUTS)]
    return layouts if request.device == "cpu" else ["shared"]


def workloads_of(request: Request) -> list[Workload]:
    """Return the workloads that are asked for.

    Raises:
        ConfigError: one is unknown, or there is no actor of the size asked for.
    """
    standard = [name for name in WORKLOADS if name != SMOKE.name]
    workloads = [WORKLOADS[name] for name in chosen("workload", request.workload, WORKLOADS, standard)]
    if request.device == "cpu":
        return workloads
    if request.actor not in ACTORS_ON_A_GPU:
        raise ConfigError(f"there is no actor {request.actor!r} for a GPU; expected {' or '.join(ACTORS_ON_A_GPU)}")
    return [on_gpu(each, request.actor) for each in workloads]


def write(ladders: Sequence[Ladder], request: Request) -> None:
    """Write the results so far: an object for one run, a list of them for several."""
    results = [ladder.as_json() for ladder in ladders]
    request.keep(results[0] if len(results) == 1 else results)
    if request.plot is not None:
        plot([cast("Results", each) for each in results], request.plot)


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


def require_peer(request: Request) -> None:
    """Check that the peer of this name is installed, and that what was asked for can be compared with it.

    Raises:
        ConfigError: there is none, it is not, or it cannot.
    """
    if request.peer != PEER:
        raise ConfigError(f"there is no peer {request.peer!r}; expected {PEER!r}")
    if request.device != "cpu":
        raise ConfigError("on a GPU lengths are scripted, and the peer cannot be told how long its responses are")
    interpreter(CHECKOUT)


def peer(files: Files) -> Entry:
    """Return the peer as a contestant, at the best of the settings that were tried.

    Raises:
        ConfigError: its environment is not there.
    """
    choice = choose(Sweep.read(CHECKOUT / SWEEP), files.directory, len(cores_here()))
    return Entry(PEER, tuple(command(files.directory, choice.cell)), f"{choice.cell}, {choice.origin}")


def _progress(tell: Tell, part: float = 0.1) -> Progress:
    """Return what tells of the making of a workload: at its beginning, and after each tenth of it."""
    told: dict[str, float] = {}

    def progress(words: str, done: float) -> None:
        key = words.partition(",")[0]
        if done >= told.get(key, 0.0):
            told[key] = done + part
            tell(f"{words} ({done:.0%})")

    return progress
