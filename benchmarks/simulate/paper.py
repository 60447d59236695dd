"""The OPPO paper's four settings in simulation: what each schedule takes, on TRL's engine and on one that serves.

The engine like TRL's is that of the profiles. The serving engine decodes as vLLM does on an H200, pads nothing, and
reaches 40 to 45 % of the FLOP/s. Schedules that decode while they train have devices of their own for each: k decode,
the others train, reference and critic read along on the reward model's device. k is the one that is fastest with
lookahead 1 and a Delta of 8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import numpy as np

from oppo.admission import Admission, Overcommit, Synchronous, TailAdaptive
from oppo.app.profile import load_profile
from oppo.simulate.course import Course
from oppo.simulate.outcome import LAST, Outcome
from oppo.simulate.profile import EngineSection, Profile
from oppo.simulate.schedules import FORESEEN, Schedule
from oppo.simulate.study import Spread

RESULTS: Final = Path(__file__).with_name("paper.json")
PROFILES: Final = Path(__file__).with_name("profiles")

SETTINGS: Final = ("se-7b", "se-3b", "gsm8k-7b", "code-3b")
DEVICES: Final = 7
"""Devices that decode and train; one more scores."""

STEPS: Final = 60
SKIPPED: Final = 12
SEEDS: Final = (0, 1, 2)
CHUNK: Final = 256

Engine: TypeAlias = Literal["like TRL's", "serving"]
ENGINES: Final[tuple[Engine, ...]] = ("like TRL's", "serving")

SERVING: Final[Mapping[str, EngineSection]] = MappingProxyType(
    {
        "qwen2.5-7b": EngineSection(step_seconds=5.8e-3, row_seconds=5e-5, context_seconds=3.3e-8),
        "qwen2.5-3b": EngineSection(step_seconds=4.0e-3, row_seconds=3.5e-5, context_seconds=2.2e-8),
    }
)
"""By actor."""


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule of the table.

    Attributes:
        split: whether decoding and training have devices of their own.
        extra: Delta; ``None``: adaptive.
        recompute: whether contexts are read again with new weights.
    """

    name: str
    split: bool = False
    held: bool = False
    chunk: int | None = CHUNK
    extra: int | None = 0
    lookahead: int = 0
    in_flight: bool = False
    recompute: bool = True

    def schedule(self, batch: int, max_deferrals: int) -> Schedule:
        """Return the schedule."""
        bounded = min(max_deferrals, FORESEEN)
        admission: Callable[[], Admission] = partial(TailAdaptive, batch, max_deferrals=bounded)
        if self.extra is not None:
            admission = partial(Overcommit, batch, self.extra, max_deferrals)
        if self.extra == 0:
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
    Row("inter: serial, Delta 8", held=True, chunk=None, extra=8),
    Row("both: chunk, Delta 8", extra=8),
    Row("chunk, adaptive", extra=None),
    Row("lookahead 1", split=True, lookahead=1),
    Row("lookahead 1, Delta 8", split=True, extra=8, lookahead=1),
    Row("in flight, Delta 8", split=True, extra=8, lookahead=2, in_flight=True),
    Row("in flight, Delta 28", split=True, extra=28, lookahead=2, in_flight=True),
    Row("in flight, Delta 28, kept", split=True, extra=28, lookahead=2, in_flight=True, recompute=False),
)
BASELINE: Final = ROWS[0].name
TUNED: Final = "lookahead 1, Delta 8"
"""The row for which the number of decoding devices is chosen."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        decode: devices that decode; 0: all, in turn with training.
    """

    setting: str
    engine: Engine
    row: str
    decode: int
    max_deferrals: int
    seed: int

    def run(self) -> Outcome:
        """Make the run."""
        row = next(each for each in ROWS if each.name == self.row)
        profile = profile_of(self.setting, self.engine, self.decode)
        profile = replace(profile, schedule=replace(profile.schedule, recompute=row.recompute))
        schedule = row.schedule(profile.workload.batch, self.max_deferrals)
        steps = STEPS + LAST + schedule.lookahead
        return Course(profile.system(), profile.work(), schedule, steps, SKIPPED, self.seed).run()


@cache
def setting_of(name: str) -> Profile:
    """Return the profile of a setting, as it is committed."""
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
    """Return the work bound in seconds a step (:meth:`oppo.simulate.profile.Profile.bound`)."""
    profile = profile_of(setting, engine, decode)
    batches = 200
    lengths = profile.work().lengths(batches * profile.workload.batch, 1, SEEDS[0])
    return profile.bound(lengths.reshape(batches, profile.workload.batch))


