"""GAE: dropped rollouts, the order of the batch, rewards at tokens and at the end."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Self, SupportsFloat

import numpy as np
import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from oppo.admission import Overcommit
from oppo.algorithms.group import grpo
from oppo.algorithms.ppo import ppo
from oppo.errors import ConfigError, GraphError, ModelError, ProtocolError
from oppo.events import (
    Batch,
    Chunk,
    Drop,
    Finish,
    FinishReason,
    FloatArray,
    Prompt,
    Response,
    Scored,
    ToolTokens,
)
from oppo.returns import AdaptiveKL, FixedKL, ScoreShaping, TokenRewards, shaped_rewards, weighted_sum
from oppo.scorers import ByColumn
from oppo.stages import GAE, Distillation, GroupRelative, InParts, Score, ScoredRollout, ScoredRollouts
from oppo.stages.advantage import AdaptiveObjective
from oppo.stages.batch import scored_rollout
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_per_token, fake_scalar, run_virtual
from tests.kit.known import known
from tests.kit.pipelines import Pipeline, Setting, same_batches
from tests.kit.responses import PerToken, Said, sent
from tests.kit.virtual import virtually


def finish(rollout: int, *, sampled: int = 4, given: int = 0, group: int | None = None) -> Finish:
    prompt = Prompt(rollout, rollout, np.arange(3, dtype=np.int32), group=rollout if group is None else group)
    logprobs = np.full(sampled, -1, np.float32)
    chunk = Chunk(rollout, 0, np.arange(sampled, dtype=np.int32), logprobs, np.zeros(sampled, np.int32))
    return Finish(
        rollout, Response.of(prompt, [chunk, ToolTokens(rollout, sampled, np.arange(given, dtype=np.int32))]), "eos"
    )


def per_token(rollout: int) -> Scored[FloatArray]:
    return Scored(rollout, np.full(4, -rollout, np.float32), 0)


def by_hand(rows: list[ScoredRollout], *, gamma: float, kl: float) -> list[float]:
    """Return the advantages of REINFORCE++ (Hu 2025, arXiv 2501.03262), token after token, in plain Python."""
    returns = []
    for each in rows:
        response, log_probs = each.finish.response, known(each.reference)
        sampled = [t for t in range(len(response)) if response.sampled[t]]
        reward = [-kl * (float(response.logprobs[t]) - float(log_probs[t])) for t in sampled]
        reward[-1] += each.score
        total = [sum(gamma ** (k - i) * reward[k] for k in range(i, len(reward))) for i in range(len(reward))]
        returns.append([total[sampled.index(t)] if t in sampled else 0.0 for t in range(len(response))])
    counted = [total for each, row in zip(rows, returns, strict=True) for total in masked(each, row)]
    mean = sum(counted) / len(counted)
    deviation = (sum((total - mean) ** 2 for total in counted) / (len(counted) - 1)) ** 0.5
    return [
        (total - mean) / deviation if response.sampled[t] else 0.0
        for response, row in zip((each.finish.response for each in rows), returns, strict=True)
        for t, total in enumerate(row)
    ]


def masked(each: ScoredRollout, row: list[float]) -> list[float]:
    return [total for total, sampled in zip(row, each.finish.response.sampled, strict=True) if sampled]


@given(st.floats(0, 1), st.floats(0, 1), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_without_a_critic_the_advantages_are_the_whitened_returns_of_reinforce(
    gamma: float, kl: float, lengths: list[int], seed: int
) -> None:
    dice, rows = np.random.default_rng(seed), []
    for rollout, length in enumerate([3, *lengths]):  # of one token alone there is no deviation
        sampled = dice.random(length) < 0.7
        sampled[dice.integers(length)] = True
        log, reference = -dice.random((2, length)).astype(np.float32) * 3
        tokens, versions = np.arange(length, dtype=np.int32), np.zeros(length, np.int32)
        response = Response(Prompt(rollout, rollout, tokens[:1]), tokens, log * sampled, versions, sampled)
        rows.append(ScoredRollout(Finish(rollout, response, "eos"), reference, float(dice.normal())))
    batch = GAE(gamma=gamma, kl=kl).batch(rows)
    np.testing.assert_allclose(known(batch.advantages), by_hand(rows, gamma=gamma, kl=kl), rtol=1e-3, atol=1e-4)
    assert (batch.values, batch.returns) == (None, None)


@pytest.mark.parametrize(
    ("score", "reference", "value", "reason"),
    [
        (float("nan"), 0.0, 0.0, "nonfinite score"),
        (1e39, 0.0, 0.0, "nonfinite score"),
        (1.0, -np.inf, 0.0, "nonfinite reference log-prob"),
        (1.0, 0.0, np.nan, "nonfinite value"),
    ],
)
def test_a_number_that_is_not_finite_drops_its_rollout_alone(
    score: float, reference: float, value: float, reason: str
) -> None:
    def batch(*, spoilt: bool) -> Batch:
        rollouts = (1, 2, 3) if spoilt else (1, 3)

        def lane(added: float) -> list[PerToken]:
            rows = {number: per_token(number).value.copy() for number in rollouts}
            if spoilt:
                rows[2][1] += added
            return [Scored(number, row, 0) for number, row in rows.items()]

        scores: list[Said] = [Scored(number, score if number == 2 else float(number), 0) for number in rollouts]
        stage, ends = GAE(shaping=ScoreShaping(norm=True)), [finish(number) for number in rollouts]
        (batch,) = sent(stage, [*ends], scores, reference=lane(reference), value=lane(value))
        return batch

    spoilt, without = batch(spoilt=True), batch(spoilt=False)
    assert spoilt.rollouts == (1, 3)
    assert spoilt.dropped == (Drop(2, reason),)
    assert np.array_equal(known(spoilt.advantages), known(without.advantages))
    assert spoilt.metrics == without.metrics


@pytest.mark.parametrize("length", [0, 4])
def test_a_rollout_of_which_nothing_was_sampled_is_dropped_by_name_and_the_others_are_trained(length: int) -> None:
    given = ToolTokens(2, 0, np.arange(length, dtype=np.int32))
    silent = Finish(2, Response.empty(finish(2).response.prompt).then(given), "length")
    zeros = Scored(2, np.zeros(length, np.float32), 0)
    ends = ((finish(1), per_token(1)), (silent, zeros), (finish(3), per_token(3)))
    outcomes = [scored_rollout(end, Scored(end.rollout, 1.0, 0), scored, scored) for end, scored in ends]
    rollouts = [outcome for outcome in outcomes if isinstance(outcome, ScoredRollout)]
    batch = GAE().batch_of(ScoredRollouts(rollouts, [outcome for outcome in outcomes if isinstance(outcome, Drop)]))
    assert batch.rollouts == (1, 3)
    assert batch.dropped == (Drop(2, "nothing was sampled"),)


def test_the_last_token_earns_the_shaped_score_and_the_batch_keeps_the_raw_one() -> None:
    rows = [ScoredRollout(finish(n), per_token(1).value, float(n), per_token(0).value) for n in (1, 2, 3)]
    stage = GAE(kl=0.0, shaping=ScoreShaping(norm=True, scale=2.0))
    batch = stage.batch(rows)
    assert known(batch.rewards)[[3, 7, 11]].tolist() == [-2.0, 0.0, 2.0]
    assert batch.scores.tolist() == [1.0, 2.0, 3.0]
    assert (batch.metrics["objective/scores"], batch.metrics["objective/shaped_scores"]) == (2.0, 0.0)
    assert stage.shaping.moments.count == 3


def test_the_kl_in_the_reward_is_that_of_the_proximal_policy() -> None:
    said = ScoredRollout(finish(1), per_token(1).value, 0.0, np.zeros(4, np.float32))
    again = replace(said, proximal=np.array([-1, -1, -3, -2], np.float32))
    plain, corrected = (GAE(kl=0.5).batch([row]) for row in (said, again))
    assert plain.proximal is None
    assert corrected.logprobs.tolist() == [-1, -1, -1, -1]
    assert known(corrected.proximal).tolist() == [-1, -1, -3, -2]
    assert known(plain.rewards).tolist() == [0, 0, 0, 0]
    assert known(corrected.rewards).tolist() == [0, 0, 1, 0.5]


def test_the_stage_of_five_inputs_estimates_what_the_one_of_four_does_where_nothing_is_stale() -> None:
    setting = Setting(extra=2, steps=6)
    plain, five = Pipeline(setting), Pipeline(setting, proximal=True)
    for pipeline in (plain, five):
        run_virtual(pipeline.run)
    assert any(report.deferred for report in plain.reports)
    assert same_batches(plain.batches, five.batches)


def test_a_rollout_whose_proximal_log_probs_are_not_finite_is_dropped_alone() -> None:
    broken = ScoredRollout(finish(1), per_token(1).value, 0.0, np.zeros(4, np.float32), np.full(4, np.nan, np.float32))
    assert broken.fault() == Drop(broken.finish.rollout, "nonfinite proximal log-prob")


def test_a_rollout_whose_own_log_probs_are_not_finite_is_dropped_though_they_were_computed_again() -> None:
    """The ratio of an update has them as its denominator, where the policy that sampled a token is asked for."""
    said = finish(1)
    said.response.logprobs[2] = np.nan
    broken = ScoredRollout(said, per_token(1).value, 0.0, np.zeros(4, np.float32), np.full(4, -1, np.float32))
    assert broken.fault() == Drop(broken.finish.rollout, "nonfinite behaviour log-prob")


@pytest.mark.parametrize("kl", [np.float32(0.5), np.float64(0.5), np.array(0.5), Fraction(1, 2), FixedKL(0.5)])
def test_any_real_number_is_a_coefficient(kl: SupportsFloat | FixedKL) -> None:
    assert GAE(kl=kl).state_dict()["kl"] == 0.5


def conversation(rollout: int, length: int, seed: int, said: Sequence[int] = ()) -> ScoredRollout:
    """Return a scored response of ``length`` sampled tokens, with as many of a tool's before each as ``said`` has.

    What the scorers give of a tool's tokens is arbitrary: it must not count.
    """
    dice = np.random.default_rng((seed, rollout))
    log, reference, values, earned = dice.normal(size=(4, length)).astype(np.float32)
    score, last = float(dice.normal()), np.float32(dice.normal())
    places = np.cumsum([1, *(1 + each for each in [*said, *[0] * length][1:length])]) - 1  # of the sampled tokens
    n = int(places[-1]) + 1 + sum(said[length:])
    sampled = np.zeros(n, np.bool_)
    sampled[places] = True

    def spread(x: FloatArray, elsewhere: float) -> FloatArray:
        row = np.full(n, elsewhere, np.float32)
        row[places] = x
        return row

    prompt = Prompt(rollout, rollout, np.zeros(1, np.int32), group=rollout // 2)
    zeros = np.zeros(n, np.int32)
    response = Response(prompt, zeros, spread(-np.abs(log), 0.0), zeros, sampled)
    reason: FinishReason = "length" if rollout % 2 else "eos"
    return ScoredRollout(
        Finish(rollout, response, reason),
        spread(-np.abs(reference), np.nan),
        TokenRewards(spread(earned, 0.0)) if rollout % 3 else score,
        np.append(spread(values, np.inf), last),
        spread(-np.abs(log + 0.1), -np.inf),
    )


SHAPED = ScoreShaping(norm=True, missing_eos_penalty=0.5, long_from=2, long_to=9)
STAGES: dict[str, Callable[[], AdaptiveObjective]] = {
    "gae": lambda: GAE(gamma=0.9, shaping=SHAPED, kl=AdaptiveKL(0.1), whiten_rewards=True),
    "bootstrapped": lambda: GAE(gamma=0.9, shaping=SHAPED, bootstrap_truncated=True, whiten_advantages=False),
    "rloo": lambda: GroupRelative("leave_one_out", kl=0.1, shaping=SHAPED),
    "masked": lambda: GroupRelative(shaping=SHAPED, mask_truncated=True),
}


@pytest.mark.parametrize("stage", STAGES)
@given(st.lists(st.lists(st.integers(0, 5), max_size=9), min_size=6, max_size=6), st.integers(0, 2**32 - 1))
def test_a_tool_s_tokens_change_nothing_of_what_the_sampled_ones_learn(
    stage: str, said: list[list[int]], seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 9, 6).tolist()
    plain = STAGES[stage]().batch([conversation(k, lengths[k], seed) for k in range(6)])
    tools = STAGES[stage]().batch([conversation(k, lengths[k], seed, said[k]) for k in range(6)])
    where = np.concatenate([response.sampled for response in tools.responses])
    for name, column in plain.estimates.items():
        np.testing.assert_array_equal(column, known(tools.estimates[name])[where], name)
        assert not tools.estimates[name][~where].any()
    assert plain.metrics == tools.metrics
    assert (plain.sampled == tools.sampled[where]).all()
    assert not tools.sampled[~where].any()


Turns = Sequence[tuple[int, int]]
"""The lengths of each turn and of its answer."""


def spoken(rollout: int, turns: Turns, dice: np.random.Generator) -> ScoredRollout:
    """Return a scored conversation, each turn and answer a piece of its own."""
    response = Response.empty(Prompt(rollout, rollout, np.zeros(1, np.int32)))
    for said, heard in turns:
        tokens, log = dice.integers(9, size=said).astype(np.int32), -dice.random(said).astype(np.float32)
        response = response.then(Chunk(rollout, len(response), tokens, log, np.zeros(said, np.int32)))
        if heard:
            response = response.then(ToolTokens(rollout, len(response), np.zeros(heard, np.int32)))
    reference, values = -dice.random((2, len(response))).astype(np.float32)
    return ScoredRollout(Finish(rollout, response, "eos"), reference, float(dice.normal()), np.append(values, np.nan))


def reconstructed(turns: Turns, scored: ScoredRollout, score: float) -> list[tuple[bool, float, float]]:
    """Return of each token whether the policy said it, its advantage and its return, by plain loops from the turns."""
    mask = [by for said, heard in turns for by in [True] * said + [False] * heard]
    rows, ahead, value_after, earned = list[tuple[bool, float, float]](), 0.0, 0.0, score
    for t in reversed(range(len(mask))):
        if not mask[t]:
            rows.append((False, 0.0, 0.0))
            continue
        value = float(known(scored.values)[t])
        kl = float(scored.finish.response.logprobs[t]) - float(known(scored.reference)[t])
        ahead = earned - 0.1 * kl + 0.9 * value_after - value + 0.9 * 0.8 * ahead
        rows.append((True, ahead, ahead + value))
        value_after, earned = value, 0.0
    return rows[::-1]


@hypothesis_settings(max_examples=500)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_masks_and_advantages_of_conversations_are_those_of_an_independent_reconstruction(
    conversations: list[Turns], seed: int
) -> None:
    dice = np.random.default_rng(seed)
    scored = [spoken(rollout, turns, dice) for rollout, turns in enumerate(conversations)]
    batch = GAE(gamma=0.9, lam=0.8, kl=0.1, whiten_advantages=False).batch(scored)
    expected = [
        row
        for turns, each, score in zip(conversations, scored, batch.scores.tolist(), strict=True)
        for row in reconstructed(turns, each, score)
    ]
    mask, advantages, returns = zip(*expected, strict=True)
    assert batch.sampled.tolist() == list(mask)
    np.testing.assert_allclose(known(batch.advantages), advantages, atol=1e-5)
    np.testing.assert_allclose(known(batch.returns), returns, atol=1e-5)


def test_a_response_that_was_cut_off_goes_on_with_the_value_of_its_last_state() -> None:
    values = np.array([1, 2, 3, 4, 7], np.float32)
    ends = [replace(finish(1), reason="length"), finish(2)]
    rows = [ScoredRollout(end, None, 1.0, values) for end in ends]
    batch = GAE(gamma=0.5, lam=0.0, kl=0.0, whiten_advantages=False, bootstrap_truncated=True).batch(rows)
    assert known(batch.advantages).tolist() == [0, -0.5, -1, 1 + 0.5 * 7 - 4, 0, -0.5, -1, 1 - 4]
    assert known(batch.last_values).tolist() == [7, 7]
    assert known(batch.values).tolist() == [1, 2, 3, 4] * 2
    plain = GAE(gamma=0.5, lam=0.0, kl=0.0, whiten_advantages=False).batch(rows)
    assert known(plain.advantages)[[3, 7]].tolist() == [-3, -3]


def test_a_bootstrap_needs_a_critic_that_values_the_last_state() -> None:
    stage = GAE(kl=0.0, bootstrap_truncated=True)
    assert ["bootstrap_truncated" in fault for fault in stage.faults([], ())] == [True]
    assert stage.faults([], {"value"}) == []
    with pytest.raises(ProtocolError, match=r"bootstrap_truncated .* n \+ 1 values"):
        stage.batch([ScoredRollout(finish(1), None, 1.0, np.zeros(4, np.float32))])
    with pytest.raises(ConfigError, match=r"bootstrap_truncated .* mask_truncated"):
        GAE(bootstrap_truncated=True, mask_truncated=True)


@pytest.mark.parametrize("stage", [GAE(kl=0.0, mask_truncated=True), GroupRelative("centred", mask_truncated=True)])
def test_a_masked_response_is_compared_with_the_others_and_not_in_the_loss(stage: AdaptiveObjective) -> None:
    ends = [finish(0), replace(finish(1), reason="length"), finish(2)]
    prompt = finish(0).response.prompt
    rows = [
        ScoredRollout(
            replace(end, response=replace(end.response, prompt=replace(prompt, rollout=k))), None, [0.0, 9.0, 3.0][k]
        )
        for k, end in enumerate(ends)
    ]
    plain = replace(stage, mask_truncated=False).batch(rows)  # type: ignore[type-var] # both are dataclasses
    masked = stage.batch(rows)
    assert np.array_equal(known(masked.advantages), known(plain.advantages))
    assert masked.metrics == plain.metrics
    assert masked.sampled.tolist() == [True] * 4 + [False] * 4 + [True] * 4
    assert [row.tolist() for row in masked.sampled_rows()] == [[0, 1, 2, 3], [], [8, 9, 10, 11]]


TOO_LARGE: dict[str, tuple[ScoredRollout, str]] = {
    "k3": (ScoredRollout(finish(2), np.full(4, 88, np.float32), 1.0, np.zeros(4, np.float32)), "nonfinite reward"),
    "score": (ScoredRollout(finish(2), None, 3e38), "nonfinite reward"),
    "token rewards": (ScoredRollout(finish(2), None, TokenRewards([3e38, -3e38, 0, 0])), "nonfinite reward"),
    "values": (
        ScoredRollout(finish(2), None, 1.0, np.array([3e38, -3e38, 0, 0], np.float32)),
        "nonfinite advantage",
    ),
}


@pytest.mark.parametrize("what", TOO_LARGE)
@pytest.mark.parametrize("group", [False, True])
def test_what_float32_does_not_hold_drops_its_rollout_before_it_reaches_the_others(what: str, *, group: bool) -> None:
    broken, reason = TOO_LARGE[what]

    def stage() -> AdaptiveObjective:
        shaping = ScoreShaping(scale=2.0)
        if group:
            return GroupRelative("leave_one_out", AdaptiveKL(0.05), "k3", shaping)
        return GAE(kl=AdaptiveKL(0.05), kl_estimator="k3", shaping=shaping, whiten_rewards=True)

    def among(rows: Sequence[ScoredRollout]) -> list[ScoredRollout]:
        same = (each.finish.response.prompt for each in rows)
        return [
            replace(
                each, finish=replace(each.finish, response=replace(each.finish.response, prompt=replace(p, group=0)))
            )
            for each, p in zip(rows, same, strict=True)
        ]

    def beside(score: float, rollout: int) -> ScoredRollout:
        given_too = (broken.reference is not None, broken.values is not None)
        reference, values = (per_token(1).value if each else None for each in given_too)
        return ScoredRollout(finish(rollout), reference, score, values)

    others = [beside(1.0, 1), beside(3.0, 3)]
    spoilt, without = (stage() for _ in range(2))
    found = spoilt.batch(among([others[0], broken, others[1]]))
    clean = without.batch(among(others))
    assert found.dropped == (Drop(2, reason),)
    assert found.dropped[0].nonfinite
    assert found.rollouts == (1, 3)
    assert np.isfinite(known(found.advantages)).all()
    assert np.array_equal(known(found.advantages), known(clean.advantages))
    assert (found.metrics, spoilt.state_dict()) == (clean.metrics, without.state_dict())


def test_one_left_alone_by_a_rollout_that_is_too_large_is_dropped_too() -> None:
    rows = [ScoredRollout(finish(k, group=k // 2), None, k or 3e38) for k in range(4)]
    batch = GroupRelative().batch(rows)
    assert batch.rollouts == (2, 3)
    assert batch.dropped == (Drop(0, "nonfinite reward"), Drop(1, "left alone in its group"))


FINITE = st.floats(-8, 8, width=32).map(lambda number: number + 0.0)  # a sum of zeros has no sign


def floats(*numbers: float) -> FloatArray:
    return np.array(numbers, np.float32)


def row(rollout: int, score: float, **of: int) -> ScoredRollout:
    end = finish(rollout, **of)
    n = len(end.response)
    return ScoredRollout(end, np.full(n, -1.25, np.float32), score, np.linspace(0, 1, n, dtype=np.float32))


def same_numbers(a: Batch, b: Batch) -> bool:
    pairs = [(a.rewards, b.rewards), (a.advantages, b.advantages), (a.returns, b.returns), (a.scores, b.scores)]
    return all(x is not None and y is not None and x.tobytes() == y.tobytes() for x, y in pairs)


def test_a_score_made_of_rewards_is_their_sum_and_survives_a_process() -> None:
    score = TokenRewards([0.5, 0, 2])
    again = pickle.loads(pickle.dumps(score))
    assert (float(again), again.rewards.tolist()) == (2.5, [0.5, 0.0, 2.0])
    assert TokenRewards.at(3, {0: 0.5, -1: 2}) == score == 2.5
    with pytest.raises(ValueError, match="no token 3 in a response of 3 tokens"):
        TokenRewards.at(3, {3: 1.0})
    with pytest.raises(ValueError, match="numbers in one row"):
        TokenRewards(np.zeros((2, 2), np.float32))


def test_what_each_token_earned_stands_where_it_was_earned_and_the_kl_penalty_is_added() -> None:
    batch = GAE(kl=0.1, whiten_advantages=False).batch([row(0, TokenRewards([0, 1, 0, 2]))])
    assert known(batch.rewards).tolist() == floats(-0.025, 0.975, -0.025, 1.975).tolist()
    assert batch.scores.tolist() == [3.0]
    assert batch.token_rewards is not None
    assert batch.token_rewards.tolist() == [0, 1, 0, 2]


@given(st.lists(st.tuples(FINITE, st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=5), st.booleans())
def test_a_process_reward_of_zeros_and_a_last_score_is_the_scalar_path_to_the_bit(
    made: list[tuple[float, int, int]], norm: bool
) -> None:
    def stage() -> GAE:
        return GAE(kl=0.3, shaping=ScoreShaping(norm=norm, clip=3.0, scale=0.5, missing_eos_penalty=0.25))

    plain = [row(k, score, sampled=n, given=g) for k, (score, n, g) in enumerate(made)]
    for where in ("last sampled", "last"):
        placed = [
            row(k, TokenRewards.at(n + g, {n - 1 if where == "last sampled" else -1: score}), sampled=n, given=g)
            for k, (score, n, g) in enumerate(made)
        ]
        assert same_numbers(stage().batch(placed), stage().batch(plain))


@given(
    st.lists(st.lists(FINITE, min_size=1, max_size=8), min_size=1, max_size=4),
    st.data(),
    st.sampled_from([ScoreShaping(), ScoreShaping(scale=3.0), ScoreShaping(norm=True, clip=1.0)]),
)
def test_however_rewards_are_placed_and_shaped_those_of_a_response_sum_to_its_shaped_score(
    made: list[list[float]], data: st.DataObject, shaping: ScoreShaping
) -> None:
    rows = []
    for k, rewards in enumerate(made):
        given = data.draw(st.integers(0, len(rewards) - 1))
        rows.append(row(k, TokenRewards(rewards), sampled=len(rewards) - given, given=given))
    stage = GAE(kl=0.0, shaping=shaping)
    batch = stage.batch(rows)
    shaped = stage.shaping.shaped(batch.scores, np.ones(len(rows), np.bool_), np.diff(batch.offsets))
    sums = [known(batch.rewards)[each].sum(dtype=np.float64) for each in batch.rows()]
    assert np.allclose(sums, shaped, atol=1e-4)
    assert not known(batch.rewards)[~batch.sampled].any()


def test_shaping_scales_the_rewards_of_tokens_and_settles_the_rest_at_the_last() -> None:
    rows = [row(k, TokenRewards([k, 0, 0, k])) for k in (1, 2, 3)]
    batch = GAE(kl=0.0, shaping=ScoreShaping(norm=True)).batch(rows)  # scores 2, 4, 6: mean 4, deviation 2
    assert known(batch.rewards).reshape(3, 4).tolist() == [[0.5, 0, 0, -1.5], [1, 0, 0, -1], [1.5, 0, 0, -0.5]]


def test_what_a_tool_answer_earned_goes_to_the_sampled_token_before_it() -> None:
    sampled = np.array([False, True, False, True, False])
    rewards = shaped_rewards(15.0, np.zeros(5, np.float32), 0.1, sampled, floats(1, 2, 4, 0, 8))
    assert rewards.tolist() == [0, 7, 0, 8, 0]


def test_a_group_is_compared_by_the_sums() -> None:
    def group(*scores: float) -> list[ScoredRollout]:
        return [row(k, score, group=0) for k, score in enumerate(scores)]

    placed = GroupRelative("centred").batch(group(TokenRewards([1, 1, 0, 1]), TokenRewards.at(4, {0: 1})))
    plain = GroupRelative("centred").batch(group(3.0, 1.0))
    assert known(placed.advantages).tolist() == known(plain.advantages).tolist() == [1] * 4 + [-1] * 4


def test_responses_with_and_without_rewards_at_tokens_may_share_a_batch() -> None:
    batch = GAE(kl=0.0).batch([row(0, 2.0), row(1, TokenRewards([1, 0, 0, 0]))])
    assert known(batch.rewards).tolist() == [0, 0, 0, 2, 1, 0, 0, 0]
    assert GAE().batch([row(0, 2.0)]).token_rewards is None


def test_rewards_for_another_number_of_tokens_are_refused_and_what_is_not_finite_drops_the_rollout() -> None:
    end = finish(7)
    with pytest.raises(ProtocolError, match=r"rollout 7: expected 4 numbers as its token rewards.*shape \(3,\)"):
        scored_rollout(end, Scored(7, TokenRewards([1, 2, 3]), 0))
    for rewards, reason in (
        ([np.nan, 0, 0, 0], "nonfinite score"),
        ([1e39, 0, 0, 0], "nonfinite score"),
        ([3e38, -3e38, 1, 1], ""),
    ):
        outcome = scored_rollout(end, Scored(7, TokenRewards(rewards), 0))
        assert (outcome.reason if isinstance(outcome, Drop) else "") == reason


def test_a_weighted_sum_keeps_rewards_where_they_are() -> None:
    total = weighted_sum([(2.0, TokenRewards([1, 0, 0])), (0.5, 3.0), (1.0, TokenRewards([0, 1, 0]))])
    assert isinstance(total, TokenRewards)
    assert total.rewards.tolist() == [2, 1, 1.5]
    assert weighted_sum([(2.0, 1.0), (0.5, 3.0)]) == 3.5


SCORED = (FakeScorer(fake_scalar), FakeTrainer())


def rows(seed: int, *, proximal: bool = False, groups: int = 2) -> list[ScoredRollout]:
    """Return pairs of responses of several lengths, with tool tokens, scores, values and a teacher's log-probs."""
    dice, found = np.random.default_rng(seed), []
    for rollout in range(2 * groups):
        length = int(dice.integers(1, 9))
        sampled = dice.random(length) < 0.7
        sampled[dice.integers(length)] = True
        log, teacher, values, again = (-dice.random((4, length)) * 5).astype(np.float32)
        tokens, versions = np.arange(length, dtype=np.int32), np.zeros(length, np.int32)
        prompt = Prompt(rollout, rollout // 2, tokens[:1], group=rollout // 2)
        response = Response(prompt, tokens, log * sampled, versions, sampled)
        score, newest = float(dice.normal()), again if proximal else None
        scored = ScoredRollout(Finish(rollout, response, "eos"), None, score, values, newest, teacher)
        found.append(scored)
    return found


def taught_by_hand(each: ScoredRollout, task: FloatArray, coefficient: float) -> Sequence[float]:
    response, teacher = each.finish.response, known(each.teacher).tolist()
    policy = (response.logprobs if each.proximal is None else each.proximal).tolist()
    return [
        float(task[t]) - coefficient * (policy[t] - teacher[t]) if response.sampled[t] else 0.0
        for t in range(len(response))
    ]


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 10), st.booleans())
def test_the_teacher_adds_its_log_ratio_to_each_sampled_token_after_all_else(
    seed: int, coefficient: float, proximal: bool
) -> None:
    scored = rows(seed, proximal=proximal)
    for stage in (GAE(kl=0), GroupRelative("leave_one_out"), GroupRelative()):
        task, both = stage.batch(scored), replace(stage, distill=coefficient).batch(scored)
        expected = [
            taught_by_hand(each, known(task.advantages)[at], coefficient)
            for each, at in zip(scored, task.rows(), strict=True)
        ]
        np.testing.assert_allclose(known(both.advantages), np.concatenate(expected), rtol=1e-6, atol=1e-6)
        assert task.returns is both.returns is None or np.array_equal(known(task.returns), known(both.returns))
    alone = Distillation(coefficient).batch(scored)
    expected = [taught_by_hand(each, np.zeros(9, np.float32), coefficient) for each in scored]
    np.testing.assert_allclose(known(alone.advantages), np.concatenate(expected), rtol=1e-6, atol=1e-6)
    kl = [-sum(taught_by_hand(each, np.zeros(9, np.float32), 1.0)) for each in scored]
    assert alone.metrics["objective/teacher_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-5, abs=1e-5)


def test_a_group_that_goes_early_has_the_teacher_s_part_too() -> None:
    scored = rows(3)
    stage = GroupRelative("centred", distill=0.5)
    whole, part = stage.batch(scored), InParts(stage, 2)._early(scored[:2])
    assert np.array_equal(known(part.advantages), known(whole.advantages)[: len(part.tokens)])


def test_a_masked_response_teaches_nothing() -> None:
    scored = rows(5)
    cut = replace(scored[0], finish=replace(scored[0].finish, reason="length"))
    batch = Distillation(mask_truncated=True).batch([cut, *scored[1:]])
    assert not batch.sampled[batch.rows()[0]].any()
    assert batch.sampled[batch.rows()[1]].any()


@pytest.mark.parametrize(
    ("teacher", "coefficient", "reason"),
    [(-np.inf, 1.0, "nonfinite teacher log-prob"), (-3e38, 10.0, "nonfinite reward"), (-1.0, 1.0, "")],
)
def test_a_rollout_that_float32_does_not_hold_is_dropped_by_name(
    teacher: float, coefficient: float, reason: str
) -> None:
    first, *others = rows(7)
    bad = np.full(len(first.finish.response), teacher, np.float32)
    fault = replace(first, teacher=bad).fault()
    said = "" if fault is None else fault.reason
    if fault is None:
        with np.errstate(over="ignore"):
            batch = Distillation(coefficient).batch([replace(first, teacher=bad), *others])
        said = batch.dropped[0].reason if batch.dropped else ""
        assert np.isfinite(known(batch.advantages)).all()
    assert said == reason


def test_an_empty_batch_stays_empty() -> None:
    batch = Distillation().batch([])
    assert (len(batch), len(known(batch.advantages)), dict(batch.metrics)) == (0, 0, {})


@pytest.mark.parametrize("stage", [GAE(kl=0, distill=0.5), Distillation()], ids=["GAE", "Distillation"])
def test_a_weight_without_a_teacher_is_a_fault_of_the_graph(stage: AdaptiveObjective) -> None:
    reward, trainer = SCORED
    models = {"policy": FakePolicy(), "reward": reward, "trainer": trainer, "admission": Overcommit(2)}
    with pytest.raises(GraphError, match=r"needs a teacher: connect teacher=stream, or leave distill out"):
        ppo(**models, advantage=stage)  # type: ignore[arg-type]  # all are fakes
    assert ppo(**models, advantage=stage, teacher=FakeScorer(fake_per_token))  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"distill = 0\.5, which needs a teacher"):
        grpo(**models, advantage=GroupRelative(distill=0.5))  # type: ignore[arg-type]


