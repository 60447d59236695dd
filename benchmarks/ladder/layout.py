"""The cores and threads of each side of a step.

``split`` is the paper's layout: each side has a device of its own in every mode, the serial one too. Here a device is a
core. The update is made on the actor's, which is free then, or, where it may run beside decoding, on the scorers'.
``shared`` is one device: the running side has all cores, and what runs beside decoding has the cores that decoding
leaves. Decoding has one thread in every mode: the matrix products of a decode step of these small models are so small
that two threads mostly wait for each other, and took twice as long on two cores. With more threads the serial modes
would look worse than they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.ladder.workloads import Layout
from oppo.hf.devices import use_cores


@dataclass(frozen=True, slots=True)
class Seat:
    """The cores of a thread, and its intra-op threads of torch."""

    cores: tuple[int, ...]
    threads: int

    def take(self) -> None:
        """Bind the calling thread and its intra-op threads."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)
        use_cores(self.threads)


@dataclass(frozen=True, slots=True)
class Seats:
    """The seats of a contestant; its event loop shares the actor's."""

    actor: Seat
    scorers: Seat
    trainer: Seat

    def table(self) -> dict[str, dict[str, object]]:
        """Return the seats as JSON values."""
        named = {"decode": self.actor, "score": self.scorers, "update": self.trainer}
        return {name: {"cores": list(seat.cores), "threads": seat.threads} for name, seat in named.items()}


def seats(layout: Layout, cores: Sequence[int], *, held: bool, apart: bool = False) -> Seats:
    """Return the seats of a layout.

    Args:
        held: scoring never runs beside decoding.
        apart: the update may run beside decoding.

    Example:
        >>> seats("shared", (0, 1), held=False).scorers.threads, seats("shared", (0, 1), held=True).scorers.threads
        (1, 2)
    """
    every = tuple(cores)
    if layout == "split":
        ours, theirs = every[:1], every[1:2] or every[:1]
        return Seats(Seat(ours, 1), Seat(theirs, 1), Seat(theirs if apart else ours, 1))
    whole, decoding = Seat(every, len(every)), Seat(every, 1)
    rest = Seat(every, max(1, len(every) - 1))
    return Seats(decoding, whole if held else rest, rest if apart else whole)
