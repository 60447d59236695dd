"""Runs the ladders of a request, shows and writes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.ladder.acting import ENGINES
from benchmarks.ladder.against import earlier
from benchmarks.ladder.calibration import Calibration, bounds_of, calibrate
from benchmarks.ladder.directory import Files, cache_directory, files_of
from benchmarks.ladder.modes import MODES
from benchmarks.ladder.plot import plot, require_svg
from benchmarks.ladder.rounds import Entry, Ladder, Plan, Tell, entries, run, seating, serial_costs
from benchmarks.ladder.show import render
from benchmarks.ladder.workloads import ACTORS_ON_A_GPU, SMOKE, WORKLOADS, BenchWorkload, Layout, on_gpu
from benchmarks.machine import cores_here
from benchmarks.peer.cells import SWEEP, Sweep, choose, command, interpreter
from benchmarks.request import Request
from oppo.demo.models import Progress
from oppo.errors import ConfigError

LAYOUTS = ("split", "shared")
PEER = "trl"


def bench(request: Request, console: Console, tell: Tell) -> list[Ladder]:
    """Run every workload in every layout, show each ladder when it is done, and write the requested files.

    Raises:
        ConfigError: a name is unknown, or the peer is not installed.
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
            for line in seating(workload, layout, modes):
                tell(f"{workload.name}, {layout}: {line}")
            contestants = entries(files, modes, layout, plan)
            contestants += [peer(files)] if request.peer is not None else []
            with earlier(request.against, files, modes, layout, plan) as others:
                ladder = run(files, layout, [*contestants, *others], plan, tell, calibration=calibration)
            console.print(render(ladder), highlight=False)
            ladders.append(ladder)
            write(ladders, request)  # after each, in case the next one fails
    return ladders


def made(
    workload: BenchWorkload, layout: Layout, request: Request, plan: Plan, tell: Tell
) -> tuple[Files, Calibration | None]:
    """Return the files of a workload; if it states all shares of a step, its models are calibrated.

    Raises:
        ModelError: the actor did not learn to write responses of the announced lengths.
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
    """Return the plan of a request; a GPU does not hold several contestants at once.

    Raises:
        ConfigError: a number of steps or rounds is below 1, or the engine is unknown.
    """
    if request.steps < 1 or request.rounds < 1:
        raise ConfigError(f"at least one step and one round are needed, not {request.steps} x {request.rounds}")
    if request.warm_up < 1:
        raise ConfigError(f"at least one step of warm-up is needed, not {request.warm_up}: a first step is slower")
    if request.policy not in ENGINES:
        raise ConfigError(f"there is no engine {request.policy!r}; expected one of {', '.join(ENGINES)}")
    device = request.device
    scorers = request.scorers if device == "cpu" else "thread"  # a process cannot receive models on a GPU
    return Plan(
        steps=request.steps,
        rounds=request.rounds,
        warm_up=request.warm_up,
        device=device,
        scorers=scorers,
        together=device == "cpu",
        engine=request.policy,
    )


def layouts_of(request: Request) -> list[Layout]:
    layouts = [cast("Layout", name) for name in chosen("layout", request.layout, LAYOUTS, LAYOUTS)]
    return layouts if request.device == "cpu" else ["shared"]  # which a GPU is


def workloads_of(request: Request) -> list[BenchWorkload]:
    """Return the requested workloads.

    Raises:
        ConfigError: a workload or the size of the actor is unknown.
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
        plot(results, request.plot)


def chosen(what: str, listed: str, known: Collection[str], everything: Sequence[str]) -> list[str]:
    """Return the names in ``listed``, in order.

    Raises:
        ConfigError: a name is unknown, or there is none.
    """
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if names == ["all"]:
        return list(everything)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no {what} {unknown[0]!r}; expected all, or some of {', '.join(known)}")
    if not names:
        raise ConfigError(f"no {what} is named; expected all, or some of {', '.join(known)}")
    return list(dict.fromkeys(names))


def require_peer(request: Request) -> None:
    """Check that the peer is known and installed, and can run the request.

    Raises:
        ConfigError: it is not, or cannot.
    """
    if request.peer != PEER:
        raise ConfigError(f"there is no peer {request.peer!r}; expected {PEER!r}")
    if request.device != "cpu":
        raise ConfigError("on a GPU lengths are scripted, and the peer cannot be told how long its responses are")
    interpreter(CHECKOUT)


def peer(files: Files) -> Entry:
    """Return the peer as a contestant, at the fastest settings of its sweep.

    Raises:
        ConfigError: its environment is missing.
    """
    choice = choose(Sweep.read(CHECKOUT / SWEEP), files.directory, len(cores_here()))
    return Entry(PEER, tuple(command(files.directory, choice.cell)), f"{choice.cell}, {choice.origin}")


def _progress(tell: Tell, part: float = 0.1) -> Progress:
    """Return a progress that reports each activity at its beginning and after each tenth."""
    due: dict[str, float] = {}

    def progress(words: str, done: float) -> None:
        activity = words.partition(",")[0]
        if done >= due.get(activity, 0.0):
            due[activity] = done + part
            tell(f"{words} ({done:.0%})")

    return progress
