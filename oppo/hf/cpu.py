"""Cores of the CPU: how many this process may use, and how many a thread computes on."""

from __future__ import annotations

import os

import torch


def use_cores(count: int) -> None:
    """Let the calling thread, and those that torch starts for it, compute on ``count`` cores.

    A thread new to torch adopts, with its first torch call, the count last set in any thread of the process. Reading
    the count is such a first call, so the count set next stays.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


def available_cores() -> int:
    """Return how many cores this process may use: its CPU affinity, at most ``OMP_NUM_THREADS``."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(bound, int(limit)) if limit.isdecimal() and int(limit) else bound
