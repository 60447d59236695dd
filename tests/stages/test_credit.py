"""Credit by turn: worked numbers, other estimators beside ours, unbiased gradients, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from oppo import GAE, Synchronous, grpo, ppo
from oppo.admission.chunking import Fixed
from oppo.environments.functions import earned_by_turns
from oppo.errors import GraphError, ProtocolError
from oppo.events import AnsweredTurn, Batch, Drop, Finish, Prompt, Response, StepReport
from oppo.graph import Graph
from oppo.returns import Credit, GroupAdvantage, TokenRewards, gae, group_advantages
from oppo.scorers import WholeScorer
from oppo.stages import Generate, GroupRelative, InParts, ScoredRollout
from oppo.stages.advantage import ALONE, sampled_turns
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, run_virtual
from oppo.turns import Answer, Turn
from tests.kit.known import known
from tests.kit.pipelines import Pipeline, Setting, on_policy, same_batches

Floats = Sequence[float]


def written(
    rollout: int, lengths: Sequence[int], rewards: Floats, keys: Sequence[str] = (), *, group: int = 0, branch: int = 0
) -> ScoredRollout:
    """Return a rollout of turns of these lengths; two tool tokens follow each turn but the last."""
    sampled = [part for n in lengths for part in ([True] * n, [False] * 2)][:-1]
    mask = np.concatenate([np.array(each) for each in sampled])
    ends = np.cumsum([n + 2 for n in lengths]) - 2
    answered = [AnsweredTurn(int(end), key=key) for end, key in zip(ends, keys or [""] * (len(ends) - 1), strict=False)]
    return at_turns(mask, answered, dict(enumerate(rewards)), rollout, group=group, branch=branch)


def at_turns(
    mask: NDArray[np.bool_],
    answered: Sequence[AnsweredTurn],
    rewards: Mapping[int, float],
    rollout: int = 0,
    *,
    group: int = 0,
    branch: int = 0,
) -> ScoredRollout:
    tokens, n = np.arange(len(mask), dtype=np.int32), len(mask)
    prompt = Prompt(rollout + (branch << 32), group, tokens[:1], rollout, group, branch=branch)
    response = Response(prompt, tokens, np.full(n, -1, np.float32) * mask, np.zeros(n, np.int32), mask)
    finish = Finish(prompt.rollout, response, "eos", answered)
    return ScoredRollout(finish, np.full(n, -1.5, np.float32), TokenRewards.by_turn(finish, rewards))


def by_turn(batch: Batch) -> list[list[float]]:
    """Return the advantages of the turns of each row, once it is certain that the tokens of a turn share one."""
    found = []
    for turns in sampled_turns(batch):
        each = [known(batch.advantages)[turn] for turn in turns]
        assert all((turn == turn[0]).all() for turn in each)
        found.append([float(turn[0]) for turn in each])
    assert not known(batch.advantages)[~batch.sampled].any()
    return found


def close(found: Sequence[Floats], expected: Sequence[Floats], tolerance: float = 6e-5) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(np.allclose(each, wanted, rtol=0, atol=tolerance) for each, wanted in pairs)


THREE: Sequence[Floats] = ([0.5, 1.0], [0.5], [0.0, 0.0])
"""Rewards by turn of three responses to a prompt."""


def three(keys: Sequence[str] = ()) -> list[ScoredRollout]:
    return [written(k, [3] * len(each), each, keys[: len(each)]) for k, each in enumerate(THREE)]


def test_a_turn_is_compared_with_the_same_turn_of_the_group_of_which_one_that_ended_earns_nothing_more() -> None:
    found = by_turn(GroupRelative("centred", credit="turns").batch(three()))
    assert close(found, [[0.8333, 0.6667], [-0.1667], [-0.6667, -0.3333]])
    apart = by_turn(GroupRelative("leave_one_out", credit="turns").batch(three()))
    assert close(apart, [[value * 1.5 for value in row] for row in found])


def test_the_turns_that_go_on_alone_are_compared_where_their_number_is_the_state() -> None:
    # by state, beside the advantage of the response: .8333, -.1667, -.6667
    whole = by_turn(GroupRelative("centred").batch(three()))
    found = by_turn(GroupRelative("centred", credit="state").batch(three("01")))
    steps = [[value - row[0] for value in turns] for turns, row in zip(found, whole, strict=True)]
    assert close(steps, [[0.8333, 0.5], [-0.1667], [-0.6667, -0.5]])


def test_all_turns_of_a_group_in_one_state_are_standardised_together() -> None:
    whole = by_turn(GroupRelative().batch(three()))
    found = by_turn(GroupRelative(credit="state").batch(three("ss")))
    steps = [[value - row[0] for value in turns] for turns, row in zip(found, whole, strict=True)]
    assert close(steps, [[1.38054, 0.61357], [-0.15339], [-0.92036, -0.92036]], 3e-4)  # 1e-4 is in the divisor


def test_turns_of_equal_states_are_compared_beside_the_response_as_in_gigpo() -> None:
    one, other = [0.0, 1.0], [0.0, 0.0, 0.0]
    rows = [written(0, [2, 2], one, ["s0", "s1"]), written(1, [2, 1, 2], other, ["s0", "s0", "s2"])]
    found = by_turn(GroupRelative("centred", credit="state", gamma=0.9).batch(rows))
    assert close(found, [[0.5 + 0.6, 0.5], [-0.5 - 0.3, -0.5 - 0.3, -0.5]])
    mean_of_rows = (2 * 1.0 + 3 * 0.0) / 5  # in place of the mean of responses, a long one counts more
    assert found[0][0] == pytest.approx(1.1)
    assert found[0][0] - 0.5 + (1.0 - mean_of_rows) == pytest.approx(1.2)
    (alone,) = by_turn(GroupRelative("centred", credit="state").batch(rows[:1]))
    assert alone == [0.0, 0.0]


def test_mt_grpo_is_the_sum_of_two_groups_scores() -> None:
    # its turn reward .2, .6 counts before the first result, its outcome 1, 0 everywhere, with a coefficient of .5
    turn, outcome = (group_advantages(np.array(each, np.float32), "standardised") for each in ([0.2, 0.6], [1.0, 0.0]))
    assert close([(outcome + 0.5 * turn).tolist(), outcome.tolist()], [[0.35358, -0.35358], [0.70701, -0.70701]])


CRITIC = np.array([0.4, 0.5, 0, 0, 0.6, 0.7], np.float32)


def valued(rewards: Floats, **settings: Any) -> Batch:
    row = replace(written(0, [2, 2], rewards), values=CRITIC)
    return GAE(kl=0.0, lam=0.9, whiten_advantages=False, **settings).batch([row])


def test_ppo_over_turns_has_one_advantage_a_turn_from_the_value_before_it() -> None:
    batch = valued([0.2, 1.0], over="turns", gamma=0.99)
    assert close(by_turn(batch), [[0.7504, 0.4]])
    assert known(batch.returns)[batch.sampled] == pytest.approx([0.4 + 0.7504] * 2 + [0.6 + 0.4] * 2)
    tokens = valued([0.2, 1.0])
    assert known(tokens.advantages)[tokens.sampled] == pytest.approx([0.6697, 0.633, 0.37, 0.3], abs=1e-5)


def bi_level(rewards: Floats, ends: Sequence[int]) -> list[float]:
    """Return VAGEN's estimate over four tokens: over turn ends (gamma .95), then over tokens inside each turn (1)."""
    values = CRITIC[[0, 1, 4, 5]]
    outer = gae(np.array(rewards, np.float32), values[list(ends)], 0.95, 0.9)[1]
    found, start = list[float](), 0
    for end, target in zip(ends, outer, strict=True):
        inner = np.zeros(end + 1 - start, np.float32)
        inner[-1] = target
        found += gae(inner, values[start : end + 1], 1.0, 0.9)[0].tolist()
        start = end + 1
    return found


