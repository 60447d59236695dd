"""``python -m benchmarks``: measures a PPO step; ``--engine`` and ``--decoding`` measure a part of it instead.

Exit codes are those of ``oppo``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from benchmarks.request import Request
from oppo.cli import DONE, call, note, program

WIDTH = 150
"""Columns where the output is no terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    app = program("python -m benchmarks", "How fast a PPO step is.")
    app.default(bench)
    return call(app, arguments)


def bench(request: Annotated[Request, Parameter(name="*")] = Request()) -> int:  # noqa: B008 - it is frozen
    """Measure a PPO step: the speedup by overlap in each schedule, and its limits and costs."""
    console = Console()
    request.require_writable()
    if request.engine:
        from benchmarks.engine import cost  # noqa: PLC0415 - `--help` should be quick

        costs = cost.measure()
        request.keep(cost.as_json(costs))
        console.out(cost.show(costs), highlight=False)
        return DONE
    if request.decoding:
        from benchmarks.decoding import cases  # noqa: PLC0415 - torch takes seconds to import

        compared = cases.measure(request.rounds)
        request.keep(cases.as_json(compared, request.rounds))
        console.out(cases.show(compared), highlight=False)
        return DONE
    from benchmarks.ladder.command import bench as measure  # noqa: PLC0415 - it needs torch

    measure(request, console if console.is_terminal else Console(width=WIDTH), note)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
