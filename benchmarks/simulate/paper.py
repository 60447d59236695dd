"""The OPPO paper's four settings in simulation: what each schedule takes, on two engines.

The engine like TRL's is that of the profiles. The serving engine decodes as vLLM does on an H200, pads nothing, and
reaches 40 to 45% of the FLOP/s. Schedules that decode while they train have devices of their own for each: k decode,
the others train, and reference and critic read along on the reward model's device. Each takes the k that is fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import numpy as np

from benchmarks.harness import markdown, placed
from benchmarks.simulate.outcomes import Outcomes
from oppo.admission import Admission, Continuous, Overcommit, Synchronous, TailAdaptive
from oppo.run.simulation import load_profile
from oppo.simulate.profile import EngineSection, Profile
from oppo.simulate.schedule import FORESEEN, Schedule, ScheduleOutcome, SimulatedRun

RESULTS: Final = Path(__file__).with_name("paper.json")
PROFILES: Final = Path(__file__).with_name("profiles")

SETTINGS: Final = ("se-7b", "se-3b", "gsm8k-7b", "code-3b")
SPLITS: Final = (1, 2, 3)  # devices that decode, of those that are tried in a split

DEVICES: Final = 7  # devices that decode and train; one more scores

STEPS: Final = 36
SKIPPED: Final = 8
# Of the lengths, by setting
SEEDS: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    {"se-7b": (0, 1), "se-3b": (0,), "gsm8k-7b": (0,), "code-3b": (0,)}
)

FIRST: Final = 0  # the seed with which the devices are split

CHUNK: Final = 256

Engine: TypeAlias = Literal["like TRL's", "serving"]
ENGINES: Final[tuple[Engine, ...]] = ("like TRL's", "serving")

# What whole passes reach, 2 FLOP for each parameter
_REACHED: Final = EngineSection(
    scoring=0.40, forward=0.40, training=0.45, activations=0.0, logits=0.0, checkpointing=True
)
# By actor
SERVING: Final[Mapping[str, EngineSection]] = MappingProxyType(
    {
        "qwen2.5-7b": replace(_REACHED, step_seconds=5.8e-3, row_seconds=5e-5, context_seconds=3.3e-8),
        "qwen2.5-3b": replace(_REACHED, step_seconds=4.0e-3, row_seconds=3.5e-5, context_seconds=2.2e-8),
    }
)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    split: bool = False  # whether decoding and training have devices of their own
    held: bool = False
    chunk: int | None = CHUNK
    overcommit: int | None = 0  # delta; `None`: adaptive; with `refill` the rollouts that are decoded at a time
    refill: bool = False  # each that ends is replaced at once
    lookahead: int = 0
    in_flight: bool = False
    # whether contexts are read again with new weights, as of `step.kv_on_sync`
    kv_on_sync: Literal["recompute", "keep"] = "recompute"

    def schedule(self, batch: int, max_deferrals: int) -> Schedule:
        bounded = min(max_deferrals, FORESEEN)
        admission: Callable[[], Admission] = partial(TailAdaptive, batch, max_deferrals=bounded)
        if self.overcommit is not None:
            admission = partial(Overcommit, batch, self.overcommit, max_deferrals)
        if self.overcommit and self.refill:
            admission = partial(Continuous, batch, self.overcommit, max_deferrals)
        if self.overcommit == 0:
            admission = partial(Synchronous, batch)
        return Schedule(
            name=self.name,
            about="",
            admission=admission,
            chunk=self.chunk,
            held=self.held,
            lookahead=self.lookahead,
            in_flight=self.in_flight,
        )


ROWS: Final = (
    Row("serial", held=True, chunk=None),
    Row("intra: chunk"),
    Row("inter: serial, Delta 8", held=True, chunk=None, overcommit=8),
    Row("both: chunk, Delta 8", overcommit=8),
    Row("chunk, adaptive", overcommit=None),
    Row("lookahead 1", split=True, lookahead=1),
    Row("lookahead 1, Delta 8", split=True, overcommit=8, lookahead=1),
    Row("in flight, 56 live", split=True, overcommit=56, refill=True, lookahead=2, in_flight=True),
    Row("in flight, 112 live", split=True, overcommit=112, refill=True, lookahead=2, in_flight=True),
)
# The same, where keys and values of older weights are kept
KEPT: Final = replace(ROWS[-1], name="in flight, 112 live, kept", kv_on_sync="keep")

BY_NAME: Final[Mapping[str, Row]] = MappingProxyType({row.name: row for row in (*ROWS, KEPT)})
ONE_STEP_OFF: Final = "lookahead 1, Delta 8"
HALF_LIVE: Final = "in flight, 56 live"
ALL_LIVE: Final = "in flight, 112 live"


@dataclass(frozen=True, slots=True)
class Cell:
    setting: str
    engine: Engine
    row: str
    decode: int  # devices that decode; 0: all, in turn with training
    max_deferrals: int
    seed: int

    def run(self) -> ScheduleOutcome:
        row = BY_NAME[self.row]
        profile = profile_of(self.setting, self.engine, self.decode)
        profile = replace(profile, schedule=replace(profile.schedule, kv_on_sync=row.kv_on_sync))
        schedule = row.schedule(profile.workload.batch, self.max_deferrals)
        return SimulatedRun(profile.system(), profile.work(), schedule, STEPS, SKIPPED, self.seed).run()


@cache
def setting_of(name: str) -> Profile:
    return load_profile(PROFILES / f"{name}.toml")


def profile_of(setting: str, engine: Engine, decode: int = 0) -> Profile:
    """Return the profile of a setting on an engine, with so many devices that decode; 0: all, in turn with training."""
    profile = setting_of(setting)
    if engine == "serving":
        profile = replace(profile, engine=SERVING[profile.models.actor])
    if not decode:
        return profile
    layout = replace(profile.layout, decode=decode, train=DEVICES - decode, forward="score", stream_forward=True)
    return replace(profile, layout=layout)


def bound(setting: str, engine: Engine, decode: int = 0) -> float:
    """Return the work bound in seconds for each trained token (:func:`work_bound`)."""
    profile = profile_of(setting, engine, decode)
    batches = 200
    lengths = profile.work().lengths(batches * profile.workload.batch, 1, FIRST)
    return work_bound(profile, lengths.reshape(batches, profile.workload.batch)) * batches / float(lengths.sum())


def work_bound(profile: Profile, lengths: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float:
    """Return the seconds of a step below which no schedule comes on these devices (the work bound).

    All devices but the reward model's share all work but its own, and decode steps cost what their rows do::

        max( (decoding of rows + reference and critic + update) / devices + fixed + weight sync,  reward model )
    """
    layout, engine, system = profile.layout, profile.engine, profile.system()
    pool = layout.decode + layout.train
    rows = profile.workload.prompt + lengths.astype(np.float64)
    decoder, updater = system.decoder, system.updater
    context = profile.workload.prompt + lengths / 2
    decoding = (lengths * (decoder.row + decoder.context * context)).sum(1) / pool
    share = {"actor": layout.decode, "trainer": layout.train}
    training = np.array([updater.seconds(row) for row in rows]) - updater.fixed
    total = decoding + training * share[updater.device] / pool
    busy = np.zeros(len(rows))
    for reader in system.readers.values():
        seconds = np.array([reader.passes.whole(row) for row in rows])
        if reader.device in share:
            total = total + seconds * share[reader.device] / pool
        else:
            busy = busy + seconds
    return float(np.maximum(total + engine.fixed_seconds + engine.weight_sync_seconds, busy).mean())


class Results(Outcomes[Cell]):
    def __init__(self, path: Path = RESULTS) -> None:
        super().__init__(path, Cell)

    def outcomes(
        self, setting: str, engine: Engine, row: Row, *, decode: int | None = None, max_deferrals: int = FORESEEN
    ) -> list[ScheduleOutcome]:
        if decode is None:
            decode = self.decoding(setting, engine, row)
        return [self[Cell(setting, engine, row.name, decode, max_deferrals, seed)] for seed in SEEDS[setting]]

    def decoding(self, setting: str, engine: Engine, row: Row) -> int:
        """Return the number of decoding devices with which a row is fastest, with the first seed; 0 without a split."""
        return min(splits(setting, engine, row), key=lambda cell: self[cell].seconds).decode


def splits(setting: str, engine: Engine, row: Row) -> list[Cell]:
    """Return the runs of a row with the first seed, one for each split of the devices."""
    return [Cell(setting, engine, row.name, decode, FORESEEN, FIRST) for decode in (SPLITS if row.split else (0,))]


def simulate(results: Results) -> None:
    """Make every run that the tables need and that is missing: first those that say how the devices are split."""
    tables = [(setting, engine) for setting in SETTINGS for engine in ENGINES]
    results.simulate(cell for each in tables for row in shown(*each) for cell in splits(*each, row))
    results.simulate(
        [
            *(
                replace(cell, decode=results.decoding(*each, row), seed=seed)
                for each in tables
                for row in shown(*each)
                for cell in splits(*each, row)[:1]
                for seed in SEEDS[each[0]]
            ),
            *(cell for each in SPLIT_CELLS for cell in each),
        ]
    )


def shown(setting: str, engine: Engine) -> list[Row]:
    """Return the rows of a setting; the ablation's own is simulated for that alone."""
    ablated = (setting, engine) == ("se-7b", ENGINES[0])
    return [row for row in ROWS if ablated or not row.name.startswith("inter")]


