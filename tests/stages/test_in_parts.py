"""Groups that are trained while others are written: what comes when, what it saves, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from oppo.admission import Observation, Overcommit
from oppo.algorithms.group import grpo
from oppo.errors import ConfigError
from oppo.events import Batch, BatchPart, Drop, Finish, Prompt, StepReport
from oppo.graph import Graph
from oppo.models import Trained, Trainer
from oppo.returns import AdaptiveKL, ScoreShaping
from oppo.stages import GAE, GroupRelative, InParts, Update
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, Fault, FaultyTrainer, Raise, fake_scalar, run_virtual
from tests.known import known
from tests.pipelines import Tap

SAMPLES = 3


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
    """Return the graph with another trainer."""
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


def test_what_needs_the_whole_batch_first_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="GAE estimates advantages from the whole batch"):
        InParts(GAE(), SAMPLES)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ConfigError, match="scores normalised by the moments of all"):
        InParts(GroupRelative(shaping=ScoreShaping(norm=True)), SAMPLES)
    with pytest.raises(ConfigError, match="a KL coefficient that adapts"):
        InParts(GroupRelative("centred", AdaptiveKL(0.1, target=1.0, horizon=10)), SAMPLES)
    with pytest.raises(ConfigError, match="samples must be"):
        InParts(GroupRelative(), 1)


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
