"""Charts as SVG: lines and stacked bars over steps, and a timeline with a row for each model's work.

Text and rules have the page's text colour, so a picture follows its light or dark theme. Sizes are in pixels of the
view box, before it is scaled to the page.

A timeline of the models' work: a row for each, steps from left to right, runs stacked on one scale.

With lookahead the steps overlap. Work for other steps than those shown, which lies beside them, is drawn faintly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import compress, cycle, groupby, pairwise
from operator import itemgetter
from typing import Final, TypeAlias

from oppo.observe import Interval, Role, Span, union
from oppo.report.trace import TimedStep

# Distinct for most people, on white and on black
COLOURS: Final = ("#3b82f6", "#d97706", "#10a37a", "#8b5cf6", "#ef4444", "#ec4899", "#84cc16", "#6b7280")

ROW: Final = 15  # height of a line of a legend


@dataclass(frozen=True, slots=True)
class Axes:
    """Maps x from 0 to ``right`` and y from ``bottom`` to ``top`` to ``width`` x ``height`` pixels."""

    width: float
    height: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        return value / self.right * self.width

    def y(self, value: float) -> float:
        return self.height - (value - self.bottom) / (self.top - self.bottom) * self.height

    def at(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f} {self.y(y):.1f}"

    def framed(self, drawn: str, *, label: str = "", start: str = "0", end: str = "", y: str = ".3g") -> str:
        levels = [self.bottom + part * (self.top - self.bottom) for part in (0.0, 0.5, 1.0)]
        rules = (rule(0, self.y(level), self.width, self.y(level)) for level in levels)
        near_zero = 1e-3 * (self.top - self.bottom)
        shown = [f"{level if abs(level) > near_zero else 0.0:{y}}" for level in levels]
        names = (text(-6, self.y(level) + 4, name, anchor="end") for level, name in zip(levels, shown, strict=True))
        below = self.height + 16
        ends = (
            text(0, below, start),
            text(self.width / 2, below, label, anchor="middle"),
            text(self.width, below, end, anchor="end"),
        )
        return "".join([*rules, *names, drawn, *ends])


def text(
    x: float, y: float, content: str, *, anchor: str = "start", colour: str = "currentColor", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    point = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {point} fill="{colour}"{weight}>{escape(content)}</text>' if content else ""


def box(x: float, y: float, width: float, height: float, colour: str, *, title: str = "", opacity: float = 1.0) -> str:
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    paint = f'fill="{colour}"' + (f' fill-opacity="{opacity}"' if opacity < 1 else "")
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" {paint}>{tooltip}</rect>'


def rule(x1: float, y1: float, x2: float, y2: float, *, opacity: float = 0.2, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="currentColor" stroke-opacity="{opacity}"{dashed}/>'


def legend(x: float, y: float, entries: Iterable[tuple[str, str]], width: float) -> tuple[str, int]:
    """Return names from left to right, each after a square of its colour, and how many lines of ``width`` they take."""
    drawn: list[str] = []
    at, rows = 0.0, 1
    for name, colour in entries:
        needed = 26 + 7 * len(name)
        if at and at + needed > width:
            at, rows = 0.0, rows + 1
        line = y + ROW * (rows - 1)
        drawn += [box(x + at, line - 9, 10, 10, colour), text(x + at + 14, line, name)]
        at += needed
    return "".join(drawn), rows


def placed(x: float, y: float, drawn: str) -> str:
    return f'<g transform="translate({x} {y})">{drawn}</g>'


def inline(width: float, height: float, title: str, drawn: str, *, size: int = 11) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg" font-size="{size}">{drawn}</svg>'
    )


def picture(width: float, height: float, drawn: str, *, size: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="{size}"><rect width="100%" height="100%" fill="white"/>{drawn}</svg>\n'
    )


Series: TypeAlias = Mapping[str, Sequence[float | None]]

WIDTH, HEIGHT = 560, 220
MOST = 500  # steps that a chart resolves: it bounds the size of a long run's page

_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 28, 44
_ACROSS, _DOWN = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM


def lines(title: str, series: Series, *, gaps: bool = True, within: Sequence[float] = ()) -> str:
    # More than ``MOST`` steps are drawn in blocks, by the lowest and the highest value of each, so that spikes stay.
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
    # More than ``MOST`` steps are drawn in blocks, by their means, which the title says.
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
    # Of each block of steps the lowest and the highest, with their steps, in order; none for a gap.
    known = [(index, value) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    within = {block: list(points) for block, points in groupby(known, key=lambda point: point[0] // stride)}
    for block in range(math.ceil(len(values) / stride)):
        points = sorted(within.get(block, ()), key=itemgetter(1))
        yield sorted({*points[:1], *points[-1:]})


def _padded(low: float, high: float) -> tuple[float, float]:
    pad = 0.05 * (high - low) or max(abs(high) * 0.05, 1e-6)
    return low - pad, high + pad


def _chart(title: str, names: Iterable[tuple[str, str]], axes: Axes, drawn: str, count: int) -> str:
    end = f"step {count}" if count > 1 else ""
    key, rows = legend(_LEFT, HEIGHT - 7, names, _ACROSS)
    head = text(_LEFT, 16, title, bold=True)
    picture = head + placed(_LEFT, _TOP, axes.framed(drawn, start="1", end=end)) + key
    return inline(WIDTH, HEIGHT + ROW * (rows - 1), title, picture)


# Colours of the roles, in the order of their rows
ROLES: Final[Mapping[Role, str]] = dict(zip(("decode", "score", "update", "evaluate"), COLOURS, strict=False))

TIMELINE_WIDTH, LEFT, RIGHT = 1120, 110, 60
_HEAD, _ROW, _SPACE, _ARROWS, _AXIS, _LEGEND = 38, 18, 3, 22, 38, 45
_TIMELINE_ACROSS = TIMELINE_WIDTH - LEFT - RIGHT
_TICKS = 10  # at most
_LABELS = 75  # between a step's start and its cut, for both to be named
_STUB = 24  # of an arrow that has no step to lead to
_FAINT = 0.35  # opacity


@dataclass(frozen=True, slots=True)
class Excerpt:
    name: str
    steps: Sequence[TimedStep]

    @property
    def seconds(self) -> float:
        return self.steps[-1].end - self.steps[0].start

    @property
    def shown(self) -> frozenset[int]:
        return frozenset(step.index for step in self.steps)

    @property
    def work(self) -> Sequence[Span]:
        """The models' work in its time, for other steps too; each span once."""
        spans = (span for step in self.steps for span in (*step.spans, *step.beside) if span.role in ROLES)
        return list({id(span): span for span in spans}.values())

    def rows(self) -> Mapping[str, Sequence[Span]]:
        order = [*ROLES]
        found: dict[str, list[Span]] = {}
        for span in sorted(self.work, key=lambda span: (order.index(span.role or "other"), span.track)):
            found.setdefault(span.track, []).append(span)
        return found


