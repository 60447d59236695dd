"""How long a step takes in the long run: real stages, models of constant cost, a device each, in virtual time.

With D seconds of decoding, S of scoring, E of it after the end of decoding, U of the update, and n steps of lookahead::

    n = 0     D + E + U
    n >= 1    max(D, S, U, (D + E + U) / (n + 1))      n + 1 steps are alive, and each passes three devices
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import anyio
import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo.admission import Observation, Overcommit
from oppo.admission.chunking import Fixed, WholeRollout
from oppo.admission.forecast import pace
from oppo.algorithms.ppo import ppo
from oppo.models import Capabilities
from oppo.stages import GAE, Update
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer, fake_scalar, prompts, run_virtual
from tests.kit.pipelines import Tap

pytestmark = pytest.mark.schedules

BATCH, LENGTH, PROMPT = 2, 8, 3
STEPS, COUNTED, LAST = 44, 12, 6

Slow = Literal["critic", "reward"]


@dataclass(frozen=True)
class Costs:
    """The seconds of each device in a step; all are sums of powers of two, so that times are exact.

    Attributes:
        reading: for each token, so that the scorer works while its rollouts are written.
        answering: for all responses together, at their end.
        slow: the scorer that takes that time; the other takes none.
    """

    decode: float
    update: float
    answering: float = 0.0
    reading: float = 0.0
    slow: Slow = "critic"

    @property
    def score(self) -> float:
        return self.answering + self.reading * BATCH * (PROMPT + LENGTH)

    def period(self, lookahead: int, *, in_flight: bool = False, tap: Tap | None = None) -> float:
        """Return the mean seconds between the ends of steps, once the pipeline is full and before it runs empty."""
        policy, critic = FakePolicy(lambda prompt: LENGTH, self.decode / LENGTH), FakeCritic()
        reward: FakeScorer[float] = FakeScorer(fake_scalar)
        scorer = critic if self.slow == "critic" else reward
        scorer.answering, scorer.per_token = lambda finished: self.answering, self.reading
        graph = ppo(
            policy=policy,
            reward=reward,
            critic=critic,
            trainer=FakeTrainer(self.update),
            admission=Overcommit(BATCH),
            advantage=GAE(kl=0.0),
            chunks=Fixed(2) if self.reading else WholeRollout(),
        )
        if in_flight:
            policy.capabilities = Capabilities(loads_while_decoding="between decode steps")
            graph = graph.replace(update=replace(graph.stage("update", Update), after=()))

        async def main() -> list[float]:
            async with graph.open(prompts(BATCH * STEPS), observers=[tap or Tap()], lookahead=lookahead) as run:
                return [anyio.current_time() async for _ in run.steps(STEPS)]

        ends = run_virtual(main)
        return (ends[-LAST] - ends[-LAST - COUNTED]) / COUNTED


def whole(decode: float, score: float, update: float, slow: Slow = "critic") -> Costs:
    """Return the costs of scoring that begins when decoding has ended."""
    return Costs(decode, update, answering=score, slow=slow)


@pytest.mark.parametrize("slow", ["critic", "reward"])
@pytest.mark.parametrize("reading", [1 / 128, 5 / 64])
@pytest.mark.parametrize("update", [0.25, 1.0])
def test_streamed_scoring_counts_where_it_is_not_hidden(slow: Slow, reading: float, update: float) -> None:
    costs = Costs(1.0, update, reading=reading, slow=slow)
    exposed = costs.period(0) - 1.0 - update
    assert 0 < exposed < costs.score
    for lookahead in (1, 2):
        chain = (1.0 + exposed + update) / (lookahead + 1)
        assert costs.period(lookahead) == max(1.0, costs.score, update, chain)


# Devices that differ by less need more steps until what the first steps gained is used up, and the period is reached.
seconds = st.integers(1, 8).map(lambda parts: parts / 4)


@given(
    costs=st.builds(whole, seconds, seconds, seconds, st.sampled_from(["critic", "reward"])),
    lookahead=st.integers(0, 3),
    in_flight=st.booleans(),
)
def test_the_period_of_any_three_devices(costs: Costs, lookahead: int, in_flight: bool) -> None:
    took = costs.period(lookahead, in_flight=in_flight and lookahead > 0)
    chain = (costs.decode + costs.score + costs.update) / (lookahead + 1)
    assert took == pytest.approx(max(costs.decode, costs.score, costs.update, chain), rel=1e-9)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize(
    "costs", [whole(1.0, 0.5, 0.75), whole(0.5, 1.0, 0.25), whole(0.25, 0.5, 1.0), Costs(1.0, 0.5, reading=1 / 128)]
)
def test_controllers_predict_that_period(costs: Costs, lookahead: int) -> None:
    tap = Tap()
    took = costs.period(lookahead, tap=tap)
    seen = [item for _, stage, item in tap.items if stage == "generate" and isinstance(item, Observation)]
    window = seen[-LAST - COUNTED : -LAST]
    predicted = pace(window, BATCH).seconds(np.array([float(LENGTH)]), float(LENGTH))
    assert predicted[0] == pytest.approx(took, rel=0.03)
    assert np.mean([each.seconds for each in window]) == pytest.approx(took)