def test_turns_that_rewards_mark_merge_where_one_is_zero_and_recorded_ones_do_not() -> None:
    assert bi_level([0.2, 1.0], [1, 3]) == pytest.approx([0.65935, 0.6215, 0.37, 0.3], abs=1e-5)
    assert bi_level([0.0, 1.0], [1, 3]) == pytest.approx([0.47935, 0.4215, 0.37, 0.3], abs=1e-5)
    assert bi_level([1.0], [3]) == pytest.approx([0.4897, 0.433, 0.37, 0.3], abs=1e-5)
    ours = by_turn(valued([0.0, 1.0], over="turns", gamma=0.95))
    assert close(ours, [[0.95 * 0.6 - 0.4 + 0.95 * 0.9 * 0.4, 0.4]])


def test_tokens_that_were_not_sampled_end_no_turn_of_themselves() -> None:
    mask = np.array([True, True, False, True, False, True])  # the third was forced into the first turn
    batch = GroupRelative("centred", credit="turns").batch(
        [at_turns(mask, [AnsweredTurn(4)], {0: 1.0, 1: 2.0}), written(1, [1, 1], [0.0, 0.0])]
    )
    assert [turn.tolist() for turn in sampled_turns(batch)[0]] == [[0, 1, 3], [5]]
    assert close(by_turn(batch), [[1.5, 1.0], [-1.5, -1.0]])


