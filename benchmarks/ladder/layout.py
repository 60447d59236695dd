"""Which cores and how many threads each side of a step has.

``split`` is the paper's: each side has a device of its own in every mode, the serial one too. Here a device is a core.
``shared`` is one device for everybody: whoever runs has all cores, and where scoring overlaps decoding it has those
that decoding leaves. Decoding computes with one thread in every mode: the products of a decode step of these small
models are so small that two threads mostly wait for one another, and took twice as long on two cores. With more of
them the serial modes would look worse than they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.ladder.workloads import Layout
from oppo.hf.cpu import use_cores
from oppo.hf.device import use_stream


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a thread works: on which cores, with how many intra-op threads of torch."""

    cores: tuple[int, ...]
    threads: int

    def take(self) -> None:
        """Bind the calling thread, and those that torch starts for it."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)
        use_cores(self.threads)


@dataclass(frozen=True, slots=True)
class Seats:
    """The seats of a contestant; its event loop sits with the actor."""

    actor: Seat
    scorers: Seat
    trainer: Seat

    def table(self) -> dict[str, dict[str, object]]:
        """Return the seats as JSON has them."""
        named = {"decode": self.actor, "score": self.scorers, "update": self.trainer}
        return {name: {"cores": list(seat.cores), "threads": seat.threads} for name, seat in named.items()}


def seats(layout: Layout, cores: Sequence[int], *, held: bool) -> Seats:
    """Return who works where.

    Args:
        layout: see the module.
        cores: those that this process may use; ``split`` takes the first two of them.
        held: scoring never runs beside decoding.

    Example:
        >>> seats("shared", (0, 1), held=False).scorers.threads, seats("shared", (0, 1), held=True).scorers.threads
        (1, 2)
    """
    every = tuple(cores)
    if layout == "split":
        ours, theirs = every[:1], every[1:2] or every[:1]
        return Seats(Seat(ours, 1), Seat(theirs, 1), Seat(ours, 1))
    whole, decoding = Seat(every, len(every)), Seat(every, 1)
    return Seats(decoding, whole if held else Seat(every, max(1, len(every) - 1)), whole)


def claim_cores(seat: Seat, device: str) -> None:
    """Take a seat in the calling thread; on a GPU, with a stream of its own, so that threads overlap there."""
    seat.take()
    use_stream(torch.device(device))
