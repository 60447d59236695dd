"""The small regime: a batch of two dozen responses of some dozens of tokens, on two cores; costs as measured there."""

from __future__ import annotations

from oppo.simulate.costs import Decoder, Lognormal, Passes, Reader, System, Updater, Workload


def desk(row: float) -> System:
    """Return the costs of models of some millions of parameters: in proportion to the tokens of responses.

    One core decodes and trains, the other one scores.

    Args:
        row: seconds of a decode step for each live row.
    """
    return System(
        decoder=Decoder(step=5.6e-3, row=row),
        readers={"reward": Reader(passes=Passes(token=0.75e-3))},  # reference and critic included
        updater=Updater(passes=Passes(token=0.54e-3)),
    )


def desk_workload(batch: int, sigma: float = 1.0, cap: int = 384) -> Workload:
    """Return the workload of a batch of that size."""
    return Workload(batch=batch, lengths=Lognormal(median=(40, 40), sigma=sigma, cap=cap), cap=cap, prompt=0)
