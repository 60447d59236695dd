"""GDPO: each of several rewards is compared within its group, as plain float64 code compares it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo.algorithms.group import DAPO, GRPO
from oppo.errors import ConfigError, ProtocolError
from oppo.events import Finish, Prompt, Response
from oppo.returns import NamedScores, ScoreShaping
from oppo.rewards import Rewards
from oppo.stages import GroupRelative, InParts
from oppo.stages.batch import ScoredRollout
from oppo.testing import FakeScorer, run_virtual
from tests.known import known

WEIGHTS: Mapping[str, float] = {"right": 1.0, "short": 0.25, "rare": -2.0}


def row(rollout: int, score: float) -> ScoredRollout:
    tokens = np.arange(1 + rollout % 3, dtype=np.int32)
    prompt = Prompt(rollout, rollout // 3, tokens[:1], group=rollout // 3)
    logprobs = np.full(len(tokens), -1, np.float32)
    response = Response(prompt, tokens, logprobs, np.zeros_like(tokens), np.ones(len(tokens), np.bool_))
    return ScoredRollout(Finish(rollout, response, "eos"), None, score)


def by_hand(scores: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the advantages of responses in groups of three."""
    total = [0.0] * len(scores)
    for name, weight in WEIGHTS.items():
        for first in range(0, len(scores), 3):
            members = [at for at in range(first, first + 3) if name in scores[at]]
            found = [float(np.float32(scores[at][name])) for at in members]
            for at in members if len(members) > 1 else ():
                centred = float(np.float32(scores[at][name])) - statistics.fmean(found)
                total[at] += weight * centred / (statistics.stdev(found) + 1e-4)
    mean, deviation = statistics.fmean(total), statistics.variance(total) ** 0.5
    return [(each - mean) / (deviation**2 + 1e-8) ** 0.5 for each in total]


@given(st.lists(st.fixed_dictionaries({}, optional={name: st.integers(-3, 3) for name in WEIGHTS}), min_size=6).filter(
    lambda rows: all(rows) and len(rows) % 3 == 0 and len(rows) < 16
))  # fmt: skip
def test_each_reward_is_standardised_in_its_group_and_their_sum_whitened(rows: list[dict[str, float]]) -> None:
    scored = [
        row(number, NamedScores({name: (WEIGHTS[name], each[name]) for name in each}))
        for number, each in enumerate(rows)
    ]
    batch = GroupRelative("each_reward").batch(scored)
    firsts = known(batch.advantages)[batch.offsets[:-1]]
    np.testing.assert_allclose(firsts, by_hand(rows), rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(batch.scores, [float(each.score) for each in scored], rtol=1e-6)


def test_several_rewards_give_their_scores_by_name() -> None:
    async def main() -> None:
        one, two = FakeScorer(lambda *_: 0.5), FakeScorer(lambda *_: 2.0)
        rewards = Rewards({"one": (1.0, one), "two": (0.5, two)})
        each = row(0, 0.0)
        await rewards.extend([each.finish.response.prompt, *each.finish.response.pieces()])
        (score,) = await rewards.finish([each.finish])
        assert isinstance(score, NamedScores)
        assert (float(score), score.terms) == (1.5, {"one": (1.0, 0.5), "two": (0.5, 2.0)})

    run_virtual(main)


def test_what_it_cannot_compare_is_refused() -> None:
    for score in (1.0, 0.5):
        with pytest.raises(ProtocolError, match=r"compares each of several rewards, and the scores are single numbers"):
            GroupRelative("each_reward").batch([row(0, score), row(1, score)])
    with pytest.raises(ConfigError, match=r"the shaping changes their sum"):
        GroupRelative("each_reward", shaping=ScoreShaping(scale=2.0))
    with pytest.raises(ConfigError, match=r"cannot have a KL in the reward"):
        GroupRelative("each_reward", kl=0.1)
    with pytest.raises(ConfigError, match=r"deviation of the batch cannot come in parts"):
        InParts(GroupRelative("each_reward"), 3)
    with pytest.raises(ConfigError, match=r"one by one, and score_clip = 2\.0 changes their sum"):
        GRPO(scale_scores="each_reward", score_clip=2.0)
    with pytest.raises(ConfigError, match=r"long_buffer = None changes their sum"):
        DAPO(scale_scores="each_reward")
    assert DAPO(scale_scores="each_reward", long_buffer=0).compared == "each_reward"
    assert len(GroupRelative("each_reward").batch([])) == 0
