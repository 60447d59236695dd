"""Rewards at tokens, from a scorer's value to the reward of each token of a batch."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from oppo.errors import ProtocolError
from oppo.events import Batch, Chunk, Drop, Finish, FloatArray, Prompt, Response, Scored, ToolTokens
from oppo.returns import ScoreShaping, TokenRewards, shaped_rewards, weighted_sum
from oppo.stages import GAE, GroupRelative, ScoredRollout
from oppo.stages.batch import scored_rollout
from oppo.testing import FakeScorer, fake_scalar, run_virtual
from tests.known import known
from tests.pipelines import Pipeline, Setting, same_batches

FINITE = st.floats(-8, 8, width=32).map(lambda number: number + 0.0)  # a sum of zeros has no sign


def floats(*numbers: float) -> FloatArray:
    return np.array(numbers, np.float32)


def finish(rollout: int, *, sampled: int = 4, given: int = 0, group: int | None = None) -> Finish:
    prompt = Prompt(rollout, rollout, np.arange(3, dtype=np.int32), group=rollout if group is None else group)
    logprobs = np.full(sampled, -1, np.float32)
    chunk = Chunk(rollout, 0, np.arange(sampled, dtype=np.int32), logprobs, np.zeros(sampled, np.int32))
    return Finish(
        rollout, Response.of(prompt, [chunk, ToolTokens(rollout, sampled, np.arange(given, dtype=np.int32))]), "eos"
    )


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


def test_an_advantage_knows_the_token_that_earned_the_reward() -> None:
    early, late = (
        GAE(kl=0.0, whiten_advantages=False).batch([replace(row(0, TokenRewards.at(4, {at: 1})), values=None)])
        for at in (1, 3)
    )
    assert known(early.advantages).tolist() == [1, 1, 0, 0]
    assert known(late.advantages).tolist() == [1, 1, 1, 1]


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


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 4), st.integers(1, 9))
def test_whole_runs_learn_the_same_from_it_to_the_bit(extra: int, length: int) -> None:
    def run(reward: FakeScorer[float]) -> Pipeline:
        pipeline = Pipeline(Setting(lengths=(length, 7, 2, 12), extra=extra, reward=0.01), reward)
        run_virtual(pipeline.run)
        return pipeline

    scalar = run(FakeScorer(fake_scalar, 0.01))
    placed = run(
        FakeScorer(
            lambda end, tokens, version: TokenRewards.at(len(end.response), {-1: fake_scalar(end, tokens, version)}),
            0.01,
        )
    )
    bare = [replace(batch, token_rewards=None) for batch in placed.trainer.batches]
    assert len(bare) == 3
    assert same_batches(bare, scalar.trainer.batches)


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
