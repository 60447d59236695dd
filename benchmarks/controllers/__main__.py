"""``python -m benchmarks.controllers [ENGINE ...]``: run what is missing, then write table and figure to ``docs/``."""

from __future__ import annotations

import sys

from benchmarks.controllers.compare import Results, cells
from benchmarks.controllers.page import write
from benchmarks.controllers.regimes import ENGINES


def main(engines: list[str]) -> None:
    """Run every cell that has no result yet; each takes some seconds of one core."""
    results = Results.load()
    for engine in engines:
        for cell in cells(engine):
            if cell not in results.outcomes:
                results.outcomes[cell] = outcome = cell.run()
                results.save()
                print(
                    f"{cell}: {outcome.seconds:.2f} s, lag {outcome.lag:.3f}, predicted {outcome.predicted:.3f}",
                    flush=True,
                )
    write(results)


if __name__ == "__main__":
    main(sys.argv[1:] or list(ENGINES))
