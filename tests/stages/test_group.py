"""GroupRelative: comparison within groups, with several rewards, and of groups that go to the trainer early."""

from __future__ import annotations

import pickle
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from oppo.admission import Observation, Overcommit
from oppo.algorithms.group import DAPO, GRPO, grpo
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
    StepReport,
    ToolTokens,
)
from oppo.graph import Graph, GraphBuilder
from oppo.models import Trained, Trainer
from oppo.returns import GROUP_EPSILON, AdaptiveKL, GroupAdvantage, NamedScores, ScoreShaping, TokenRewards
from oppo.rewards import Rewards
from oppo.stages import Generate, GroupRelative, InParts, Score, ScoredRollout, ScoredRollouts, Update
from oppo.stages.batch import BatchPart
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, Fault, FaultyTrainer, Raise, fake_scalar, run_virtual
from tests.kit.known import known
from tests.kit.pipelines import Tap
from tests.kit.responses import PerToken, Said, sent
from tests.kit.virtual import virtually

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


def test_rollouts_without_others_to_compare_with_are_no_groups_that_teach_nothing() -> None:
    stage = GroupRelative("batch_standardised", credit="turns")
    alone, mixed = stage.batch([row(0, 1.0), row(3, 2.0)]), stage.batch([row(0, 1.0), row(3, 2.0), row(4, 4.0)])
    assert len(alone) == 2
    assert not {"objective/group_std", "objective/frac_zero_std"} & {*alone.metrics}
    assert mixed.metrics["objective/frac_zero_std"] == 0
    assert mixed.metrics["objective/group_std"] == pytest.approx(2**0.5)


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
    batch = GroupRelative().batch_of(
        ScoredRollouts([row(1, 5.0), row(3, 1.0), row(4, 2.0)], [Drop(0, "no score")], deferred)
    )
    assert batch.rollouts == (3, 4)
    assert batch.dropped == (Drop(0, "no score"), Drop(1, "left alone in its group"))
    assert batch.deferred == (Defer(9, 1),)


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


WEIGHTS: Mapping[str, float] = {"right": 1.0, "short": 0.25, "rare": -2.0}