BEGIN: Final = "<!-- python -m benchmarks.simulate paper -->\n"


def in_page(text: str, results: Results) -> str:
    """Return the text of ``benchmarks/simulate/README.md`` with the tables of the results."""
    lines = [*ablation(results)]
    for engine in ENGINES:
        for setting in SETTINGS:
            lines += settings_table(results, setting, engine)
    tables = "\n".join([*lines, *split_table(results)])
    return placed(text, BEGIN, f"\n{tables.strip()}\n\n")


# What the paper reports of its 7B ablation
PAPER: Final = {"intra: chunk": "1.2", "inter: serial, Delta 8": "1.6", "both: chunk, Delta 8": "1.83"}


def ablation(results: Results) -> Iterator[str]:
    """Yield the ablation of the 7B setting."""
    yield "### The ablation of the 7B setting\n"
    base, rows = results.outcomes("se-7b", "like TRL's", ROWS[0]), []
    for row in ROWS[1:4]:
        speed = speeds(base, results.outcomes("se-7b", "like TRL's", row))
        rows.append([row.name, f"{mean(base):.0f}", ranged(speed), PAPER[row.name]])
    yield markdown(["", "serial, s a step", "speed", "the paper reports"], rows)
    yield ""


def settings_table(results: Results, setting: str, engine: Engine) -> Iterator[str]:
    yield f"### {setting}, engine {engine}\n"
    base, rows = results.outcomes(setting, engine, ROWS[0]), []
    for row in shown(setting, engine):
        decode = results.decoding(setting, engine, row)
        devices = f"{decode} decode, {DEVICES - decode} train" if decode else f"{DEVICES} in turn"
        found = results.outcomes(setting, engine, row)
        rows.append([row.name, devices, *figures(base, found, bound(setting, engine, decode))])
    yield markdown(["schedule", "devices", *FIGURES], rows)
    yield ""


