"""The arithmetic between records and figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.ladder.measures import Baseline, DecodeCost, Figures, faults, per_token, speedup
from benchmarks.ladder.record import StepRecord
from benchmarks.ladder.rounds import ratios
from benchmarks.ladder.workloads import PAPER, Bound
from oppo.errors import ProtocolError

STEP = StepRecord(
    seconds=4.0,
    tokens=100,
    samples=10,
    capped=1,
    decode=2.0,
    score=1.2,
    update=0.8,
    exposed=1.2,
    busy={"actor": 2.0, "reward": 1.2, "trainer": 0.8},
    decode_steps=50,
    decoded=100,
)


def figures(*steps: StepRecord, score: float | None = None, cost: DecodeCost | None = None) -> Figures:
    return Figures.of([steps], Baseline(score, cost), 100.0)


def test_a_serial_step_hides_nothing_and_its_shares_are_those_of_its_phases() -> None:
    serial = figures(STEP, STEP, score=2.4, cost=DecodeCost.fitted([STEP]))
    assert serial.hidden_fraction == pytest.approx(0.0)
    assert serial.decode_slowdown == pytest.approx(1.0)
    assert serial.shares == pytest.approx({"decode": 0.5, "score": 0.3, "update": 0.2})
    assert serial.busy == pytest.approx({"actor": 0.5, "reward": 0.3, "trainer": 0.2})
    assert (serial.tokens_per_second, serial.samples_per_second) == (25.0, 2.5)
    assert (serial.live_rows_per_decode_step, serial.cap_hit_rate) == (2.0, 0.1)


def test_hiding_is_measured_against_the_serial_scoring_and_bought_with_slower_decoding() -> None:
    overlapped = replace(STEP, seconds=4.0, decode=3.2, score=2.0, exposed=0.0)
    chunk = figures(overlapped, score=1.2, cost=DecodeCost.fitted([STEP]))
    assert chunk.hidden_fraction == 1.0
    assert chunk.decode_slowdown == pytest.approx(1.6)
    assert figures(replace(overlapped, exposed=0.3), score=1.2).hidden_fraction == pytest.approx(0.75)


def test_the_cost_of_decoding_alone_is_found_from_steps_of_different_occupancy() -> None:
    alone = [
        replace(STEP, decode_steps=steps, decoded=tokens, decode=0.01 * steps + 0.001 * tokens)
        for steps, tokens in ((100, 400), (300, 700), (50, 900))
    ]
    cost = DecodeCost.fitted(alone)
    assert cost is not None
    assert (cost.per_step, cost.per_token) == pytest.approx((0.01, 0.001))


def test_a_cost_is_never_negative_and_right_in_total() -> None:
    alone = [
        replace(STEP, decode_steps=steps, decoded=tokens, decode=took)
        for steps, tokens, took in ((100, 100, 1.0), (100, 200, 0.8), (200, 300, 2.0))
    ]
    cost = DecodeCost.fitted(alone)
    assert cost is not None
    assert min(cost.per_step, cost.per_token) >= 0
    assert sum(map(cost.seconds, alone)) == pytest.approx(3.8)


def test_what_the_steps_are_bound_by_is_judged_over_all_of_them() -> None:
    parts = {"decode": 0.1, "tail": 0.4, "cap": 0.0, "score": 0.3, "train": 0.2, "limit": 2.0, "scoring": 0.6}
    parts |= {"limit_stream": 1.2, "limit_carry": 1.8, "limit_lookahead": 1.1}
    said = {f"bottleneck/{name}": value for name, value in {**parts, "capped": 0.0, "finished": 10.0}.items()}
    trained = {**said, "bottleneck/tail": 0.0, "bottleneck/train": 0.6, "bottleneck/limit": 1.5}
    found = figures(replace(STEP, bottleneck=said), replace(STEP, seconds=12.0, bottleneck=trained))
    assert found.verdict is not None
    assert found.verdict.largest == "train"
    assert found.verdict.shares["train"] == pytest.approx((4 * 0.2 + 12 * 0.6) / 16)
    told = found.as_json()["verdict"]
    assert isinstance(told, dict)
    assert told["sentence"] == found.verdict.sentence
    assert figures(STEP).as_json()["verdict"] is None


def test_nothing_decoded_is_no_cost() -> None:
    assert DecodeCost.fitted([replace(STEP, decode=0.0, decode_steps=0)]) is None


def test_a_peer_that_cannot_look_inside_has_speeds_only() -> None:
    peer = figures(StepRecord(seconds=8.0, tokens=100, samples=10), score=1.2, cost=DecodeCost.fitted([STEP]))
    assert peer.tokens_per_second == 12.5
    assert (peer.hidden_fraction, peer.decode_slowdown, peer.live_rows_per_decode_step) == (None, None, None)
    assert peer.shares == {}


def test_a_speed_up_is_of_pairs_of_rounds_so_that_a_slow_minute_cancels() -> None:
    fast = [[replace(STEP, seconds=2.0)], [replace(STEP, seconds=20.0)], [replace(STEP, seconds=2.0)]]
    slow = [[replace(STEP, seconds=3.0)], [replace(STEP, seconds=30.0)], [replace(STEP, seconds=4.0)]]
    pairs = speedup(fast, slow)
    assert (pairs.median, pairs.low, pairs.high) == pytest.approx((1.5, 1.5, 2.0))


def test_a_mode_is_compared_with_serial_with_what_it_adds_to_and_with_peers() -> None:
    counted = {name: [[replace(STEP, seconds=took)]] for name, took in (("serial", 4.0), ("chunk", 3.0), ("trl", 12.0))}
    found = ratios(counted | {"adaptive": [[replace(STEP, seconds=2.0)]]})
    assert {name: spread.median for name, spread in found.items()} == pytest.approx(
        {
            "chunk/serial": 4 / 3,
            "trl/serial": 1 / 3,
            "adaptive/serial": 2.0,
            "adaptive/chunk": 1.5,
            "serial/trl": 3.0,
            "chunk/trl": 4.0,
            "adaptive/trl": 6.0,
        }
    )


def test_short_responses_trained_first_earn_no_credit() -> None:
    short = [[replace(STEP, seconds=2.0, tokens=50)]]
    assert per_token(short[0]) == per_token([STEP])
    assert speedup(short, [[STEP]]).median == 1.0


def test_outside_of_the_stated_shares_a_run_is_invalid_and_says_what_it_measured() -> None:
    serial = figures(STEP, score=1.2)
    wanted = replace(PAPER, shares=(Bound("split", "score", 0.25, 0.30),), capped=(0.0, 0.2))
    assert faults(wanted, "split", {"serial": serial}, 0.1) == []
    narrow = replace(wanted, shares=(Bound("split", "score", 0.25, 0.29),))
    (fault,) = faults(narrow, "split", {"serial": serial}, 0.1)
    assert fault == "score took 0.300 of the serial step, and the workload states 0.25 to 0.29"
    assert faults(narrow, "shared", {"serial": serial}, 0.1) == []
    assert "did not run" in faults(wanted, "split", {"chunk": serial}, 0.1)[0]


def test_other_lengths_than_the_stated_ones_make_a_run_invalid() -> None:
    drifted = figures(replace(STEP, as_announced=0.5))
    (capped, announced) = faults(replace(PAPER, shares=()), "split", {"chunk": drifted}, 0.05)
    assert "0.050 of the prompts announce the cap" in capped
    assert "chunk: only 0.500 of the responses were as long as announced" in announced


@pytest.mark.parametrize("told", ["fast", {"seconds": 1}, {"seconds": 0, "tokens": 5, "samples": 1}])
def test_a_record_that_is_none_is_refused(told: object) -> None:
    with pytest.raises(ProtocolError, match="expected a step"):
        StepRecord.of(told)


def test_a_record_survives_the_pipe() -> None:
    assert StepRecord.of({**STEP.as_json(), "mean_length": 10}) == STEP
