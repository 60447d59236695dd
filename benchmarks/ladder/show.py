"""The ladder on a terminal: workload, machine, figures and validity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.ladder.directory import LengthStatistics
from benchmarks.ladder.measures import Figures, Spread
from benchmarks.ladder.rounds import Ladder

BAR: Final = 40
"""Characters of the longest bar."""


def render(ladder: Ladder) -> Group:
    """Return the ladder, its validity last."""
    return Group(*head(ladder), speeds(ladder), details(ladder), *bars(ladder), *bottlenecks(ladder), validity(ladder))


def head(ladder: Ladder) -> list[Text]:
    workload, plan, machine, facts = ladder.workload, ladder.plan, ladder.machine, ladder.files.facts
    lines = [
        f"workload {workload.name}: {workload.about}",
        f"  batch {workload.batch}, extra {workload.extra}, {workload.epochs} epoch(s), chunks of {workload.chunk}",
        f"  seed {workload.seed}; parameters {_counts(facts.parameters)}",
        f"  announced lengths, {len_line(facts.announced)}, cap {workload.lengths.cap}",
    ]
    if facts.written is None:
        lines.append("  lengths are SCRIPTED: the models have random weights, and responses end where they are told to")
    else:
        lines.append(
            f"  the trained actor's,  {len_line(facts.written)}, {facts.written.as_announced:.1%} as announced"
        )
    lines += [
        f"layout {ladder.layout}; {machine.cpu}, {machine.cores} core(s), {machine.memory_gb} GB, {machine.device}",
        f"  load {machine.load} at the end: figures of a machine that has other things to do mean little",
        f"  the policy on {plan.engine}, scorers in a {plan.scorers}",
        f"  {plan.rounds} rounds of {plan.steps} steps after {plan.warm_up} to warm up, "
        + ("interleaved" if plan.together else "one contestant after the other, NOT interleaved"),
    ]
    lines += [] if ladder.calibration is None else [f"  {ladder.calibration.sentence()}"]
    lines += [f"  {name}: {remark}" for name, remark in ladder.remarks.items()]
    seats: dict[str, list[str]] = {}
    for name, threads in ladder.threads.items():
        seats.setdefault(_seats(threads), []).append(name)
    lines += [f"  {', '.join(names)}: {line}" for line, names in seats.items()]
    return [Text(line) for line in lines]


def speeds(ladder: Ladder) -> Table:
    measured = {name.partition("/")[2] for name in ladder.ratios}
    against = [name for name in ladder.modes if name in measured]
    table = Table("mode", "s/step", "min - max", "tokens/s", "samples/s", *(f"x {name}" for name in against))
    for name, each in ladder.modes.items():
        step = Spread.of(each.seconds_per_step)
        table.add_row(
            name,
            f"{step.median:.3f}",
            f"{step.low:.3f} - {step.high:.3f}",
            f"{each.tokens_per_second:.0f}",
            f"{each.samples_per_second:.2f}",
            *(times(ladder.ratios.get(f"{name}/{other}")) for other in against),
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


def bars(ladder: Ladder) -> list[Text]:
    fastest = max(each.tokens_per_second for each in ladder.modes.values())
    widest = max(map(len, ladder.modes))
    return [Text(bar_line(name, each, fastest, widest)) for name, each in ladder.modes.items()]


def bottlenecks(ladder: Ladder) -> list[Text]:
    """Return the bottleneck of each contestant that measures it, and its remedy."""
    widest = max(map(len, ladder.modes))
    return [
        Text(f"{name:<{widest}}  {each.verdict.largest}-bound: {each.verdict.sentence}")
        for name, each in ladder.modes.items()
        if each.verdict is not None
    ]


def bar_line(name: str, figures: Figures, fastest: float, widest: int) -> str:
    length = max(1, round(BAR * figures.tokens_per_second / fastest))
    return f"{name:<{widest}}  {'█' * length:<{BAR}}  {figures.tokens_per_second:.0f} tokens/s"


def validity(ladder: Ladder) -> RenderableType:
    if ladder.valid:
        return Text("valid: shares and lengths are those that the workload states", style="green")
    return Text("\n".join(["INVALID", *(f"  {fault}" for fault in ladder.faults)]), style="bold red")


def times(ratio: Spread | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} - {ratio.high:.2f})"


def optional(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def len_line(lengths: LengthStatistics) -> str:
    return f"median {lengths.median:.0f}, p95 {lengths.p95:.0f}, {lengths.capped:.1%} at the cap"


def _counts(parameters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in parameters.items()) or "as the recipe says"


def _seats(threads: object) -> str:
    if not isinstance(threads, Mapping):
        return f"{threads} thread(s), not pinned"
    return ", ".join(f"{side} {seat['threads']} thread(s) on cores {seat['cores']}" for side, seat in threads.items())
