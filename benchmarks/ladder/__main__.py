"""``python -m benchmarks.ladder``: prints the README's table of speed from the results of record.

``--plot`` draws its picture instead, ``--plot FILE`` another one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ladder.show import PICTURE, ladders, plot, table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder")
    parser.add_argument("--plot", type=Path, nargs="?", const=PICTURE, help="draw the ladders into this file instead")
    chosen = parser.parse_args(arguments)
    if chosen.plot is None:
        print(table(ladders()))
    else:
        plot(ladders(), chosen.plot)


if __name__ == "__main__":
    main()
