"""Controllers of overcommit in eight regimes, simulated: their own decisions, models of cost, virtual time.

``python -m benchmarks.controllers [ENGINE ...]`` makes the runs that ``results/controllers.json`` lacks, then writes
``results/controllers.md`` and its figure. Nothing here was measured on a device.

Seven devices hold actor, critic and reference, and decode side by side; one holds the reward model. The reference and
the critic read a step's rollouts after the cut, on the actor's devices. FLOPs are 2 N a token and 4 L d a token and
token of context, at the stated part of a peak of 989 TFLOP/s; training is four forward passes an epoch.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from benchmarks import CHECKOUT
from benchmarks.harness import command, markdown, placed as in_page
from benchmarks.simulate.outcomes import Outcomes
from oppo.admission import Admission, Overcommit, SlopeAdaptive, TailAdaptive, TailBatched
from oppo.errors import ConfigError
from oppo.report.charts import Axes, picture, placed
from oppo.simulate.profile import (
    GPUS,
    MODELS,
    TRAINED_PASSES,
    Decoder,
    Lognormal,
    Reader,
    ScorerName,
    System,
    Updater,
    Workload,
)
from oppo.simulate.schedule import Schedule, ScheduleOutcome, SimulatedRun

PEAK = GPUS["h200"].flops
DEVICES = 7

SIZES = {"3B": MODELS["qwen2.5-3b"], "7B": MODELS["qwen2.5-7b"], "70B": MODELS["llama-3.1-70b"]}


@dataclass(frozen=True, slots=True)
class Engine:
    launch: dict[str, float]  # seconds below which no decode step falls, by actor
    weights: dict[str, float]  # seconds a decode step needs to read the weights, by actor
    row: dict[str, float]  # seconds for each live row
    context: dict[str, float]  # seconds for each token of context of the live rows
    padded: bool  # whether forward passes are padded to the longest row
    # reading, forward, training: reached fraction of the peak
    reading: float
    forward: float
    training: float
    call: float  # seconds of one call of the reward model
    # overhead, weight_sync: seconds a step
    overhead: float
    weight_sync: float


@dataclass(frozen=True, slots=True)
class Regime:
    name: str
    actor: str
    batch: int
    prompt: int
    median: tuple[float, float]  # of the lengths, at the beginning and at the end of the run; they are lognormal
    sigma: float  # spread of their logarithm
    cap: int  # the longest response
    epochs: int = 2
    reward: str | None = None  # size of the reward model; `None`: a rule that costs nothing
    runaways: float = 0.0  # fraction of the responses that run to the cap regardless of the lognormal

    @property
    def workload(self) -> Workload:
        lengths = Lognormal(median=self.median, sigma=self.sigma, cap=self.cap, runaways=self.runaways)
        return Workload(batch=self.batch, lengths=lengths, cap=self.cap, prompt=self.prompt)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ENGINES = TypeAdapter(dict[str, Engine]).validate_python(_TABLES["engines"])
REGIMES = TypeAdapter(tuple[Regime, ...]).validate_python(_TABLES["regimes"])


def system(regime: Regime, engine: Engine) -> System:
    """Return the costs of a regime on an engine; the seven replicas of the actor decode equal shares of every row."""
    size, actor = SIZES[regime.actor], regime.actor
    readers: dict[ScorerName, Reader] = {
        name: Reader(
            passes=size.passes(DEVICES * PEAK * engine.forward),
            streams=False,
            padded=engine.padded,
            device="actor",
            place="forward",
        )
        for name in ("reference", "critic")
    }
    if regime.reward is not None:
        reading = SIZES[regime.reward].passes(PEAK * engine.reading)
        readers["reward"] = Reader(passes=reading, call=engine.call)
    return System(
        decoder=Decoder(
            floor=engine.launch[actor],
            step=engine.weights[actor],
            row=engine.row[actor] / DEVICES,
            context=engine.context[actor] / DEVICES,
        ),
        readers=readers,
        updater=Updater(
            passes=size.passes(DEVICES * PEAK * engine.training, 2 * (TRAINED_PASSES + 1) * regime.epochs),
            fixed=engine.overhead,
            padded=engine.padded,
            weight_sync=engine.weight_sync,
        ),
    )


RESULTS = CHECKOUT / "benchmarks" / "results" / "controllers.json"

FIXED = (0, 4, 8, 16)  # values of Delta on the frontier

STEPS, SKIPPED = 80, 15

CHUNK = 256  # tokens of a chunk

SEEDS = (0, 1, 2)  # seeds of the lengths; the first is for all controllers, the others show the spread

FULL = "modern"  # the engine on which all controllers are compared

CONTROLLERS: dict[str, Callable[[int], Admission]] = {
    "tail": TailAdaptive,
    "text": lambda batch: SlopeAdaptive(batch, rule="text"),
    "tail batched": TailBatched,
    "algorithm 1": lambda batch: SlopeAdaptive(batch, rule="algorithm1"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    engine: str
    regime: str
    controller: str  # a name of `CONTROLLERS`, or `fixed N`
    seed: int = 0  # of the lengths

    def admission(self, batch: int) -> Admission:
        if self.controller.startswith("fixed "):
            return Overcommit(batch, int(self.controller.removeprefix("fixed ")))
        return CONTROLLERS[self.controller](batch)

    def run(self) -> ScheduleOutcome:
        regime = next(regime for regime in REGIMES if regime.name == self.regime)
        costs = system(regime, ENGINES[self.engine])
        return SimulatedRun(costs, regime.workload, self.schedule(regime.batch), STEPS, SKIPPED, self.seed).run()

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
    """A controller in one regime, against fixed Delta."""

    regime: str
    speed: float  # seconds of a step with Delta = 0, over its own
    staleness: float
    frontier: float  # the speed of a fixed Delta of the same staleness, interpolated
    outcome: ScheduleOutcome


class Results(Outcomes[Cell]):
    def __init__(self, path: Path = RESULTS) -> None:
        super().__init__(path, Cell)

    def frontier(self, engine: str, regime: str, seed: int = 0) -> list[tuple[float, float]]:
        fixed = [self[Cell(engine, regime, name, seed)] for name in FRONTIER]
        return sorted((outcome.staleness, fixed[0].seconds / outcome.seconds) for outcome in fixed)

    def standings(self, engine: str, controller: str, seed: int = 0) -> list[Standing]:
        found = []
        for regime in REGIMES:
            cell = Cell(engine, regime.name, controller, seed)
            if cell not in self:
                continue
            outcome = self[cell]
            staleness, speeds = np.array(self.frontier(engine, regime.name, seed)).T
            speed = self[replace(cell, controller="fixed 0")].seconds / outcome.seconds
            at_its_staleness = float(np.interp(outcome.staleness, staleness, speeds))
            found.append(Standing(regime.name, speed, outcome.staleness, at_its_staleness, outcome))
        return found


def mean_speed(standings: Sequence[Standing]) -> float:
    return float(np.exp(np.mean([np.log(each.speed) for each in standings])))


def mean_staleness(standings: Sequence[Standing]) -> float:
    """Return the arithmetic mean of the staleness; the geometric one is 0 if any of them is."""
    return float(np.mean([each.staleness for each in standings]))


def longest(standings: Sequence[Standing]) -> str:
    return str(max(each.outcome.longest_staleness for each in standings))


def mean_worth(standings: Sequence[Standing]) -> float:
    """Return the geometric mean of speed / (1 + staleness): the speed at a price of 1 for a step of staleness."""
    return float(np.exp(np.mean([np.log(each.speed / (1 + each.staleness)) for each in standings])))


PAGE = RESULTS.with_suffix(".md")

COLOURS = {"tail": "#dc2626", "text": "#2563eb", "algorithm 1": "#7c3aed", "tail batched": "#059669"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 190, 130, 44, 40, 62

BEGIN = "<!-- python -m benchmarks.controllers -->\n"
FIXED_8 = ("speed, fixed 8", "staleness, fixed 8")


def write(results: Results) -> None:
    PAGE.with_suffix(".svg").write_text(figure(results, FULL), encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")


def page(results: Results) -> str:
    content = "\n".join([*tables(results, FULL), *seeds(results)])
    return in_page(PAGE.read_text(encoding="utf-8"), BEGIN, f"\n{content}")


def seeds(results: Results) -> Iterator[str]:
    yield "## `TailAdaptive` with other lengths, and on both engines\n"
    head = ["engine", "seed", *FIXED_8, "speed", "staleness", "worth, best fixed Delta", "worth"]
    rows = []
    for engine in ENGINES:
        for seed in SEEDS:
            fixed, tail = (results.standings(engine, name, seed) for name in ("fixed 8", "tail"))
            ahead = [each.speed / each.frontier for each in tail]
            predicted = [each.outcome.predicted for each in tail]
            best = max(mean_worth(results.standings(engine, name, seed)) for name in FRONTIER)
            means = [figure(each) for each in (fixed, tail) for figure in (mean_speed, mean_staleness)]
            figures = [*means, best, mean_worth(tail)]
            ranges = [f"{min(each):.3f} - {max(each):.3f}" for each in (ahead, predicted)]
            rows.append([engine, str(seed), *(f"{each:.3f}" for each in figures), *ranges])
    yield markdown([*head, "frontier", "predicted / realised"], rows)
    yield ""


def tables(results: Results, engine: str) -> Iterator[str]:
    names = [*(f"fixed {extra}" for extra in FIXED), *CONTROLLERS]
    standings = {name: results.standings(engine, name) for name in names}
    yield f"## In the mean of the eight regimes, engine `{engine}`\n"
    yield markdown(
        ["controller", "speed (geometric mean)", "staleness (mean)", "largest"],
        [[name, f"{mean_speed(of):.3f}", f"{mean_staleness(of):.3f}", longest(of)] for name, of in standings.items()],
    )
    yield f"\n## `TailAdaptive` by regime, engine `{engine}`\n"
    head = ["regime", *FIXED_8, "speed", "staleness", "mean Delta", "frontier", "predicted / realised"]
    rows = []
    for fixed, tail in zip(standings["fixed 8"], standings["tail"], strict=True):
        out = tail.outcome
        figures = [f"{each:.3f}" for each in (fixed.speed, fixed.staleness, tail.speed, tail.staleness)]
        told = [f"{tail.speed / tail.frontier:.3f}", f"{out.predicted:.3f}", f"{out.spread:.0%}"]
        rows.append([tail.regime, *figures, f"{out.extra:.1f}", *told])
    yield markdown([*head, "error of one prediction"], rows)
    yield f"\n## `TailBatched` by regime, engine `{engine}`\n"
    costs = ("tokens of aborted rollouts, for each trained", "swing of the batches' mean length")
    yield markdown(
        ["regime", "speed", "staleness", *costs],
        [
            [one.regime, f"{one.speed:.3f}", f"{one.staleness:.3f}", f"{cost.waste:.0%}", f"{cost.swing:.0%}"]
            for one in standings["tail batched"]
            if (cost := one.outcome.restarts) is not None
        ],
    )
    yield ""


def figure(results: Results, engine: str) -> str:
    """Return a panel for each regime as SVG: the frontier of fixed Delta, and the controllers."""
    panels = [
        placed(_LEFT + k % 4 * (_WIDTH + _GAP), _TOP + k // 4 * (_HEIGHT + _GAP), panel(results, engine, regime.name))
        for k, regime in enumerate(REGIMES)
    ]
    width, height = 4 * (_WIDTH + _GAP), 2 * (_HEIGHT + _GAP) + _TOP
    legend = [f'<text x="{_LEFT}" y="14" fill="#555">-- fixed Delta {", ".join(map(str, FIXED))}</text>']
    for k, name in enumerate(CONTROLLERS):
        x = _LEFT + 190 + 110 * k
        legend.append(f'<circle cx="{x}" cy="10" r="4" fill="{COLOURS[name]}"/><text x="{x + 9}" y="14">{name}</text>')
    return picture(width, height, "".join([*legend, *panels]), size=11)


def panel(results: Results, engine: str, regime: str) -> str:
    """Return one panel: staleness to the right, speed upwards."""
    fixed = results.frontier(engine, regime)
    points = {
        name: (each.staleness, each.speed)
        for name in CONTROLLERS
        for each in results.standings(engine, name)
        if each.regime == regime
    }
    right = max(staleness for staleness, _ in [*fixed, *points.values()]) * 1.05
    top = max(1.1, *(speed for _, speed in [*fixed, *points.values()]))
    axes = Axes(_WIDTH, _HEIGHT, right, 0.95, top)
    line = "L".join(axes.at(*point) for point in fixed)
    marks = "".join(_dot(axes.at(*point), "#555", 2.5) for point in fixed)
    marks += "".join(_dot(axes.at(*point), COLOURS[name], 4) for name, point in points.items())
    drawn = f'<path d="M{line}" fill="none" stroke="#555" stroke-dasharray="4 3"/>{marks}'
    heading = f'<text y="-8" font-weight="600">{escape(regime)}</text>'
    return heading + axes.framed(drawn, label="mean staleness", end=f"{right:.2f}", y=".2f")


def _dot(place: str, colour: str, radius: float) -> str:
    x, y = place.split()
    return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour}"/>'


def make(*engines: str) -> None:
    """Make every run that has no outcome yet; each takes some seconds of one core. Then write the page.

    Args:
        engines: modern, plain, or both if none is named.
    """
    if unknown := [engine for engine in engines if engine not in ENGINES]:
        raise ConfigError(f"there is no engine {unknown[0]!r}; expected some of {', '.join(ENGINES)}")
    results = Results()
    results.simulate([cell for engine in engines or ENGINES for cell in cells(engine)])
    write(results)


if __name__ == "__main__":
    sys.exit(command(make))