DEFERRALS: Final = ((FORESEEN, "unbounded"), (2, "at most 2"))
SPLIT_ROWS: Final = ((ONE_STEP_OFF, (1, 2, 6)), (HALF_LIVE, (1, 2)), (ALL_LIVE, (1, 2)), (KEPT.name, (1,)))
SPLIT_CELLS: Final = tuple(
    tuple(Cell("se-7b", "serving", name, decode, most, seed) for seed in SEEDS["se-7b"])
    for name, decoding in SPLIT_ROWS
    for decode in decoding
    for most, _ in DEFERRALS
)


def split_table(results: Results) -> Iterator[str]:
    """Yield what the split of the devices makes of the 7B setting on the serving engine, and bounded deferral."""
    yield "### se-7b on the serving engine: which devices decode, and how often a rollout may be deferred\n"
    base, rows = results.outcomes("se-7b", "serving", ROWS[0]), []
    words = dict(DEFERRALS)
    for cells in SPLIT_CELLS:
        cell = cells[0]
        devices = f"{cell.decode} decode, {DEVICES - cell.decode} train"
        found = [results[each] for each in cells]
        told = figures(base, found, bound("se-7b", "serving", cell.decode))
        rows.append([cell.row, devices, words[cell.max_deferrals], *told])
    yield markdown(["schedule", "devices", "deferrals", *FIGURES], rows)
    yield ""


FIGURES: Final = ("s a step", "speed", "mean staleness", "largest", "idle", "of the bound")


def figures(base: Sequence[ScheduleOutcome], found: Sequence[ScheduleOutcome], least: float) -> list[str]:
    """Return a row of :data:`FIGURES`; ``least`` is the bound in seconds for each token."""
    staleness, idle = np.mean([each.staleness for each in found]), np.mean([each.idle for each in found])
    return [
        f"{mean(found):.1f}",
        ranged(speeds(base, found)),
        f"{staleness:.2f}",
        f"{max(each.longest_staleness for each in found)}",
        f"{100 * idle:.0f}%",
        f"{100 * least / per_token(found):.0f}%",
    ]


def mean(outcomes: Sequence[ScheduleOutcome]) -> float:
    return float(np.mean([each.seconds for each in outcomes]))


def per_token(outcomes: Sequence[ScheduleOutcome]) -> float:
    return float(np.mean([each.per_token for each in outcomes]))


def speeds(base: Sequence[ScheduleOutcome], found: Sequence[ScheduleOutcome]) -> Sequence[float]:
    """Return the speed of each seed."""
    return [one.per_token / other.per_token for one, other in zip(base, found, strict=True)]


def ranged(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):.2f}"
    return mean if min(values) == max(values) else f"{mean} ({min(values):.2f} - {max(values):.2f})"