ESTIMATORS: Sequence[GroupAdvantage] = ("leave_one_out", "standardised", "centred", "batch_standardised", "max_rl")


@given(
    st.lists(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=4), min_size=2, max_size=9),
    st.sampled_from(ESTIMATORS),
    st.sampled_from([0.0, 0.3]),
)
def test_the_first_turn_has_the_advantage_of_the_response_up_to_its_groups_divisor(
    rewards: list[list[float]], estimator: GroupAdvantage, kl: float
) -> None:
    kl = kl if estimator in {"leave_one_out", "centred", "batch_standardised"} else 0.0
    rows = [written(k, [2] * len(each), each) for k, each in enumerate(rewards)]
    whole, turns = (GroupRelative(estimator, kl, credit=credit).batch(rows) for credit in ("response", "turns"))
    if all(len(each) == 1 for each in rewards):
        assert known(whole.advantages).tobytes() == known(turns.advantages).tobytes()
    firsts, of_whole = ([row[0] for row in by_turn(batch)] for batch in (turns, whole))
    if estimator not in {"standardised", "batch_standardised"}:
        assert firsts == pytest.approx(of_whole, rel=1e-4, abs=1e-5)
    limit = (len(rows) - 1) / len(rows) ** 0.5 + 1e-3
    if estimator == "standardised":  # also where all responses earn the same, in different turns
        assert all(abs(value) <= limit for row in by_turn(turns) for value in row)


def test_one_alone_in_its_group_has_no_advantage_and_stays_and_branches_have_that_of_the_first_turn() -> None:
    rows = [written(0, [2, 2], [1.0, 1.0]), written(4, [2], [1.0], group=4), written(1, [1, 1], [0.0, 0.0])]
    rows = [*rows, written(1, [2, 1], [0.0, 0.0], branch=1)]
    batch = GroupRelative("centred", credit="turns").batch(rows)
    assert close(by_turn(batch), [[1.0, 0.5], [0.0], [-1.0, -0.5], [-1.0, -1.0]])
    assert not batch.dropped
    whole = GroupRelative("centred").batch(rows)
    assert whole.dropped == (Drop(4, ALONE),)


