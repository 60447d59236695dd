"""``python -m benchmarks.ladder``: the README's table of speed, from the results of record; nothing is measured again.

``--plot`` draws its picture instead, ``--plot FILE`` another one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from benchmarks.ladder.of_record import PICTURE, ladders, table
from benchmarks.ladder.plot import Results, plot


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, or draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder")
    parser.add_argument("--plot", type=Path, nargs="?", const=PICTURE, help="draw the ladders into this file instead")
    chosen = parser.parse_args(arguments)
    if chosen.plot is None:
        print(table(ladders()))
    else:
        plot([cast("Results", each) for each in ladders()], chosen.plot)


if __name__ == "__main__":
    main()