def timeline(excerpts: Sequence[Excerpt]) -> str:
    shown = [each for each in excerpts if each.steps and each.work]
    if not shown:
        return ""
    scale = Axes(_TIMELINE_ACROSS, 1, max(each.seconds for each in shown), 0, 1)
    drawn, y = [], 0.0
    for each in shown:
        drawn.append(placed(LEFT, y, _block(each, scale)))
        y += _HEAD + _height(each) + _ARROWS
    grid = placed(LEFT, y, _axis(scale, y))
    y += _AXIS + _LEGEND
    names, notes = _key(shown)
    key = legend(LEFT, y - 10 - ROW, names, _TIMELINE_ACROSS)[0] + text(LEFT, y - 10, notes)
    return inline(TIMELINE_WIDTH, y, "When each model worked", grid + "".join(drawn) + key, size=12)


def _key(shown: Sequence[Excerpt]) -> tuple[list[tuple[str, str]], str]:
    steps = [step for each in shown for step in each.steps]
    roles = {span.role for each in shown for span in each.work}
    notes = {
        "dashed: the cut": any(step.cut is not None for step in steps),
        "arrows: responses deferred to the next step": any(step.deferred for step in steps),
        "faint: work for other steps": any(span.step not in each.shown for each in shown for span in each.work),
    }
    return [pair for pair in ROLES.items() if pair[0] in roles], "; ".join(compress(notes, notes.values()))


