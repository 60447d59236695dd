"""Work simulated in bulk: beside the graph of training in virtual time, and the laws that it must keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from oppo.admission import Admission, Continuous, Overcommit, SlopeAdaptive, Synchronous, TailAdaptive, TailBatched
from oppo.admission.forecast import cut_intervals, kaplan_meier
from oppo.models import Passes
from oppo.simulate.calibrate import LAYOUTS
from oppo.simulate.profile import Decoder, Lognormal, Reader, System, Updater, Workload, time_shared
from oppo.simulate.schedule import Schedule, SimulatedRun
from tests.kit.graph_run import LAST, GraphRun
from tests.simulate.systems import WORKLOAD, machine

B = 16
SPLIT, SHARED = machine(LAYOUTS["split"]), machine(LAYOUTS["shared"])
# Three replicas on a device that trains too, and scorers that read at the cut, one of them padded
LATE = System(
    decoder=Decoder(step=4e-3, row=1e-4, context=1e-6, floor=6e-3, prefill=Passes(token=2e-5), replicas=3),
    readers={
        "reference": Reader(passes=Passes(token=5e-5, pair=1e-8), call=3e-3, streams=False, device="actor", place="f"),
        "critic": Reader(passes=Passes(token=5e-5), call=3e-3, streams=False, padded=True, device="actor", place="f"),
        "reward": Reader(passes=Passes(token=2e-4), call=4e-3, answer=1e-3),
    },
    updater=Updater(passes=Passes(token=1e-4), fixed=0.2, weight_sync=0.05, padded=True),
    interference=time_shared,
)
SLOW = replace(SPLIT, readers={"reward": replace(SPLIT.readers["reward"], passes=Passes(token=4e-3))})
KEPT = replace(SHARED, decoder=replace(SHARED.decoder, recomputes=False, replicas=2))
GROUPS = replace(WORKLOAD, batch=6, samples=3)
TAIL = replace(WORKLOAD, lengths=Lognormal(median=(20, 20), sigma=1.4, cap=300))


def schedule(admission: Callable[[], Admission], **others: object) -> Schedule:
    found = Schedule(name="it", about="", admission=admission, chunk=32)
    return replace(found, **others)  # type: ignore[arg-type]  # fields of a schedule


ALL = partial(Synchronous, B)
FIXED, ADAPTIVE = partial(Overcommit, B, 3), partial(TailAdaptive, B)
CASES: dict[str, tuple[System, Workload, Schedule]] = {
    "serial": (SPLIT, WORKLOAD, schedule(ALL, held=True, chunk=None)),
    "whole responses": (SPLIT, WORKLOAD, schedule(ALL, chunk=None)),
    "streamed": (SHARED, WORKLOAD, schedule(ALL)),
    "fixed": (SHARED, WORKLOAD, schedule(FIXED)),
    "adaptive": (SPLIT, WORKLOAD, schedule(ADAPTIVE)),
    "slope": (SHARED, WORKLOAD, schedule(partial(SlopeAdaptive, B))),
    "tail batched": (SPLIT, TAIL, schedule(partial(TailBatched, B))),
    "lookahead": (SPLIT, WORKLOAD, schedule(ALL, lookahead=1)),
    "lookahead and fixed": (SHARED, WORKLOAD, schedule(FIXED, lookahead=2)),
    "in flight": (SHARED, WORKLOAD, schedule(FIXED, lookahead=2, in_flight=True)),
    "continuous, kept": (KEPT, WORKLOAD, schedule(partial(Continuous, B, 8), lookahead=2, in_flight=True)),
    "groups": (SHARED, GROUPS, schedule(partial(Overcommit, 6, 2))),
    "scorer bound": (SLOW, WORKLOAD, schedule(FIXED)),
    "tail bound": (SPLIT, TAIL, schedule(FIXED)),
    "read at the cut": (LATE, WORKLOAD, schedule(FIXED)),
    "a slow scorer, ahead": (SLOW, WORKLOAD, schedule(ADAPTIVE, lookahead=1)),
}
DEEP = {"whole responses", "slope", "lookahead", "tail bound", "a slow scorer, ahead"}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.deep] if each in DEEP else []) for each in CASES]
)
def test_a_step_takes_as_long_as_in_the_graph_of_training(name: str) -> None:
    """Within 3%, with the controller's own choices and the same staleness."""
    system, workload, chosen = CASES[name]
    bulk = SimulatedRun(system, workload, chosen, 20, 5, seed=1).run()
    graph = GraphRun(system, workload, chosen, 20 + LAST + chosen.lookahead, 5, seed=1).run()
    assert bulk.per_token == pytest.approx(graph.seconds / graph.tokens, rel=0.03)
    assert bulk.staleness == pytest.approx(graph.staleness, abs=0.05 * (1 + graph.staleness))
    assert bulk.token_staleness == pytest.approx(graph.token_staleness, abs=0.05 * (1 + graph.staleness))
    assert bulk.longest_staleness == graph.longest_staleness
    assert np.mean(bulk.extras) == pytest.approx(np.mean(graph.extras[: len(bulk.extras)]), abs=0.25)


