"""The metrics of a step that are the same for every algorithm: its pace, its overlap, its queues."""

from __future__ import annotations

import math
from collections.abc import Mapping

from oppo.graph import Step
from oppo.observe import Span
from oppo.overlap import occupation


def run_metrics(step: Step, seconds: float, tokens: float | None) -> Mapping[str, float]:
    """Return the metrics of a step by the time of its report.

    Scoring of this step is hidden by decoding and training of any step that is alive beside it.

    Args:
        step: with the work that its stages recorded (:meth:`oppo.Step.working`).
        seconds: of the step.
        tokens: of the trained responses; ``None`` without any.
    """
    metrics: dict[str, float] = {"timing_s/step": seconds}
    if tokens is not None and seconds > 0:
        metrics["throughput/tokens_per_s"] = tokens / seconds
    own = [span for _, span in step.recorded(Span)]
    busy = occupation(own, beside=step.work)
    if own:
        metrics |= {
            "timing_s/decode": busy.decode,
            "timing_s/score": busy.score,
            "timing_s/score_exposed": busy.exposed,
        }
    if math.isfinite(busy.hidden):
        metrics["overlap/hidden_fraction"] = busy.hidden
    for channel, counters in step.channels().items():
        metrics |= {f"queue/{channel}/{name}": counters[name] for name in ("peak", "merged")}
    return metrics | {name: gauge() for name, gauge in step.gauges.items()}