def test_a_rollout_counts_once_whatever_it_summarised() -> None:
    rows = [written(0, [3], [1.0]), written(0, [2], [1.0], branch=1), written(0, [4], [1.0], branch=2)]
    batch = GroupRelative("centred").batch([*rows, written(1, [2], [0.0])])
    assert close(by_turn(batch), [[0.5], [0.5], [0.5], [-0.5]])


def test_groups_in_parts_have_the_advantages_of_the_batch() -> None:
    parts = InParts(GroupRelative("centred", credit="turns", gamma=0.5), 3)
    batch = parts.estimator.batch(three())
    early = parts._early(three()[::-1])
    assert known(early.advantages).tobytes() == known(batch.advantages).tobytes()


class Walk:
    """A tiny environment: in each state the policy stops, or takes one of two ways on; at most three turns."""

    def __init__(self, dice: np.random.Generator) -> None:
        self.rewards = dice.normal(1, 1, (4, 3))
        self.next = dice.integers(0, 4, (4, 3))
        scores = dice.normal(0, 1, (4, 3))
        self.policy: NDArray[np.float64] = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)

    def paths(self, state: int = 0, turns: int = 3) -> Iterator[list[tuple[int, int]]]:
        """Return all ways through, each as states and actions; action 0 stops."""
        for action in range(3):
            here = (state, action)
            if not action or turns == 1:
                yield [here]
            else:
                yield from ([here, *rest] for rest in self.paths(int(self.next[here]), turns - 1))

    def probability(self, path: Sequence[tuple[int, int]]) -> float:
        return float(np.prod([self.policy[here] for here in path]))

    def earned(self, path: Sequence[tuple[int, int]]) -> list[float]:
        return [float(self.rewards[here]) for here in path]

    def score(self, path: Sequence[tuple[int, int]], weights: Floats) -> NDArray[np.float64]:
        """Return the sum over turns of a weight times the gradient of the log-probability, by the scores."""
        found = np.zeros_like(self.policy)
        for (state, action), weight in zip(path, weights, strict=True):
            found[state] -= weight * self.policy[state]
            found[state, action] += weight
        return found

    def gradient(self) -> NDArray[np.float64]:
        found = np.zeros_like(self.policy)
        for path in self.paths():
            found += self.probability(path) * self.score(path, [sum(self.earned(path))] * len(path))
        return found

    def expected(self, estimate: Callable[[Sequence[tuple[Any, Any]]], list[list[Floats]]]) -> NDArray[np.float64]:
        """Return the expected gradient of an estimator of the advantages of pairs, over all pairs of ways."""
        paths = [*self.paths()]
        pairs = [(one, other) for one in paths for other in paths]
        found = np.zeros_like(self.policy)
        for pair, weights in zip(pairs, estimate(pairs), strict=True):
            for path, each in zip(pair, weights, strict=True):
                found += self.probability(pair[0]) * self.probability(pair[1]) * self.score(path, each) / 2
        return found

    def ours(self, estimator: GroupAdvantage, pairs: Sequence[tuple[Any, Any]]) -> list[list[Floats]]:
        rows = [
            written(2 * group + k, [1] * len(path), self.earned(path), group=group)
            for group, pair in enumerate(pairs)
            for k, path in enumerate(pair)
        ]
        flat = by_turn(GroupRelative(estimator, credit="turns").batch(rows))
        return [[flat[2 * at], flat[2 * at + 1]] for at in range(len(pairs))]

    def summed(self, pairs: Sequence[tuple[Any, Any]]) -> list[list[Floats]]:
        """Return sums over the turns from each on of rewards less their mean over the responses with that turn."""
        return [biased([self.earned(path) for path in pair]) for pair in pairs]


def biased(earned: Sequence[Floats]) -> list[Floats]:
    means = [
        np.mean([row[turn] for row in earned if len(row) > turn]) for turn in range(max(len(row) for row in earned))
    ]
    less = [[reward - mean for reward, mean in zip(row, means, strict=False)] for row in earned]
    return [[float(sum(row[turn:])) for turn in range(len(row))] for row in less]


