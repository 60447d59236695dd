"""Charts as SVG: lines over steps, and a timeline with a row for each model's work, several runs on one scale.

Text and rules have the page's text colour, so a picture follows its light or dark theme. Sizes are in pixels of the
view box, before it is scaled to the page. Where steps overlap, work for other steps is drawn faintly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import compress, pairwise
from typing import Final

from oppo.errors import counted
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
        levels = ticks(self.bottom, self.top)
        rules = (rule(0, self.y(level), self.width, self.y(level)) for level in levels)
        names = (text(-6, self.y(level) + 4, f"{level:{y}}", anchor="end") for level in levels)
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


@dataclass(frozen=True, slots=True)
class Line:
    """A metric of one run over its steps: ``None`` is a gap; ``error`` half of an interval, empty without one."""

    label: str
    name: str  # of the metric
    x: Sequence[int]
    y: Sequence[float | None]
    error: Sequence[float | None] = ()
    run: int = 0

    def thinned(self, most: int, *, means: bool = False) -> Line:
        """Return it with a few points of each of ``most`` blocks: the lowest and the highest, or their mean."""
        stride = math.ceil(len(self.x) / most)
        if stride <= 1:
            return self
        kept, y = list[int](), list[float | None](self.y)
        for block in (range(first, min(first + stride, len(self.x))) for first in range(0, len(self.x), stride)):
            known = [(value, index) for index in block if (value := self.y[index]) is not None]
            if means:
                y[block[0]] = math.fsum(value for value, _ in known) / len(known) if known else None
            kept += sorted({min(known)[1], max(known)[1]}) if known and not means else block[:1]
        x, shown, error = [self.x[k] for k in kept], [y[k] for k in kept], [self.error[k] for k in kept if self.error]
        return replace(self, x=x, y=shown, error=error)

    def points(self) -> Iterator[tuple[int, float | None, float | None]]:
        return zip(self.x, self.y, self.error or [None] * len(self.x), strict=True)


WIDTH, HEIGHT = 420, 190
MOST = 500  # blocks of steps that a picture resolves: it bounds the size of a long run's page

_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 44
_ACROSS, _DOWN = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM


def lines(title: str, series: Sequence[Line], *, within: Sequence[float] = ()) -> str:
    """Return a picture of lines; of a long run with extremes of several steps."""
    series = [each.thinned(MOST) for each in series if any(value is not None for value in each.y)]
    if not series:
        return ""
    bars = [(x, y, error or 0.0) for each in series for x, y, error in each.points() if y is not None]
    first, last = min(x for x, _, _ in bars), max(x for x, _, _ in bars)
    low = min([*within, *(y - error for _, y, error in bars)])
    high = max([*within, *(y + error for _, y, error in bars)])
    axes = Axes(_ACROSS, _DOWN, max(1, last - first), *_rounded(low, high))
    one = len({each.name for each in series}) == 1  # then each run has its own colour
    key = [(each.label, COLOURS[(each.run if one else k) % len(COLOURS)]) for k, each in enumerate(series)]
    drawn = ""
    for each, (_, colour) in zip(series, key, strict=True):
        path, pen = "", "M"
        for x, y, error in each.points():
            path += "" if y is None else f"{pen}{axes.at(x - first, y)}" + ("h.01" if pen == "M" else "")
            pen = "M" if y is None else "L"
            if y is not None and error is not None:
                at = axes.x(x - first)
                drawn += rule(at, axes.y(y - error), at, axes.y(y + error), opacity=0.7)
        drawn += f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    named, rows = legend(_LEFT, HEIGHT - 7, key, _ACROSS - 30)
    named += text(WIDTH - _RIGHT, HEIGHT - 7, "step", anchor="end")
    steps = [step for step in ticks(first, max(last, first + 1)) if step in range(first, last + 1)]
    marks = [text(axes.x(step - first), _DOWN + 16, f"{step:g}", anchor="middle") for step in steps]
    framed = axes.framed(drawn, start="") + "".join(marks)
    return inline(WIDTH, HEIGHT + ROW * (rows - 1), title, placed(_LEFT, _TOP, framed) + named)


def _rounded(low: float, high: float) -> tuple[float, float]:
    # Multiples of the distance of the ticks, which hold both
    low, high = max(low, -_LARGEST), min(high, _LARGEST)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1 / _LARGEST:
        high = low + 1
    tick = _tick((high - low) / _LEVELS)
    return tick * math.floor(low / tick + 1e-3), tick * math.ceil(high / tick - 1e-3)


_LEVELS: Final = 5  # ticks at most, about
_LARGEST: Final = 1e300  # of a value that is drawn where it is


def ticks(low: float, high: float) -> list[float]:
    tick = _tick((high - low) / _LEVELS)
    first, last = math.ceil(low / tick - 1e-6), math.floor(high / tick + 1e-6)
    return [float(f"{tick * k:.12g}") for k in range(first, last + 1)]


# Colours of the roles, in the order of their rows
ROLES: Final[Mapping[Role, str]] = dict(zip(("decode", "score", "update", "evaluate"), COLOURS, strict=False))

TIMELINE_WIDTH, LEFT, RIGHT = 1120, 110, 60
_HEAD, _ROW, _SPACE, _ARROWS, _AXIS, _LEGEND = 38, 18, 3, 32, 38, 45
_TIMELINE_ACROSS = TIMELINE_WIDTH - LEFT - RIGHT
_TICKS = 10  # at most
_LABELS = 75  # between a step's start and its cut, for both to be named
_STUB = 24  # of an arrow that has no step to lead to
_FAINT = 0.35  # opacity
_BUSY = 0.1  # share of the cores


@dataclass(frozen=True, slots=True)
class Excerpt:
    name: str
    steps: Sequence[TimedStep]
    others: float = 0.0  # share of the machine's cores that processes beside this program took meanwhile

    def as_shown(self) -> Excerpt:
        """Return it with work that its picture cannot show apart as one; it takes a file of some kilobytes."""
        works: dict[tuple[str, Role | None, int | None], list[Interval]] = {}
        for span in self.work:
            works.setdefault((span.track, span.role, span.step), []).append((span.start, span.end))
        gap = 0.5 * self.seconds / _TIMELINE_ACROSS
        spans = [
            Span(track, "work", start, end, step, role)
            for (track, role, step), found in works.items()
            for start, end in union(found, gap=gap)
        ]
        first, *others = (replace(step, spans=(), beside=()) for step in self.steps)
        return replace(self, steps=[replace(first, spans=spans), *others])

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


def busy_machine(others: float) -> str:
    return f"other processes took {others:.0%} of the cores" if others >= _BUSY else ""


def _key(shown: Sequence[Excerpt]) -> tuple[list[tuple[str, str]], str]:
    steps = [step for each in shown for step in each.steps]
    roles = {span.role for each in shown for span in each.work}
    notes = {
        "dashed: the batch is complete (cut)": any(step.cut is not None for step in steps),
        "arrows: responses deferred to the next step": any(step.deferred for step in steps),
        "faint: work for other steps": any(span.step not in each.shown for each in shown for span in each.work),
    }
    return [pair for pair in ROLES.items() if pair[0] in roles], "; ".join(compress(notes, notes.values()))


def _height(excerpt: Excerpt) -> float:
    return len(excerpt.rows()) * (_ROW + _SPACE)


def _block(excerpt: Excerpt, scale: Axes) -> str:
    origin, bottom = excerpt.steps[0].start, _HEAD + _height(excerpt)
    heading = f"{excerpt.name}: {counted(len(excerpt.steps), 'step')} in {excerpt.seconds:.2f} s"
    drawn = [text(0, 14, "; ".join(filter(None, (heading, busy_machine(excerpt.others)))), bold=True)]
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
            label = f"{counted(step.deferred, 'response')} deferred"
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