def each_reward_row(rollout: int, score: float) -> ScoredRollout:
    tokens = np.arange(1 + rollout % 3, dtype=np.int32)
    prompt = Prompt(rollout, rollout // 3, tokens[:1], group=rollout // 3)
    logprobs = np.full(len(tokens), -1, np.float32)
    response = Response(prompt, tokens, logprobs, np.zeros_like(tokens), np.ones(len(tokens), np.bool_))
    return ScoredRollout(Finish(rollout, response, "eos"), None, score)


def at_tokens(rollout: int, score: NamedScores) -> float:
    """Return the score of every second rollout as rewards at its tokens."""
    rewards = TokenRewards.at(1 + rollout % 3, {0: float(score) - 1, -1: 1})
    return TokenRewards(rewards.rewards, score.terms) if rollout % 2 else score


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
        each_reward_row(number, at_tokens(number, NamedScores({name: (WEIGHTS[name], each[name]) for name in each})))
        for number, each in enumerate(rows)
    ]
    batch = GroupRelative("each_reward").batch(scored)
    firsts = known(batch.advantages)[batch.offsets[:-1]]
    np.testing.assert_allclose(firsts, by_hand(rows), rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(batch.scores, [float(each.score) for each in scored], rtol=1e-6)


@pytest.mark.parametrize("first", [0.5, TokenRewards([0.5])])
@virtually
async def test_several_rewards_give_their_scores_by_name(first: float) -> None:
    """Also where one says which tokens earned it."""
    one, two = FakeScorer(lambda *_: first), FakeScorer(lambda *_: 2.0)
    rewards = Rewards({"one": (1.0, one), "two": (0.5, two)})
    each = each_reward_row(0, 0.0)
    await rewards.extend([each.finish.response.prompt, *each.finish.response.pieces()])
    (score,) = await rewards.finish([each.finish])
    assert isinstance(score, TokenRewards if isinstance(first, TokenRewards) else NamedScores)
    assert (float(score), score.terms) == (1.5, {"one": (1.0, 0.5), "two": (0.5, 2.0)})
    assert [*map(type, score.terms["one"])] == [float, float]
    copied = pickle.loads(pickle.dumps(score))
    assert (type(copied), copied.terms) == (type(score), score.terms)


def test_what_it_cannot_compare_is_refused() -> None:
    for score in (1.0, 0.5):
        with pytest.raises(ProtocolError, match=r"compares each of several rewards, and the scores are single numbers"):
            GroupRelative("each_reward").batch([each_reward_row(0, score), each_reward_row(1, score)])
    with pytest.raises(ConfigError, match=r"the shaping changes their sum"):
        GroupRelative("each_reward", shaping=ScoreShaping(scale=2.0))
    with pytest.raises(ConfigError, match=r"cannot have a KL in the reward"):
        GroupRelative("each_reward", kl=0.1)
    with pytest.raises(ConfigError, match=r"compared over the batch cannot come in parts"):
        InParts(GroupRelative("each_reward"), 3)
    with pytest.raises(ConfigError, match=r"one by one, and score_clip = 2\.0 changes their sum"):
        GRPO(scale_scores="each_reward", score_clip=2.0)
    with pytest.raises(ConfigError, match=r"long_buffer = None changes their sum"):
        DAPO(scale_scores="each_reward")
    assert DAPO(scale_scores="each_reward", long_buffer=0).compared == "each_reward"
    assert len(GroupRelative("each_reward").batch([])) == 0


@dataclass
class Made:
    """A run of groups in parts: decoding takes a second a token, and the tail is as long as ``lengths`` says."""

    lengths: Sequence[int] = (2, 4, 9)
    parts: bool = True
    batch: int = 3
    extra: int = 0
    steps: int = 1
    estimator: GroupRelative = field(default_factory=GroupRelative)
    trainer: FakeTrainer = field(
        default_factory=lambda: FakeTrainer(
            seconds=lambda batch: 0.5 * len(batch), accumulating=lambda part: 0.5 * len(part), committing=0.25
        )
    )
    unscored: frozenset[int] = frozenset()
    cap: int = 1_000

    def graph(self) -> Graph[StepReport]:
        def score(finish: Finish, tokens: tuple[int, ...], version: int) -> float | Drop:
            known = fake_scalar(finish, tokens, version)
            return Drop(finish.rollout, "no score") if finish.rollout in self.unscored else known

        graph = grpo(
            policy=FakePolicy(
                length=lambda prompt: self.lengths[prompt.admission % len(self.lengths)], cap=self.cap, seconds=1.0
            ),
            reward=FakeScorer(score),
            trainer=self.trainer,
            admission=Overcommit(batch=self.batch, overcommit=self.extra),
            samples=SAMPLES,
            advantage=self.estimator,
        )
        return graph.replace(advantage=InParts(self.estimator, SAMPLES)) if self.parts else graph

    async def run(self) -> tuple[list[StepReport], Tap]:
        tap, count = Tap(), self.batch * self.steps + self.extra
        asked = [Prompt(n, n, np.arange(n, n + 4, dtype=np.int32), group=n) for n in range(count)]
        async with self.graph().open(asked, observers=[tap]) as run:
            return [report async for report in run.steps(self.steps)], tap


def trained_by(trainer: Trainer, made: Made) -> Graph[StepReport]:
    graph = made.graph()
    return graph.replace(update=Update(trainer, graph.stage("update", Update).synced))


def test_the_update_is_hidden_behind_the_tail() -> None:
    """Of nine seconds of decoding; the two short groups are accumulated by then, the last takes its own time."""
    (whole,), _ = run_virtual(Made(parts=False).run)
    (streamed,), tap = run_virtual(Made().run)
    assert whole.seconds == pytest.approx(9 + 0.5 * 9)
    assert streamed.seconds == pytest.approx(9 + 0.5 * 3 + 0.25)
    sent = [item for _, stage, item in tap.items if stage == "advantage"]
    assert [type(item) for item in sent] == [BatchPart, BatchPart, BatchPart, Batch]
    assert streamed.metrics["timing_s/update"] == pytest.approx(0.25), "what is hidden is not an update's time"
    (seen,) = [item for _, _, item in tap.items if isinstance(item, Observation)]
    assert (seen.accumulate_seconds, seen.rest_seconds) == pytest.approx((0.5 * 6, 0.5 * 3 + 0.25)), (
        "the trainer's time"
    )


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    extra=st.integers(0, 2),
    unscored=st.sets(st.integers(0, 8), max_size=3),
)
@example(lengths=[9, 1], extra=2, unscored={1})
def test_parts_are_rows_of_the_batch_that_follows(lengths: list[int], extra: int, unscored: set[int]) -> None:
    made = Made(lengths=lengths, extra=extra, steps=2, unscored=frozenset(unscored))
    usual = replace(made, parts=False, trainer=FakeTrainer())
    reports, tap = run_virtual(made.run)
    expected, _ = run_virtual(usual.run)
    assert [report.trained for report in reports] == [report.trained for report in expected]
    parts: list[Batch] = []
    for _, stage, item in tap.items:
        if stage == "advantage" and isinstance(item, BatchPart):
            parts.append(item.batch)
        elif stage == "advantage" and isinstance(item, Batch):
            for part in parts:
                assert len(part) == SAMPLES
                assert set(part.rollouts) <= set(item.rollouts)
                for row, rollout in enumerate(part.rollouts):
                    at = item.rollouts.index(rollout)
                    here, there = part.rows()[row], item.rows()[at]
                    assert np.array_equal(known(part.advantages)[here], known(item.advantages)[there])
            dropped = {drop.rollout // SAMPLES for drop in item.dropped}
            assert {rollout // SAMPLES for part in parts for rollout in part.rollouts} == {
                rollout // SAMPLES for rollout in item.rollouts
            } - dropped, "every group without a drop comes early"
            parts = []


def test_a_part_that_fails_ends_the_run_and_the_next_run_trains_the_batch() -> None:
    trainer = FaultyTrainer("trainer", FakeTrainer(), (Fault("trainer", "accumulate", Raise(OSError), call=1),))
    graph = trained_by(trainer, Made())

    async def run() -> list[StepReport]:
        asked = [Prompt(n, n, np.arange(n, n + 4, dtype=np.int32), group=n) for n in range(3)]
        async with graph.open(asked) as opened:
            return [report async for report in opened.steps(1)]

    with pytest.raises(OSError, match=r"call 1 of accumulate\(\)"):
        run_virtual(run)
    (report,) = run_virtual(run)
    assert len(report.trained) == 9


class Whole:
    """A trainer that takes batches whole."""

    version = 0

    async def update(self, batch: Batch) -> Trained:
        self.version += 1
        return Trained()

    async def sync_weights(self, *synced: object) -> None:
        """Give nothing."""


def test_a_trainer_that_takes_batches_whole_is_refused_by_name() -> None:
    async def run() -> None:
        graph = trained_by(Whole(), Made())
        async with graph.open([Prompt(0, 0, np.arange(4, dtype=np.int32))]) as opened:
            await opened.step()

    with pytest.raises(ConfigError, match=r"the batch comes in parts, and Whole takes it whole"):
        run_virtual(run)


def test_the_state_is_the_estimators() -> None:
    stage = InParts(GroupRelative("centred", 0.1), SAMPLES)
    other = InParts(GroupRelative("centred", 0.1), SAMPLES)
    other.load_state_dict(stage.state_dict())
    assert other.state_dict() == stage.state_dict()


def test_a_group_of_which_nothing_is_trained_is_no_part() -> None:
    made = Made(lengths=(9, 2, 4), cap=9, estimator=GroupRelative(mask_truncated=True))
    reports, tap = run_virtual(made.run)
    parts = [
        item.batch.rollouts for _, stage, item in tap.items if stage == "advantage" and isinstance(item, BatchPart)
    ]
    (report,) = reports
    left_out = tuple(drop.rollout for drop in report.dropped)
    assert left_out == tuple(range(SAMPLES))
    assert {drop.reason for drop in report.dropped} == {"left out of the loss"}
    assert sorted(rollout for part in parts for rollout in part) == list(report.trained)
    assert report.score == pytest.approx(float(made.trainer.batches[0].scores.mean()))
