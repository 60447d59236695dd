"""The ladder as a picture, from results as they are written, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol, TypedDict, cast

from benchmarks.ladder.modes import MODES
from oppo.errors import ConfigError

TIMES_SERIAL: Final = "times the serial step; whiskers: worst and best round"
OURS: Final = "tab:blue"
PEERS: Final = "tab:gray"


class Machine(TypedDict):
    """What is shown of a machine."""

    cpu: str


class Mode(TypedDict):
    """What is shown of a contestant."""

    tokens_per_second: float


class Results(TypedDict):
    """What is shown of a file of results, see :meth:`benchmarks.ladder.rounds.Ladder.as_json`."""

    workload: str
    layout: str
    valid: bool
    machine: Machine
    modes: Mapping[str, Mode]
    ratios: Mapping[str, float]
    ratio_ranges: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Bars:
    """One run as bars.

    Attributes:
        unit: of the numbers.
        names: of the contestants.
        widths, below, above: of each, the median, and the worst and the best round.
    """

    unit: str
    names: Sequence[str]
    widths: Sequence[float]
    below: Sequence[float]
    above: Sequence[float]


class Axes(Protocol):
    """What is used of matplotlib's axes."""

    def barh(
        self,
        y: Sequence[str],
        width: Sequence[float],
        *,
        height: float,
        color: Sequence[str],
        xerr: Sequence[Sequence[float]],
        capsize: int,
    ) -> object:
        """Draw horizontal bars with whiskers."""

    def invert_yaxis(self) -> None:
        """Put the first bar on top."""

    def axvline(self, x: float, *, color: str, linewidth: float) -> object:
        """Draw a vertical line."""

    def set_xlim(self, left: float, right: float) -> object:
        """Set the range of the axis."""

    def set_axis_off(self) -> None:
        """Leave the place empty."""

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
        raise ConfigError("--plot needs matplotlib, which is not installed: `make bench` installs it")


def plot(ladders: Sequence[Results], path: Path) -> None:
    """Write a picture: a panel for each run, a bar for each contestant, whiskers from the worst to the best round.

    Args:
        ladders: at least one; two panels stand side by side, and equal units have equal axes.
        path: its ending says what kind of picture it is.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    columns = min(len(ladders), 2)
    rows = -(-len(ladders) // columns)
    # Its figure alone, without the state of pyplot; imported by name, since it comes with an extra.
    make = import_module("matplotlib.figure").Figure
    figure = cast("Figure", make(figsize=(6 * columns, 0.4 + 2.2 * rows), layout="constrained"))
    axes = [each for row in figure.subplots(rows, columns, squeeze=False) for each in row]
    bars = [bars_of(ladder) for ladder in ladders]
    for each, ladder, drawn in zip(axes, ladders, bars, strict=False):
        widest = max(max(other.above) for other in bars if other.unit == drawn.unit)
        draw(each, title(ladder), drawn, 1.05 * widest)
    for empty in axes[len(ladders) :]:
        empty.set_axis_off()
    figure.savefig(path, dpi=150)


def bars_of(ladder: Results) -> Bars:
    """Return the bars of one run: times the serial mode, or tokens a second where that did not run."""
    ratios, ranges = ladder["ratios"], ladder["ratio_ranges"]
    names = [name for name in ladder["modes"] if name == "serial" or f"{name}/serial" in ratios]
    if len(names) > 1:
        ends = [ranges.get(f"{name}/serial", (1.0, 1.0)) for name in names]
        widths = [ratios.get(f"{name}/serial", 1.0) for name in names]
        return Bars(TIMES_SERIAL, names, widths, [low for low, _ in ends], [high for _, high in ends])
    speeds = [mode["tokens_per_second"] for mode in ladder["modes"].values()]
    return Bars("tokens a second", list(ladder["modes"]), speeds, speeds, speeds)


def draw(axes: Axes, heading: str, bars: Bars, right: float) -> None:
    """Draw one run on an axis that ends at ``right``."""
    below = [width - low for width, low in zip(bars.widths, bars.below, strict=True)]
    above = [high - width for width, high in zip(bars.widths, bars.above, strict=True)]
    colors = [OURS if name in MODES else PEERS for name in bars.names]
    axes.barh(bars.names, bars.widths, height=0.6, color=colors, xerr=[below, above], capsize=3)
    axes.invert_yaxis()
    axes.axvline(bars.widths[0], color="gray", linewidth=0.8)
    axes.set_xlim(0.0, right)
    axes.set_xlabel(bars.unit)
    axes.set_title(heading, fontsize=9)


def title(ladder: Results) -> str:
    """Return what a run was, and whether it counts."""
    validity = "" if ladder["valid"] else ", INVALID"
    return f"{ladder['workload']}, {ladder['layout']} ({ladder['machine']['cpu']}){validity}"
