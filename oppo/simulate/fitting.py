"""Costs fitted to measurements: a robust sum of terms none of which is negative."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatArray64 = NDArray[np.float64]

ROUNDS: Final = 8
"""Times that measurements are weighed anew: those far from the fit count less."""

FAR: Final = 2.0
"""Typical deviations beyond which a measurement counts in proportion to its distance, not its square (Huber 1964)."""

SPREAD: Final = 1e-3
"""Weight of the prior that all terms share the seconds alike; it decides only what the measurements leave open."""


def fitted(work: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the cost of each kind of work: ``seconds = sum over kinds of cost * amount``, no cost below 0.

    A kind of which there was nothing costs nothing. Deviations are weighed by the square root of the seconds, as those
    of a sum of independent ones are; disturbed measurements count less; half of the time exceeds what the costs say.

    Args:
        work: of each measurement, the amount of each kind.
        seconds: of each measurement.

    Example:
        >>> [round(cost, 6) for cost in fitted([[1, 0], [1, 2], [1, 5]], [1.0, 2.0, 3.5])]
        [1.0, 0.5]
    """
    amounts, took = np.asarray(work, np.float64), np.asarray(seconds, np.float64)
    kinds = amounts.shape[1] if amounts.ndim == 2 else 0
    useful = took > 0
    amounts, took = amounts[useful] if len(took) else amounts, took[useful]
    if not len(took) or not kinds:
        return [0.0] * kinds
    scale = np.where(amounts.mean(0) > 0, amounts.mean(0), 1.0)
    inputs, unit = amounts / scale, took.mean()
    weights = 1 / np.sqrt(took / unit)
    shares = np.zeros(kinds)
    for _ in range(ROUNDS):
        shares = _least_squares(inputs, took / unit, weights)
        off = np.abs(inputs @ shares - took / unit) / np.sqrt(took / unit)
        typical = max(float(np.median(off)), 1e-9)
        weights = np.minimum(1.0, FAR * typical / np.maximum(off, 1e-12)) ** 0.5 / np.sqrt(took / unit)
    costs = shares * unit / scale
    costs *= _weighted_median(took / np.maximum(amounts @ costs, 1e-12), amounts @ costs)
    return [float(cost) for cost in costs]


def _weighted_median(values: FloatArray64, weights: FloatArray64) -> float:
    """Return the value up to which half of the weights lie."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)]) if reached[-1] > 0 else 1.0


def _least_squares(inputs: FloatArray64, outputs: FloatArray64, weights: FloatArray64) -> FloatArray64:
    """Return the best shares without a negative one: the kinds are few, so every choice of them is tried."""
    kinds = inputs.shape[1]
    prior = 1 / kinds
    best, least = np.zeros(kinds), np.inf
    for chosen in _choices(np.flatnonzero(inputs.any(0)).tolist()):
        columns = list(chosen)
        x = inputs[:, columns] * weights[:, None]
        y = outputs * weights
        ridge = SPREAD * np.eye(len(columns))
        found = prior + np.linalg.solve(x.T @ x + ridge, x.T @ (y - x.sum(1) * prior))
        if (found < 0).any():
            continue
        error = float(((x @ found - y) ** 2).sum() + SPREAD * ((found - prior) ** 2).sum())
        if error < least:
            best, least = np.zeros(kinds), error
            best[columns] = found
    return best


def _choices(kinds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(len(kinds), 0, -1):
        yield from combinations(kinds, size)
