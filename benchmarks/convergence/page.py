"""What the sections of ``docs/learning.md`` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.convergence.comparison import KL, SCORE, Difference, examination_error
from benchmarks.convergence.results import Results

END: Final = "<!-- end -->"


def rows_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, of which every row has as many columns as the head.

    Raises:
        ValueError: one has not.
    """
    every = zip(*zip(head, ["---"] * len(head), *rows, strict=True), strict=True)
    return "\n".join(f"| {' | '.join(row)} |" for row in every)


def percent(found: Difference) -> str:
    """Return a relative difference with its interval."""
    relative = found.relative
    return f"{relative.mean:+.1%} ({relative.low:+.1%} to {relative.high:+.1%})"


def shared(results: Results) -> str:
    """Return the machine, and how its runs shared it."""
    machine, jobs = results.machine, results.plan.jobs
    runs = "all of them for one run at a time" if jobs == 1 else f"{jobs} runs at a time"
    return f"{machine['cpu']}, {machine['cores']} cores, {runs}"


def noise(results: Results, arm: str, baseline: str) -> str:
    """Return what examining few responses adds to every difference, with that of an arm as the example."""
    score = examination_error(results, arm, baseline, SCORE, lambda answers: answers.score)
    kl = examination_error(results, arm, baseline, KL, lambda answers: answers.kl)
    return (
        f"- Of every difference, examining only {results.plan.examined} responses has a standard error of {score:.1%} "
        f"for the score and {kl:.1%} for the KL."
    )


def placed(page: str, begin: str, content: str) -> str:
    """Return the page with ``content`` between the line ``begin`` and the next ``END``.

    Raises:
        ValueError: a marker is missing.
    """
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"the page has no {begin.strip()} with {END} after it, so the section has no place in it")
    return f"{before}{begin}{content}{end}{after}"
