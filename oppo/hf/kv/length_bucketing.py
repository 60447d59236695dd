"""Length bucketing: rows of different length in padded groups of least total cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch


def overhead_on(device: torch.device) -> int:
    # Fitted to small models on a CPU, 29 to 60 for updates and 30 to 80 for forward passes; larger models compute more
    # per token, so it is lower. Elsewhere kernel launches cost more tokens; 1024 is an estimate.
    return 64 if device.type == "cpu" else 1024


def packed_row_on(device: torch.device) -> int:
    # Fitted to small models, at 2 to 6.
    return 6 if device.type == "cpu" else 0


def filled(sizes: Sequence[int], budget: float) -> Iterator[list[int]]:
    """Yield the indices of ``sizes`` in groups of at most ``budget`` in all, or of one size, the largest first."""
    group, size = list[int](), 0
    for at in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        if group and size + sizes[at] > budget:
            yield group
            group, size = [], 0
        group, size = [*group, at], size + sizes[at]
    if group:
        yield group


def cheapest_groups(
    lengths: Sequence[int],
    rows: Iterable[int],
    *,
    overhead: int,
    budget: float = math.inf,
    counts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return ``rows`` in the groups of least total cost: a group costs its padded tokens and ``overhead``."""
    # A group has neighbours by length, the longest first: a budget of padded tokens too large for the device then fails
    # at once. A longer row is a group of its own. counts: multiplicity of each of all rows.
    order = sorted(rows, key=lambda row: (-lengths[row], row))
    widths = np.array([lengths[row] for row in order], np.float64)
    before = np.cumsum([0, *(1 if counts is None else counts[row] for row in order)])
    costs = np.zeros(len(order) + 1)  # least cost of the first rows, by their number
    starts = [0] * (len(order) + 1)  # where the last group of that solution begins
    for end in range(1, len(order) + 1):
        sizes = (before[end] - before[:end]) * widths[:end]  # of the last group, by its first row
        sizes[:-1][sizes[:-1] > budget] = np.inf
        starts[end] = int(np.argmin(costs[:end] + sizes))
        costs[end] = costs[starts[end]] + sizes[starts[end]] + overhead
    groups, end = list[list[int]](), len(order)
    while end:
        groups.append(order[starts[end] : end])
        end = starts[end]
    return groups[::-1]
