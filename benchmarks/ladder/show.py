"""The ladder for people: on a terminal, as the Markdown table of ``benchmarks/results/README.md``, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks import CHECKOUT
from benchmarks.harness import Spread, markdown
from benchmarks.ladder.measures import Ladder
from benchmarks.ladder.workloads import MODES
from benchmarks.peer.sweep import PEERS
from oppo.errors import ConfigError
from oppo.report.charts import COLOURS, Axes, box, picture, placed, rule, text


def render(ladder: Ladder) -> Group:
    return Group(*head(ladder), speeds(ladder), details(ladder), *bottlenecks(ladder), validity(ladder))


def head(ladder: Ladder) -> list[Text]:
    workload, plan, machine, facts = ladder.workload, ladder.plan, ladder.machine, ladder.files.facts
    lengths, cap = facts.announced, workload.lengths.cap
    lines = [
        f"workload {workload.name}: {workload.about}",
        f"  batch {workload.batch}, extra {workload.extra}, {workload.epochs} epoch(s), chunks of {workload.chunk}",
        f"  seed {workload.seed}; parameters {_counts(facts.parameters)}",
        f"  announced: median {lengths.median:.0f}, p95 {lengths.p95:.0f}, {lengths.capped:.1%} at the cap, {cap}",
    ]
    lines += [
        f"layout {ladder.layout}; {machine.cpu}, {machine.cores} core(s), {machine.memory_gb} GB, {machine.device}",
        f"  load {machine.load} at the end: figures of a machine that has other things to do mean little",
        f"  the policy on {plan.engine}, scorers in a {plan.scorers}",
        f"  {plan.rounds} rounds of {plan.steps} steps after {plan.warm_up} to warm up, interleaved",
    ]
    lines += [] if ladder.calibration is None else [f"  {ladder.calibration.message()}"]
    lines += [f"  {name}: {remark}" for name, remark in ladder.remarks.items()]
    seats: dict[str, list[str]] = {}
    for name, threads in ladder.threads.items():
        seats.setdefault(_seats(threads), []).append(name)
    lines += [f"  {', '.join(names)}: {line}" for line, names in seats.items()]
    return [Text(line) for line in lines]


def speeds(ladder: Ladder) -> Table:
    measured = {name.partition("/")[2] for name in ladder.ratios}
    against = [name for name in ladder.modes if name in measured]
    trained = ("trained a step", "tokens/s", "samples/s")
    table = Table("mode", "s/step", "min - max", *trained, *(f"x {name}" for name in against))
    for name, each in ladder.modes.items():
        step = Spread.of(each.seconds_per_step)
        table.add_row(
            name,
            f"{step.median:.3f}",
            f"{step.low:.3f} - {step.high:.3f}",
            f"{each.samples_per_step:.0f} x {each.tokens_per_step / each.samples_per_step:.1f} tokens",
            f"{each.tokens_per_second:.0f}",
            f"{each.samples_per_second:.2f}",
            *(str(ladder.ratios.get(f"{name}/{other}", "-")) for other in against),
        )
    return table


def details(ladder: Ladder) -> Table:
    table = Table("mode", "hidden", "decode slower", "decode/score/update", "busy", "rows", "at cap", "carried", "MB")
    for name, each in ladder.modes.items():
        table.add_row(
            name,
            optional(each.hidden_fraction),
            optional(each.decode_slowdown),
            " / ".join(f"{share:.2f}" for share in each.shares.values()) or "-",
            ", ".join(f"{model} {part:.2f}" for model, part in each.busy.items()) or "-",
            optional(each.live_rows_per_decode_step, ".1f"),
            f"{each.cap_hit_rate:.1%}",
            f"{each.deferrals['mean']:.1f}",
            f"{each.peak_rss_mb:.0f}",
        )
    return table


def bottlenecks(ladder: Ladder) -> list[Text]:
    widest = max(map(len, ladder.modes))
    return [
        Text(f"{name:<{widest}}  {each.verdict.largest}-bound: {each.verdict.message}")
        for name, each in ladder.modes.items()
        if each.verdict is not None
    ]


def validity(ladder: Ladder) -> RenderableType:
    if ladder.valid:
        return Text("valid: shares and lengths are those that the workload states", style="green")
    return Text("\n".join(["INVALID", *(f"  {fault}" for fault in ladder.faults)]), style="bold red")


def optional(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _counts(parameters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in parameters.items()) or "as the recipe says"


def _seats(threads: object) -> str:
    if not isinstance(threads, Mapping):
        return f"{threads} thread(s), not pinned"
    return ", ".join(f"{side} {seat['threads']} thread(s) on cores {seat['cores']}" for side, seat in threads.items())


Results: TypeAlias = Mapping[str, Any]  # A file of results, see `benchmarks.ladder.measures.Ladder.as_json`

RESULTS: Final = CHECKOUT / "benchmarks" / "results" / "intel-xeon-2-cores"
PICTURE: Final = CHECKOUT / "docs" / "ladder.svg"
ORDER: Final = ("paper", "grpo", "train-bound", "rule-reward", "capped")
COLUMNS: Final = ("rollout", "chunk", "fixed", "adaptive")
BESIDE_PEERS: Final = ("chunk", "adaptive")


def ladders(directory: Path = RESULTS) -> list[Results]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))]
    of_workloads = [each for each in found if isinstance(each, dict) and each.get("workload") in ORDER]
    return sorted(of_workloads, key=lambda each: (ORDER.index(each["workload"]), each["layout"] != "split"))


def table(found: Sequence[Results]) -> str:
    """Return a Markdown table: the speed of each mode over serial, and of two over TRL's trainer."""
    head = ["workload, layout", "serial, s a step", *COLUMNS, "adaptive / chunk", "hidden (chunk)"]
    rows = []
    for each in found:
        serial = sorted(each["modes"]["serial"]["seconds_per_step"])
        name = f"{each['workload']}, {each['layout']}{'' if each['valid'] else ' (INVALID)'}"
        ratios = [ratio(each, f"{mode}/serial") for mode in COLUMNS]
        hidden = each["modes"].get("chunk", {}).get("hidden_fraction")
        peer = next(filter(PEERS.__contains__, each["modes"]), "")
        rows.append(
            [
                name,
                f"{serial[len(serial) // 2]:.1f}",
                *ratios,
                ratio(each, "adaptive/chunk"),
                "-" if hidden is None else f"{hidden:.2f}",
                *(ratio(each, f"{mode}/{peer}") for mode in BESIDE_PEERS),
            ]
        )
    return markdown([*head, *(f"{mode} / TRL" for mode in BESIDE_PEERS)], rows)


def ratio(ladder: Results, name: str) -> str:
    if name not in ladder["ratios"]:
        return "-"
    return str(Spread(ladder["ratios"][name], *ladder["ratio_ranges"][name]))


TIMES_SERIAL: Final = "times the serial step; whiskers: worst and best round"
OURS: Final = COLOURS[0]
OTHERS: Final = "#9ca3af"
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
    """Write a picture: a panel for each run, a bar for each contestant, whiskers from the worst to the best round."""
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
    panel = Axes(WIDTH - LEFT - RIGHT, ROW * len(bars.names), right, 0, 1)
    drawn = []
    for k, name in enumerate(bars.names):
        y = k * ROW
        low, width, high = (panel.x(each[k]) for each in (bars.below, bars.widths, bars.above))
        drawn += [
            text(-8, y + 17, name, anchor="end"),
            box(0, y + 4, width, ROW - 8, OURS if name in MODES else OTHERS),
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