sizes = st.tuples(st.integers(2, 12), st.integers(1, 3), st.integers(1, 4))  # of a batch, of a group; most deferrals
overlaps = st.tuples(st.integers(0, 2), st.booleans(), st.booleans(), st.sampled_from([None, 8, 32]))


@given(sizes, overlaps, st.sampled_from([SPLIT, SHARED, LATE, KEPT]), st.integers(0, 99))
@settings(max_examples=30)
def test_every_token_is_decoded_once_and_none_is_older_than_promised(
    size: tuple[int, int, int], overlap: tuple[int, bool, bool, int | None], system: System, seed: int
) -> None:
    (batch, samples, most), (lookahead, in_flight, refills, chunk) = size, overlap
    extra = max(1, batch // 3)
    admission = partial(Continuous if refills else Overcommit, batch, extra, most)
    workload = replace(WORKLOAD, batch=batch, samples=samples)
    chosen = schedule(admission, lookahead=lookahead, in_flight=in_flight and lookahead > 0, chunk=chunk)
    run = SimulatedRun(system, workload, chosen, 8, 2, seed=seed)
    outcome = run.run()
    trained = [row for step in run.ended for row in step.trained]
    assert len(trained) == len({row.prompt.rollout for row in trained}) == 8 * batch * samples
    behind = [row for step in run.alive for row in step.trained]
    decoded = sum(lane.places for lane in run.lanes)
    flying = sum(row.home.made(row) for row in run.rows.values() if row.home is not None)
    assert decoded == sum(row.length for row in (*trained, *behind)) + flying
    assert outcome.longest_staleness <= most + lookahead
    assert all(row.read[n] == workload.prompt + row.length for row in trained for n in range(len(row.read)))


@pytest.mark.parametrize("extra", [4, 8, 16, 28])
def test_decode_steps_and_staleness_are_what_the_law_says(extra: int) -> None:
    """The law is `oppo.admission.forecast`'s: B sum S(k n) = Delta; by Little's law the mean lag is Delta / B."""
    lengths, batch = Lognormal(median=(375, 375), sigma=0.8, cap=4096), 112
    system = System(decoder=Decoder(step=5.8e-3, row=5e-5, replicas=7), updater=Updater(fixed=1.0))
    workload = Workload(batch=batch, lengths=lengths, cap=4096, prompt=250)
    chosen = schedule(partial(Overcommit, batch, extra, 64), chunk=None)
    run = SimulatedRun(system, workload, chosen, 72, 12, seed=2)
    outcome = run.run()
    law = cut_intervals(kaplan_meier(lengths(40_000, 1, 5)[:, 0].tolist(), []), batch, extra, 64)[extra]
    assert np.mean([step.steps for step in run.ended[12:]]) == pytest.approx(law, rel=0.03)
    assert outcome.staleness == pytest.approx(extra / batch, rel=0.02)


def test_what_defers_nothing_is_the_synchronous_schedule_to_the_last_digit() -> None:
    def ends(admission: Callable[[], Admission]) -> list[float]:
        run = SimulatedRun(SHARED, WORKLOAD, schedule(admission), 10, 2, seed=3)
        run.run()
        return [step.ended for step in run.ended]

    assert ends(partial(Overcommit, B, 0)) == ends(ALL)
    assert ends(partial(TailAdaptive, B, price=1e9)) == ends(ALL)


def test_lengths_in_grains_change_little() -> None:
    fine, coarse = (SimulatedRun(SHARED, TAIL, schedule(FIXED), 40, 8, 1, grain).run() for grain in (1, 4))
    assert coarse.per_token == pytest.approx(fine.per_token, rel=0.02)


def test_rows_that_keep_their_place_are_decoded_and_padded_to_the_end() -> None:
    """In a static engine: four rows of the longest's context in each of its steps."""
    decoder = Decoder(step=0.01, row=0.001, context=1e-5, static=True)
    lengths = np.array([[5], [9], [30], [12]] * 8)
    workload = Workload(batch=4, lengths=lambda units, samples, seed: lengths[:units], cap=30, prompt=20)
    outcome = SimulatedRun(System(decoder=decoder), workload, schedule(partial(Synchronous, 4), held=True), 4, 1).run()
    step = 30 * (0.01 + 4 * 0.001 + 1e-5 * 4 * 20.5) + 1e-5 * 4 * 30 * 29 / 2
    assert outcome.seconds == pytest.approx(step)
