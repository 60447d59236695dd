"""Runs the contestants in interleaved rounds, and collects their figures.

All contestants are loaded first and warmed up, which is not counted. Then each round runs a few steps of each in turn;
every second round goes the other way, so that none always follows the same neighbour. On a device that cannot hold all
of them they run one after the other instead, which the result says.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from benchmarks import CHECKOUT
from benchmarks.ladder.calibration import Calibration, Costs
from benchmarks.ladder.contestant import Contestant
from benchmarks.ladder.directory import Files
from benchmarks.ladder.layout import seats
from benchmarks.ladder.measures import Baseline, DecodeCost, Figures, Rounds, Spread, faults, speedup
from benchmarks.ladder.modes import MODES, SERIAL
from benchmarks.ladder.record import StepRecord
from benchmarks.ladder.workloads import BenchWorkload, Layout, Scorers
from benchmarks.machine import Machine, cores_here

Tell = Callable[[str], None]

EARLIER: Final = "@"
"""Between a mode and the commit that ran it, in the name of a contestant that is not of this checkout."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant to run: its name, its command, a remark on its settings, and the checkout that it runs."""

    name: str
    command: tuple[str, ...]
    remark: str = ""
    source: Path = CHECKOUT


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a run.

    Attributes:
        steps: of each contestant in a round.
        rounds: counted ones.
        warm_up: steps of each contestant before the first round.
        device: of the models.
        scorers: the place of the scorers: a thread, or a process of their own.
        together: all contestants are loaded at once, and interleaved.
        engine: serves the policy: transformers or vllm.
    """

    steps: int = 3
    rounds: int = 5
    warm_up: int = 8
    device: str = "cpu"
    scorers: Scorers = "process"
    together: bool = True
    engine: str = "transformers"


@dataclass(frozen=True, slots=True, eq=False)
class Ladder:
    """One workload in one layout, measured.

    Attributes:
        threads: cores and threads by contestant.
        versions: of Python and the libraries, by contestant.
        faults: why the run is INVALID; none: it is valid.
        ratios: ``a/b``: the speed of a over that of b.
        remarks: on the settings of a contestant.
        calibration: of the models' depths; ``None``: they are those of the table.
        records: what a simulation is calibrated on and compared with: the counted steps of each mode, round by round.
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
    records: Mapping[str, Rounds] = field(default_factory=dict)

    @property
    def workload(self) -> BenchWorkload:
        """The workload of the files."""
        return self.files.workload

    @property
    def valid(self) -> bool:
        """Whether the run measured what its workload states."""
        return not self.faults

    def as_json(self) -> dict[str, object]:
        """Return the content of a file of results."""
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
            "records": {
                name: [[step.for_simulation() for step in steps] for steps in rounds]
                for name, rounds in self.records.items()
            },
        }


def entries(files: Files, modes: Sequence[str], layout: Layout, plan: Plan) -> list[Entry]:
    program = (sys.executable, "-m", "benchmarks.ladder.worker", str(files.directory), "--layout", layout)
    options = ("--device", plan.device, "--scorers", plan.scorers, "--engine", plan.engine)
    return [Entry(mode, (*program, "--mode", mode, *options)) for mode in modes]


def serial_costs(files: Files, layout: Layout, plan: Plan) -> Costs:
    """Return the costs of a plan's steps in the serial mode, with nothing else running.

    Raises:
        ModelLost: the contestant ended or took too long.
        ProtocolError: its answer is malformed.
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
    """Run every contestant and return their ladder; ``calibration`` is for the record.

    Raises:
        ModelLost: a contestant ended or took too long.
        ProtocolError: an answer of a contestant is malformed.
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
        threads={name: facts.get("threads") for name, facts in started.items()},
        versions={name: facts.get("versions") for name, facts in started.items()},
        modes=figures,
        ratios=ratios(counted),
        faults=faults(files.workload, layout, figures, files.facts.announced.capped),
        remarks={entry.name: entry.remark for entry in contestants if entry.remark},
        calibration=calibration,
        records={name: rounds for name, rounds in counted.items() if name in MODES},
    )


def start(entry: Entry, logs: Path) -> Contestant:
    """Start a contestant without the environment's limits on threads."""
    limits = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    environment = {name: value for name, value in os.environ.items() if name not in limits}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(entry.source), environment.get("PYTHONPATH"))))
    log = logs / f"{entry.name}.log"
    return Contestant(entry.name, entry.command, log=log, environment=environment, directory=entry.source)


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
    """Return the ratios of all contestants to the serial mode, and of each mode to the one it extends and to peers."""
    return {
        f"{name}/{other}": speedup(rounds, counted[other])
        for other in counted
        for name, rounds in counted.items()
        if name != other and _compared(name, other)
    }


def _compared(name: str, other: str) -> bool:
    if EARLIER in other:
        return other.partition(EARLIER)[0] == name
    if other == "serial":
        return EARLIER not in name
    return name in MODES and (other not in MODES or other == MODES[name].over)


def seating(workload: BenchWorkload, layout: Layout, modes: Sequence[str]) -> list[str]:
    """Return the seats in words, a line for the modes with the same ones, and a warning on a single core."""
    cores = cores_here()
    lines: dict[str, list[str]] = {}
    for mode in modes:
        chosen = MODES[mode]
        table = seats(layout, cores, held=chosen.held, apart=chosen.trains_apart(workload)).table()
        line = ", ".join(f"{side} {seat['threads']} thread(s) on cores {seat['cores']}" for side, seat in table.items())
        lines.setdefault(line, []).append(mode)
    warning = ["one core only: all sides share it, and overlap cannot gain anything"] if len(cores) == 1 else []
    return [f"{', '.join(named)}: {line}" for line, named in lines.items()] + warning
