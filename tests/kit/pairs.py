"""Covering arrays of pairs: few rows in which any two values of different axes meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import combinations
from typing import TypeAlias

Axes: TypeAlias = Mapping[str, Collection[str]]
Row: TypeAlias = Mapping[str, str]
Pair: TypeAlias = tuple[tuple[str, str], tuple[str, str]]

CANDIDATES = 6
"""Rows that are made for each one that is taken."""

ATTEMPTS = 30
"""Rows that are begun before a pair is given up, which has no row."""


def pairs_of(row: Row) -> Iterable[Pair]:
    return combinations(row.items(), 2)


def covering(
    axes: Axes,
    fits: Callable[[Row], bool],
    *,
    wanted: Callable[[Row], bool] = lambda pair: True,
    expensive: Collection[str] = (),
    seed: int = 0,
) -> tuple[list[Row], set[Pair]]:
    """Return rows that cover all wanted pairs, and the pairs that no row was found for.

    Args:
        axes: the values of each axis.
        fits: whether a row, or a part of one, is allowed; once false for a part, it is for every row with that part.
        wanted: whether a pair, as a row of two axes, must be covered.
        expensive: axes of which a row has the first value unless another covers more.
        seed: of the choice among rows that are as good.
    """
    choice, order = random.Random(seed), {name: place for place, name in enumerate(axes)}
    every = combinations([(name, value) for name, values in axes.items() for value in values], 2)
    missing = {
        (a, b): None for a, b in every if a[0] != b[0] and fits({a[0]: a[1], b[0]: b[1]}) and wanted(dict((a, b)))
    }
    rows: list[Row] = []
    impossible: set[Pair] = set()

    def gain(row: Row, name: str, value: str) -> int:
        here = order[name]
        ours = (name, value)
        return sum(((item, ours) if order[item[0]] < here else (ours, item)) in missing for item in row.items())

    def grown(pair: Pair) -> dict[str, str] | None:
        row = dict(pair)
        rest = [name for name in axes if name not in row]
        choice.shuffle(rest)
        for name in rest:
            open_values = [value for value in axes[name] if fits({**row, name: value})]
            if not open_values:
                return None
            first = next(iter(axes[name])) if name in expensive else None
            row[name] = max(open_values, key=lambda value: (gain(row, name, value), value == first, choice.random()))
        return {name: row[name] for name in axes}

    while missing:
        pair = next(iter(missing))
        candidates: list[dict[str, str]] = []
        for _ in range(ATTEMPTS):
            if len(candidates) < CANDIDATES and (row := grown(pair)) is not None:
                candidates.append(row)
        if not candidates:
            del missing[pair]
            impossible.add(pair)
            continue
        best = max(candidates, key=lambda row: sum(each in missing for each in pairs_of(row)))
        for each in pairs_of(best):
            missing.pop(each, None)
        rows.append(best)
    return rows, impossible
