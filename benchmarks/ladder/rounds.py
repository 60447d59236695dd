"""Running the contestants: interleaved, round by round, and what a run of them came to.

All contestants are loaded at first and warmed up, which is not counted. Then each round asks them in turn for a few
steps; every second round goes the other way, so that nobody always runs after the same neighbour. On a device that
cannot hold them all, they run one after the other instead, which the result says.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.ladder.calibration import Calibration, Costs
from benchmarks.ladder.contestant import Contestant
from benchmarks.ladder.directory import Files
from benchmarks.ladder.layout import seats
from benchmarks.ladder.measures import Baseline, DecodeCost, Figures, Rounds, Spread, faults, speedup
from benchmarks.ladder.modes import MODES, SERIAL
from benchmarks.ladder.record import StepRecord
from benchmarks.ladder.workloads import Layout, Scorers, Workload
from benchmarks.machine import Machine, cores_here

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant that is to run: its name and its command, and what a reader should know of how it was chosen."""

    name: str
    command: tuple[str, ...]
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run.

    Attributes:
        steps: of each contestant in a round.
        rounds: counted ones.
        warm_up: steps of each contestant before the first round.
        device: where models are.
        scorers: whether scorers work in a thread or in a process of their own.
        together: all contestants are loaded at the same time, and interleaved.
    """

    steps: int = 3
    rounds: int = 5
    warm_up: int = 8
    device: str = "cpu"
    scorers: Scorers = "process"
    together: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Ladder:
    """One workload in one layout, measured.

    Attributes:
        threads: by contestant, what it says of its cores and threads.
        versions: by contestant, of Python and the libraries.
        faults: why the run is INVALID; none: it is valid.
        ratios: ``a/b``: how many times faster a is than b.
        remarks: what a reader should know of a contestant.
        calibration: how the depths of the models were chosen; ``None``: they are those of the table.
    """

    files: Files
    layout: Layout
    plan: Plan
    machine: Machine
    threads: Mapping[str, object]
    versions: Mapping[str, object]
    modes: Mapping[str, Figures]
    ratios: Mapping[str, Spread]
    faults: Sequence[str] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None

    @property
    def workload(self) -> Workload:
        """What was run."""
        return self.files.workload

    @property
    def valid(self) -> bool:
        """Whether the run measured what its workload states."""
        return not self.faults

    def as_json(self) -> dict[str, object]:
        """Return everything, as a file of results holds it."""
        facts = asdict(self.files.facts)
        return {
            "workload": self.workload.name,
            "layout": self.layout,
            "machine": asdict(self.machine),
            "threads": dict(self.threads),
            "valid": self.valid,
            "faults": list(self.faults),
            "modes": {name: figures.as_json() for name, figures in self.modes.items()},
            "ratios": {name: ratio.median for name, ratio in self.ratios.items()},
            "ratio_ranges": {name: [ratio.low, ratio.high] for name, ratio in self.ratios.items()},
            "plan": asdict(self.plan),
            "remarks": dict(self.remarks),
            "versions": dict(self.versions),
            "lengths": {"by": "script" if self.workload.models.scripted else "a trained actor", **facts},
            "recipe": asdict(self.workload),
            "calibration": None if self.calibration is None else self.calibration.as_json(),
        }


def entries(files: Files, modes: Sequence[str], layout: Layout, plan: Plan) -> list[Entry]:
    """Return the contestants for some modes."""
    program = (sys.executable, "-m", "benchmarks.ladder.worker", str(files.directory), "--layout", layout)
    options = ("--device", plan.device, "--scorers", plan.scorers)
    return [Entry(mode, (*program, "--mode", mode, *options)) for mode in modes]


def serial_costs(files: Files, layout: Layout, plan: Plan) -> Costs:
    """Return what the steps that a plan counts cost serially, with nothing else running.

    Raises:
        ModelLost: the contestant ended or took too long.
        ProtocolError: it said something that it should not.
    """
    (entry,) = entries(files, [SERIAL.name], layout, plan)
    with tempfile.TemporaryDirectory(prefix="oppo-bench-") as logs, start(entry, Path(logs)) as serial:
        serial.ready()
        serial.run(plan.warm_up)
        return Costs.of(serial.run(plan.rounds * plan.steps))


def run(
    files: Files,
    layout: Layout,
    contestants: Sequence[Entry],
    plan: Plan,
    tell: Tell,
    *,
    calibration: Calibration | None = None,
) -> Ladder:
    """Run every contestant and return what they came to.

    Args:
        files: the workload.
        layout: which cores each side has.
        contestants: in the order of the ladder.
        plan: how much to run.
        tell: told, in a sentence, what is going on.
        calibration: how the workload's depths were chosen, for the record.

    Raises:
        ModelLost: a contestant ended or took too long.
        ProtocolError: a contestant said something that it should not.
    """
    started: dict[str, Mapping[str, object]] = {}
    records: dict[str, list[list[StepRecord]]] = {entry.name: [] for entry in contestants}
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="oppo-bench-") as logs:
        groups = [list(contestants)] if plan.together else [[entry] for entry in contestants]
        for group in groups:
            with ExitStack() as stack:
                tell(f"loading {', '.join(entry.name for entry in group)}")
                running = [stack.enter_context(start(entry, Path(logs))) for entry in group]
                started |= {each.name: each.ready() for each in running}
                for number in range(plan.rounds + 1):
                    for each in running if number % 2 else reversed(running):
                        tell(f"{'warm-up' if not number else f'round {number}/{plan.rounds}'}: {each.name}")
                        records[each.name].append(each.run(plan.steps if number else plan.warm_up))
                        peaks[each.name] = each.peak_rss_mb
    counted = {name: rounds[1:] for name, rounds in records.items()}
    figures = _figures(counted, peaks)
    return Ladder(
        files=files,
        layout=layout,
        plan=plan,
        machine=Machine.here(plan.device),
        threads={name: told.get("threads") for name, told in started.items()},
        versions={name: told.get("versions") for name, told in started.items()},
        modes=figures,
        ratios=ratios(counted),
        faults=faults(files.workload, layout, figures, files.facts.announced.capped),
        remarks={entry.name: entry.remark for entry in contestants if entry.remark},
        calibration=calibration,
    )


def start(entry: Entry, logs: Path) -> Contestant:
    """Start a contestant of this checkout; how many threads it has is its own business, not the environment's."""
    limits = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    environment = {name: value for name, value in os.environ.items() if name not in limits}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(CHECKOUT), environment.get("PYTHONPATH"))))
    return Contestant(entry.name, entry.command, log=logs / f"{entry.name}.log", environment=environment)


