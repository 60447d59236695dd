"""``python -m benchmarks``: measures a PPO step; ``--decoding`` measures a part of it instead.

Exit codes are those of ``oppo``.
"""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from benchmarks.harness import command, keep, require_writable
from benchmarks.ladder.workloads import Request

WIDTH = 150  # columns where the output is no terminal


def bench(request: Annotated[Request, Parameter(name="*")] = Request()) -> None:  # noqa: B008 - it is frozen
    """Measure a PPO step: the speedup by overlap in each schedule, and its limits and costs."""
    console = Console()
    require_writable({"--json": request.json, "--plot": request.plot})
    if request.decoding:
        from benchmarks import decoding  # noqa: PLC0415 - torch takes seconds to import

        compared = decoding.measure(request.rounds)
        keep(request.json, decoding.as_json(compared, request.rounds))
        console.out(decoding.show(compared), highlight=False)
    else:
        from benchmarks.ladder.rounds import bench as measure  # noqa: PLC0415 - it needs torch

        measure(request, console if console.is_terminal else Console(width=WIDTH))


if __name__ == "__main__":
    sys.exit(command(bench))
