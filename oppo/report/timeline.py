"""A timeline of the models' work: a row for each, steps from left to right, runs stacked on one scale.

With lookahead the steps overlap. Work for other steps than those shown, which lies beside them, is drawn faintly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Final

from oppo.observe import Role, Span
from oppo.overlap import Interval, union
from oppo.report.svg import COLOURS, ROW, Axes, box, inline, legend, placed, rule, text
from oppo.report.timed import TimedStep

ROLES: Final[Mapping[Role, str]] = dict(zip(("decode", "score", "update", "evaluate"), COLOURS, strict=False))
"""Colours of the roles, in the order of their rows."""

WIDTH, LEFT, RIGHT = 1120, 110, 60
_HEAD, _ROW, _SPACE, _ARROWS, _AXIS, _LEGEND = 38, 18, 3, 22, 38, 45
_ACROSS = WIDTH - LEFT - RIGHT
_TICKS = 10  # at most
_LABELS = 75  # between a step's start and its cut, for both to be named
_STUB = 24  # of an arrow that has no step to lead to
_FAINT = 0.35  # opacity


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Consecutive steps of one run, under a name."""

    name: str
    steps: Sequence[TimedStep]

    @property
    def seconds(self) -> float:
        """From the start of the first step to the end of the last."""
        return self.steps[-1].end - self.steps[0].start

    @property
    def shown(self) -> frozenset[int]:
        """The steps, by index."""
        return frozenset(step.index for step in self.steps)

    @property
    def work(self) -> Sequence[Span]:
        """The models' work in its time, for other steps too; each span once."""
        spans = (span for step in self.steps for span in (*step.spans, *step.beside) if span.role in ROLES)
        return list({id(span): span for span in spans}.values())

    def rows(self) -> Mapping[str, Sequence[Span]]:
        """Return the work of each model, in the order of the rows: models that decode, that score, that learn."""
        order = [*ROLES]
        found: dict[str, list[Span]] = {}
        for span in sorted(self.work, key=lambda span: (order.index(span.role or "other"), span.track)):
            found.setdefault(span.track, []).append(span)
        return found


def timeline(excerpts: Sequence[Excerpt]) -> str:
    """Return the picture as SVG; an empty text if no model worked."""
    shown = [each for each in excerpts if each.steps and each.work]
    if not shown:
        return ""
    scale = Axes(_ACROSS, 1, max(each.seconds for each in shown), 0, 1)
    drawn, y = [], 0.0
    for each in shown:
        drawn.append(placed(LEFT, y, _block(each, scale)))
        y += _HEAD + _height(each) + _ARROWS
    grid = placed(LEFT, y, _axis(scale, y))
    y += _AXIS + _LEGEND
    names, notes = _key(shown)
    key = legend(LEFT, y - 10 - ROW, names, _ACROSS)[0] + text(LEFT, y - 10, notes)
    return inline(WIDTH, y, "When each model worked", grid + "".join(drawn) + key, size=12)


def _key(shown: Sequence[Excerpt]) -> tuple[list[tuple[str, str]], str]:
    """Return the roles that are drawn, with their colours, and what the other marks mean."""
    steps = [step for each in shown for step in each.steps]
    roles = {span.role for each in shown for span in each.work}
    notes = {
        "dashed: the cut": any(step.cut is not None for step in steps),
        "arrows: responses carried into the next step": any(step.carried for step in steps),
        "faint: work for other steps": any(span.step not in each.shown for each in shown for span in each.work),
    }
    return [pair for pair in ROLES.items() if pair[0] in roles], "; ".join(compress(notes, notes.values()))


def _height(excerpt: Excerpt) -> float:
    return len(excerpt.rows()) * (_ROW + _SPACE)


def _block(excerpt: Excerpt, scale: Axes) -> str:
    """Return one run: its heading, rows, cuts and carried responses."""
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
            foot = bottom + (12 if step.carried else 0)
            label = "cut" if at - x >= _LABELS else ""
            top = 22 if label else _HEAD - 3
            drawn += [rule(at, top, at, foot, opacity=0.9, dashes="4 3"), text(at - 4, _HEAD - 6, label, anchor="end")]
    end = scale.x(excerpt.seconds)
    drawn.append(rule(end, 20, end, bottom, opacity=0.6))
    starts = [scale.x(after.start - origin) for _, after in pairwise(excerpt.steps)] + [end + _STUB]
    for step, start in zip(excerpt.steps, starts, strict=True):
        if step.cut is not None and step.carried:
            at = scale.x(step.cut - origin)  # with lookahead the next step has begun, and waits for it to decode
            drawn.append(
                _arrow(at, start if start > at else at + _STUB, bottom + 10, f"{step.carried} responses deferred")
            )
    return "".join(drawn)


def _bars(excerpt: Excerpt, track: str, spans: Sequence[Span], y: float, scale: Axes) -> Iterator[str]:
    """Yield a bar for each busy interval of a model: of one role, for one step."""
    kinds = dict.fromkeys((span.step, span.role) for span in spans)
    for number, role in kinds:
        colour, opacity = ROLES[role or "other"], 1.0 if number in excerpt.shown else _FAINT
        for start, end in _busy(excerpt, [span for span in spans if (span.step, span.role) == (number, role)], scale):
            step = "" if number is None else f" for step {number + 1}"
            title = f"{track}: {end - start:.3f} s{step}, from {start:.3f} s on"
            left, width = scale.x(start), max(0.75, scale.x(end - start))
            yield box(left, y, width, _ROW, colour, title=title, opacity=opacity)


def _busy(excerpt: Excerpt, spans: Iterable[Span], scale: Axes) -> Iterator[Interval]:
    """Yield busy intervals, in seconds from the first step's start; invisible gaps are closed."""
    origin, length = excerpt.steps[0].start, excerpt.seconds
    inside = [(max(0.0, span.start - origin), min(length, span.end - origin)) for span in spans]
    return iter(union(inside, gap=0.5 * scale.right / scale.width))


def _arrow(x: float, to: float, y: float, label: str) -> str:
    shaft = rule(x, y, to - 6, y, opacity=0.9)
    head = f'<path d="M{to:.1f} {y}l-8 -4v8z" fill="currentColor"/>'
    return shaft + head + text(x + 5, y + 12, label)


def _axis(scale: Axes, height: float) -> str:
    """Return the axis of seconds, with faint rules up through the rows."""
    tick = _tick(scale.right / _TICKS)
    drawn = []
    for k in range(math.floor(scale.right / tick * (1 + 1e-9)) + 1):
        x = scale.x(k * tick)
        drawn += [rule(x, 20 - height, x, 4, opacity=0.12), text(x, 18, f"{k * tick:g}", anchor="middle")]
    return rule(0, 0, scale.width, 0) + "".join(drawn) + text(scale.width / 2, 34, "seconds", anchor="middle")


def _tick(least: float) -> float:
    """Return the smallest of 1, 2, 5, times a power of ten, that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= least * (1 - 1e-9))
