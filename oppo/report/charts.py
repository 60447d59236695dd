"""Charts of a run: lines and stacked bars over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress, cycle, groupby
from operator import itemgetter
from typing import TypeAlias

from oppo.report.svg import COLOURS, ROW, Axes, box, inline, legend, placed, text

Series: TypeAlias = Mapping[str, Sequence[float | None]]

WIDTH, HEIGHT = 560, 220
MOST = 500
"""Steps that a chart resolves: it bounds the size of a long run's page."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 44
_ACROSS, _DOWN = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM


def lines(title: str, series: Series, *, gaps: bool = True, within: Sequence[float] = ()) -> str:
    """Return a chart with one line for each series; a missing or non-finite value is a gap, or is passed over.

    More than ``MOST`` steps are drawn in blocks, by the lowest and the highest value of each, so that spikes stay.

    Args:
        within: values that the axis has in any case: 0 of a count, 0 and 1 of a share. Without any it has a margin.

    Returns:
        An SVG picture; an empty text if nothing was measured.
    """
    series = {name: each for name, each in series.items() if any(v is not None and math.isfinite(v) for v in each)}
    values = [v for each in series.values() for v in each if v is not None and math.isfinite(v)]
    if not values:
        return ""
    low, high = min(*values, *within, values[0]), max(*values, *within, values[0])
    if low == high or not within:
        low, high = _padded(low, high)
    count = max(len(each) for each in series.values())
    axes = Axes(_ACROSS, _DOWN, max(1, count - 1), low, high)
    drawn = [
        f'<path d="{_path(axes, each, count, gaps=gaps)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        for each, colour in zip(series.values(), cycle(COLOURS), strict=False)
    ]
    return _chart(title, _coloured(series), axes, "".join(drawn), count)


def stacked(title: str, series: Series) -> str:
    """Return a chart with one bar a step, the series on top of one another; a missing value counts as 0.

    More than ``MOST`` steps are drawn in blocks, by their means, which the title says. An empty text if all is 0.
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
        return ""
    axes = Axes(_ACROSS, _DOWN, len(columns), 0, high)
    width = max(0.5, axes.x(1) - 0.5)
    bars = []
    for index, column in enumerate(columns):
        floor = 0.0
        for value, colour in zip(column, cycle(COLOURS), strict=False):
            top = axes.y(floor + value)
            bars.append(box(axes.x(index), top, width, axes.y(floor) - top, colour))
            floor += value
    shown = [any(column[place] for column in columns) for place in range(len(series))]
    return _chart(title, compress(_coloured(series), shown), axes, "".join(bars), count)


def _coloured(series: Series) -> Iterator[tuple[str, str]]:
    return zip(series, cycle(COLOURS), strict=False)


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


def _chart(title: str, names: Iterable[tuple[str, str]], axes: Axes, drawn: str, count: int) -> str:
    """Frame a chart; the legend has ``names`` and their colours, on as many lines as they need."""
    end = f"step {count}" if count > 1 else ""
    key, rows = legend(_LEFT, HEIGHT - 7, names, _ACROSS)
    head = text(_LEFT, 16, title, bold=True)
    picture = head + placed(_LEFT, _TOP, axes.framed(drawn, start="1", end=end)) + key
    return inline(WIDTH, HEIGHT + ROW * (rows - 1), title, picture)
