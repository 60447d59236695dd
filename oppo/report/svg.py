"""Charts as inline SVG: lines and stacked bars over steps, nothing to load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

Series: TypeAlias = Mapping[str, Sequence[float | None]]

WIDTH, HEIGHT = 560, 220
MOST = 500
"""As many steps as can be told apart: with more, a page about a long run would be megabytes of them."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 44
_COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626")


def lines(title: str, series: Series) -> str:
    """Return a chart with one line for each series; a missing or non-finite value is a gap.

    Of more than ``MOST`` steps it has the lowest and the highest of each so many, so that no spike is lost.
    """
    values = [v for each in series.values() for v in each if v is not None and math.isfinite(v)]
    if not values:
        return _frame(title, (), "", _text(WIDTH / 2, HEIGHT / 2, "nothing measured", "middle"))
    low, high = _padded(min(values), max(values))
    count = max(len(each) for each in series.values())
    body = [
        f'<path d="{_path(each, count, low, high)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        for each, colour in zip(series.values(), _COLOURS, strict=False)
    ]
    return _frame(title, tuple(series), _axes(low, high, count), "".join(body))


def stacked(title: str, series: Series) -> str:
    """Return a chart with one bar a step, the series on top of one another; a missing value counts as nothing.

    Of more than ``MOST`` steps it has one bar for several of them, their mean, and says so.
    """
    count = max((len(each) for each in series.values()), default=0)
    columns = [
        [max(0.0, (each[i] if i < len(each) else None) or 0.0) for each in series.values()] for i in range(count)
    ]
    stride = math.ceil(count / MOST)
    if stride > 1:
        columns = [_mean(columns[first : first + stride]) for first in range(0, count, stride)]
        title = f"{title}, means of {stride} steps"
    high = max((math.fsum(column) for column in columns), default=0.0)
    if high <= 0 or not math.isfinite(high):
        return _frame(title, (), "", _text(WIDTH / 2, HEIGHT / 2, "nothing measured", "middle"))
    width = (WIDTH - _LEFT - _RIGHT) / len(columns)
    bars = []
    for index, column in enumerate(columns):
        floor = 0.0
        for value, colour in zip(column, _COLOURS, strict=False):
            top = _y(floor + value, 0, high)
            bars.append(
                f'<rect x="{_LEFT + index * width:.2f}" y="{top:.2f}" width="{max(0.5, width - 0.5):.2f}" '
                f'height="{_y(floor, 0, high) - top:.2f}" fill="{colour}"/>'
            )
            floor += value
    return _frame(title, tuple(series), _axes(0, high, count), "".join(bars))


def _mean(columns: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of some steps, for each series."""
    return [math.fsum(values) / len(columns) for values in zip(*columns, strict=True)]


def _path(values: Sequence[float | None], count: int, low: float, high: float) -> str:
    parts, pen_down = [], False
    for points in _points(values, math.ceil(count / MOST)):
        for index, value in points:
            x = _LEFT + (WIDTH - _LEFT - _RIGHT) * (index / (count - 1) if count > 1 else 0.5)
            y = _y(value, low, high)
            start = "" if pen_down else f"L{x + 0.01:.2f} {y:.2f}"
            parts.append(f"{'L' if pen_down else 'M'}{x:.2f} {y:.2f}{start}")
            pen_down = True
        pen_down = bool(points)
    return "".join(parts)


def _points(values: Sequence[float | None], stride: int) -> Iterator[list[tuple[int, float]]]:
    """Yield the lowest and the highest value of each so many steps, with their steps, in order; none of a gap."""
    known = [(index, value) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    within = {block: list(points) for block, points in groupby(known, key=lambda point: point[0] // stride)}
    for block in range(math.ceil(len(values) / stride)):
        points = sorted(within.get(block, ()), key=itemgetter(1))
        yield sorted({*points[:1], *points[-1:]})


def _y(value: float, low: float, high: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = 0.05 * (high - low) or max(abs(high) * 0.05, 1e-6)
    return low - pad, high + pad


def _axes(low: float, high: float, count: int) -> str:
    marks = []
    for part in (0.0, 0.5, 1.0):
        value = low + part * (high - low)
        y = _y(value, low, high)
        marks.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.2f}" y2="{y:.2f}" stroke="#ddd"/>')
        marks.append(_text(_LEFT - 6, y + 4, f"{value:.3g}", "end"))
    marks.append(_text(_LEFT, HEIGHT - _BOTTOM + 16, "0", "middle"))
    if count > 1:
        marks.append(_text(WIDTH - _RIGHT, HEIGHT - _BOTTOM + 16, f"step {count - 1}", "end"))
    return "".join(marks)


def _frame(title: str, names: Sequence[str], axes: str, body: str) -> str:
    legend, x = [], float(_LEFT)
    for name, colour in zip(names, _COLOURS, strict=False):
        legend.append(f'<rect x="{x:.0f}" y="{HEIGHT - 16}" width="10" height="10" fill="{colour}"/>')
        legend.append(_text(x + 14, HEIGHT - 7, name, "start"))
        x += 26 + 7 * len(name)
    heading = f'<text x="{_LEFT}" y="16" font-weight="600">{escape(title)}</text>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg" font-size="11">{heading}{axes}{body}{"".join(legend)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'
