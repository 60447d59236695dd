"""Pictures as SVG: text, rectangles, and panels whose x runs from 0 to the right and whose y runs upwards.

Letters and rules have the colour of the text around them, so a picture within a page follows its light or dark theme.
Sizes are in pixels of the view box, before it is scaled to the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Final

COLOURS: Final = ("#3b82f6", "#d97706", "#10a37a", "#8b5cf6", "#ef4444")
"""Told apart by most people, on white and on black."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A rectangle, in pixels, for x from 0 to ``right`` and y from ``bottom`` to ``top``."""

    width: float
    height: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        """Return how far to the right a value lies."""
        return value / self.right * self.width

    def y(self, value: float) -> float:
        """Return how far down a value lies."""
        return self.height - (value - self.bottom) / (self.top - self.bottom) * self.height

    def at(self, x: float, y: float) -> str:
        """Return the place of a point, as a path has it."""
        return f"{self.x(x):.1f} {self.y(y):.1f}"

    def framed(self, drawn: str, *, label: str = "", start: str = "0", end: str = "", y: str = ".3g") -> str:
        """Return what is drawn over three levels of y, in format ``y``.

        Args:
            drawn: in the panel's pixels.
            label: of the x axis.
            start, end: what its ends are called.
            y: the format of the levels.
        """
        levels = [self.bottom + part * (self.top - self.bottom) for part in (0.0, 0.5, 1.0)]
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
    x: float, y: float, said: str, *, anchor: str = "start", colour: str = "currentColor", bold: bool = False
) -> str:
    """Return a line of text that starts, is centred or ends at a place; nothing for no text."""
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}"{weight}>{escape(said)}</text>' if said else ""


def box(x: float, y: float, width: float, height: float, colour: str, *, title: str = "") -> str:
    """Return a filled rectangle; a title is shown where the pointer rests on it."""
    said = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{colour}">{said}</rect>'


def rule(x1: float, y1: float, x2: float, y2: float, *, opacity: float = 0.2, dashes: str = "") -> str:
    """Return a straight line in the colour of the text."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="currentColor" stroke-opacity="{opacity}"{dashed}/>'


def legend(x: float, y: float, entries: Iterable[tuple[str, str]]) -> str:
    """Return names, each behind a square of its colour, from left to right."""
    drawn = []
    for name, colour in entries:
        drawn += [box(x, y - 9, 10, 10, colour), text(x + 14, y, name)]
        x += 26 + 7 * len(name)
    return "".join(drawn)


def placed(x: float, y: float, drawn: str) -> str:
    """Return what is drawn, moved so far to the right and down."""
    return f'<g transform="translate({x} {y})">{drawn}</g>'


def inline(width: float, height: float, title: str, drawn: str, *, size: int = 11) -> str:
    """Return a picture for a page, with letters of a size; ``title`` is what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg" font-size="{size}">{drawn}</svg>'
    )


def picture(width: float, height: float, drawn: str, *, size: int) -> str:
    """Return a file of what is drawn on white, with letters of a size."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="{size}"><rect width="100%" height="100%" fill="white"/>{drawn}</svg>\n'
    )
