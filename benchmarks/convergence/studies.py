"""The studies: their arms, their words in ``benchmarks/convergence/README.md``, and their figures.

``schedules`` goes from serial to more deferral than is good. ``lookahead`` trains tokens that are n updates old, with
and without importance weights. A figure shows the score of what was trained: mean and interval of every arm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean, median
from typing import Final, Literal, TypeAlias

from benchmarks.convergence.comparison import (
    FIRST_HALF,
    KL,
    SCORE,
    Interval,
    Taken,
    by_updates,
    curve,
    difference,
    made_at,
    pace,
)
from benchmarks.convergence.results import Outcome, Results
from benchmarks.harness import markdown
from oppo.config.settings import Settings
from oppo.report.charts import Axes, picture, placed


@dataclass(frozen=True, slots=True)
class Arm:
    """One schedule; models, prompts, noise and learning are the same for all arms of a study."""

    name: str
    about: str
    colour: str  # of its line in the figure
    dashed: bool = False  # draw that line in dashes
    # rollouts kept in flight beyond the batch, as a fraction of it; `None`: left to the admission
    share: float | None = 0.0
    held: bool = False  # scoring waits until decoding has ended (`oppo.stages.hold.Hold`), and then has all cores
    step: Mapping[str, object] = field(default_factory=dict)  # other changes to the demo's `[step]`
    algorithm: Mapping[str, object] = field(default_factory=dict)  # changes to its `[algorithm]`

    def settings(self, demo: Settings, batch: int) -> Settings:
        """Return the demo's settings in this schedule, without the files that a study does not read."""
        extra = {} if self.share is None else {"admission": "overcommit", "overcommit": round(self.share * batch)}
        quiet = {"panel": "off", "trace": 0, "logged_samples": 0}
        step = {"batch": batch, **extra, **self.step}
        return demo.changed({"step": step, "algorithm": self.algorithm, "run": quiet})


