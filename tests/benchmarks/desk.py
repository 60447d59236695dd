"""The small regime: a batch of two dozen responses of some dozens of tokens, on two cores; costs as measured there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.controllers.regimes import Regime


@dataclass(frozen=True, slots=True)
class Desk:
    """Seconds of everything that is done by models of some millions of parameters: in proportion to tokens.

    One core decodes and trains, the other one scores.

    Attributes:
        step, row: seconds of a decode step: for itself, and for each live row.
        scoring, update: seconds for each token of a response.
    """

    regime: Regime
    step: float = 5.6e-3
    row: float = 0.75e-3
    scoring: float = 0.75e-3
    update: float = 0.54e-3
    grain: int = 1
    chunk: int = 32
    call: float = 0.0
    publish: float = 0.0

    def decoding(self, rows: int, context: float, steps: int) -> float:
        """Return the seconds of ``steps`` decode steps of so many live rows; their context costs nothing."""
        del context
        return steps * (self.step + self.row * rows)

    def reading(self, start: int, stop: int) -> float:
        """Return the seconds in which the scorers read positions ``start .. stop`` of a row."""
        return self.scoring * (stop - start)

    def forward(self, lengths: NDArray[np.int64]) -> float:
        """Return 0: the reference and the critic read along, too, and are among what reading costs."""
        del lengths
        return 0.0

    def training(self, lengths: NDArray[np.int64]) -> float:
        """Return the seconds of an update."""
        return self.update * float(lengths.sum())


def desk_regime(batch: int, sigma: float = 1.0, cap: int = 384) -> Regime:
    """Return the regime of a batch of that size."""
    return Regime(f"desk-{batch}", "", "any", batch, 0, (40, 40), sigma, cap)
