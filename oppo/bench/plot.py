"""The ladder as a picture; needs the extra ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from oppo.bench.ladder import Ladder
from oppo.errors import ConfigError


class Axes(Protocol):
    """What is used of matplotlib's axes."""

    def barh(
        self, y: Sequence[str], width: Sequence[float], *, xerr: Sequence[Sequence[float]], capsize: int
    ) -> object:
        """Draw horizontal bars with whiskers."""

    def invert_yaxis(self) -> None:
        """Put the first bar on top."""

    def axvline(self, x: float, *, color: str, linewidth: float) -> object:
        """Draw a vertical line."""

    def set_title(self, label: str, *, fontsize: int) -> object:
        """Set the title."""

    def set_xlabel(self, xlabel: str) -> object:
        """Name the axis."""


class Figure(Protocol):
    """What is used of matplotlib's figures."""

    def subplots(self, rows: int, columns: int, *, squeeze: bool) -> Sequence[Sequence[Axes]]:
        """Return a grid of axes."""

    def savefig(self, path: Path, *, dpi: int) -> None:
        """Write a file."""


def require_matplotlib() -> None:
    """Find matplotlib, before anything is measured.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'oppo[report]'")


def plot(ladders: Sequence[Ladder], path: Path) -> None:
    """Write a picture: a panel for each run, a bar for each contestant, whiskers from the worst to the best round.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    # Its figure alone, without the state of pyplot; imported by name, since it comes with an extra.
    make = import_module("matplotlib.figure").Figure
    figure = cast("Figure", make(figsize=(8, 1.2 + 2.4 * len(ladders)), layout="constrained"))
    for (axes,), ladder in zip(figure.subplots(len(ladders), 1, squeeze=False), ladders, strict=True):
        draw(axes, ladder)
    figure.savefig(path, dpi=150)


def draw(axes: Axes, ladder: Ladder) -> None:
    """Draw one run: times the serial mode, or tokens a second where that did not run."""
    against = {name: ladder.ratios[f"{name}/serial"] for name in ladder.modes if f"{name}/serial" in ladder.ratios}
    if against:
        names = ["serial", *against]
        widths = [1.0, *(ratio.median for ratio in against.values())]
        below = [0.0, *(ratio.median - ratio.low for ratio in against.values())]
        above = [0.0, *(ratio.high - ratio.median for ratio in against.values())]
        axes.set_xlabel("times the serial step; whiskers: worst and best round")
    else:
        names = list(ladder.modes)
        widths = [each.tokens_per_second for each in ladder.modes.values()]
        below = above = [0.0] * len(names)
        axes.set_xlabel("tokens a second")
    axes.barh(names, widths, xerr=[below, above], capsize=3)
    axes.invert_yaxis()
    axes.axvline(widths[0], color="gray", linewidth=0.8)
    verdict = "" if ladder.valid else ", INVALID"
    axes.set_title(f"{ladder.workload.name}, {ladder.layout} ({ladder.machine.cpu}){verdict}", fontsize=9)
