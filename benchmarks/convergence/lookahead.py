"""The study of lookahead: tokens that are n updates old, with and without importance weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from math import isfinite
from statistics import fmean, median
from typing import Final

from benchmarks.convergence.arms import Arm
from benchmarks.convergence.comparison import (
    BAND,
    FIRST_HALF,
    KL,
    LEAST,
    SCORE,
    TARGET,
    Difference,
    Quantity,
    Taken,
    difference,
    pace,
)
from benchmarks.convergence.page import noise, percent, rows_of, shared
from benchmarks.convergence.results import Results
from benchmarks.convergence.study import Panel, Study

WEIGHTS: Final = {"ratio_base": "proximal", "is_correction": "truncated"}
COLOURS: Final = {0: "#111827", 1: "#2563eb", 2: "#059669", 4: "#dc2626"}


def cut(n: int) -> Arm:
    """Return lookahead n, published between two steps."""
    return Arm(f"n{n}", f"lookahead {n}", COLOURS[n], step={"lookahead": n})


def weighted(n: int) -> Arm:
    """Return lookahead n with truncated importance weights."""
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
    "lookahead 2, published in flight",
    "#d97706",
    step={"lookahead": 2, "publish": "in-flight"},
)

ARMS: Final = {
    arm.name: arm
    for arm in (BASELINE, *(cut(n) for n in (1, 2, 4)), *(weighted(n) for n in (1, 2, 4)), BEHAVIOUR, IN_FLIGHT)
}
"""No arm carries anything over, so that lookahead is the only cause of lag; without it weights would change nothing."""

PAIRS: Final = (
    *((f"n{n}-tis", f"n{n}", f"The weights at lookahead {n}") for n in (1, 2, 4)),
    ("n4-tis-b", "n4", "The weights alone at lookahead 4, the ratio still that to the behaviour policy"),
    ("n4-tis", "n4-tis-b", "With them, the ratio to the proximal policy instead"),
    ("n2-flight", "n2", "Publishing in flight at lookahead 2"),
)
"""Two arms with one difference between them, and its name."""

RUNAWAY: Final = 2
"""Times the largest KL of the baseline's runs, beyond which a run is counted."""

QUANTITIES: Final = {"final score": SCORE, "score of the first half": FIRST_HALF, "final KL": KL}


def section(results: Results) -> str:
    """Return the section with its heading."""
    plan, base = results.plan, results.known_start.score.mean
    return f"""\
## What lookahead costs

The same task and {plan.steps} steps of {plan.batch} rollouts, with {len(results.whole())} seeds; {shared(results)}.
Nothing is carried over, so that lookahead is the only cause of lag: with `step.lookahead = n` the rollouts of step k
are written by the weights after update max(0, k - n). All arms of a seed train the same prompts in the same batches,
and as often. Each final policy answers the same {plan.examined} held-out prompts; the base policy scores
{base:.2f} on them. Differences are paired by seed, with 90 % bootstrap intervals, in parts of what
`{BASELINE.name}` gained.

- `-tis` adds truncated importance weights: `algorithm.ratio_base = "proximal"` and
  `algorithm.is_correction = "truncated"`. Without lookahead no token is stale, and they change no bit.
- `-tis-b` adds the weights alone: the ratio stays that to the behaviour policy, and so does the clip.
- `-flight` is `step.publish = "in-flight"`.
- The first half is the mean score of what was trained, by the number of updates that its writer had seen, from 1 to
  {plan.steps // 2}. By steps the curve of lookahead n would come n steps later, whatever is learned.
- Updates is how many it takes until the mean score of what was trained has {TARGET:.0%} of `{BASELINE.name}`'s final
  gain, and seconds is when they had been made, from the start of the run.
- KL is the median over seeds, and the largest; its difference is of means.
- Lag, mismatch, effective sample size (ESS) and the share of clipped tokens are means over the steps of
  `staleness/lag_mean`, `mismatch/kl`, `mismatch/ess` and `policy/clipfrac_avg`.

![score against the updates that the writer had seen, and against seconds](convergence-lookahead.svg)

{table(results)}

{findings(results)}
"""


