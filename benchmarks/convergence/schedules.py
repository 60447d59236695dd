"""The study of schedules without lookahead: from serial to more deferral than is good."""

from __future__ import annotations

from statistics import fmean
from typing import Final

from benchmarks.convergence.arms import Arm
from benchmarks.convergence.comparison import BAND, KL, LEAST, SCORE, difference
from benchmarks.convergence.page import noise, percent, rows_of, shared
from benchmarks.convergence.results import Results
from benchmarks.convergence.study import Panel, Study

SERIAL: Final = Arm("serial", "decode, then score, then train", "#111827", held=True, step={"chunk": "whole"})
CHUNK: Final = Arm("chunk", "streamed, nothing carried over", "#2563eb")
FIXED: Final = Arm("fixed", "streamed, B / 4 carried over", "#059669", share=1 / 4)
ADAPTIVE: Final = Arm(
    "adaptive", "streamed, carried over as it pays", "#dc2626", share=None, step={"admission": "adaptive"}
)
STALE: Final = Arm("stale", "streamed, B carried over, up to 8 times", "#d97706", share=1.0, step={"max_deferrals": 8})

ARMS: Final = {arm.name: arm for arm in (SERIAL, CHUNK, FIXED, ADAPTIVE, STALE)}
"""``chunk`` differs from ``serial`` in rounding only, ``stale`` should do harm."""


def section(results: Results) -> str:
    """Return the section with its heading."""
    plan, seeds = results.plan, len(results.whole())
    return f"""\
## What was measured

The demo's task, {plan.steps} steps of {plan.batch} rollouts, with {seeds} seeds of prompts, noise and training, the
same for all schedules; {shared(results)}. Each final
policy answers the same {plan.examined} held-out prompts with the same noise. Differences are paired by seed, with 90 %
bootstrap intervals, in parts of what serial gained. `serial` is the streamed engine with scoring held until decoding
has ended; `benchmarks/README.md` says more.

![score against steps and against seconds](convergence.svg)

{table(results)}

{findings(results)}
"""


def table(results: Results) -> str:
    head = ["", "schedule", "score", "against serial", "KL, nats", "against serial", "s a run", "mean lag", "carried"]
    return rows_of(head, [row(results, arm) for arm in ARMS.values()])


def row(results: Results, arm: Arm) -> list[str]:
    """Return an arm's row of the table."""
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


def findings(results: Results) -> str:
    """Return the findings, line by line."""
    harm = {
        -1: "does harm: all of the interval of its score lies below serial's",
        None: f"is not judged by fewer than {LEAST} seeds",
    }.get(difference(results, STALE.name, SERIAL.name, SCORE).sign, "shows no harm to the score beyond chance")
    return "\n".join(
        (
            conclusion(results, ADAPTIVE.name),
            conclusion(results, FIXED.name),
            f"- `{STALE.name}` {harm}.",
            noise(results, ADAPTIVE.name, SERIAL.name),
        )
    )


def conclusion(results: Results, arm: str) -> str:
    """Return whether an arm learns as serial does, in a sentence."""
    late = fmean(each.late for each in results.of(arm))
    score, kl = (difference(results, arm, SERIAL.name, quantity).conclusion for quantity in (SCORE, KL))
    return (
        f"- That `{arm}`, which carried {late:.0%} over, ends within {BAND:.0%} of serial's gain **{score}** for the "
        f"score and **{kl}** for the KL."
    )


SCHEDULES: Final = Study(
    name="schedules",
    arms=ARMS,
    file="results.json",
    picture="convergence.svg",
    panels=(Panel("steps", "steps", tuple(ARMS)), Panel("seconds", "seconds", tuple(ARMS))),
    table=table,
    findings=findings,
    section=section,
)