class Results:
    """The outcomes so far; those that are asked for and missing are simulated.

    Args:
        tell: called with a sentence before each run.
    """

    def __init__(self, path: Path = RESULTS, tell: Callable[[str], None] | None = None) -> None:
        self._path = path
        self._tell = tell
        written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        self._outcomes = {Cell(**each["cell"]): _outcome(each["outcome"]) for each in written}

    def outcome(self, cell: Cell) -> Outcome:
        """Return the outcome of a run.

        Raises:
            KeyError: it is missing, and nothing is to be simulated.
        """
        if cell not in self._outcomes and self._tell is not None:
            self._tell(f"simulating {cell}")
            self._outcomes[cell] = cell.run()
            self._save()
        return self._outcomes[cell]

    def outcomes(
        self, setting: str, engine: Engine, row: Row, *, decode: int | None = None, max_deferrals: int = FORESEEN
    ) -> list[Outcome]:
        """Return the outcomes of a row, by seed."""
        if decode is None:
            decode = self.decoding(setting, engine) if row.split else 0
        return [self.outcome(Cell(setting, engine, row.name, decode, max_deferrals, seed)) for seed in SEEDS]

    def decoding(self, setting: str, engine: Engine) -> int:
        """Return the number of decoding devices with which the tuned row is fastest, with the first seed."""
        cells = [Cell(setting, engine, TUNED, decode, FORESEEN, SEEDS[0]) for decode in range(1, DEVICES)]
        return min(cells, key=lambda cell: self.outcome(cell).seconds).decode

    def _save(self) -> None:
        records = [{"cell": asdict(cell), "outcome": asdict(outcome)} for cell, outcome in self._outcomes.items()]
        self._path.write_text("[\n" + ",\n".join(json.dumps(each) for each in records) + "\n]\n", encoding="utf-8")


def _outcome(record: Mapping[str, object]) -> Outcome:
    return Outcome(**{**record, "extras": tuple(record["extras"])})  # type: ignore[arg-type]  # written by asdict


def page(results: Results) -> str:
    """Return the tables of ``docs/simulate.md``."""
    lines = [*ablation(results)]
    for engine in ENGINES:
        for setting in SETTINGS:
            lines += settings_table(results, setting, engine)
    return "\n".join([*lines, *split_table(results)])


PAPER: Final = {"intra: chunk": "1.2", "inter: serial, Delta 8": "1.6", "both: chunk, Delta 8": "1.83"}
"""What the paper reports of its 7B ablation."""


def ablation(results: Results) -> Iterator[str]:
    """Yield the ablation of the 7B setting."""
    yield "### The ablation of the 7B setting\n"
    yield "| | serial, s a step | speed | the paper reports |\n|---|---|---|---|"
    base = results.outcomes("se-7b", "like TRL's", ROWS[0])
    for row in ROWS[1:4]:
        speed = speeds(base, results.outcomes("se-7b", "like TRL's", row))
        yield f"| {row.name} | {mean(base):.0f} | {ranged(speed)} | {PAPER[row.name]} |"
    yield ""


def settings_table(results: Results, setting: str, engine: Engine) -> Iterator[str]:
    """Yield the schedules of a setting."""
    decode = results.decoding(setting, engine)
    split = f"{decode} decode, {DEVICES - decode} train"
    yield f"### {setting}, engine {engine}\n"
    yield "| schedule | devices | s a step | speed | mean lag | largest | idle | of the bound |"
    yield "|---|---|---|---|---|---|---|---|"
    base = results.outcomes(setting, engine, ROWS[0])
    for row in ROWS:
        if row.name.startswith("inter"):
            continue
        yield line(row.name, split if row.split else f"{DEVICES} in turn", base, results.outcomes(setting, engine, row),
                   bound(setting, engine, decode if row.split else 0))  # fmt: skip
    yield ""


def split_table(results: Results) -> Iterator[str]:
    """Yield what the split of the devices makes of the 7B setting on the serving engine, and bounded deferral."""
    yield "### se-7b on the serving engine: which devices decode\n"
    yield "| schedule | devices | deferrals | s a step | speed | mean lag | largest | idle | of the bound |"
    yield "|---|---|---|---|---|---|---|---|---|"
    base = results.outcomes("se-7b", "serving", ROWS[0])
    named = {row.name: row for row in ROWS}
    for name in (TUNED, "in flight, Delta 28"):
        for decode in (1, 2, 6):
            for most, words in ((FORESEEN, "unbounded"), (2, "at most 2")):
                found = results.outcomes("se-7b", "serving", named[name], decode=decode, max_deferrals=most)
                devices = f"{decode} decode, {DEVICES - decode} train | {words}"
                yield line(name, devices, base, found, bound("se-7b", "serving", decode))
    yield ""


def line(name: str, devices: str, base: Sequence[Outcome], found: Sequence[Outcome], least: float) -> str:
    """Return a line of a table."""
    speed, lag = speeds(base, found), np.mean([each.lag for each in found])
    longest, idle = max(each.longest_lag for each in found), np.mean([each.idle for each in found])
    figures = f"{mean(found):.1f} | {ranged(speed)} | {lag:.2f} | {longest} | {idle:.0%} | {least / mean(found):.0%}"
    return f"| {name} | {devices} | {figures} |".replace("%", " %")


def mean(outcomes: Sequence[Outcome]) -> float:
    """Return the mean seconds of a step."""
    return float(np.mean([each.seconds for each in outcomes]))


def speeds(base: Sequence[Outcome], found: Sequence[Outcome]) -> Spread:
    """Return the speed over the baseline's, paired by seed."""
    return Spread.of(one.seconds / other.seconds for one, other in zip(base, found, strict=True))


def ranged(spread: Spread) -> str:
    return f"{spread.mean:.2f} ({spread.low:.2f} - {spread.high:.2f})"
