"""GroupRelative as a stage: who is compared with whom, what a response is worth, and what its inputs are."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oppo.admission import Overcommit
from oppo.errors import ConfigError, GraphError, ProtocolError
from oppo.events import (
    Batch,
    Chunk,
    Defer,
    Drop,
    Finish,
    FinishReason,
    FloatArray,
    Prompt,
    Response,
    RolloutEvent,
    Scored,
    ToolTokens,
)
from oppo.graph import GraphBuilder
from oppo.graph.channel import Channel
from oppo.returns import GROUP_EPSILON, AdaptiveKL, GroupAdvantage, ScoreShaping
from oppo.stages import Generate, GroupRelative, Score, ScoredRollout, Update
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, run_virtual
from tests.known import known

SAMPLES = 3


def finish(rollout: int, *, length: int = 4, given: int = 0, reason: FinishReason = "eos") -> Finish:
    """Return the end of one of three responses to a prompt: log-probs of -1, and tool tokens at its end."""
    prompt = Prompt(rollout, rollout // SAMPLES, np.arange(3, dtype=np.int32)).samples(SAMPLES)[rollout % SAMPLES]
    tokens = np.arange(length, dtype=np.int32)
    chunk = Chunk(rollout, 0, tokens, np.full(length, -1, np.float32), np.zeros(length, np.int32))
    assert prompt.rollout == rollout
    return Finish(rollout, Response.of(prompt, [chunk, ToolTokens(rollout, length, tokens[:given])]), reason)


def row(rollout: int, score: float, *, reference: float | None = None, length: int = 4) -> ScoredRollout:
    log_probs = None if reference is None else np.full(length, reference, np.float32)
    return ScoredRollout(finish(rollout, length=length), log_probs, score)


def firsts(batch: Batch) -> list[float]:
    return [float(known(batch.advantages)[tokens][0]) for tokens in batch.rows()]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("leave_one_out", [-1.5, 0, 1.5, 6, -3, -3]),
        ("centred", [-1, 0, 1, 4, -2, -2]),
        ("max_rl", [-1 / 2, 0, 1 / 2, 4 / 3, -2 / 3, -2 / 3]),
        ("batch_standardised", [each / (5.5**0.5 + GROUP_EPSILON) for each in (-1, 0, 1, 4, -2, -2)]),
        ("standardised", [-1 / (1 + GROUP_EPSILON), 0, 1 / (1 + GROUP_EPSILON), 2 / 3**0.5, -(3**-0.5), -(3**-0.5)]),
    ],
)
def test_responses_are_compared_within_their_group(advantage: GroupAdvantage, expected: list[float]) -> None:
    batch = GroupRelative(advantage).batch([row(k, score) for k, score in enumerate([1, 2, 3, 7, 1, 1])])
    np.testing.assert_allclose(firsts(batch), expected, rtol=1e-4, atol=1e-7)
    assert batch.scores.tolist() == [1, 2, 3, 7, 1, 1]
    assert known(batch.advantages).dtype == np.float32
    assert (batch.values, batch.returns) == (None, None)


def test_every_sampled_token_has_the_advantage_of_its_response_and_given_ones_have_none() -> None:
    rows = [ScoredRollout(finish(0, length=2, given=1), None, 0.0), ScoredRollout(finish(1, length=3), None, 2.0)]
    batch = GroupRelative("centred").batch(rows)
    assert known(batch.advantages).tolist() == [-1, -1, 0, 1, 1, 1]


def test_a_batch_says_which_log_probs_it_has() -> None:
    plain, known = ([row(n, 1.0, reference=reference) for n in (0, 1)] for reference in (None, -1.0))
    again = [replace(each, proximal=np.full(4, -1, np.float32)) for each in known]
    said = [GroupRelative().batch(rows) for rows in (plain, known, again)]
    assert [batch.reference is not None for batch in said] == [False, True, True]
    assert [batch.proximal is not None for batch in said] == [False, False, True]


def test_the_kl_to_the_reference_is_taken_from_what_a_response_is_worth() -> None:
    rows = [row(0, 1.0, reference=-1.0), row(1, 1.0, reference=-1.5), row(2, 1.0, reference=-3.0)]
    batch = GroupRelative("centred", kl=0.1).batch(rows)
    assert firsts(batch) == pytest.approx([1 / 3, 0.4 / 3, -1.4 / 3], abs=1e-6)
    assert batch.metrics["objective/kl"] == pytest.approx(10 / 3)
    assert batch.metrics["objective/kl_coef"] == 0.1
    assert batch.metrics["objective/rlhf_reward"] == pytest.approx(1 - 1 / 3)
    assert batch.metrics["objective/scores"] == 1


def test_a_controller_of_the_coefficient_learns_from_each_batch() -> None:
    rows = [row(0, 1.0, reference=-1.5), row(1, 1.0, reference=-1.5)]
    stage = GroupRelative("leave_one_out", kl=AdaptiveKL(0.1, target=1.0, horizon=4))
    first, second = stage.batch(rows), stage.batch(rows)
    assert (first.metrics["objective/kl"], first.metrics["objective/kl_coef"]) == (2, 0.1)
    assert second.metrics["objective/kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 2 / 4))
    assert stage.batch([]).metrics == {}
    assert stage.state_dict()["kl"] == pytest.approx(0.1 * (1 + 0.2 * 2 / 4) ** 2), "an empty batch teaches nothing"


def test_without_a_reference_nothing_is_said_of_a_kl_to_it() -> None:
    batch = GroupRelative().batch([row(0, 0.0), row(1, 1.0)])
    assert batch.reference is None
    assert set(batch.metrics) == {
        "objective/entropy", "objective/rlhf_reward", "objective/scores", "objective/scores_std",
        "objective/shaped_scores", "objective/group_std", "objective/frac_zero_std",
    }  # fmt: skip


def test_the_metrics_say_how_many_groups_teach_nothing() -> None:
    batch = GroupRelative().batch([row(k, score) for k, score in enumerate([0.1, 0.1, 0.1, 2, 0, 4])])
    assert batch.metrics["objective/frac_zero_std"] == 0.5
    assert batch.metrics["objective/group_std"] == pytest.approx(1.0)
    assert firsts(batch)[:3] == [0, 0, 0]


def test_a_group_whose_scores_tie_is_counted_whatever_its_kl_is() -> None:
    rows = [row(k, score, reference=-1.0 - k) for k, score in enumerate([1, 1, 1, 3, 1, 2])]
    batch = GroupRelative("leave_one_out", kl=0.1).batch(rows)
    assert any(firsts(batch)[:3]), "the KL teaches"
    assert batch.metrics["objective/frac_zero_std"] == 0.5
    assert batch.metrics["objective/group_std"] == pytest.approx(0.5)


def test_scores_are_shaped_before_they_are_compared_and_what_was_learned_of_them_is_kept() -> None:
    ends: list[FinishReason] = ["eos", "length", "stop"]
    rows = [ScoredRollout(finish(k, reason=reason), None, 0.0) for k, reason in enumerate(ends)]
    stage = GroupRelative("centred", shaping=ScoreShaping(missing_eos_penalty=3.0, norm=True))
    batch = stage.batch(rows)
    assert firsts(batch) == [1, -2, 1]
    assert batch.scores.tolist() == [0, 0, 0]
    assert stage.shaping.moments.count == 3


def test_a_response_that_is_left_alone_is_dropped_with_a_reason() -> None:
    deferred = [Defer(9, 1)]
    batch = GroupRelative().batch([row(1, 5.0), row(3, 1.0), row(4, 2.0)], [Drop(0, "no score")], deferred)
    assert batch.rollouts == (3, 4)
    assert batch.dropped == (Drop(0, "no score"), Drop(1, "left alone in its group"))
    assert batch.deferred == (Defer(9, 1),)


def test_a_batch_of_which_everybody_was_left_alone_is_empty() -> None:
    batch = GroupRelative().batch([row(1, 5.0)])
    assert (len(batch), len(batch.tokens), batch.metrics) == (0, 0, {})


Said = Scored[float] | Drop
PerToken = Scored[FloatArray] | Drop


def sent(
    stage: GroupRelative, events: list[RolloutEvent], scores: list[Said], **logprobs: list[PerToken]
) -> list[Batch]:
    """Return what the stage sends when it is given all of this at once."""
    batches: list[Batch] = []

    class Out:
        async def send(self, item: Batch, /) -> None:
            batches.append(item)

    async def main() -> None:
        rollouts, reward = Channel[RolloutEvent]("generate->advantage", 9), Channel[Said]("reward->advantage", 9)
        more = {name: Channel[PerToken](f"{name}->advantage", 9) for name in logprobs}
        for event in events:
            rollouts.send_nowait(event)
        for score in scores:
            reward.send_nowait(score)
        for name, items in logprobs.items():
            for item in items:
                more[name].send_nowait(item)
        rollouts.close()
        reward.close()
        for lane in more.values():
            lane.close()
        await stage.run(rollouts, reward, out=Out(), **more)

    run_virtual(main)
    return batches


ENDS: list[RolloutEvent] = [finish(2), finish(0), finish(1)]
SCORES: list[Said] = [Scored(1, 1.0, 0), Scored(2, 2.0, 0), Scored(0, 0.0, 0)]


def first(column: FloatArray | None) -> float | None:
    return None if column is None else float(column[0])


def per_token(value: float) -> list[PerToken]:
    return [Scored(rollout, np.full(4, value, np.float32), 0) for rollout in (0, 1, 2)]


def test_log_probs_of_a_reference_and_proximal_ones_are_inputs_by_name() -> None:
    (neither,) = sent(GroupRelative(), ENDS, SCORES)
    (referred,) = sent(GroupRelative(), ENDS, SCORES, reference=per_token(-2))
    (proximal,) = sent(GroupRelative(), ENDS, SCORES, proximal=per_token(-3))
    (both,) = sent(GroupRelative("centred", kl=0.1), ENDS, SCORES, reference=per_token(-2), proximal=per_token(-3))
    batches = neither, referred, proximal, both
    assert [batch.rollouts for batch in batches] == [(0, 1, 2)] * 4
    assert [float(batch.logprobs[0]) for batch in batches] == [-1, -1, -1, -1]
    assert [first(batch.reference) for batch in batches] == [None, -2, None, -2]
    assert [first(batch.proximal) for batch in batches] == [None, None, -3, -3]
    assert [batch.metrics.get("objective/kl") for batch in batches] == [None, 4, None, -4]


def test_values_of_a_critic_are_in_the_batch_and_returns_for_it_are_not() -> None:
    (batch,) = sent(GroupRelative(), ENDS, SCORES, value=per_token(0.5))
    assert known(batch.values).tolist() == [0.5] * 12
    assert batch.returns is None


@pytest.mark.parametrize("kl", [0.1, AdaptiveKL(0.1)])
def test_a_penalty_without_a_reference_is_refused(kl: float | AdaptiveKL) -> None:
    g: GraphBuilder[Prompt] = GraphBuilder("mine")
    policy = FakePolicy()
    rollout = g.add("generate", Generate(policy, Overcommit(2)), g.prompts)
    score = g.add("reward", Score(FakeScorer(fake_scalar)), rollout)
    batch = g.add("advantage", GroupRelative("centred", kl=kl), rollout, score)
    with pytest.raises(GraphError, match="'advantage' has a KL penalty, which needs a reference: connect reference="):
        g.build(g.add("update", Update(FakeTrainer(), [policy]), batch))


class OfRows(GroupRelative):
    """Its advantages are one for each row."""

    def estimated(self, batch: Batch) -> Batch:
        return replace(super().estimated(batch), advantages=np.zeros(len(batch), np.float32))


def test_estimates_have_a_number_for_each_token() -> None:
    with pytest.raises(ProtocolError, match=r"Batch.advantages must .* each token, 12 in 3 rows") as caught:
        sent(OfRows(), ENDS, SCORES)
    assert any(note.startswith("raised by OfRows.estimated() at ") for note in caught.value.__notes__)


def test_offsets_are_the_borders_of_the_responses() -> None:
    (batch,) = sent(GroupRelative(), ENDS, SCORES)
    shifted = batch.offsets + np.array([0, 1, 0, 0])
    for wrong in (shifted, batch.offsets[:-1], batch.offsets - 1):
        with pytest.raises(ProtocolError, match=r"Batch.offsets .* 4 numbers.* 12"):
            replace(batch, offsets=wrong)


def test_what_is_not_finite_or_dropped_leaves_its_group_and_the_others_go_on() -> None:
    scores: list[Said] = [Scored(0, float("nan"), 0), Scored(1, 1.0, 0), Scored(2, 2.0, 0)]
    (batch,) = sent(GroupRelative("leave_one_out"), [*ENDS, Defer(6, 1)], scores)
    assert (batch.rollouts, firsts(batch)) == ((1, 2), [-1, 1])
    assert batch.dropped == (Drop(0, "nonfinite score"),)
    assert batch.deferred == (Defer(6, 1),)
    scores = [Scored(0, 0.0, 0), Drop(1, "no score"), Scored(2, 2.0, 0)]
    (batch,) = sent(GroupRelative("leave_one_out"), ENDS, scores)
    assert (batch.rollouts, batch.dropped) == ((0, 2), (Drop(1, "no score"),))


@pytest.mark.parametrize("name", ["reference", "proximal"])
def test_a_scorer_that_answers_nothing_is_not_one_that_nobody_asked(name: str) -> None:
    nothing: list[Any] = [Scored(rollout, None, 0) for rollout in (0, 1, 2)]
    with pytest.raises(ProtocolError, match=r"rollout \d: expected 4 numbers as its .* log-probs, .* got None"):
        sent(GroupRelative(), ENDS, SCORES, **{name: nothing})


def test_a_step_without_a_rollout_sends_nothing_and_one_that_only_carries_sends_that() -> None:
    assert sent(GroupRelative(), [], []) == []
    (batch,) = sent(GroupRelative(), [Defer(6, 1)], [])
    assert (len(batch), batch.deferred) == (0, (Defer(6, 1),))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            {"advantage": "median"},
            "advantage must be 'leave_one_out', 'standardised', 'centred', 'batch",
        ),
        ({"kl_estimator": "k9"}, "kl_estimator must be 'k1', 'k2' or 'k3', not 'k9'"),
        ({"kl": "0.1"}, "kl must be a number, or a controller such as AdaptiveKL, not '0.1'"),
        ({"kl": -0.1}, "the KL coefficient must be 0 or more and finite, not -0.1"),
        ({"kl": 0.1}, "advantage = 'standardised' cannot have a KL in the reward, got kl = 0.1: where the scores"),
        ({"advantage": "max_rl", "kl": 0.1}, "advantage = 'max_rl' cannot have a KL in the reward"),
        ({"kl": AdaptiveKL(0.01)}, 'put it into the loss, with algorithm.kl_in="loss"'),
    ],
)
def test_what_cannot_be_compared_with_is_refused_at_once(choice: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=re.escape(message)):
        GroupRelative(**choice)