# What scores are drawn against. `updates`: those that the policy had seen that wrote the rollouts; `update seconds`:
# when these had been made
Axis: TypeAlias = Literal["steps", "seconds", "updates", "update seconds"]


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of the figure: the scores of some arms, by name.

    Attributes:
        label: of the x axis.
    """

    axis: Axis
    label: str
    arms: Sequence[str]


@dataclass(frozen=True, slots=True)
class Study:
    """A question to training, whose arms are its possible answers."""

    name: str
    arms: Mapping[str, Arm]  # by name, in the order of the table
    file: str  # name of the file of results
    picture: str  # name of the figure, beside the page and beside the results
    panels: Sequence[Panel]  # of the figure
    table: Callable[[Results], str]  # returns the results as a table

    @property
    def begin(self) -> str:
        return f"<!-- python -m benchmarks.convergence --study {self.name} --page -->\n"

    def shown(self, results: Results) -> str:
        """Return the part of the page that is made from the results: the runs, the figure and the table."""
        plan, machine, seeds = results.plan, results.machine, len(results.whole())
        at_once = "one run at a time" if plan.jobs == 1 else f"{plan.jobs} runs at a time"
        return (
            f"\n{plan.steps} steps of {plan.batch} rollouts, {seeds} seeds; {plan.examined} held-out prompts; "
            f"{machine['cpu']}, {machine['cores']} cores, {at_once}.\n\n"
            f"![score of what was trained, by arm]({self.picture})\n\n{self.table(results)}\n"
        )


SERIAL: Final = Arm("serial", "decode, then score, then train", "#111827", held=True, step={"chunk": "whole"})
CHUNK: Final = Arm("chunk", "streamed, nothing deferred", "#2563eb")
FIXED: Final = Arm("fixed", "streamed, B / 4 deferred", "#059669", share=1 / 4)
ADAPTIVE: Final = Arm(
    "adaptive", "streamed, deferred as it pays", "#dc2626", share=None, step={"admission": "adaptive"}
)
STALE: Final = Arm("stale", "streamed, B deferred, up to 8 times", "#d97706", share=1.0, step={"max_deferrals": 8})

# `chunk` differs from `serial` in rounding only, `stale` should do harm
SCHEDULE_ARMS: Final = {arm.name: arm for arm in (SERIAL, CHUNK, FIXED, ADAPTIVE, STALE)}


def schedules_table(results: Results) -> str:
    against = "against serial"
    head = ["", "schedule", "score", against, "KL, nats", against, "s a run", "mean staleness", "deferred"]
    return markdown(head, [schedules_row(results, arm) for arm in SCHEDULE_ARMS.values()])


def schedules_row(results: Results, arm: Arm) -> list[str]:
    outcomes = results.of(arm.name)
    score, kl = (
        "-" if arm is SERIAL else str(difference(results, arm.name, SERIAL.name, quantity)) for quantity in (SCORE, KL)
    )
    return [
        arm.name,
        arm.about,
        f"{fmean(each.answers.score.mean for each in outcomes):.2f}",
        score,
        f"{fmean(each.answers.kl.mean for each in outcomes):.1f}",
        kl,
        f"{fmean(sum(each.seconds) for each in outcomes):.1f}",
        f"{fmean(each.lag for each in outcomes):.2f}",
        f"{fmean(each.late for each in outcomes):.0%}",
    ]


SCHEDULES: Final = Study(
    name="schedules",
    arms=SCHEDULE_ARMS,
    file="results.json",
    picture="convergence.svg",
    panels=(Panel("steps", "steps", tuple(SCHEDULE_ARMS)), Panel("seconds", "seconds", tuple(SCHEDULE_ARMS))),
    table=schedules_table,
)


WEIGHTS: Final = {"ratio_base": "proximal", "is_correction": "truncated"}
COLOURS: Final = {0: "#111827", 1: "#2563eb", 2: "#059669", 4: "#dc2626"}


def cut(n: int) -> Arm:
    return Arm(f"n{n}", f"lookahead {n}", COLOURS[n], step={"lookahead": n})


def weighted(n: int) -> Arm:
    return Arm(
        f"n{n}-tis",
        f"lookahead {n}, truncated weights",
        COLOURS[n],
        dashed=True,
        step={"lookahead": n},
        algorithm=WEIGHTS,
    )


BASELINE: Final = cut(0)
BEHAVIOUR: Final = Arm(
    "n4-tis-b",
    "lookahead 4, truncated weights, ratio to the behaviour policy",
    "#8b5cf6",
    step={"lookahead": 4},
    algorithm={"is_correction": "truncated"},
)
IN_FLIGHT: Final = Arm(
    "n2-flight",
    "lookahead 2, synced in flight",
    "#d97706",
    step={"lookahead": 2, "weight_sync": "in-flight"},
)

# By name. No arm defers anything, so lookahead is the only cause of staleness; without it weights would change nothing
LOOKAHEAD_ARMS: Final = {
    arm.name: arm
    for arm in (BASELINE, *(cut(n) for n in (1, 2, 4)), *(weighted(n) for n in (1, 2, 4)), BEHAVIOUR, IN_FLIGHT)
}


def lookahead_table(results: Results) -> str:
    learned = ["score", "against n0", "first half, against n0"]
    taken = ["updates", "times n0's", "seconds", "times n0's", "s a run"]
    written = ["KL, nats", "against n0", "tokens", "staleness (largest)", "mismatch", "ESS", "clipped"]
    return markdown(
        ["", "schedule", *learned, *taken, *written], [lookahead_row(results, arm) for arm in LOOKAHEAD_ARMS.values()]
    )


def lookahead_row(results: Results, arm: Arm) -> list[str]:
    outcomes = results.of(arm.name)
    score, first_half, kl = (
        "-" if arm is BASELINE else str(difference(results, arm.name, BASELINE.name, quantity))
        for quantity in (SCORE, FIRST_HALF, KL)
    )
    taken = pace(results, arm.name, BASELINE.name)
    kls = [each.answers.kl.mean for each in outcomes]
    off_policy = [each.known_off_policy for each in outcomes]
    return [
        arm.name,
        arm.about,
        f"{fmean(each.answers.score.mean for each in outcomes):.2f}",
        score,
        first_half,
        *(worth for each in (taken.updates, taken.seconds) for worth in (count(each.mean, each.last), times(each))),
        f"{fmean(sum(each.seconds) for each in outcomes):.1f}",
        f"{median(kls):.1f} ({max(kls):.1f})",
        kl,
        f"{fmean(each.answers.length.mean for each in outcomes):.0f}",
        f"{fmean(each.lag for each in outcomes):.2f} ({max(each.largest for each in off_policy):.0f})",
        f"{fmean(each.kl for each in off_policy):.4f}",
        f"{fmean(fmean(each.samples) for each in off_policy):.3f}",
        f"{fmean(each.clipped for each in off_policy):.1%}",
    ]


def count(number: float, last: float) -> str:
    """Return a number of updates, or of times; above the ``last`` that was seen where it is infinite."""
    return f"{number:.1f}" if isfinite(number) else f"over {last:.1f}"


def times(taken: Taken) -> str:
    return " to ".join(count(each, taken.last_ratio) for each in (taken.ratio.low, taken.ratio.high))


LOOKAHEAD: Final = Study(
    name="lookahead",
    arms=LOOKAHEAD_ARMS,
    file="lookahead.json",
    picture="convergence-lookahead.svg",
    panels=(
        Panel("updates", "updates before it was written: lookahead", ("n0", "n1", "n2", "n4")),
        Panel("updates", "with truncated weights", ("n0", "n1-tis", "n2-tis", "n4-tis", "n4-tis-b")),
        Panel("updates", "synced in flight, or not", ("n0", "n2", "n2-flight")),
        Panel("update seconds", "seconds until these updates had been made", ("n0", "n1", "n1-tis", "n2", "n4")),
    ),
    table=lookahead_table,
)

# By name; the first is made where none is named
STUDIES: Final = {study.name: study for study in (SCHEDULES, LOOKAHEAD)}


WIDTH, HEIGHT, LEFT, TOP, GAP = 400, 260, 50, 44, 60
APART: Final = 90  # pixels from the beginning of a name in the legend to that of the next

SCORES: Final[Mapping[Axis, Callable[[Outcome], Sequence[float]]]] = {
    "steps": lambda outcome: outcome.scores,
    "seconds": lambda outcome: outcome.scores,
    "updates": by_updates,
    "update seconds": by_updates,
}

# When a score was there, in seconds from the start of the run
ENDS: Final[Mapping[Axis, Callable[[Outcome], Sequence[float]]]] = {
    "seconds": lambda outcome: made_at(outcome)[1:],
    "update seconds": made_at,
}


def figure(study: Study, results: Results) -> str:
    """Return the panels as SVG; all of them have the same scale of scores."""
    drawn = [{arm: points(results, arm, panel.axis) for arm in panel.arms} for panel in study.panels]
    bounds = [bound for arms in drawn for _, y in arms.values() for one in y for bound in (one.low, one.high)]
    spare = 0.05 * (max(bounds) - min(bounds)) or 1.0
    scale = (min(bounds) - spare, max(bounds) + spare)
    panels = [
        placed(LEFT + k * (WIDTH + GAP), TOP, panel_of(panel, arms, study.arms, scale))
        for k, (panel, arms) in enumerate(zip(study.panels, drawn, strict=True))
    ]
    width, height = LEFT + len(panels) * (WIDTH + GAP) - GAP + 20, TOP + HEIGHT + 40
    return picture(width, height, legend(study, results) + "".join(panels), size=12)


def points(results: Results, arm: str, axis: Axis) -> tuple[list[float], list[Interval]]:
    scores = curve(results, arm, SCORES[axis])
    if axis in ENDS:
        ends = curve(results, arm, ENDS[axis])
        return [each.mean for each in ends][: len(scores)], scores
    first = 1 if axis == "steps" else 0
    return [float(first + k) for k in range(len(scores))], scores


def legend(study: Study, results: Results) -> str:
    entries = [
        f'<text x="{LEFT + APART * k}" y="18" fill="{arm.colour}" font-weight="600">{name}</text>'
        for k, (name, arm) in enumerate(study.arms.items())
    ]
    words = f"score of the rollouts trained: mean of {len(results.whole())} seeds, 90% interval"
    entries.append(f'<text x="{LEFT + APART * len(study.arms)}" y="18" fill="#555">{words}</text>')
    return "".join(entries)


def panel_of(
    panel: Panel,
    lines: Mapping[str, tuple[list[float], list[Interval]]],
    arms: Mapping[str, Arm],
    scale: tuple[float, float],
) -> str:
    """Return one panel: x to the right, the score upwards from the first of ``scale`` to the second."""
    axes = Axes(WIDTH, HEIGHT, max(max(x) for x, _ in lines.values()), *scale)
    drawn = "".join(line(axes, x, y, arms[arm]) for arm, (x, y) in lines.items())
    return axes.framed(drawn, label=panel.label, end=f"{axes.right:.0f}", y=".1f")


def line(axes: Axes, x: Sequence[float], y: Sequence[Interval], arm: Arm) -> str:
    points = list(zip(x, y, strict=True))
    middle = "L".join(axes.at(at, each.mean) for at, each in points)
    upper = [axes.at(at, each.high) for at, each in points]
    lower = [axes.at(at, each.low) for at, each in reversed(points)]
    dashes = ' stroke-dasharray="5 3"' if arm.dashed else ""
    return (
        f'<path d="M{"L".join([*upper, *lower])}Z" fill="{arm.colour}" fill-opacity="0.1"/>'
        f'<path d="M{middle}" fill="none" stroke="{arm.colour}" stroke-width="1.5"{dashes}/>'
    )