@virtually
async def test_scorers_by_a_column_are_open_as_long_as_the_run() -> None:
    class Service(FakeScorer[float]):
        open = 0

        async def __aenter__(self) -> Self:
            self.open += 1
            return self

        async def __aexit__(self, *error: object) -> None:
            self.open -= 1

    service = Service(lambda *_: 1.0)
    async with Score(ByColumn("domain", {"math": service, "code": FakeScorer(lambda *_: 2.0)})):
        assert service.open == 1
    assert service.open == 0


@virtually
async def test_scorers_by_a_column_read_their_own_rollouts_and_answer_in_order() -> None:
    parts = {"math": FakeScorer(lambda *_: 1.0), "code": FakeScorer(lambda *_: 2.0)}
    scorer = ByColumn("domain", parts)
    tokens = np.arange(2, dtype=np.int32)
    prompts = [
        Prompt(rollout, rollout, tokens, columns={"domain": name})
        for rollout, name in enumerate(("math", "code", "math", "code"))
    ]
    await scorer.extend(prompts)
    finished = [Finish(prompt.rollout, Response.empty(prompt), "eos") for prompt in prompts]
    await scorer.forget([3, 9])
    assert await scorer.finish(finished[2::-1]) == [1.0, 2.0, 1.0]
    await scorer.extend(prompts[:1])
    with pytest.raises(ModelError, match=r"expected one of math, code in the column 'domain' .* got None"):
        await scorer.extend([replace(prompts[0], columns={})])
