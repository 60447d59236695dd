"""The ladder as a picture, from files of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.ladder.modes import MODES
from benchmarks.ladder.of_record import Results
from oppo.errors import ConfigError
from oppo.report.charts import COLOURS, Axes, box, picture, placed, rule, text

TIMES_SERIAL: Final = "times the serial step; whiskers: worst and best round"
OURS: Final = COLOURS[0]
PEERS: Final = "#9ca3af"
WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 560, 90, 24, 32, 26, 36


@dataclass(frozen=True, slots=True)
class Bars:
    """The bars of one run: by contestant its name, the median, the worst and the best round, in ``unit``."""

    unit: str
    names: Sequence[str]
    widths: Sequence[float]
    below: Sequence[float]
    above: Sequence[float]


def plot(ladders: Sequence[Results], path: Path) -> None:
    """Write a picture: a panel for each run, a bar for each contestant, whiskers from the worst to the best round.

    Args:
        ladders: at least one; two panels stand side by side, and equal units have equal axes.
        path: of an SVG file.

    Raises:
        ConfigError: the file is of another kind.
    """
    require_svg(path)
    bars = [bars_of(ladder) for ladder in ladders]
    panels, columns = [], min(len(ladders), 2)
    bottoms = [0.0] * columns
    for k, (ladder, drawn) in enumerate(zip(ladders, bars, strict=True)):
        widest = max(max(other.above) for other in bars if other.unit == drawn.unit)
        if k % columns == 0:
            bottoms = [max(bottoms)] * columns
        panels.append(placed(k % columns * WIDTH, bottoms[k % columns], draw(title(ladder), drawn, 1.05 * widest)))
        bottoms[k % columns] += TOP + ROW * len(drawn.names) + BOTTOM
    path.write_text(picture(columns * WIDTH, max(bottoms), "".join(panels), size=12), encoding="utf-8")


def require_svg(path: Path) -> None:
    """Check that the name of a picture is that of an SVG file.

    Raises:
        ConfigError: it is not.
    """
    if path.suffix != ".svg":
        raise ConfigError(f"a picture of the ladder is an SVG file, expected a name that ends in .svg, not {path.name}")


def bars_of(ladder: Results) -> Bars:
    """Return the bars of one run: times the serial mode, or tokens a second without it."""
    ratios, ranges = ladder["ratios"], ladder["ratio_ranges"]
    names = [name for name in ladder["modes"] if name == "serial" or f"{name}/serial" in ratios]
    if len(names) > 1:
        ends = [ranges.get(f"{name}/serial", (1.0, 1.0)) for name in names]
        widths = [ratios.get(f"{name}/serial", 1.0) for name in names]
        return Bars(TIMES_SERIAL, names, widths, [low for low, _ in ends], [high for _, high in ends])
    speeds = [mode["tokens_per_second"] for mode in ladder["modes"].values()]
    return Bars("tokens a second", list(ladder["modes"]), speeds, speeds, speeds)


def draw(heading: str, bars: Bars, right: float) -> str:
    """Return one run as SVG, on an axis that ends at ``right``."""
    panel = Axes(WIDTH - LEFT - RIGHT, ROW * len(bars.names), right, 0, 1)
    drawn = []
    for k, name in enumerate(bars.names):
        y = k * ROW
        low, width, high = (panel.x(each[k]) for each in (bars.below, bars.widths, bars.above))
        drawn += [
            text(-8, y + 17, name, anchor="end"),
            box(0, y + 4, width, ROW - 8, OURS if name in MODES else PEERS),
            rule(low, y + ROW / 2, high, y + ROW / 2, opacity=0.8),
            *(rule(end, y + 8, end, y + ROW - 8, opacity=0.8) for end in (low, high)),
        ]
    first = panel.x(bars.widths[0])
    below = panel.height + 18
    drawn += [
        rule(first, 0, first, panel.height, opacity=0.5),
        rule(0, panel.height, panel.width, panel.height),
        text(0, below, "0"),
        text(panel.width / 2, below, bars.unit, anchor="middle"),
        text(panel.width, below, f"{right:.3g}", anchor="end"),
    ]
    return text(12, 18, heading, bold=True) + placed(LEFT, TOP, "".join(drawn))


def title(ladder: Results) -> str:
    validity = "" if ladder["valid"] else ", INVALID"
    return f"{ladder['workload']}, {ladder['layout']} ({ladder['machine']['cpu']}){validity}"
