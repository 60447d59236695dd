"""Pictures as SVG: panels whose x runs from 0 to the right, whose y runs upwards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Panel:
    """A rectangle, in pixels, for x from 0 to ``right`` and y from ``bottom`` to ``top``."""

    width: int
    height: int
    right: float
    bottom: float
    top: float

    def at(self, x: float, y: float) -> str:
        """Return the place of a point, as a path has it."""
        up = (y - self.bottom) / (self.top - self.bottom)
        return f"{x / self.right * self.width:.1f} {self.height - up * self.height:.1f}"

    def framed(self, drawn: str, label: str, x: str = ".0f", y: str = ".1f") -> str:
        """Return what is drawn in its frame, with the ends of its axes in formats ``x`` and ``y``."""
        below = self.height + 16
        return (
            f'<rect width="{self.width}" height="{self.height}" fill="none" stroke="#ccc"/>{drawn}'
            f'<text x="-6" y="10" text-anchor="end">{self.top:{y}}</text>'
            f'<text x="-6" y="{self.height}" text-anchor="end">{self.bottom:{y}}</text>'
            f'<text y="{below}">0</text><text x="{self.width}" y="{below}" text-anchor="end">{self.right:{x}}</text>'
            f'<text x="{self.width / 2}" y="{below}" text-anchor="middle">{label}</text>'
        )


def placed(x: int, y: int, drawn: str) -> str:
    """Return what is drawn, moved so far to the right and down."""
    return f'<g transform="translate({x} {y})">{drawn}</g>'


def picture(width: int, height: int, drawn: str, *, size: int) -> str:
    """Return a file of what is drawn on white, with letters of a size."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="{size}"><rect width="100%" height="100%" fill="white"/>{drawn}</svg>\n'
    )
