"""Charts of a run: lines and stacked bars over steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

from oppo.report.svg import COLOURS, Axes, box, inline, legend, placed, text

Series: TypeAlias = Mapping[str, Sequence[float | None]]

WIDTH, HEIGHT = 560, 220
MOST = 500
"""Steps that a chart resolves: it bounds the size of a long run's page."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 44
_ACROSS, _DOWN = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM


def lines(title: str, series: Series, *, gaps: bool = True) -> str:
    """Return a chart with one line for each series; a missing or non-finite value is a gap, or is passed over.

    More than ``MOST`` steps are drawn in blocks, by the lowest and the highest value of each, so that spikes stay.
    """
    values = [v for each in series.values() for v in each if v is not None and math.isfinite(v)]
    if not values:
        return _nothing(title)
    low, high = _padded(min(values), max(values))
    count = max(len(each) for each in series.values())
    axes = Axes(_ACROSS, _DOWN, max(1, count - 1), low, high)
    drawn = [
        f'<path d="{_path(axes, each, count, gaps=gaps)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        for each, colour in zip(series.values(), COLOURS, strict=False)
    ]
    return _chart(title, series, axes, "".join(drawn), count)


def stacked(title: str, series: Series) -> str:
    """Return a chart with one bar a step, the series on top of one another; a missing value counts as 0.

    More than ``MOST`` steps are drawn in blocks, by their means, which the title says.
    """
    count = max((len(each) for each in series.values()), default=0)
    columns = [
        [max(0.0, (each[i] if i < len(each) else None) or 0.0) for each in series.values()] for i in range(count)
    ]
    stride = math.ceil(count / MOST)
    if stride > 1:
        blocks = (columns[first : first + stride] for first in range(0, count, stride))
        columns = [[math.fsum(values) / len(block) for values in zip(*block, strict=True)] for block in blocks]
        title = f"{title}, means of {stride} steps"
    high = max((math.fsum(column) for column in columns), default=0.0)
    if high <= 0 or not math.isfinite(high):
        return _nothing(title)
    axes = Axes(_ACROSS, _DOWN, len(columns), 0, high)
    width = max(0.5, axes.x(1) - 0.5)
    bars = []
    for index, column in enumerate(columns):
        floor = 0.0
        for value, colour in zip(column, COLOURS, strict=False):
            top = axes.y(floor + value)
            bars.append(box(axes.x(index), top, width, axes.y(floor) - top, colour))
            floor += value
    return _chart(title, series, axes, "".join(bars), count)


def _path(axes: Axes, values: Sequence[float | None], count: int, *, gaps: bool) -> str:
    parts, pen_down = [], False
    for points in _points(values, math.ceil(count / MOST)):
        for index, value in points:
            x, y = axes.x(index if count > 1 else 0.5), axes.y(value)
            start = "" if pen_down else f"L{x + 0.01:.2f} {y:.2f}"
            parts.append(f"{'L' if pen_down else 'M'}{x:.2f} {y:.2f}{start}")
            pen_down = True
        pen_down = bool(points) or (pen_down and not gaps)
    return "".join(parts)


def _points(values: Sequence[float | None], stride: int) -> Iterator[list[tuple[int, float]]]:
    """Yield for each block of steps its lowest and highest value, with their steps, in order; none for a gap."""
    known = [(index, value) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    within = {block: list(points) for block, points in groupby(known, key=lambda point: point[0] // stride)}
    for block in range(math.ceil(len(values) / stride)):
        points = sorted(within.get(block, ()), key=itemgetter(1))
        yield sorted({*points[:1], *points[-1:]})


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = 0.05 * (high - low) or max(abs(high) * 0.05, 1e-6)
    return low - pad, high + pad


def _chart(title: str, series: Series, axes: Axes, drawn: str, count: int) -> str:
    end = f"step {count - 1}" if count > 1 else ""
    names = legend(_LEFT, HEIGHT - 7, zip(series, COLOURS, strict=False))
    return _framed(title, placed(_LEFT, _TOP, axes.framed(drawn, end=end)) + names)


def _nothing(title: str) -> str:
    return _framed(title, text(WIDTH / 2, HEIGHT / 2, "nothing measured", anchor="middle"))


def _framed(title: str, drawn: str) -> str:
    return inline(WIDTH, HEIGHT, title, text(_LEFT, 16, title, bold=True) + drawn)