def _height(excerpt: Excerpt) -> float:
    return len(excerpt.rows()) * (_ROW + _SPACE)


def _block(excerpt: Excerpt, scale: Axes) -> str:
    origin, bottom = excerpt.steps[0].start, _HEAD + _height(excerpt)
    count = len(excerpt.steps)
    heading = f"{excerpt.name}: {count} step{'s' if count > 1 else ''} in {excerpt.seconds:.2f} s"
    drawn = [text(0, 14, heading, bold=True)]
    for k, (track, spans) in enumerate(excerpt.rows().items()):
        y = _HEAD + k * (_ROW + _SPACE)
        drawn += [text(-8, y + _ROW - 5, track, anchor="end"), *_bars(excerpt, track, spans, y, scale)]
    for step in excerpt.steps:
        x = scale.x(step.start - origin)
        drawn += [rule(x, 20, x, bottom, opacity=0.6), text(x + 4, _HEAD - 6, f"step {step.index + 1}")]
        if step.cut is not None:
            at = scale.x(step.cut - origin)
            foot = bottom + (12 if step.deferred else 0)
            label = "cut" if at - x >= _LABELS else ""
            top = 22 if label else _HEAD - 3
            drawn += [rule(at, top, at, foot, opacity=0.9, dashes="4 3"), text(at - 4, _HEAD - 6, label, anchor="end")]
    end = scale.x(excerpt.seconds)
    drawn.append(rule(end, 20, end, bottom, opacity=0.6))
    starts = [scale.x(after.start - origin) for _, after in pairwise(excerpt.steps)] + [end + _STUB]
    for step, start in zip(excerpt.steps, starts, strict=True):
        if step.cut is not None and step.deferred:
            at = scale.x(step.cut - origin)  # with lookahead the next step has begun, and waits for it to decode
            label = f"{step.deferred} response{'s' * (step.deferred != 1)} deferred"
            drawn.append(_arrow(at, start if start > at else at + _STUB, bottom + 10, label))
    return "".join(drawn)


def _bars(excerpt: Excerpt, track: str, spans: Sequence[Span], y: float, scale: Axes) -> Iterator[str]:
    kinds = dict.fromkeys((span.step, span.role) for span in spans)
    for number, role in kinds:
        colour, opacity = ROLES[role or "other"], 1.0 if number in excerpt.shown else _FAINT
        for start, end in _busy(excerpt, [span for span in spans if (span.step, span.role) == (number, role)], scale):
            step = "" if number is None else f" for step {number + 1}"
            title = f"{track}: {end - start:.3f} s{step}, from {start:.3f} s on"
            left, width = scale.x(start), max(0.75, scale.x(end - start))
            yield box(left, y, width, _ROW, colour, title=title, opacity=opacity)


def _busy(excerpt: Excerpt, spans: Iterable[Span], scale: Axes) -> Iterator[Interval]:
    # In seconds from the first step's start; invisible gaps are closed.
    origin, length = excerpt.steps[0].start, excerpt.seconds
    inside = [(max(0.0, span.start - origin), min(length, span.end - origin)) for span in spans]
    return iter(union(inside, gap=0.5 * scale.right / scale.width))


def _arrow(x: float, to: float, y: float, label: str) -> str:
    shaft = rule(x, y, to - 6, y, opacity=0.9)
    head = f'<path d="M{to:.1f} {y}l-8 -4v8z" fill="currentColor"/>'
    return shaft + head + text(x + 5, y + 12, label)


def _axis(scale: Axes, height: float) -> str:
    tick = _tick(scale.right / _TICKS)
    drawn = []
    for k in range(math.floor(scale.right / tick * (1 + 1e-9)) + 1):
        x = scale.x(k * tick)
        drawn += [rule(x, 20 - height, x, 4, opacity=0.12), text(x, 18, f"{k * tick:g}", anchor="middle")]
    return rule(0, 0, scale.width, 0) + "".join(drawn) + text(scale.width / 2, 34, "seconds", anchor="middle")


def _tick(least: float) -> float:
    # The smallest of 1, 2, 5, times a power of ten, that is at least ``least``.
    power = 10.0 ** math.floor(math.log10(least))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= least * (1 - 1e-9))
