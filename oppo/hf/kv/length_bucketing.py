"""Rows of different length in rectangles, so that padding and the number of rectangles together cost least."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch


def overhead_on(device: torch.device) -> int:
    """Return what a pass over a model costs besides its tokens, in tokens, be it forward only or backward too.

    On a CPU that was fitted to small models: updates cost 29 to 60, reading alone 30 to 80, and larger models have more
    to do for a token. On other devices launches cost as much as many more tokens; how many is an estimate.
    """
    return 64 if device.type == "cpu" else 1024


def cheapest_groups(
    lengths: Sequence[int],
    rows: Iterable[int],
    *,
    overhead: int,
    budget: float = math.inf,
    counts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return ``rows`` in groups that together cost least, where a group costs its longest row for each of its rows.

    Rows of a group are neighbours by length, so that they need little padding. The longest come first, so that a budget
    that is too large for the device shows at once. A row longer than the budget is a group of its own.

    Args:
        lengths: of all rows, in tokens.
        rows: those to be grouped.
        overhead: what a group costs besides, in tokens.
        budget: tokens of a group at most, padding included.
        counts: of all rows, how many each stands for; 1 unless given.
    """
    order = sorted(rows, key=lambda row: (-lengths[row], row))
    widths = np.array([lengths[row] for row in order], np.float64)
    before = np.cumsum([0, *(1 if counts is None else counts[row] for row in order)])
    costs = np.zeros(len(order) + 1)  # of the cheapest way to read so many of the longest rows
    starts = [0] * (len(order) + 1)  # where the last group of that way begins
    for end in range(1, len(order) + 1):
        sizes = (before[end] - before[:end]) * widths[:end]  # of the group from each of these rows on
        sizes[:-1][sizes[:-1] > budget] = np.inf
        starts[end] = int(np.argmin(costs[:end] + sizes))
        costs[end] = costs[starts[end]] + sizes[starts[end]] + overhead
    groups, end = list[list[int]](), len(order)
    while end:
        groups.append(order[starts[end] : end])
        end = starts[end]
    return groups[::-1]
