"""Where the models of a run work, and on which share of the cores.

The actor decodes in a thread of its own with half of the cores; reward, reference and critic take turns in another
thread, or in a process, with the rest; the update, which nothing runs beside, has them all. The counts are the same
whatever the schedule and the places, so runs can be compared bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch

from oppo.placement import Place, Process, Thread

RESTARTS = 3
"""How many dead processes of the scorers a run replaces: one may be an accident, more are a fault that stays."""


class Places(NamedTuple):
    """The places of a run; closed together."""

    acting: Thread
    scoring: Place
    training: Thread

    @classmethod
    def of(cls, cores: int, scorers: Literal["auto", "thread", "process"], tell: Callable[[str], None]) -> Places:
        """Return places that share ``cores``; ``tell`` is told, in a sentence, of processes that are started.

        ``auto`` is a process wherever scorers can compute beside the actor: on a CPU with two cores or more. There both
        are Python to a good part, and two threads of one interpreter take turns at that.
        """
        if scorers == "auto":
            scorers = "process" if cores > 1 and not torch.cuda.is_available() else "thread"
        return cls(
            Thread("actor", setup=partial(use_cores, max(1, cores // 2))),
            _scoring(scorers, max(1, cores - cores // 2), tell),
            Thread("trainer", setup=partial(use_cores, cores)),
        )

    def settle(self) -> None:
        """Return when everything that lives in another process is there: what cannot be is known before a run begins.

        Raises:
            ModelLost: the process died.
            Exception: whatever kept it from starting.
        """
        if isinstance(self.scoring, Process):
            self.scoring.settle()

    def close(self) -> None:
        """Close each of them after the call in progress."""
        for place in self:
            place.close()


def _scoring(kind: Literal["thread", "process"], cores: int, tell: Callable[[str], None]) -> Place:
    setup = partial(use_cores, cores)
    if kind == "thread":
        return Thread("scorers", setup=setup)
    tell("starting the scorers' process")
    return Process("scorers", setup=setup, restarts=RESTARTS, tell=tell)


def use_cores(count: int) -> None:
    """Let this thread, and those it starts, compute on ``count`` cores."""
    torch.set_num_threads(count)


def available_cores() -> int:
    """Return how many cores this process may use: those it is bound to, no more than ``OMP_NUM_THREADS`` says."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(bound, int(wanted)) if wanted.isdecimal() and int(wanted) else bound