@given(st.integers(0, 2**32 - 1))
def test_the_expected_gradient_is_that_of_the_expected_reward_also_where_the_policy_chooses_when_to_stop(
    seed: int,
) -> None:
    walk = Walk(np.random.default_rng(seed))
    true = walk.gradient()
    assert walk.expected(partial(walk.ours, "leave_one_out")) == pytest.approx(true, abs=1e-5)
    assert 2 * walk.expected(partial(walk.ours, "centred")) == pytest.approx(true, abs=1e-5)


def test_the_sum_of_rewards_compared_turn_by_turn_teaches_to_stop_and_is_not_offered() -> None:
    firsts = [row[0] for row in biased(THREE)]
    assert firsts == pytest.approx([0.6667, 0.1667, -0.8333], abs=6e-5)  # +.1667 to one below the mean of the group
    walk = Walk(np.random.default_rng(0))
    walk.rewards[:] = 1.0  # another turn is worth as much as this one, so that to go on is better
    true, other = walk.gradient(), walk.expected(walk.summed)
    assert true[0, 0] < -0.05
    assert np.abs(other).max() < 1e-12, "it sees nothing to gain"
    assert walk.expected(partial(walk.ours, "leave_one_out")) == pytest.approx(true, abs=1e-5)


# What has no effect, or no key


def tool(turn: Turn) -> Answer | None:
    return Answer(np.full(2, 90_000, np.int32), reward=0.5 * (turn.number + 1), key=f"{turn.number}")


class Replies:
    """Answers each turn with a reward, and the last one with no more than that."""

    def __init__(self, outcome: Callable[[Turn], Answer | None] = tool) -> None:
        self.outcome = outcome

    async def answer(self, turn: Turn) -> Answer | None:
        return self.outcome(turn)


def graph(environment: Replies | None, **advantage: Any) -> Graph[StepReport]:
    recipe: Any = ppo if "over" in advantage else grpo
    kind = partial(GAE, kl=0.0) if "over" in advantage else GroupRelative
    made: Graph[StepReport] = recipe(
        policy=FakePolicy(lambda prompt: 4, 0.01),
        reward=FakeScorer(fake_scalar),
        trainer=FakeTrainer(),
        admission=Synchronous(2),
        samples=2,
        advantage=kind(**advantage),
        environment=environment,
    )
    return made


@pytest.mark.parametrize("advantage", [{"over": "turns"}, {"credit": "turns"}, {"credit": "state"}])
def test_credit_by_turn_where_nothing_answers_turns_is_refused(advantage: dict[str, Any]) -> None:
    (name, value), *_ = advantage.items()
    with pytest.raises(GraphError, match=f"'advantage' has {name} = '{value}', and nothing answers turns: give Gen"):
        graph(None, **advantage)
    graph(Replies(), **advantage)


def test_states_without_keys_and_rewards_of_turns_that_are_not_there_are_refused() -> None:
    with pytest.raises(ProtocolError, match="turn 0 of rollout 0 has no key of one: give it with the answer"):
        GroupRelative("centred", credit="state").batch(three())
    finish = three()[0].finish
    with pytest.raises(ValueError, match="there is no turn 2 in a response of 2 turns to be rewarded"):
        TokenRewards.by_turn(finish, {2: 1.0})
    assert TokenRewards.by_turn(finish, {-1: 1.0, 0: 2.0}, 0.25).rewards[[2, 7]].tolist() == [2.0, 1.25]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"reward": float("nan")}, "the reward of a turn must be a finite number, not nan"),
        ({"key": 3}, "the key of the state of a turn is a text; got 3"),
        ({"tokens": np.zeros(0, np.int32)}, r"tokens, a NumPy array, int32 \[1 or more\]"),
    ],
)
def test_an_answer_with_a_reward_or_a_key_that_is_none_is_refused(answer: dict[str, Any], words: str) -> None:
    given = {"tokens": np.full(2, 9, np.int32), **answer}
    made = Credited(Setting(lengths=(6,), steps=1, samples=2), environment=Replies(lambda turn: Answer(**given)))
    with pytest.raises(ProtocolError, match=words):
        run_virtual(made.run)


