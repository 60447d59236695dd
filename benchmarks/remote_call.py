"""What a call costs in each place: ``python -m benchmarks.remote_call``, on two raylets of this machine.

A call carries a chunk of 64 token ids there and a number back, and computes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from contextlib import ExitStack
from typing import Final

import anyio
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.raylets import two_raylets
from oppo.observe import now
from oppo.placement import Hosted, Inline, Place, Process, Thread
from oppo.placement.ray import RayPlace

CHUNK: Final = np.arange(64, dtype=np.int32)
WARM: Final = 50
"""Calls that are not counted."""


class Length:
    """Counts tokens."""

    def __init__(self) -> None:
        self.total = 0

    def extend(self, tokens: NDArray[np.int32]) -> int:
        """Return how many there have been."""
        self.total += len(tokens)
        return self.total


async def milliseconds(place: Place, calls: int) -> list[float]:
    """Return how long each of so many calls took, one after the other."""
    length: Hosted[Length] = place.host(Length)
    took = []
    for _ in range(WARM + calls):
        begun = now()
        await length.call("extend", Length.extend, CHUNK)
        took.append((now() - begun) * 1e3)
    return took[WARM:]


def main() -> None:
    """Print the median and the tail of each place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    calls = parser.parse_args().calls
    console = Console()
    with ExitStack() as stack:
        cluster, other = stack.enter_context(two_raylets())
        places: dict[str, Place] = {
            "inline": Inline("length"),
            "thread": Thread("length"),
            "process": Process("length"),
            "actor on another raylet": RayPlace("length", cluster, strategy=other),
        }
        for name, place in places.items():
            with place:
                took = anyio.run(milliseconds, place, calls)
            tail = statistics.quantiles(took, n=100)[-1]
            console.print(f"{name:24} median {statistics.median(took):6.2f} ms, 99 of 100 within {tail:6.2f} ms")


if __name__ == "__main__":
    importlib.import_module("benchmarks.remote_call").main()  # what is called in a place is not of the program itself
