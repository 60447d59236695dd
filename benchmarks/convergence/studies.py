"""The studies: their arms, their words in ``benchmarks/convergence/README.md``, and their figures.

``schedules`` goes from serial to more deferral than is good. ``lookahead`` trains tokens that are n updates old, with
and without importance weights. A figure shows the score of what was trained: mean and interval of every arm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from math import isfinite
from statistics import fmean, median
from textwrap import fill
from typing import Final, Literal, TypeAlias

from benchmarks.convergence.comparison import (
    BAND,
    FIRST_HALF,
    KL,
    LEAST,
    SCORE,
    TARGET,
    Difference,
    Interval,
    Quantity,
    Taken,
    by_updates,
    curve,
    difference,
    examination_error,
    made_at,
    pace,
)
from benchmarks.convergence.results import Outcome, Results
from benchmarks.harness import markdown
from oppo.config.settings import Settings
from oppo.report.charts import Axes, picture, placed

COLUMNS: Final = 120  # columns of the page


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
    findings: Callable[[Results], str]  # returns what was found, an item each
    section: Callable[[Results], str]  # returns the section of `benchmarks/convergence/README.md`, with its heading

    @property
    def begin(self) -> str:
        return f"<!-- python -m benchmarks.convergence --study {self.name} --page -->\n"


def items(lines: Iterable[str]) -> str:
    return "\n".join(
        fill(line, COLUMNS, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) for line in lines
    )


def percent(found: Difference) -> str:
    relative = found.relative
    return f"{relative.mean:+.1%} ({relative.low:+.1%} to {relative.high:+.1%})"


def shared(results: Results) -> str:
    machine, jobs = results.machine, results.plan.jobs
    runs = "all of them for one run at a time" if jobs == 1 else f"{jobs} runs at a time"
    return f"{machine['cpu']}, {machine['cores']} cores, {runs}"


def noise(results: Results, arm: str, baseline: str) -> str:
    """Return what examining few responses adds to every difference, with that of an arm as the example."""
    score = examination_error(results, arm, baseline, SCORE, lambda answers: answers.score)
    kl = examination_error(results, arm, baseline, KL, lambda answers: answers.kl)
    return (
        f"Examining only {results.plan.examined} responses gives every difference a standard error of {score:.1%} "
        f"for the score and {kl:.1%} for the KL."
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


def schedules_section(results: Results) -> str:
    plan, seeds = results.plan, len(results.whole())
    return f"""\
## What was measured

The demo's task, {plan.steps} steps of {plan.batch} rollouts, with {seeds} seeds of prompts, noise and training, the
same for all schedules; {shared(results)}. Each final
policy answers the same {plan.examined} held-out prompts with the same noise. Differences are paired by seed, with 90 %
bootstrap intervals, in parts of what serial gained. `serial` is the streamed engine with scoring held until decoding
has ended.

![score against steps and against seconds](convergence.svg)

{schedules_table(results)}

