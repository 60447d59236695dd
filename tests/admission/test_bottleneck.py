"""What a step's time went to: known steps, the boundaries between bottlenecks, and what holds for any step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, strategies as st

from oppo import grpo
from oppo.admission import Bottleneck, Observation, Overcommit, Scoring, bottleneck, together
from oppo.admission.bottleneck import PARTS, StepPart
from oppo.events import StepReport
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, prompts, run_virtual

STEP = Observation(
    step=3,
    seconds=12.0,
    decode_seconds=10.0,
    decode_steps=100,
    tokens=200,
    rows=4,
    finished=(10, 30, 60, 100),
    scoring=(Scoring("ref_logp", 1.0, 0.5), Scoring("reward", 4.0, 1.0)),
    rest_seconds=1.0,
)
"""Half of the places in its decode steps are empty."""


def judge(seen: Observation) -> Bottleneck:
    found = bottleneck(seen)
    assert found is not None
    return found


def shares(**parts: float) -> dict[StepPart, float]:
    return {part: parts.get(part, 0.0) for part in PARTS}


def test_a_step_with_empty_slots_is_bound_by_its_tail() -> None:
    found = judge(STEP)
    assert found.shares == pytest.approx(shares(decode=5 / 12, tail=5 / 12, score=1 / 12, train=1 / 12))
    assert found.limits == pytest.approx({"stream": 12 / (10 + 1), "defer": 12 / (5 + 1), "lookahead": 12 / 10})
    assert found.limit == pytest.approx(12 / 5)
    assert judge(replace(STEP, tokens=199)).largest == "tail"
    assert judge(replace(STEP, tokens=200)).largest == "decode", "of equal parts the first counts"
    assert judge(replace(STEP, tokens=199)).message == (
        "42% of the step is lost to slots left empty by the long tail; defer more stragglers: at most 2.0 times as "
        "fast; all schedules together: at most 2.4 times"
    )


def test_a_step_of_equal_lengths_is_bound_by_decoding() -> None:
    found = judge(replace(STEP, tokens=400, finished=(100,) * 4))
    assert found.largest == "decode"
    assert (found.limits["defer"], found.limit) == pytest.approx((12 / 11, 12 / 10))
    streamed = judge(replace(STEP, tokens=400, seconds=10.2, scoring=(), rest_seconds=0.2))
    assert streamed.next_schedule is None
    assert streamed.message == (
        "98% of the step is decoding with every slot taken; only a faster decode step would help; no schedule makes "
        "it more than 1.0 times as fast"
    )


def test_a_tail_that_reaches_the_cap_within_a_step_is_one_of_the_cap() -> None:
    capped = judge(replace(STEP, tokens=196, capped=1))
    assert capped.largest == "cap"
    assert capped.shares["tail"] == 0
    assert capped.needed == 3
    assert "1 of 4 run into the length cap; defer more stragglers: fewer than reach the cap gain" in capped.message
    assert "about 3 are needed: at most 2.0 times as fast" in capped.message


def test_a_scorer_busier_than_decoding_sets_its_pace() -> None:
    nearly = replace(STEP, seconds=14.0, scoring=(Scoring("reward", 6.99, 3.0),))
    assert judge(nearly).shares["score"] == pytest.approx(3 / 14)
    paced = judge(replace(nearly, scoring=(Scoring("reward", 7.0, 3.0),)))
    assert paced.shares == pytest.approx(shares(decode=1.5 / 14, tail=1.5 / 14, score=10 / 14, train=1 / 14))
    assert paced.limits == pytest.approx({"stream": 14 / 11, "defer": 14 / 11, "lookahead": 14 / 10})
    assert paced.limit == pytest.approx(14 / 10)
    assert paced.message.startswith("the slowest scorer is busy for 1.0 times as long as decoding, 71% of the step")


def test_scores_that_come_after_decoding_are_to_be_streamed() -> None:
    held = judge(replace(STEP, seconds=20.0, scoring=(Scoring("reward", 0.0, 9.0),)))
    assert held.largest == "score"
    assert held.message.startswith(
        "45% of the step waits for scores after decoding; score responses while they are decoded: at most 1.8 times"
    ), "without any staleness"
    assert held.limits == pytest.approx({"stream": 20 / 11, "defer": 20 / 10, "lookahead": 20 / 10})
    assert held.limit == pytest.approx(20 / 9)


def test_an_update_of_half_the_step_is_to_be_overlapped_with_decoding() -> None:
    found = judge(replace(STEP, seconds=27.4, rest_seconds=17.0, scoring=()))
    assert found.limits["defer"] == pytest.approx(27.4 / 22)
    assert found.message == (
        "the update takes 62% of the step; decode during the update (one more step of lookahead, or streamed "
        "updates): at most 1.6 times as fast on hardware of its own"
    )


def test_what_a_streamed_update_took_beside_decoding_counts_to_the_trainer() -> None:
    streamed = replace(STEP, tokens=400, accumulate_seconds=9.5, scoring=())
    assert judge(streamed).limits["defer"] == pytest.approx(12 / 11)
    assert judge(streamed).limit == pytest.approx(12 / 10.5)
    assert judge(streamed).shares == judge(replace(streamed, accumulate_seconds=0.0)).shares


def virtual_steps(lookahead: int) -> list[StepReport]:
    """Return steps that decode for 10 s, every slot taken, and update for 8 s."""

    async def main() -> list[StepReport]:
        graph = grpo(
            policy=FakePolicy(length=lambda _: 20, seconds=0.5),
            reward=FakeScorer(fake_scalar),
            trainer=FakeTrainer(seconds=8.0),
            samples=4,
            admission=Overcommit(batch=4),
        )
        async with graph.open(prompts(100), lookahead=lookahead) as run:
            return [step async for step in run.steps(8)]

    return run_virtual(main)


def test_the_limit_holds_for_the_schedule_that_the_verdict_names() -> None:
    in_turn, ahead = (virtual_steps(lookahead)[-2] for lookahead in (0, 1))
    before, after = (Bottleneck.of_metrics(each.metrics, each.seconds) for each in (in_turn, ahead))
    assert before is not None
    assert before.next_schedule == "lookahead"
    assert before.limit == pytest.approx(1.8) == before.limits["lookahead"]
    assert before.limits["defer"] == pytest.approx(1.0)
    assert in_turn.seconds / ahead.seconds == pytest.approx(1.8)
    assert after is not None
    assert (after.largest, after.next_schedule) == ("decode", None)
    assert after.limit == pytest.approx(1.0)
    assert "no schedule makes it more than 1.0 times as fast" in after.message


@pytest.mark.parametrize("nothing", [replace(STEP, decode_seconds=0.0), replace(STEP, decode_steps=0)])
def test_nothing_is_said_of_a_step_that_decoded_nothing(nothing: Observation) -> None:
    assert bottleneck(nothing) is None


def test_a_bottleneck_is_found_again_among_the_metrics() -> None:
    found = judge(replace(STEP, capped=1))
    metrics: dict[str, float | None] = {"objective/kl": 1.0, **found.as_metrics()}
    assert Bottleneck.of_metrics(metrics, found.seconds) == found
    assert Bottleneck.of_metrics({**metrics, "bottleneck/limit": None}, 1.0) is None
    assert Bottleneck.of_metrics({}, 1.0) is None


def test_steps_together_are_judged_by_the_second() -> None:
    long, short = replace(STEP, seconds=42.0, rest_seconds=31.0, capped=2), replace(STEP, tokens=100)
    both = together([judge(long), judge(short), judge(short)])
    assert both is not None
    assert both.largest == "train"
    assert both.shares["train"] == pytest.approx(33 / 66)
    assert both.limit == pytest.approx(66 / (31 + 5 + 5), rel=1e-6)
    assert both.limits == pytest.approx(
        {"stream": 66 / (41 + 2 * 11), "defer": 66 / (36 + 6 + 6), "lookahead": 66 / 51}
    )
    assert both.capped == pytest.approx(2 / 3)
    assert together([]) is None


AHEAD = replace(STEP, lookahead=1, seconds=10.0)
"""Decoding all the time, beside the scoring and the update of the step before."""


def test_with_steps_in_flight_the_longest_phase_sets_the_pace() -> None:
    found = judge(AHEAD)
    assert found.shares == pytest.approx(shares(decode=0.5, tail=0.5))
    assert found.limit == pytest.approx(10 / 5), "with every slot taken decoding would be as long as the scorer is busy"
    trained = judge(replace(AHEAD, seconds=20.0, rest_seconds=20.0))
    assert trained.shares == pytest.approx(shares(train=1.0))
    assert trained.limit == 1.0
    assert trained.message.startswith("the update takes 100% of the step; only a faster update would help; no sched")
    scored = judge(replace(AHEAD, seconds=15.0, scoring=(Scoring("reward", 9.0, 6.0),)))
    assert scored.shares == pytest.approx(shares(score=1.0))
    assert scored.message.startswith("the slowest scorer is busy for 1.5 times as long as decoding, 100% of the step")


def test_what_the_longest_phase_waits_for_has_its_share_too() -> None:
    """Three phases of one length, of which two steps in flight can fill two."""
    chained = replace(AHEAD, tokens=400, seconds=15.0, scoring=(Scoring("reward", 0.0, 10.0),), rest_seconds=10.0)
    assert judge(chained).shares == pytest.approx(shares(decode=10 / 15, score=2.5 / 15, train=2.5 / 15))
    assert judge(chained).limit == pytest.approx(1.5), "more steps in flight would fill all three"
    assert judge(chained).next_schedule == "lookahead"
    waits = replace(AHEAD, seconds=12.0)
    assert judge(waits).limits == pytest.approx({"stream": 12 / 11, "defer": 12 / 7, "lookahead": 12 / 10})
    assert judge(waits).next_schedule == "defer"


SECONDS = st.floats(0, 1e4)


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    """Any step in which something was decoded; scorers work between its beginning and its last value."""
    decode, waited, rest = draw(st.floats(1e-6, 1e4)), draw(SECONDS), draw(SECONDS)
    rows, steps = draw(st.integers(1, 50)), draw(st.integers(1, 5_000))
    tokens = draw(st.integers(steps, rows * steps))
    finished = tuple(draw(st.lists(st.integers(1, 5_000), max_size=8)))
    parts = st.tuples(st.floats(0, 1), st.floats(0, 1))
    return Observation(
        step=0,
        seconds=decode + waited + rest,
        decode_seconds=decode,
        decode_steps=steps,
        tokens=tokens,
        rows=rows,
        finished=finished,
        capped=draw(st.integers(0, len(finished))),
        scoring=tuple(
            Scoring(str(k), before * decode, after * waited) for k, (before, after) in enumerate(draw(st.lists(parts)))
        ),
        rest_seconds=rest,
    )


@given(observations())
def test_every_step_that_decodes_has_one_bottleneck_with_parts_that_add_up(seen: Observation) -> None:
    found = judge(seen)
    assert found.largest in PARTS
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in found.shares.values())
    assert math.fsum(found.shares.values()) == pytest.approx(1)
    assert 1 <= found.limit < math.inf
    assert found.limit * found.shares["train"] <= 1 + 1e-9, "the update is part of the least"
    assert all(1 <= limit <= found.limit * (1 + 1e-9) for limit in found.limits.values())
    assert found.limits["stream"] <= found.limits["defer"] * (1 + 1e-9)
    assert (found.next_schedule is None) == (max(found.limits.values()) < 1.05)
    assert found.message


@given(observations(), st.floats(0, 1e4))
def test_a_longer_update_lowers_what_is_gained_before_it_and_raises_its_share(seen: Observation, more: float) -> None:
    longer = judge(replace(seen, seconds=seen.seconds + more, rest_seconds=seen.rest_seconds + more))
    assert longer.limits["stream"] <= judge(seen).limits["stream"] * (1 + 1e-9)
    assert longer.limits["defer"] <= judge(seen).limits["defer"] * (1 + 1e-9)
    assert longer.shares["train"] >= judge(seen).shares["train"] - 1e-9


@given(observations(), st.floats(0, 1))
def test_a_busier_scorer_in_the_same_time_never_raises_the_limit(seen: Observation, more: float) -> None:
    decode, waited = seen.decode_seconds, max(0.0, seen.seconds - seen.decode_seconds - seen.rest_seconds)
    busier = [
        Scoring(each.stage, max(each.before, more * decode), max(each.after, more * waited)) for each in seen.scoring
    ]
    assert judge(replace(seen, scoring=tuple(busier))).limit <= judge(seen).limit * (1 + 1e-9)


@example(Observation(0, seconds=1.0, decode_seconds=1.0, decode_steps=1, tokens=1, rows=1, rest_seconds=5e-324), 1, 0.5)
@given(observations(), st.integers(1, 3), st.floats(0, 1e4))
def test_with_steps_in_flight_too_parts_add_up_and_the_longest_phase_is_the_bottleneck_where_nothing_waits(
    seen: Observation, lookahead: int, idle: float
) -> None:
    busy = max((each.busy for each in seen.scoring), default=0.0)
    longest = max(seen.decode_seconds, busy, seen.rest_seconds)
    found = judge(replace(seen, lookahead=lookahead, seconds=longest + idle))
    assert math.fsum(found.shares.values()) == pytest.approx(1)
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in found.shares.values())
    assert found.seconds == pytest.approx(longest + idle)
    assert 1 <= found.limit < math.inf
    tight = judge(replace(seen, lookahead=lookahead, seconds=longest))
    parts = {"train": seen.rest_seconds, "score": busy}
    assert tight.shares[tight.largest] > 0
    assert parts.get(tight.largest, seen.decode_seconds) == longest


@given(st.lists(observations(), min_size=1, max_size=5))
def test_steps_together_have_a_limit_between_their_own(seen: list[Observation]) -> None:
    each = [judge(step) for step in seen]
    both = together(each)
    assert both is not None
    limits = [one.limit for one in each]
    assert min(limits) * (1 - 1e-9) <= both.limit <= max(limits) * (1 + 1e-9)
    assert math.fsum(both.shares.values()) == pytest.approx(1)
