"""PPO with several responses to each prompt, and the parts of VAPO against plain float64 code."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import oppo
from oppo.algorithms.group import GRPO, GSPO
from oppo.algorithms.ppo import PPO
from oppo.errors import ConfigError
from oppo.events import Finish, Prompt, Response, StepReport
from oppo.losses import ClippedLoss, Input, Inputs, PPOLoss, Whole
from oppo.stages import GAE
from oppo.stages.batch import ScoredRollout
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    fake_per_token,
    fake_scalar,
    prompts,
    run_virtual,
)
from tests.kit.known import known


def by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Return generalised advantage estimates as the double sum of the paper (Schulman et al. 2016, equation 16)."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    n = len(deltas)
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0.02, 2))
def test_advantages_and_returns_have_lambdas_of_their_own_and_one_may_follow_the_length(
    seed: int, gamma: float, lam: float, lam_value: float, alpha: float
) -> None:
    dice, rows, advantages, returns, adapted = np.random.default_rng(seed), [], [], [], []
    for rollout in range(3):
        length = int(dice.integers(1, 30))
        sampled = dice.random(length) < 0.8
        sampled[-1] = True
        tokens, values = np.arange(length, dtype=np.int32), dice.normal(size=length).astype(np.float32)
        log = (-dice.random(length) * sampled).astype(np.float32)
        response = Response(Prompt(rollout, rollout, tokens[:1]), tokens, log, np.zeros(length, np.int32), sampled)
        score = float(np.float32(dice.normal()))
        rows.append(ScoredRollout(Finish(rollout, response, "eos"), None, score, values))
        states = [float(value) for value, is_sampled in zip(values, sampled, strict=True) if is_sampled]
        rewards = [0.0] * (len(states) - 1) + [score]
        advantages += by_hand(rewards, states, gamma, lam)
        plain = by_hand(rewards, states, gamma, lam_value)
        returns += [each + value for each, value in zip(plain, states, strict=True)]
        adapted += by_hand(rewards, states, gamma, max(0.0, 1 - 1 / (alpha * len(states))))
    stage = GAE(gamma=gamma, lam=lam, lam_value=lam_value, kl=0, whiten_advantages=False)
    batch = stage.batch(rows)
    np.testing.assert_allclose(known(batch.advantages)[batch.sampled], advantages, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(known(batch.returns)[batch.sampled], returns, rtol=1e-6, atol=1e-6)
    batch = GAE(gamma=gamma, lam_alpha=alpha, kl=0, whiten_advantages=False).batch(rows)
    np.testing.assert_allclose(known(batch.advantages)[batch.sampled], adapted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["tokens", "responses", "constant", "response_sums"])
def test_responses_with_a_high_score_become_likelier_and_no_others(aggregation: str) -> None:
    log = [-0.5, -1.0, -2.0, -0.25, -3.0]
    rows, scores, mask = [0, 0, 1, 1, 2], [1.0, 0.4, 0.6], [True, True, True, False, True]
    logprobs = torch.tensor(log, requires_grad=True)
    given: dict[Input, torch.Tensor] = {
        "logprobs": logprobs,
        "entropies": torch.zeros(5),
        "behaviour": torch.tensor(log),
        "advantages": torch.zeros(5),
        "scores": torch.tensor(scores),
    }
    whole = Whole(tokens=4, rows=3, groups=3, cap=8)
    inputs = Inputs(torch.tensor(mask), torch.tensor(rows), torch.arange(3), whole, given)
    loss = ClippedLoss(nll=0.1, nll_above=0.5, aggregation=aggregation)  # type: ignore[arg-type]
    assert "scores" in loss.reads
    found = loss(inputs)
    found.loss.backward()
    share = {
        "tokens": [4.0, 4.0, 4.0],
        "responses": [3.0 * 2, 3.0 * 1, 3.0 * 1],
        "constant": [3.0 * 8] * 3,
        "response_sums": [3.0] * 3,
    }
    divisor = [share[aggregation][row] for row in rows]
    counted = [mask[t] and scores[rows[t]] > 0.5 for t in range(5)]
    expected = sum(-0.1 * log[t] / divisor[t] for t in range(5) if counted[t])
    assert found.loss.item() == pytest.approx(expected, rel=1e-6)
    assert found.measured["loss/nll_avg"].item() == pytest.approx(10 * expected, rel=1e-6)
    gradient = [-0.1 / divisor[t] if counted[t] else 0.0 for t in range(5)]
    assert known(logprobs.grad).tolist() == pytest.approx(gradient, rel=1e-6)


def test_the_settings_reach_stage_and_loss_and_idle_ones_are_refused() -> None:
    chosen = PPO(lam_value=1.0, lam_alpha=0.05, nll=0.1, nll_above=0.5)
    stage, loss = chosen.advantage(), chosen.loss()
    assert (stage.lam_value, stage.lam_alpha) == (1.0, 0.05)
    assert isinstance(loss, PPOLoss)
    assert (loss.nll, loss.nll_above) == (0.1, 0.5)
    assert GSPO(nll=0.1).loss().nll == GRPO(nll=0.1).loss().nll == 0.1
    with pytest.raises(ConfigError, match=r"lam_alpha = 0\.05 chooses lambda by the length .* in place of lam = 0\.9"):
        PPO(lam_alpha=0.05, lam=0.9)
    with pytest.raises(ConfigError, match=r"nll_above = 0\.5 says which responses nll makes likelier, and nll is 0"):
        GRPO(nll_above=0.5)
    with pytest.raises(ConfigError, match="lam_alpha"):
        PPO(lam_alpha=math.inf)
    assert GAE(kl=0, lam_value=1.0).faults((), ()) == [
        "has lam_value, which needs a critic: connect value=stream, or leave lam_value out"
    ]


@pytest.mark.parametrize("overcommit", [0, 2])
def test_the_responses_to_a_prompt_are_trained_together_and_once(overcommit: int) -> None:
    trainer = FakeTrainer()
    graph = oppo.ppo(
        policy=FakePolicy(length=lambda prompt: 4 + 40 * (prompt.rollout % 7 == 0)),
        reference=FakeScorer(fake_per_token),
        reward=FakeScorer(fake_scalar),
        critic=FakeCritic(),
        trainer=trainer,
        admission=oppo.Overcommit(batch=4, overcommit=overcommit),
        samples=3,
    )

    async def main() -> list[StepReport]:
        async with graph.open(prompts(60)) as run:
            return [report async for report in run.steps(5)]

    reports = run_virtual(main)
    assert any(report.deferred for report in reports) is (overcommit > 0)
    assert [len(report.trained) for report in reports] == [12] * 5
    assert max(Counter(rollout for report in reports for rollout in report.trained).values()) == 1
    for batch in trainer.batches:
        assert set(Counter(response.prompt.group for response in batch.responses).values()) == {3}
        assert batch.returns is not None