{schedules_findings(results)}
"""


def schedules_table(results: Results) -> str:
    head = [
        "",
        "schedule",
        "score",
        "against serial",
        "KL, nats",
        "against serial",
        "s a run",
        "mean staleness",
        "deferred",
    ]
    return markdown(head, [schedules_row(results, arm) for arm in SCHEDULE_ARMS.values()])


def schedules_row(results: Results, arm: Arm) -> list[str]:
    outcomes = results.of(arm.name)
    score, kl = (
        "-" if arm is SERIAL else percent(difference(results, arm.name, SERIAL.name, quantity))
        for quantity in (SCORE, KL)
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


def schedules_findings(results: Results) -> str:
    harm = {
        -1: "does harm: all of the interval of its score lies below serial's",
        None: f"is not judged by fewer than {LEAST} seeds",
    }.get(difference(results, STALE.name, SERIAL.name, SCORE).sign, "shows no harm to the score beyond chance")
    return items(
        (
            conclusion(results, ADAPTIVE.name),
            conclusion(results, FIXED.name),
            f"`{STALE.name}` {harm}.",
            noise(results, ADAPTIVE.name, SERIAL.name),
        )
    )


def conclusion(results: Results, arm: str) -> str:
    late = fmean(each.late for each in results.of(arm))
    score, kl = (difference(results, arm, SERIAL.name, quantity).conclusion for quantity in (SCORE, KL))
    return (
        f"That `{arm}`, which deferred {late:.0%}, ends within {BAND:.0%} of serial's gain **{score}** for the "
        f"score and **{kl}** for the KL."
    )


SCHEDULES: Final = Study(
    name="schedules",
    arms=SCHEDULE_ARMS,
    file="results.json",
    picture="convergence.svg",
    panels=(Panel("steps", "steps", tuple(SCHEDULE_ARMS)), Panel("seconds", "seconds", tuple(SCHEDULE_ARMS))),
    table=schedules_table,
    findings=schedules_findings,
    section=schedules_section,
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

# Two arms with one difference between them, and its name
PAIRS: Final = (
    *((f"n{n}-tis", f"n{n}", f"The weights at lookahead {n}") for n in (1, 2, 4)),
    ("n4-tis-b", "n4", "The weights alone at lookahead 4, the ratio still that to the behaviour policy"),
    ("n4-tis", "n4-tis-b", "With them, the ratio to the proximal policy instead"),
    ("n2-flight", "n2", "Weight sync in flight at lookahead 2"),
)

RUNAWAY: Final = 2  # times the largest KL of the baseline's runs, beyond which a run is counted

QUANTITIES: Final = {"final score": SCORE, "score of the first half": FIRST_HALF, "final KL": KL}


def lookahead_section(results: Results) -> str:
    plan, base = results.plan, results.known_start.score.mean
    return f"""\
## What lookahead costs

The same task and {plan.steps} steps of {plan.batch} rollouts, with {len(results.whole())} seeds; {shared(results)}.
Nothing is deferred, so lookahead is the only cause of staleness: with `step.lookahead = n` the weights after update
max(0, k - n) sample the rollouts of step k. All arms of a seed train the same prompts in the same batches,
and as often. Each final policy answers the same {plan.examined} held-out prompts; the base policy scores
{base:.2f} on them. Differences are paired by seed, with 90 % bootstrap intervals, in parts of what
`{BASELINE.name}` gained.

- `-tis` adds truncated importance weights: `algorithm.ratio_base = "proximal"` and
  `algorithm.is_correction = "truncated"`. Without lookahead no token is stale, and they change no bit.
