"""One flat record of metrics a step, and the summary of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from oppo.events import StepReport

Metrics: TypeAlias = dict[str, float | int | None]

SCORING: Final = 0.01
"""The least share of a step's seconds from which scoring is worth hiding; a reward of milliseconds is below."""


def step_metrics(report: StepReport) -> Metrics:
    """Return the line of ``metrics.jsonl`` for a step: the counts of its report, and the report's metrics."""
    head: Metrics = {"step": report.index, "version": report.version, "score": finite(report.score)}
    counts = {"trained": len(report.trained), "deferred": len(report.deferred), "dropped": len(report.dropped)}
    measured = {name: finite(value) for name, value in report.metrics.items()}
    return head | {"seconds": report.seconds} | counts | measured


def scalars(report: StepReport) -> dict[str, float]:
    """Return the numbers of a step's line for trackers: all but the step's own and those that are not finite."""
    return {name: float(value) for name, value in step_metrics(report).items() if name != "step" and value is not None}


def finite(value: float) -> float | None:
    """Return the number; ``None`` for NaN and infinities, which JSON lacks."""
    return value if math.isfinite(value) else None


def summary(records: Sequence[Mapping[str, float | None]]) -> dict[str, float | int | None]:
    """Return the summary of a run; medians and means leave out steps without the metric."""
    return {
        "steps": len(records),
        "trained": int(sum(column(records, "trained"))),
        "dropped": int(sum(column(records, "dropped"))),
        "deferrals": int(sum(column(records, "deferred"))),
        "seconds": math.fsum(column(records, "seconds")),
        "step_seconds_median": _median(column(records, "seconds")),
        "score_first": _mean(column(records[:10], "score")),
        "score_last": _mean(column(records[-10:], "score")),
        "kl_last": _mean(column(records[-10:], "objective/kl")),
        "tokens_per_s_median": _median(column(records, "throughput/tokens_per_s")),
        "hidden_fraction": hidden_fraction(records),
    }


def hidden_fraction(records: Sequence[Mapping[str, float | None]]) -> float | None:
    """Return the share of a run's scoring seconds that decoding or training hid, 0 to 1.

    ``None`` where scoring took less than ``SCORING`` of the steps' seconds: there is nothing to hide.
    """
    scoring, exposed = (math.fsum(column(records, name)) for name in ("timing_s/score", "timing_s/score_exposed"))
    return 1 - exposed / scoring if scoring > SCORING * math.fsum(column(records, "seconds")) else None


def column(records: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
    """Return one metric over the steps that have it."""
    return [value for each in records if (value := each.get(name)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
