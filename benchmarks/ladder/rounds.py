"""Runs what a request asks for: workloads, made and calibrated, whose contestants take turns in interleaved rounds.

All contestants are loaded first and warmed up, which is not counted. Then each round runs a few steps of each in turn
(:func:`benchmarks.harness.turns`). A commit's contestants run its own workers from a checkout, in the same rounds as
today's. They read a copy of the workload's directory, whose recipe has no field that the commit does not know.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.harness import Machine, checkout, cores_here, keep, turns
from benchmarks.ladder.contestant import EARLIER, Entry, StepRecord
from benchmarks.ladder.directory import Files, cache_directory, files_of
from benchmarks.ladder.measures import (
    Baseline,
    Calibration,
    Costs,
    DecodeCost,
    Figures,
    Ladder,
    Rounds,
    bounds_of,
    calibrate,
    faults,
    ratios,
    require_equal_work,
)
from benchmarks.ladder.show import plot, render, require_svg
from benchmarks.ladder.workloads import (
    MODES,
    SERIAL,
    BenchWorkload,
    Layout,
    Plan,
    Request,
    chosen,
    layouts_of,
    plan_of,
    workloads_of,
)
from benchmarks.peer.sweep import PEERS, SWEEP, Peer, Sweep, choose, command_line
from oppo.demo.assets import Progress
from oppo.errors import ConfigError
from oppo.log import logger


def entries(files: Files, modes: Sequence[str], layout: Layout, plan: Plan) -> list[Entry]:
    program = (sys.executable, "-m", "benchmarks.ladder.worker", str(files.directory), "--layout", layout)
    options = ("--device", plan.device, "--scorers", plan.scorers, "--engine", plan.engine)
    return [Entry(mode, (*program, "--mode", mode, *options)) for mode in modes]


def serial_costs(files: Files, layout: Layout, plan: Plan) -> Costs:
    """Return the costs of a plan's steps in the serial mode, with nothing else running."""
    (entry,) = entries(files, [SERIAL.name], layout, plan)
    with tempfile.TemporaryDirectory(prefix="oppo-bench-") as logs, entry.start(Path(logs)) as serial:
        serial.ready()
        serial.run(plan.warm_up)
        return Costs.of(serial.run(plan.rounds * plan.steps))


def run(
    files: Files,
    layout: Layout,
    contestants: Sequence[Entry],
    plan: Plan,
    *,
    calibration: Calibration | None = None,
) -> Ladder:
    """Run every contestant and return their ladder; ``calibration`` is for the record."""
    started: dict[str, Mapping[str, object]] = {}
    records: dict[str, list[list[StepRecord]]] = {entry.name: [] for entry in contestants}
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="oppo-bench-") as logs, ExitStack() as stack:
        logger.info(f"loading {', '.join(entry.name for entry in contestants)}")
        running = [stack.enter_context(entry.start(Path(logs))) for entry in contestants]
        started |= {each.name: each.ready() for each in running}
        for number, each in turns(running, plan.rounds):
            logger.info(f"{'warm-up' if not number else f'round {number}/{plan.rounds}'}: {each.name}")
            records[each.name].append(each.run(plan.steps if number else plan.warm_up))
            peaks[each.name] = each.peak_rss_mb
    require_equal_work(records)
    counted = {name: rounds[1:] for name, rounds in records.items()}
    figures = _figures(counted, peaks)
    return Ladder(
        files=files,
        layout=layout,
        plan=plan,
        machine=Machine.here(plan.device),
        threads={name: facts.get("threads") for name, facts in started.items()},
        versions={name: facts.get("versions") for name, facts in started.items()},
        modes=figures,
        ratios=ratios(counted),
        faults=faults(files.workload, layout, figures, files.facts.announced.capped),
        remarks={entry.name: entry.remark for entry in contestants if entry.remark},
        calibration=calibration,
        records={name: rounds for name, rounds in counted.items() if name in MODES},
    )


def _figures(counted: Mapping[str, Rounds], peaks: Mapping[str, float]) -> dict[str, Figures]:
    held = (rounds for name, rounds in counted.items() if name in MODES and MODES[name].held)
    alone = [step for rounds in held for each in rounds for step in each]
    serial = [step.score for each in counted.get("serial", ()) for step in each]
    baseline = Baseline(sum(serial) if serial else None, DecodeCost.fitted(alone))
    return {name: Figures.of(rounds, baseline, peaks[name]) for name, rounds in counted.items()}


