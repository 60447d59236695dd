"""The section of ``docs/learning.md``, from the results."""

from __future__ import annotations

from statistics import fmean
from typing import Final

from benchmarks.convergence.arms import ADAPTIVE, ARMS, FIXED, SERIAL, STALE
from benchmarks.convergence.comparison import BAND, LEAST, Difference, difference, harm
from benchmarks.convergence.results import Results

BEGIN: Final = "<!-- python -m benchmarks.convergence --page -->\n"
END: Final = "<!-- end -->"


def section(results: Results) -> str:
    """Return the section with its heading; nothing without results."""
    seeds = len(results.whole())
    if not seeds or results.start is None:
        return ""
    plan, machine = results.plan, results.machine
    return f"""\
## What was measured

The demo's task, {plan.steps} steps of {plan.batch} rollouts, with {seeds} seeds of prompts, noise and training, the
same for all schedules; {machine["cpu"]}, {machine["cores"]} cores, all of them for one run at a time. Each final
policy answers the same {plan.examined} held-out prompts with the same noise. Differences are paired by seed, with 90 %
bootstrap intervals, in parts of what serial gained. `serial` is the streamed engine with scoring held until decoding
has ended; `benchmarks/README.md` says more.

![score against steps and against seconds](convergence.svg)

{table(results)}

{findings(results)}
"""


def table(results: Results) -> str:
    head = ["", "schedule", "score", "against serial", "KL, nats", "against serial", "s a run", "mean lag", "carried"]
    rows = [head, ["---"] * len(head)]
    for name, arm in ARMS.items():
        outcomes = results.of(name)
        rows.append(
            [
                name,
                arm.about,
                f"{fmean(each.answers.score.mean for each in outcomes):.2f}",
                "-" if arm is SERIAL else percent(difference(results, name, "score")),
                f"{fmean(each.answers.kl.mean for each in outcomes):.1f}",
                "-" if arm is SERIAL else percent(difference(results, name, "kl")),
                f"{fmean(sum(each.seconds) for each in outcomes):.1f}",
                f"{fmean(each.lag for each in outcomes):.2f}",
                f"{fmean(each.late for each in outcomes):.0%}",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def percent(found: Difference) -> str:
    relative = found.relative
    return f"{relative.mean:+.1%} ({relative.low:+.1%} to {relative.high:+.1%})"


def findings(results: Results) -> str:
    """Return the findings, line by line."""
    words = {
        True: "does harm: all of the interval of its score lies below serial's",
        False: "shows no harm to the score beyond chance",
        None: f"is not judged by fewer than {LEAST} seeds",
    }
    score, kl = (difference(results, ADAPTIVE.name, quantity).noise for quantity in ("score", "kl"))
    return (
        f"{conclusion(results, ADAPTIVE.name)}\n{conclusion(results, FIXED.name)}\n"
        f"- `{STALE.name}` {words[harm(results, STALE.name)]}.\n"
        f"- Of every difference, examining only {results.plan.examined} responses has a standard error of "
        f"{score:.1%} for the score and {kl:.1%} for the KL."
    )


def conclusion(results: Results, arm: str) -> str:
    """Return whether an arm learns as serial does, in a sentence."""
    late = fmean(each.late for each in results.of(arm))
    score, kl = (difference(results, arm, quantity).conclusion for quantity in ("score", "kl"))
    return (
        f"- That `{arm}`, which carried {late:.0%} over, ends within {BAND:.0%} of serial's gain **{score}** for the "
        f"score and **{kl}** for the KL."
    )


def placed(page: str, content: str) -> str:
    """Return the page with the section between its markers.

    Raises:
        ValueError: a marker is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN.strip()} with {END} after it, so the section has no place in it")
    return f"{before}{begin}{content}{end}{after}"
