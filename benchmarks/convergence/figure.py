"""The figure of a study: the score of what was trained in each panel, mean and interval of every arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from benchmarks.convergence.arms import Arm
from benchmarks.convergence.comparison import Interval, by_updates, curve, made_at
from benchmarks.convergence.results import Outcome, Results
from benchmarks.convergence.study import Axis, Panel, Study
from oppo.report.charts import Axes, picture, placed

WIDTH, HEIGHT, LEFT, TOP, GAP = 400, 260, 50, 44, 60
APART: Final = 90
"""Pixels from the beginning of a name in the legend to that of the next."""

SCORES: Final[Mapping[Axis, Callable[[Outcome], Sequence[float]]]] = {
    "steps": lambda outcome: outcome.scores,
    "seconds": lambda outcome: outcome.scores,
    "updates": by_updates,
    "update seconds": by_updates,
}

ENDS: Final[Mapping[Axis, Callable[[Outcome], Sequence[float]]]] = {
    "seconds": lambda outcome: made_at(outcome)[1:],
    "update seconds": made_at,
}
"""When a score was there, in seconds from the start of the run."""


def figure(study: Study, results: Results) -> str:
    """Return the panels as SVG; all of them have the same scale of scores."""
    drawn = [{arm: points(results, arm, panel.axis) for arm in panel.arms} for panel in study.panels]
    bounds = [bound for arms in drawn for _, y in arms.values() for one in y for bound in (one.low, one.high)]
    spare = 0.05 * (max(bounds) - min(bounds)) or 1.0
    scale = (min(bounds) - spare, max(bounds) + spare)
    panels = [
        placed(LEFT + k * (WIDTH + GAP), TOP, panel_of(panel, arms, study.arms, scale))
        for k, (panel, arms) in enumerate(zip(study.panels, drawn, strict=True))
    ]
    width, height = LEFT + len(panels) * (WIDTH + GAP) - GAP + 20, TOP + HEIGHT + 40
    return picture(width, height, legend(study, results) + "".join(panels), size=12)


def points(results: Results, arm: str, axis: Axis) -> tuple[list[float], list[Interval]]:
    """Return x and score of the points of an arm's line."""
    scores = curve(results, arm, SCORES[axis])
    if axis in ENDS:
        ends = curve(results, arm, ENDS[axis])
        return [each.mean for each in ends][: len(scores)], scores
    first = 1 if axis == "steps" else 0
    return [float(first + k) for k in range(len(scores))], scores


def legend(study: Study, results: Results) -> str:
    """Return the names of the arms in their colours, and the meaning of the lines."""
    entries = [
        f'<text x="{LEFT + APART * k}" y="18" fill="{arm.colour}" font-weight="600">{name}</text>'
        for k, (name, arm) in enumerate(study.arms.items())
    ]
    words = f"score of the rollouts trained: mean of {len(results.whole())} seeds, 90 % interval"
    entries.append(f'<text x="{LEFT + APART * len(study.arms)}" y="18" fill="#555">{words}</text>')
    return "".join(entries)


def panel_of(
    panel: Panel,
    lines: Mapping[str, tuple[list[float], list[Interval]]],
    arms: Mapping[str, Arm],
    scale: tuple[float, float],
) -> str:
    """Return one panel: x to the right, the score upwards from the first of ``scale`` to the second."""
    axes = Axes(WIDTH, HEIGHT, max(max(x) for x, _ in lines.values()), *scale)
    drawn = "".join(line(axes, x, y, arms[arm]) for arm, (x, y) in lines.items())
    return axes.framed(drawn, label=panel.label, end=f"{axes.right:.0f}", y=".1f")


def line(axes: Axes, x: Sequence[float], y: Sequence[Interval], arm: Arm) -> str:
    """Return an arm's mean as a line, over its interval as a band."""
    points = list(zip(x, y, strict=True))
    middle = "L".join(axes.at(at, each.mean) for at, each in points)
    upper = [axes.at(at, each.high) for at, each in points]
    lower = [axes.at(at, each.low) for at, each in reversed(points)]
    dashes = ' stroke-dasharray="5 3"' if arm.dashed else ""
    return (
        f'<path d="M{"L".join([*upper, *lower])}Z" fill="{arm.colour}" fill-opacity="0.1"/>'
        f'<path d="M{middle}" fill="none" stroke="{arm.colour}" stroke-width="1.5"{dashes}/>'
    )
