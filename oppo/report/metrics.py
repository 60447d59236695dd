"""The metrics of a step, as ``metrics.toml`` beside this module declares them, and the summary of a run.

Within the package, as in :class:`oppo.StepReport`, a metric has one name. :class:`Renamed` gives observers the name of
TRL's GRPO or of verl; readers of files take any (:func:`in_own_names`). A custom trainer or loss adds others, whose
meaning it defines.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, TypeGuard, TypeVar

from oppo.events import StepReport
from oppo.graph.engine import notify
from oppo.observe import Observer, Span
from oppo.report.records import METRICS as METRICS_FILE, Damaged, Record, read, unnoticed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # in this package; parts in braces stand for any text without a slash
    unit: str
    meaning: str  # and where TRL's or verl's differs
    trl: str = ""  # the name in TRL's GRPO, if it differs
    verl: str = ""  # the name in verl, if it differs


MetricNames: TypeAlias = Literal["trl", "verl"]  # the names of TRL's GRPO, or of verl


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(name)))


@cache
def metric(name: str) -> Metric | None:
    return next((each for each in chain(*METRICS.values()) if _pattern(each.name).fullmatch(name)), None)


def taken(name: str, by: str, section: str = "") -> str:
    # why a user's code may not give this name; a loss may give those of its section
    own = metric(name)
    if own is None or own in METRICS.get(section, ()):
        return ""
    return f"{by} would replace a metric of the run, {own.name!r}: choose another name, such as 'own/{name}'"


def renamed(metrics: Mapping[str, T], names: MetricNames) -> dict[str, T]:
    return _renamed(metrics, lambda name: getattr(metric(name), names, "") or name)


def in_own_names(record: Mapping[str, T]) -> dict[str, T]:
    return _renamed(record, _own_name)


def _renamed(record: Mapping[str, T], name_of: Callable[[str], str]) -> dict[str, T]:
    # a metric of one's own that has the name already keeps it
    return {name if (other := name_of(name)) in record else other: value for name, value in record.items()}


@cache
def _own_name(name: str) -> str:
    if metric(name) is None:
        for each in chain(*METRICS.values()):
            for other in filter(None, (each.trl, each.verl)):
                if found := _pattern(other).fullmatch(name):
                    return each.name.format(**found.groupdict())
    return name


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    section: str
    lines: Mapping[str, str] = field(default_factory=dict)  # metrics by their labels
    stack: Mapping[str, str] = field(default_factory=dict)  # likewise, of areas on one another
    of: str = ""  # the metric that the areas are parts of
    within: Sequence[float] = ()

    @property
    def unit(self) -> str:
        known = metric(next(iter((self.lines or self.stack).values())))
        return "" if known is None or known.unit == "1" else known.unit

    def names(self, known: Iterable[str]) -> dict[str, str]:
        found = {}
        for label, name in (self.lines or self.stack).items():
            for each in known:
                if fits := _pattern(name).fullmatch(each):
                    found[label.replace("$", next(iter(fits.groups()), ""))] = each
        return found


_DECLARED: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

CHARTS: Final = tuple(Chart(**each) for each in _DECLARED.pop("charts"))

# Every metric, by section of the page
METRICS: Final[Mapping[str, tuple[Metric, ...]]] = MappingProxyType(
    {
        section: tuple(Metric(name, *declared) for name, declared in metrics.items())
        for section, metrics in _DECLARED.items()
    }
)

MFU: Final = {kind: f"perf/mfu/{kind}" for kind in ("decode", "score", "update")}
DISTANCES: Final = ("objective/kl", "objective/teacher_kl")
LARGEST: Final = 1e100
HELD_OUT: Final = ("eval/score", "eval/score_ci95", "eval/response_length")
MEMORY: Final = {kind: f"memory/{kind}" for kind in ("allocated", "reserved")}

Metrics: TypeAlias = dict[str, float | int | None]

# The least share of a step's seconds from which scoring is worth hiding; a reward of milliseconds is below
SCORING: Final = 0.01


def step_metrics(report: StepReport) -> Metrics:
    head: Metrics = {"step": report.index, "version": report.version, "score": finite(report.score)}
    counts = {"trained": len(report.trained), "deferred": len(report.deferred), "dropped": len(report.dropped)}
    measured = {name: finite(value) for name, value in report.metrics.items()}
    return head | {"seconds": report.seconds} | counts | measured


def scalars(report: StepReport) -> dict[str, float]:
    return {name: float(value) for name, value in step_metrics(report).items() if name != "step" and value is not None}


def finite(value: float) -> float | None:
    # JSON has no NaN and no infinity
    return value if math.isfinite(value) else None


def metrics_of(run: Path, damaged: Damaged = unnoticed) -> Sequence[Metrics]:
    return records_of(read(run / METRICS_FILE, damaged))


def records_of(lines: Iterable[Record]) -> Sequence[Metrics]:
    return [  # which share their names: json makes them anew for each
        {sys.intern(name): value for name, value in in_own_names(each).items() if value is None or _is_number(value)}
        for each in lines
    ]


def _is_number(value: object) -> TypeGuard[float | int]:
    return isinstance(value, int | float) and abs(value) < LARGEST


Figures: TypeAlias = dict[str, dict[str, float]]  # the statistics of a metric, by its name


def summary(records: Sequence[Mapping[str, float | None]], evaluations: Sequence[Record] = ()) -> Figures:
    """Return statistics of a run's metrics; what was not measured is absent."""
    scores = column(records, "score")
    found: dict[str, dict[str, float | None]] = {
        **{name: {"total": int(sum(column(records, name)))} for name in ("trained", "dropped", "deferred")},
        "seconds": {
            "total": math.fsum(column(records, "seconds")),
            "median": _of(column(records, "seconds"), statistics.median),
        },
        "score": {
            "first": _of(scores[: _few(scores)], statistics.fmean),
            "last": _of(scores[-_few(scores) :], statistics.fmean),
        },
        **{name: {"last": _of(column(records[-10:], name), statistics.fmean)} for name in DISTANCES},
        "throughput/tokens_per_s": {"median": _of(column(records, "throughput/tokens_per_s"), statistics.median)},
        "overlap/hidden_fraction": {"mean": hidden_fraction(records)},
    }
    scored = [each for each in records_of(evaluations) if "eval/score" in each]
    for name in HELD_OUT if scored else ():
        found[name] = {"first": scored[0].get(name), "last": scored[-1].get(name)}
    if scored:
        best = max(scored, key=lambda each: each["eval/score"] or -math.inf)
        found["eval/score"] |= {"best": best["eval/score"], "best_step": (best["step"] or 0) + 1}
    known = {name: {key: value for key, value in each.items() if value is not None} for name, each in found.items()}
    return {name: each for name, each in known.items() if each}


