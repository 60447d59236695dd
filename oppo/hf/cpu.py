"""How many cores of the CPU there are for this process, and how many of them a thread computes on."""

from __future__ import annotations

import os

import torch


def use_cores(count: int) -> None:
    """Let the calling thread, and those that torch starts for it, compute on ``count`` cores from now on.

    A thread that torch has not met takes over, at the first thing it computes, the count that was set last in any
    thread of the process. Asking for the count is such a first thing, so that nothing comes between.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


def available_cores() -> int:
    """Return how many cores this process may use: those it is bound to, no more than ``OMP_NUM_THREADS`` says."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(bound, int(wanted)) if wanted.isdecimal() and int(wanted) else bound
