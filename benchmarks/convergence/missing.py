"""Makes the missing runs of a study, some at a time, and saves each outcome at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import anyio

from benchmarks.convergence.results import Answers, Cell, Outcome, Plan, Results
from oppo.errors import as_itself


def cells(arms: Sequence[str], seeds: int) -> Iterator[Cell]:
    """Yield all runs: the arms of a seed in a row, for fair seconds, and each seed beginning with another."""
    names = list(arms)
    for seed in range(seeds):
        first = seed % len(names)
        yield from (Cell(seed, name) for name in names[first:] + names[:first])


async def complete(
    results: Results,
    file: Path,
    seeds: int,
    *,
    start: Callable[[Plan], Awaitable[Answers]],
    outcome: Callable[[Plan, Cell], Awaitable[Outcome]],
    tell: Callable[[str], None],
) -> None:
    """Add the missing runs of ``seeds`` seeds to the results, ``plan.jobs`` at a time; each is saved when it has ended.

    The first run that fails ends the others.
    """
    if results.start is None:
        results.start = await start(results.plan)
        results.save(file)
    missing = [cell for cell in cells(results.arms, seeds) if cell not in results.outcomes]
    numbered = iter(enumerate(missing, 1))

    async def work() -> None:
        for number, cell in numbered:
            results.outcomes[cell] = found = await outcome(results.plan, cell)
            results.save(file)
            tell(f"{number}/{len(missing)}  {line(cell, found)}")

    with as_itself():
        async with anyio.create_task_group() as tasks:
            for _ in range(results.plan.jobs):
                tasks.start_soon(work)


def line(cell: Cell, found: Outcome) -> str:
    """Return a run in a line."""
    answers = found.answers
    return (
        f"seed {cell.seed}  {cell.arm:<8}  {sum(found.seconds):5.1f} s  "
        f"score {answers.score.mean:+.3f}  kl {answers.kl.mean:.2f}  lag {found.lag:.2f}  extra {found.extra:.1f}"
    )