def hidden_fraction(records: Sequence[Mapping[str, float | None]]) -> float | None:
    """``None`` where scoring took less than ``SCORING`` of the steps' seconds: there is nothing to hide."""
    scoring, exposed = (math.fsum(column(records, name)) for name in ("timing_s/score", "timing_s/score_exposed"))
    return 1 - exposed / scoring if scoring > max(0.0, SCORING * math.fsum(column(records, "seconds"))) else None


def column(records: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
    return [value for each in records if (value := each.get(name)) is not None]


def _few(values: Sequence[float]) -> int:
    return min(10, (len(values) + 1) // 2)


def _of(values: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> float | None:
    return statistic(values) if values else None


class Renamed(Observer):
    def __init__(self, names: MetricNames, *observers: Observer) -> None:
        self._names: MetricNames = names
        self._observers = observers

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        item = self._with_names(item)
        notify(self._observers, lambda observer: observer.on_item(step, stage, item, at))

    def on_span(self, span: Span) -> None:
        notify(self._observers, lambda observer: observer.on_span(span))

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        result = self._with_names(result)
        notify(self._observers, lambda observer: observer.on_step(step, result, channels))

    def _with_names(self, item: object) -> object:
        return replace(item, metrics=renamed(item.metrics, self._names)) if isinstance(item, StepReport) else item
