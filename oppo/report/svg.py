"""Pictures as SVG: text, rectangles, and axes whose x runs from 0 to the right and whose y runs upwards.

Text and rules have the page's text colour, so a picture follows its light or dark theme. Sizes are in pixels of the
view box, before it is scaled to the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Final

COLOURS: Final = ("#3b82f6", "#d97706", "#10a37a", "#8b5cf6", "#ef4444", "#ec4899", "#84cc16", "#6b7280")
"""Distinct for most people, on white and on black."""

ROW: Final = 15
"""Height of a line of a legend."""


@dataclass(frozen=True, slots=True)
class Axes:
    """A rectangle of ``width`` x ``height`` pixels for x from 0 to ``right`` and y from ``bottom`` to ``top``."""

    width: float
    height: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        """Return the pixels from the left edge to a value."""
        return value / self.right * self.width

    def y(self, value: float) -> float:
        """Return the pixels from the top edge down to a value."""
        return self.height - (value - self.bottom) / (self.top - self.bottom) * self.height

    def at(self, x: float, y: float) -> str:
        """Return a point in the syntax of an SVG path."""
        return f"{self.x(x):.1f} {self.y(y):.1f}"

    def framed(self, drawn: str, *, label: str = "", start: str = "0", end: str = "", y: str = ".3g") -> str:
        """Return a drawing over rules at three levels of y, in format ``y``; labels are of the x axis and its ends."""
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
    """Return a line of text that starts, is centred or ends at a point; nothing for an empty text."""
    weight = ' font-weight="600"' if bold else ""
    point = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {point} fill="{colour}"{weight}>{escape(content)}</text>' if content else ""


def box(x: float, y: float, width: float, height: float, colour: str, *, title: str = "", opacity: float = 1.0) -> str:
    """Return a filled rectangle with ``title`` as its tooltip."""
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    paint = f'fill="{colour}"' + (f' fill-opacity="{opacity}"' if opacity < 1 else "")
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" {paint}>{tooltip}</rect>'


def rule(x1: float, y1: float, x2: float, y2: float, *, opacity: float = 0.2, dashes: str = "") -> str:
    """Return a straight line in the colour of the text."""
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
    """Return a drawing moved to the right and down."""
    return f'<g transform="translate({x} {y})">{drawn}</g>'


def inline(width: float, height: float, title: str, drawn: str, *, size: int = 11) -> str:
    """Return a picture for a page, with text of ``size`` pixels and ``title`` for screen readers."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg" font-size="{size}">{drawn}</svg>'
    )


def picture(width: float, height: float, drawn: str, *, size: int) -> str:
    """Return the content of an SVG file: a drawing on white, with text of ``size`` pixels."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="{size}"><rect width="100%" height="100%" fill="white"/>{drawn}</svg>\n'
    )
