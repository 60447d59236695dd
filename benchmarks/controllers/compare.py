"""The runs of controllers in regimes, and their file of results, which later runs add to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.controllers.regimes import ENGINES, REGIMES, system
from oppo.admission import Admission, Overcommit, SlopeAdaptive, TailAdaptive, TailBatched
from oppo.simulate.run import Restarts, Schedule, ScheduleOutcome, SimulatedRun

RESULTS = Path(__file__).with_name("results.json")

FIXED = (0, 4, 8, 16)
"""Values of Delta on the frontier."""

STEPS, SKIPPED = 80, 15

GRAIN, CHUNK = 8, 256
"""Tokens for which a fake token stands, and tokens of a chunk."""

SEEDS = (0, 1, 2)
"""Seeds of the lengths; the first is for all controllers, the others show the spread."""

FULL = "modern"
"""The engine on which all controllers are compared."""

CONTROLLERS: dict[str, Callable[[int], Admission]] = {
    "tail": TailAdaptive,
    "text": lambda batch: SlopeAdaptive(batch, rule="text"),
    "tail batched": TailBatched,
    "algorithm 1": lambda batch: SlopeAdaptive(batch, rule="algorithm1"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        controller: a name of :data:`CONTROLLERS`, or ``fixed N``.
        seed: of the lengths.
    """

    engine: str
    regime: str
    controller: str
    seed: int = 0

    def admission(self, batch: int) -> Admission:
        """Return a new controller."""
        if self.controller.startswith("fixed "):
            return Overcommit(batch, int(self.controller.removeprefix("fixed ")))
        return CONTROLLERS[self.controller](batch)

    def run(self) -> ScheduleOutcome:
        """Make the run."""
        regime = next(regime for regime in REGIMES if regime.name == self.regime)
        costs = system(regime, ENGINES[self.engine])
        return SimulatedRun(costs, regime.workload, self.schedule(regime.batch), STEPS, SKIPPED, self.seed, GRAIN).run()

    def schedule(self, batch: int) -> Schedule:
        """Return the schedule: the reward model reads along."""
        return Schedule(name=self.controller, about="", admission=partial(self.admission, batch), chunk=CHUNK)


FRONTIER = tuple(f"fixed {extra}" for extra in FIXED)


def cells(engine: str) -> Iterator[Cell]:
    """Yield the runs of an engine: every controller with the first seed, the default one with all."""
    for seed in SEEDS:
        others = CONTROLLERS if engine == FULL and seed == SEEDS[0] else ("tail",)
        for controller in (*FRONTIER, *others):
            for regime in REGIMES:
                yield Cell(engine, regime.name, controller, seed)


@dataclass(frozen=True, slots=True)
class Standing:
    """A controller in one regime, against fixed Delta.

    Attributes:
        speed: seconds of a step with Delta = 0, over its own.
        frontier: the speed of a fixed Delta of the same lag, interpolated.
    """

    regime: str
    speed: float
    lag: float
    frontier: float
    outcome: ScheduleOutcome


class Results:
    """All outcomes so far, by cell."""

    def __init__(self, outcomes: dict[Cell, ScheduleOutcome]) -> None:
        self.outcomes = outcomes

    @classmethod
    def load(cls, path: Path = RESULTS) -> Results:
        """Return the results in a file; none without the file."""
        if not path.exists():
            return cls({})
        records = json.loads(path.read_text(encoding="utf-8"))
        return cls({Cell(**record["cell"]): outcome_of(record["outcome"]) for record in records})

    def save(self, path: Path = RESULTS) -> None:
        """Write the file."""
        records = [{"cell": asdict(cell), "outcome": asdict(outcome)} for cell, outcome in self.outcomes.items()]
        path.write_text("[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n", encoding="utf-8")

    def frontier(self, engine: str, regime: str, seed: int = 0) -> list[tuple[float, float]]:
        """Return lag and speed of each fixed Delta, by rising lag."""
        fixed = [self.outcomes[Cell(engine, regime, name, seed)] for name in FRONTIER]
        return sorted((outcome.lag, fixed[0].seconds / outcome.seconds) for outcome in fixed)

    def standings(self, engine: str, controller: str, seed: int = 0) -> list[Standing]:
        """Return the standing of a controller in every regime it was run in."""
        found = []
        for regime in REGIMES:
            outcome = self.outcomes.get(Cell(engine, regime.name, controller, seed))
            if outcome is None:
                continue
            lags, speeds = np.array(self.frontier(engine, regime.name, seed)).T
            speed = self.outcomes[Cell(engine, regime.name, "fixed 0", seed)].seconds / outcome.seconds
            at_its_lag = float(np.interp(outcome.lag, lags, speeds))
            found.append(Standing(regime.name, speed, outcome.lag, at_its_lag, outcome))
        return found


def outcome_of(record: dict[str, Any]) -> ScheduleOutcome:
    restarts = record.get("restarts")
    given = {"extras": tuple(record["extras"]), "restarts": Restarts(**restarts) if restarts else None}
    return ScheduleOutcome(**record | given)


def mean_speed(standings: Sequence[Standing]) -> float:
    return float(np.exp(np.mean([np.log(each.speed) for each in standings])))


def mean_lag(standings: Sequence[Standing]) -> float:
    """Return the arithmetic mean of the lags; the geometric one is 0 if any of them is."""
    return float(np.mean([each.lag for each in standings]))


def mean_worth(standings: Sequence[Standing]) -> float:
    """Return the geometric mean of speed / (1 + lag): the speed at a price of 1 for a step of lag."""
    return float(np.exp(np.mean([np.log(each.speed / (1 + each.lag)) for each in standings])))