@contextmanager
def earlier(
    revision: str | None, files: Files, modes: Sequence[str], layout: Layout, plan: Plan
) -> Iterator[list[Entry]]:
    """Yield the contestants ``mode@revision`` of a commit, whose checkout is removed afterwards; none without one."""
    if revision is None:
        yield []
        return
    with TemporaryDirectory(prefix="oppo-against-") as folder, checkout(revision, Path(folder) / "source") as source:
        code = {file.stem: file.read_text(encoding="utf-8") for file in source.glob("benchmarks/ladder/*.py")}
        if not {"worker", "workloads"} <= code.keys():
            raise ConfigError(f"commit {revision} has no ladder in benchmarks/ladder")
        if missing := [mode for mode in modes if f'"{mode}"' not in code["workloads"]]:
            raise ConfigError(f"commit {revision} has no mode {missing[0]}; choose --modes that both have")
        options = ["--layout", layout, "--device", plan.device, "--scorers", plan.scorers, "--engine", plan.engine]
        directory = _understood(files, code["workloads"], Path(folder) / "files", revision)
        program = (sys.executable, "-m", "benchmarks.ladder.worker", str(directory), *options)
        yield [Entry(f"{mode}{EARLIER}{revision}", (*program, "--mode", mode), source=source) for mode in modes]


def _understood(files: Files, workloads: str, directory: Path, revision: str) -> Path:
    """Return a directory with the models and prompts of ``files``, and the fields of its recipe that are known."""
    directory.mkdir()
    for path in files.directory.iterdir():
        (directory / path.name).symlink_to(path.resolve())
    spec = json.loads((files.directory / "spec.json").read_text(encoding="utf-8"))
    for name in [name for name in spec["recipe"] if f"    {name}: " not in workloads]:
        if spec["recipe"].pop(name):
            raise ConfigError(f"commit {revision} cannot run workload {files.workload.name}: it knows no {name}")
    (directory / "spec.json").unlink()
    (directory / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    return directory


def bench(request: Request, console: Console) -> list[Ladder]:
    """Run every workload in every layout, show each ladder when it is done, and write the requested files.

    Raises:
        ConfigError: a name is unknown, or the peer is not installed.
        ModelLost: a contestant ended.
    """
    modes = chosen("mode", request.modes, MODES, tuple(MODES))
    layouts = layouts_of(request)
    plan = plan_of(request)
    workloads = workloads_of(request)
    other = None if request.peer is None else peer_of(request.peer, workloads)
    if request.plot is not None:
        require_svg(request.plot)
    if len(cores_here()) == 1:
        logger.warning("one core only: all sides share it, and overlap cannot gain anything")
    ladders: list[Ladder] = []
    for workload in workloads:
        for layout in layouts:
            files, calibration = made(workload, layout, request, plan)
            contestants = entries(files, modes, layout, plan)
            contestants += [] if other is None else [peer(other, files)]
            with earlier(request.against, files, modes, layout, plan) as others:
                ladder = run(files, layout, [*contestants, *others], plan, calibration=calibration)
            console.print(render(ladder), highlight=False)
            ladders.append(ladder)
            write(ladders, request)  # after each, in case the next one fails
    return ladders


def made(workload: BenchWorkload, layout: Layout, request: Request, plan: Plan) -> tuple[Files, Calibration | None]:
    """Return the files of a workload; if it states all shares of a step, its models are calibrated."""
    cache, progress = request.cache or cache_directory(), _progress()
    bounds = bounds_of(workload, layout)
    if not bounds:
        return files_of(workload, cache, progress), None
    calibration = calibrate(
        workload,
        bounds,
        lambda candidate: serial_costs(files_of(candidate, cache, progress), layout, plan),
    )
    return files_of(calibration.chosen.depths.applied(workload), cache, progress), calibration


def write(ladders: Sequence[Ladder], request: Request) -> None:
    """Write the results so far: an object for one run, a list of them for several."""
    results = [ladder.as_json() for ladder in ladders]
    keep(request.json, results[0] if len(results) == 1 else results)
    if request.plot is not None:
        plot(results, request.plot)


def peer_of(name: str, workloads: Sequence[BenchWorkload]) -> Peer:
    if name not in PEERS:
        raise ConfigError(f"there is no peer {name!r}; expected {' or '.join(PEERS)}")
    found = PEERS[name]
    for workload in workloads:
        if workload.algorithm != ("GRPO" if found.by_groups else "PPO"):
            raise ConfigError(
                f"workload {workload.name!r} is trained by {workload.algorithm}; peer {found.name!r} is another's"
            )
    found.interpreter(CHECKOUT)
    return found


def peer(other: Peer, files: Files) -> Entry:
    choice = choose(Sweep.read(CHECKOUT / SWEEP), files.directory, len(cores_here()))
    command = tuple(command_line(other, files.directory, choice.cell))
    return Entry(other.name, command, f"{choice.cell}, {choice.origin}")


def _progress(part: float = 0.1) -> Progress:
    """Return a progress that reports each activity at its beginning and after each tenth."""
    due: dict[str, float] = {}

    def progress(words: str, done: float) -> None:
        activity = words.partition(",")[0]
        if done >= due.get(activity, 0.0):
            due[activity] = done + part
            logger.info(f"{words} ({done:.0%})")

    return progress