# Whole graphs


@dataclass
class Credited(Pipeline):
    """The recipe on fakes, whose reward is that of the environment."""

    environment: Replies = field(default_factory=Replies)
    credit: Credit = "turns"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.policy.turns = lambda prompt: (2, 5, 7)[: prompt.rollout % 4]
        self.reward = WholeScorer(self.earned)

    async def earned(self, finish: Finish) -> float:
        return earned_by_turns(finish, float(finish.rollout % 5))

    def graph(self) -> Graph[StepReport]:
        s = self.setting
        made = grpo(
            policy=self.policy,
            reward=known(self.reward),
            trainer=self.trainer,
            admission=s.admission,
            samples=s.samples,
            advantage=GroupRelative("leave_one_out", credit=self.credit, gamma=0.9),
            chunks=s.chunks,
            environment=self.environment,
        )
        return made.replace(generate=replace(made.stage("generate", Generate), replay=self.replay))


MANY = Setting(lengths=(9, 14, 8, 30, 21, 10, 8, 40), extra=2, steps=4, samples=3)


def played(setting: Setting, credit: Credit = "turns") -> Credited:
    made = Credited(setting, credit=credit)
    run_virtual(made.run)
    return made


def test_rewards_and_keys_of_an_environment_reach_the_turns_that_they_are_of() -> None:
    batch = played(replace(MANY, extra=0, steps=1)).batches[0]
    assert {len(turns) for turns in batch.answered} == {0, 1, 2, 3}
    for row, turns, earned in zip(batch.rows(), batch.answered, sampled_turns(batch), strict=True):
        sampled, rewards = batch.sampled[row], known(batch.rewards)[row]
        assert [bool(sampled[turn.end - 1] and not sampled[turn.end]) for turn in turns] == [True] * len(turns)
        assert [rewards[turn.end - 1] for turn in turns] == [0.5 * (number + 1) for number in range(len(turns))]
        assert [turn.key for turn in turns] == [str(number) for number in range(len(turns))]
        assert len(earned) == len(turns) + 1


@pytest.mark.parametrize("credit", ["turns", "state"])
def test_chunks_and_slow_scorers_change_no_advantage(credit: Credit) -> None:
    streamed = played(replace(MANY, extra=0, chunks=Fixed(2), capacity=2, reward=0.01), credit)
    assert same_numbers(streamed.batches, played(on_policy(replace(MANY, extra=0)), credit).batches)


def same_numbers(one: Sequence[Batch], other: Sequence[Batch]) -> bool:
    mine, theirs = ([[[*turns] for turns in batch.answered] for batch in batches] for batches in (one, other))
    return mine == theirs and same_batches(one, other)


def test_a_last_answer_without_tokens_ends_the_response_with_its_reward() -> None:
    def outcome(turn: Turn) -> Answer:
        return Answer(np.full(2 * (turn.number == 0), 9, np.int32), reward=1.0 + turn.number)

    made = Credited(replace(MANY, extra=0, steps=1), environment=Replies(outcome))
    made.policy.turns = lambda prompt: (2, 4)
    run_virtual(made.run)
    (batch,) = made.batches
    assert {len(response) for response in batch.responses} == {6}
    assert [[turn.reward for turn in turns] for turns in batch.answered] == [[1.0, 2.0]] * len(batch)
    assert [turn[1].end for turn in batch.answered] == [6] * len(batch)
    assert [[len(turn) for turn in turns] for turns in sampled_turns(batch)] == [[2, 2]] * len(batch)
    assert made.reports[0].metrics["num_turns/mean"] == 2.0
