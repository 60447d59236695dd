"""A timeline of the models' work: a row for each, steps from left to right, schedules stacked on one scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from oppo.overlap import Role, union
from oppo.report.svg import COLOURS, Axes, box, inline, legend, placed, rule, text
from oppo.report.timed import TimedStep

ROLES: Final[Mapping[Role, str]] = dict(zip(("decode", "score", "update"), COLOURS, strict=False))
"""Colours of the roles, in the order of their rows."""

WIDTH, LEFT, RIGHT = 1120, 110, 60
_HEAD, _ROW, _SPACE, _ARROWS, _AXIS, _LEGEND = 38, 18, 3, 22, 38, 30
_ACROSS = WIDTH - LEFT - RIGHT
_TICKS = 10  # at most


@dataclass(frozen=True, slots=True)
class Schedule:
    """Consecutive steps of one schedule."""

    name: str
    steps: Sequence[TimedStep]

    @property
    def seconds(self) -> float:
        """From the start of the first step to the end of the last."""
        return self.steps[-1].end - self.steps[0].start

    def tracks(self, roles: Mapping[str, Role]) -> list[str]:
        """Return the tracks of the models that worked, in the order of their rows."""
        worked = {span.track for step in self.steps for span in step.spans}
        return sorted((track for track in roles if track in worked), key=lambda track: [*ROLES].index(roles[track]))


def timeline(schedules: Sequence[Schedule], roles: Mapping[str, Role]) -> str:
    """Return the picture as SVG, without tracks that have no role; an empty text if no model worked."""
    shown = [each for each in schedules if each.steps and each.tracks(roles)]
    if not shown:
        return ""
    scale = Axes(_ACROSS, 1, max(each.seconds for each in shown), 0, 1)
    drawn, y = [], 0.0
    for each in shown:
        drawn.append(placed(LEFT, y, _block(each, roles, scale)))
        y += _height(each, roles)
    grid = placed(LEFT, y, _axis(scale, y))
    names = [(role, colour) for role, colour in ROLES.items()]
    y += _AXIS + _LEGEND
    notes = "dashed: the cut; arrows: responses carried into the next step"
    key = legend(LEFT, y - 10, names) + text(LEFT + 230, y - 10, notes)
    return inline(WIDTH, y, "When each model worked", grid + "".join(drawn) + key, size=12)


def _height(schedule: Schedule, roles: Mapping[str, Role]) -> float:
    return _HEAD + _rows(schedule, roles) + _ARROWS


def _rows(schedule: Schedule, roles: Mapping[str, Role]) -> float:
    return len(schedule.tracks(roles)) * (_ROW + _SPACE)


def _block(schedule: Schedule, roles: Mapping[str, Role], scale: Axes) -> str:
    """Return one schedule: its heading, rows, cuts and carried responses."""
    origin, bottom = schedule.steps[0].start, _HEAD + _rows(schedule, roles)
    count = len(schedule.steps)
    heading = f"{schedule.name}: {count} step{'s' if count > 1 else ''} in {schedule.seconds:.2f} s"
    drawn = [text(0, 14, heading, bold=True)]
    for k, track in enumerate(schedule.tracks(roles)):
        y = _HEAD + k * (_ROW + _SPACE)
        drawn += [text(-8, y + _ROW - 5, track, anchor="end")]
        drawn += [
            box(
                scale.x(start),
                y,
                max(0.75, scale.x(end - start)),
                _ROW,
                ROLES[roles[track]],
                title=f"{track}: {end - start:.3f} s, from {start:.3f} s on",
            )
            for start, end in _busy(schedule, track, scale)
        ]
    for step in schedule.steps:
        x = scale.x(step.start - origin)
        drawn += [rule(x, 20, x, bottom, opacity=0.6), text(x + 4, _HEAD - 6, f"step {step.index}")]
        if step.cut is not None:
            at = scale.x(step.cut - origin)
            foot = bottom + (12 if step.carried else 0)
            drawn += [rule(at, 22, at, foot, opacity=0.9, dashes="4 3"), text(at - 4, _HEAD - 6, "cut", anchor="end")]
    end = scale.x(schedule.seconds)
    drawn.append(rule(end, 20, end, bottom, opacity=0.6))
    starts = [scale.x(after.start - origin) for _, after in pairwise(schedule.steps)] + [end + 24]
    for step, to in zip(schedule.steps, starts, strict=True):
        if step.cut is not None and step.carried:
            drawn.append(_arrow(scale.x(step.cut - origin), to, bottom + 10, f"{step.carried} carried"))
    return "".join(drawn)


def _busy(schedule: Schedule, track: str, scale: Axes) -> Iterator[tuple[float, float]]:
    """Yield a model's busy intervals, in seconds from the first step's start; invisible gaps are closed."""
    origin, length = schedule.steps[0].start, schedule.seconds
    spans = [span for step in schedule.steps for span in step.spans if span.track == track]
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