- `-tis-b` adds the weights alone: the ratio stays that to the behaviour policy, and so does the clip.
- `-flight` is `step.weight_sync = "in-flight"`.
- The first half is the mean score of what was trained, by the number of updates of the policy that sampled it, from 1
  to {plan.steps // 2}. By steps the curve of lookahead n would come n steps later, whatever is learned.
- Updates is how many it takes until the mean score of what was trained has {TARGET:.0%} of `{BASELINE.name}`'s final
  gain, and seconds is the time until then, from the start of the run.
- KL is the median over seeds, and the largest; its difference is of means.
- Staleness, mismatch, effective sample size (ESS) and the share of clipped tokens are means over the steps of
  `staleness/mean`, `mismatch/kl`, `mismatch/ess` and `policy/clipfrac_avg`.

![score against the updates of the policy that sampled, and against seconds](convergence-lookahead.svg)

{lookahead_table(results)}

{lookahead_findings(results)}
"""


def lookahead_table(results: Results) -> str:
    learned = ["score", "against n0", "first half, against n0"]
    taken = ["updates", "seconds", "s a run"]
    written = ["KL, nats", "against n0", "tokens", "staleness (largest)", "mismatch", "ESS", "clipped"]
    return markdown(
        ["", "schedule", *learned, *taken, *written], [lookahead_row(results, arm) for arm in LOOKAHEAD_ARMS.values()]
    )


def lookahead_row(results: Results, arm: Arm) -> list[str]:
    outcomes = results.of(arm.name)
    score, first_half, kl = (
        "-" if arm is BASELINE else percent(against(results, arm.name, BASELINE.name, quantity))
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
        count(taken.updates.mean, taken.updates.last),
        count(taken.seconds.mean, taken.seconds.last),
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


def against(results: Results, arm: str, other: str, quantity: Quantity) -> Difference:
    return difference(results, arm, other, quantity, BASELINE.name)


def lookahead_findings(results: Results) -> str:
    arms = [name for name in LOOKAHEAD_ARMS if name != BASELINE.name]
    intervals = len(QUANTITIES) * (len(arms) + len(PAIRS))
    return items(
        (
            *(verdict(results, arms, quantity) for quantity in QUANTITIES),
            *worth(results, arms),
            runaways(results, arms),
            *(f"{name}: {changes(results, arm, other)}." for arm, other, name in PAIRS),
            f"One interval in ten misses the true difference, and there are {intervals} here.",
            noise(results, arms[0], BASELINE.name),
        )
    )


def verdict(results: Results, arms: Sequence[str], quantity: str) -> str:
    """Return which arms come within the band of the baseline, and which differ beyond chance, in two messages."""
    found = {arm: against(results, arm, BASELINE.name, QUANTITIES[quantity]) for arm in arms}
    by_conclusion = {
        words: [arm for arm, each in found.items() if each.holds is holds]
        for holds, words in ((True, "within"), (False, "not shown to be within"), (None, "not judged to be within"))
    }
    within = "; ".join(
        f"{words} {BAND:.0%} of `{BASELINE.name}`'s gain for {listed(those)}"
        for words, those in by_conclusion.items()
        if those
    )
    beyond = " and ".join(
        f"{words} for {listed(those)}"
        for sign, words in ((-1, "lower"), (1, "higher"))
        if (those := [arm for arm, each in found.items() if each.sign == sign])
    )
    judged = any(each.sign is not None for each in found.values())
    words = f" Beyond chance it is {beyond or 'no different for any'}." if judged else ""
    return f"The {quantity} is {within}.{words}"


def worth(results: Results, arms: Sequence[str]) -> tuple[str, str]:
    """Return how much longer than the baseline each arm takes to learn, with intervals: in updates, then in seconds."""
    found = {arm: pace(results, arm, BASELINE.name) for arm in arms}
    updates = "; ".join(f"`{arm}` {times(each.updates)}" for arm, each in found.items())
    seconds = "; ".join(f"`{arm}` {times(each.seconds)}" for arm, each in found.items())
    return (
        f"To get {TARGET:.0%} of the gain no later, a step has to be N times as fast: {updates}.",
        f"Here that took N times the seconds of `{BASELINE.name}`: {seconds}.",
    )


def times(taken: Taken) -> str:
    mean, low, high = (count(each, taken.last_ratio) for each in astuple(taken.ratio))
    return f"{mean} ({low} to {high})"


def runaways(results: Results, arms: Sequence[str]) -> str:
    """Return how many runs of each arm ended far beyond the KL of every run of the baseline."""

    def kls(arm: str) -> list[float]:
        return [each.answers.kl.mean for each in results.of(arm)]

    bound = RUNAWAY * max(kls(BASELINE.name))
    beyond = {arm: sum(kl > bound for kl in kls(arm)) for arm in arms}
    told = [f"`{arm}` {count}" for arm, count in beyond.items() if count]
    return (
        f"Runs of {len(results.whole())} that ended with more than {RUNAWAY} times the largest KL of "
        f"`{BASELINE.name}`: {', '.join(told) or 'none of any arm'}."
    )


def listed(arms: Sequence[str]) -> str:
    *others, last = (f"`{arm}`" for arm in arms)
    return f"{', '.join(others)} and {last}" if others else last


def changes(results: Results, arm: str, other: str) -> str:
    """Return what the only difference between two arms changes, and by how much."""
    words = {1: "higher", 0: "no different beyond chance", -1: "lower", None: f"not judged by fewer than {LEAST} seeds"}
    found = {name: against(results, arm, other, quantity) for name, quantity in QUANTITIES.items()}
    return "; ".join(f"the {name} is {words[each.sign]}, {percent(each)}" for name, each in found.items())


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
    findings=lookahead_findings,
    section=lookahead_section,
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
    words = f"score of the rollouts trained: mean of {len(results.whole())} seeds, 90 % interval"
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
