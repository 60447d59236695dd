"""Makes the missing runs of a study, one at a time, and saves each outcome at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.convergence.arms import ARMS
from benchmarks.convergence.results import Answers, Cell, Outcome, Plan, Results


def cells(seeds: int) -> Iterator[Cell]:
    """Yield all runs: the arms of a seed in a row, for fair seconds, and each seed beginning with another."""
    names = list(ARMS)
    for seed in range(seeds):
        first = seed % len(names)
        yield from (Cell(seed, name) for name in names[first:] + names[:first])


def study(
    results: Results,
    directory: Path,
    seeds: int,
    *,
    start: Callable[[Plan], Answers],
    outcome: Callable[[Plan, Cell], Outcome],
    tell: Callable[[str], None],
) -> None:
    """Add the missing runs of ``seeds`` seeds to the results; the file in ``directory`` is written after every run."""
    if results.start is None:
        results.start = start(results.plan)
        results.save(directory)
    missing = [cell for cell in cells(seeds) if cell not in results.outcomes]
    for number, cell in enumerate(missing, 1):
        results.outcomes[cell] = found = outcome(results.plan, cell)
        results.save(directory)
        answers = found.answers
        tell(
            f"{number}/{len(missing)}  seed {cell.seed}  {cell.arm:<8}  {sum(found.seconds):5.1f} s  "
            f"score {answers.score.mean:+.3f}  kl {answers.kl.mean:.2f}  lag {found.lag:.2f}  extra {found.extra:.1f}"
        )