def table(results: Results) -> str:
    learned = ["score", "against n0", "first half, against n0"]
    taken = ["updates", "seconds", "s a run"]
    written = ["KL, nats", "against n0", "tokens", "lag (largest)", "mismatch", "ESS", "clipped"]
    return rows_of(["", "schedule", *learned, *taken, *written], [row(results, arm) for arm in ARMS.values()])


def row(results: Results, arm: Arm) -> list[str]:
    """Return an arm's row of the table."""
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
    """Return the difference of two arms, in parts of what the baseline gained."""
    return difference(results, arm, other, quantity, BASELINE.name)


def findings(results: Results) -> str:
    """Return the findings, line by line."""
    arms = [name for name in ARMS if name != BASELINE.name]
    intervals = len(QUANTITIES) * (len(arms) + len(PAIRS))
    return "\n".join(
        (
            *(verdict(results, arms, quantity) for quantity in QUANTITIES),
            worth(results, arms),
            runaways(results, arms),
            *(f"- {name}: {changes(results, arm, other)}." for arm, other, name in PAIRS),
            f"- One interval in ten leaves out the true difference, and these are {intervals}.",
            noise(results, arms[0], BASELINE.name),
        )
    )


def verdict(results: Results, arms: Sequence[str], quantity: str) -> str:
    """Return which arms come within the band of the baseline, and which differ beyond chance, in two sentences."""
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
    return f"- The {quantity} is {within}.{words}"


def worth(results: Results, arms: Sequence[str]) -> str:
    """Return how much longer than the baseline each arm takes to learn, with intervals: in updates, then in seconds."""
    found = {arm: pace(results, arm, BASELINE.name) for arm in arms}
    updates = "; ".join(f"`{arm}` {times(each.updates)}" for arm, each in found.items())
    seconds = "; ".join(f"`{arm}` {times(each.seconds)}" for arm, each in found.items())
    return (
        f"- To get {TARGET:.0%} of the gain no later, so many times as fast a step has to be: {updates}.\n"
        f"- Here that took so many times the seconds of `{BASELINE.name}`: {seconds}."
    )


def times(taken: Taken) -> str:
    """Return how many times as much as the baseline an arm takes, with the interval."""
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
        f"- Of {len(results.whole())} runs so many ended with more than {RUNAWAY} times the largest KL of "
        f"`{BASELINE.name}`: {', '.join(told) or 'none of any arm'}."
    )


def listed(arms: Sequence[str]) -> str:
    """Return names in a row."""
    *others, last = (f"`{arm}`" for arm in arms)
    return f"{', '.join(others)} and {last}" if others else last


def changes(results: Results, arm: str, other: str) -> str:
    """Return what the only difference between two arms changes, and by how much."""
    words = {1: "higher", 0: "no different beyond chance", -1: "lower", None: f"not judged by fewer than {LEAST} seeds"}
    found = {name: against(results, arm, other, quantity) for name, quantity in QUANTITIES.items()}
    return "; ".join(f"the {name} is {words[each.sign]}, {percent(each)}" for name, each in found.items())


LOOKAHEAD: Final = Study(
    name="lookahead",
    arms=ARMS,
    file="lookahead.json",
    picture="convergence-lookahead.svg",
    panels=(
        Panel("updates", "updates before it was written: lookahead", ("n0", "n1", "n2", "n4")),
        Panel("updates", "with truncated weights", ("n0", "n1-tis", "n2-tis", "n4-tis", "n4-tis-b")),
        Panel("updates", "published in flight, or not", ("n0", "n2", "n2-flight")),
        Panel("update seconds", "seconds until these updates had been made", ("n0", "n1", "n1-tis", "n2", "n4")),
    ),
    table=table,
    findings=findings,
    section=section,
)
