"""The figure: the score against steps and against seconds, mean and interval of every arm."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from benchmarks.convergence.arms import ARMS
from benchmarks.convergence.comparison import Interval, curve
from benchmarks.convergence.results import Results
from oppo.report.svg import Axes, picture, placed

COLOURS: Final = {
    "serial": "#111827",
    "chunk": "#2563eb",
    "fixed": "#059669",
    "adaptive": "#dc2626",
    "stale": "#d97706",
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 400, 260, 50, 44, 60


def figure(results: Results) -> str:
    """Return the two panels as SVG; the score is the mean of what each step trained."""
    scores = {arm: curve(results, arm, lambda outcome: outcome.scores) for arm in ARMS}
    steps = {arm: [float(k + 1) for k in range(results.plan.steps)] for arm in ARMS}
    ends = {
        arm: [each.mean for each in curve(results, arm, lambda outcome: list(accumulate(outcome.seconds)))]
        for arm in ARMS
    }
    panels = [
        placed(LEFT + k * (WIDTH + GAP), TOP, panel(xs, scores, label))
        for k, (xs, label) in enumerate(((steps, "steps"), (ends, "seconds")))
    ]
    width, height = LEFT + 2 * (WIDTH + GAP) - GAP + 20, TOP + HEIGHT + 40
    return picture(width, height, legend(results) + "".join(panels), size=12)


def legend(results: Results) -> str:
    """Return the names of the arms in their colours, and the meaning of the lines."""
    entries = [
        f'<text x="{LEFT + 90 * k}" y="18" fill="{COLOURS[arm]}" font-weight="600">{arm}</text>'
        for k, arm in enumerate(ARMS)
    ]
    words = f"score of the rollouts trained: mean of {len(results.whole())} seeds, 90 % interval"
    entries.append(f'<text x="{LEFT + 90 * len(ARMS)}" y="18" fill="#555">{words}</text>')
    return "".join(entries)


def panel(xs: dict[str, list[float]], scores: dict[str, list[Interval]], label: str) -> str:
    """Return one panel: ``label`` to the right, the score upwards."""
    bounds = [bound for each in scores.values() for one in each for bound in (one.low, one.high)]
    spare = 0.05 * (max(bounds) - min(bounds)) or 1.0
    axes = Axes(WIDTH, HEIGHT, max(max(x) for x in xs.values()), min(bounds) - spare, max(bounds) + spare)
    drawn = "".join(line(axes, xs[arm], scores[arm], COLOURS[arm]) for arm in scores)
    return axes.framed(drawn, label=label, end=f"{axes.right:.0f}", y=".1f")


def line(axes: Axes, x: Sequence[float], y: Sequence[Interval], colour: str) -> str:
    """Return an arm's mean as a line, over its interval as a band."""
    points = list(zip(x, y, strict=True))
    middle = "L".join(axes.at(at, each.mean) for at, each in points)
    upper = [axes.at(at, each.high) for at, each in points]
    lower = [axes.at(at, each.low) for at, each in reversed(points)]
    return (
        f'<path d="M{"L".join([*upper, *lower])}Z" fill="{colour}" fill-opacity="0.1"/>'
        f'<path d="M{middle}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    )
