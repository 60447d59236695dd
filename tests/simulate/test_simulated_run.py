"""One simulated run: phases that are known exactly, and tens of thousands of rollouts."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from oppo.admission import Continuous, Overcommit, Synchronous
from oppo.simulate.profile import Decoder, Lognormal, Reader, System, Updater, Workload
from oppo.simulate.schedule import Schedule, SimulatedRun

# Seconds in which a batch of two responses of eight tokens is decoded, and in which both are scored at their end
DECODE, EXPOSED = 1.0, 0.5


def always(units: int, samples: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    del seed
    return np.full((units, samples), 8, np.int64)


def period(update: float, lookahead: int, *, in_flight: bool = False) -> float:
    system = System(
        decoder=Decoder(step=DECODE / 8),
        readers={"reward": Reader(answer=EXPOSED / 2)},
        updater=Updater(fixed=update, device="trainer"),
    )
    waiting = Schedule(name="it", about="", admission=partial(Synchronous, 2), lookahead=lookahead, in_flight=in_flight)
    workload = Workload(batch=2, lengths=always, cap=8, prompt=2)
    # twelve steps count: a whole number of the rounds in which two or three steps are in flight
    return SimulatedRun(system, workload, waiting, 24, 12).run().seconds


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("update", [0.25, 1.0, 2.0])
def test_constant_phases_take_what_the_slowest_device_takes(update: float, in_flight: bool) -> None:
    assert period(update, 0) == DECODE + EXPOSED + update
    one = period(update, 1, in_flight=in_flight)
    assert one == max(DECODE, update, (DECODE + EXPOSED + update) / 2)
    assert one <= max(DECODE, EXPOSED + update)
    assert period(update, 2, in_flight=in_flight) == max(DECODE, EXPOSED, update)


def test_what_bounds_a_step_is_named_by_what_the_busiest_device_does() -> None:
    """Eight decode steps of 0.1 s launching, 0.2 s for weights, 0.01 s a row and 0.001 s a token of context."""
    system = System(
        decoder=Decoder(step=0.3, launching=0.1, row=0.01, context=0.001, ending=0.25),
        readers={"reward": Reader(answer=0.2, device="actor")},
        updater=Updater(fixed=0.5, device="trainer", weight_sync=0.1),
    )
    waiting = Schedule(name="it", about="", admission=partial(Synchronous, 2), held=True)
    outcome = SimulatedRun(system, Workload(batch=2, lengths=always, cap=8, prompt=2), waiting, 24, 12).run()
    context = sum(2 * (2 + step + 1 / 2) for step in range(8)) * 0.001
    expected = {
        "weights": 1.6,
        "launching kernels": 0.8,
        "prefill and ends": 0.5,
        "scoring": 0.4,
        "rows": 0.16,
        "KV cache": context,
    }
    assert outcome.seconds == pytest.approx(sum(expected.values()) + 0.6)
    shares = {name: seconds / outcome.seconds for name, seconds in expected.items()}
    assert outcome.parts == pytest.approx(shares)
    assert list(outcome.parts) == list(expected)


def test_steps_that_are_drained_after_stand_alone() -> None:
    """Of each two steps the first has nothing before it, and the second is decoded while the first is trained."""
    system = System(decoder=Decoder(step=DECODE / 8), updater=Updater(fixed=2.0, device="trainer"))
    waiting = Schedule(name="it", about="", admission=partial(Synchronous, 2), lookahead=1)
    workload = Workload(batch=2, lengths=always, cap=8, prompt=2)
    pairs = SimulatedRun(system, workload, waiting, 24, 12, drain_after=range(1, 36, 2)).run()
    assert pairs.seconds == (DECODE + 2.0 + 2.0) / 2


def test_ten_thousand_rollouts_are_live_at_once() -> None:
    """In the graph of training, three steps of them took 23 s of one core; here they take one."""
    system = System(decoder=Decoder(step=0.006, row=5e-5, replicas=7), updater=Updater(fixed=1.0))
    workload = Workload(batch=8_000, lengths=Lognormal(median=(400, 400), sigma=0.8, cap=4096), cap=4096, prompt=250)
    carrying = Schedule(name="it", about="", admission=partial(Overcommit, 8_000, 2_000), chunk=256)
    simulated = SimulatedRun(system, workload, carrying, 3, 1)
    outcome = simulated.run()
    assert sum(lane.peak_rows for lane in simulated.lanes) == 10_000
    assert outcome.extra == 2_000
    assert outcome.staleness == pytest.approx(2_000 / 8_000, rel=0.5)


def test_rollouts_that_are_replaced_at_once_leave_no_decode_step_empty() -> None:
    system = System(
        decoder=Decoder(step=0.01, row=0.001),
        updater=Updater(fixed=0.3, device="trainer"),
        readers={"reward": Reader()},
    )
    workload = Workload(batch=16, lengths=Lognormal(median=(40, 40), sigma=0.9, cap=300), cap=300, prompt=20)
    replaced = Schedule(
        name="it", about="", admission=partial(Continuous, 16, 8, 64), chunk=16, lookahead=2, in_flight=True
    )
    waiting = Schedule(name="it", about="", admission=partial(Synchronous, 16), chunk=16, lookahead=2, in_flight=True)
    full, ragged = (SimulatedRun(system, workload, each, 24, 8, 1).run() for each in (replaced, waiting))
    assert full.idle == pytest.approx(0.0, abs=0.02)
    assert full.per_token < ragged.per_token
    assert full.longest_staleness <= 64 + 2
