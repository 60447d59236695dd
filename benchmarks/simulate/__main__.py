"""``python -m benchmarks.simulate check RESULTS ...``: the simulator beside results of ``make bench``.

``python -m benchmarks.simulate paper``: what schedules would take in the OPPO paper's settings; it keeps the outcomes
in ``paper.json`` and writes the tables of ``benchmarks/simulate/README.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from benchmarks.harness import keep, require_writable
from benchmarks.simulate import paper
from benchmarks.simulate.check import CheckedResult, LadderResult, check
from oppo.atomic_files import put
from oppo.cli import DONE, FAILED, call, note, program
from oppo.log import routed

PAGE: Final = Path(__file__).with_name("README.md")


def main(arguments: Sequence[str] | None = None) -> int:
    app = program("python -m benchmarks.simulate", "The simulator, checked and used.")
    app.command(check_results, name="check")
    app.command(simulate_paper, name="paper")
    with routed(note):
        return call(app, arguments)


def check_results(
    results: Annotated[list[Path], Parameter(negative=())],
    /,
    *,
    on: str = "chunk",
    out: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Compare simulated with measured ratios; the exit code is 1 if one is off by more than 10%, or the order wrong.

    Parameters
    ----------
    results
        Files of results of `make bench`; the first one is calibrated on, and all of the same models are checked.
    on
        The mode of the first result that is calibrated on.
    out
        Write the comparison to this file too.
    """
    require_writable({"--json": out})
    checked = list(check([result for path in results for result in LadderResult.read(path)], on))
    Console(width=110).print(table(checked))
    keep(out, {"on": on, "results": [each.as_json() for each in checked]})
    return DONE if all(each.right for each in checked) else FAILED


def simulate_paper(*, anew: bool = False) -> int:
    """Simulate the settings of the OPPO paper, and write the tables of benchmarks/simulate/README.md.

    Parameters
    ----------
    anew
        Simulate what is known already, too.
    """
    if anew:
        paper.RESULTS.unlink(missing_ok=True)
    results = paper.Results()
    paper.simulate(results)
    put(PAGE, [paper.in_page(PAGE.read_text(encoding="utf-8"), results)])
    return DONE


def table(checked: Sequence[CheckedResult]) -> Table:
    found = Table(show_edge=False, header_style="bold")
    for name in ("workload, layout", "mode", "over", "measured", "simulated", "error", "order"):
        found.add_column(name, justify="left" if name in {"workload, layout", "mode", "over", "order"} else "right")
    for each in checked:
        for ratio in each.ratios:
            wrong = [f"not faster than {slow}" for slow, fast in each.wrong_order if fast == ratio.mode]
            found.add_row(
                f"{each.workload}, {each.layout}",
                ratio.mode,
                each.over,
                str(ratio.measured),
                f"{ratio.simulated:.2f}",
                f"{ratio.error:+.0%}",
                ", ".join(wrong) or "right",
            )
    return found


if __name__ == "__main__":
    sys.exit(main())