def _figures(counted: Mapping[str, Rounds], peaks: Mapping[str, float]) -> dict[str, Figures]:
    alone = [
        step
        for name, rounds in counted.items()
        if name in MODES and MODES[name].held
        for each in rounds
        for step in each
    ]
    serial = [step.score for each in counted.get("serial", ()) for step in each]
    baseline = Baseline(sum(serial) if serial else None, DecodeCost.fitted(alone))
    return {name: Figures.of(rounds, baseline, peaks[name]) for name, rounds in counted.items()}


def ratios(counted: Mapping[str, Rounds]) -> dict[str, Spread]:
    """Return every contestant against the serial mode, and every mode against what it adds to and every peer."""
    return {
        f"{name}/{other}": speedup(rounds, counted[other])
        for other in counted
        for name, rounds in counted.items()
        if name != other and _compared(name, other)
    }


def _compared(name: str, other: str) -> bool:
    if other == "serial":
        return True
    return name in MODES and (other not in MODES or other == MODES[name].over)


def seating(layout: Layout, modes: Sequence[str]) -> list[str]:
    """Return who works where, a line for each way of sitting, and a warning where there is one core."""
    cores = cores_here()
    lines: dict[str, list[str]] = {}
    for mode in modes:
        table = seats(layout, cores, held=MODES[mode].held).table()
        said = ", ".join(f"{side} {seat['threads']} thread(s) on cores {seat['cores']}" for side, seat in table.items())
        lines.setdefault(said, []).append(mode)
    warning = ["one core only: everybody shares it, and overlap cannot gain anything"] if len(cores) == 1 else []
    return [f"{', '.join(named)}: {said}" for said, named in lines.items()] + warning
