"""The figure: the score against steps and against seconds, mean and interval of every arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from benchmarks.convergence.arms import ARMS
from benchmarks.convergence.comparison import Interval, curve
from benchmarks.convergence.results import Results

COLOURS: Final = {
    "serial": "#111827",
    "chunk": "#2563eb",
    "fixed": "#059669",
    "adaptive": "#dc2626",
    "stale": "#d97706",
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 400, 260, 50, 44, 60


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the values of a panel lie: x from 0 to ``right``, y from ``bottom`` to ``top``."""

    right: float
    bottom: float
    top: float

    def at(self, x: float, y: float) -> str:
        """Return the place of a point in the panel."""
        return f"{x / self.right * WIDTH:.1f} {HEIGHT - (y - self.bottom) / (self.top - self.bottom) * HEIGHT:.1f}"


def figure(results: Results) -> str:
    """Return the two panels as SVG; the score is the mean of what each step trained."""
    scores = {arm: curve(results, arm, lambda outcome: outcome.scores) for arm in ARMS}
    steps = {arm: [float(k + 1) for k in range(results.plan.steps)] for arm in ARMS}
    ends = {
        arm: [each.mean for each in curve(results, arm, lambda outcome: list(accumulate(outcome.seconds)))]
        for arm in ARMS
    }
    panels = [
        f'<g transform="translate({LEFT + k * (WIDTH + GAP)} {TOP})">{panel(xs, scores, label)}</g>'
        for k, (xs, label) in enumerate(((steps, "steps"), (ends, "seconds")))
    ]
    width, height = LEFT + 2 * (WIDTH + GAP) - GAP + 20, TOP + HEIGHT + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{legend(results)}{"".join(panels)}</svg>\n'
    )


def legend(results: Results) -> str:
    """Return the names of the arms in their colours, and what the lines are."""
    said = [
        f'<text x="{LEFT + 90 * k}" y="18" fill="{COLOURS[arm]}" font-weight="600">{arm}</text>'
        for k, arm in enumerate(ARMS)
    ]
    words = f"score of the rollouts trained: mean of {len(results.whole())} seeds, 90 % interval"
    said.append(f'<text x="{LEFT + 90 * len(ARMS)}" y="18" fill="#555">{words}</text>')
    return "".join(said)


def panel(xs: dict[str, list[float]], scores: dict[str, list[Interval]], label: str) -> str:
    """Return one panel: ``label`` to the right, the score upwards."""
    bounds = [bound for each in scores.values() for one in each for bound in (one.low, one.high)]
    spare = 0.05 * (max(bounds) - min(bounds)) or 1.0
    frame = Frame(max(max(x) for x in xs.values()), min(bounds) - spare, max(bounds) + spare)
    drawn = "".join(line(frame, xs[arm], scores[arm], COLOURS[arm]) for arm in scores)
    return (
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ccc"/>{drawn}'
        f'<text x="-6" y="10" text-anchor="end">{frame.top:.1f}</text>'
        f'<text x="-6" y="{HEIGHT}" text-anchor="end">{frame.bottom:.1f}</text>'
        f'<text y="{HEIGHT + 18}">0</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 18}" text-anchor="end">{frame.right:.0f}</text>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT + 18}" text-anchor="middle">{label}</text>'
    )


def line(frame: Frame, x: Sequence[float], y: Sequence[Interval], colour: str) -> str:
    """Return an arm's mean as a line, over its interval as a band."""
    points = list(zip(x, y, strict=True))
    middle = "L".join(frame.at(at, each.mean) for at, each in points)
    upper = [frame.at(at, each.high) for at, each in points]
    lower = [frame.at(at, each.low) for at, each in reversed(points)]
    return (
        f'<path d="M{"L".join([*upper, *lower])}Z" fill="{colour}" fill-opacity="0.1"/>'
        f'<path d="M{middle}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    )
