"""Dynamic sampling: groups are accepted or rejected by their scores, and rejected ones are replaced in rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import example, given

from oppo.admission import Overcommit, TailBatched
from oppo.algorithms.grpo import grpo
from oppo.errors import ConfigError, NothingTrained
from oppo.events import FloatArray, StepReport
from oppo.graph import Graph
from oppo.stages import Generate, GroupRelative, Selection, Update
from oppo.stages.selection import REJECTED, differ
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, run_virtual
from tests.pipelines import Setting, motions, on_policy, same_batches
from tests.test_grpo_graph import Grouped, groups

CARRIED = Setting(lengths=(5, 9, 3, 30, 21, 7, 8, 60), extra=2, steps=4, samples=2, reward=0.03)


def every_third(scores: FloatArray) -> bool:
    """Reject about a third of all groups."""
    return int(np.abs(scores).sum() * 1_000) % 3 > 0


@dataclass
class Selected(Grouped):
    """The recipe on fakes, with a selection."""

    select: Selection = field(default_factory=lambda: Selection(every_third, max_rounds=100))

    def graph(self) -> Graph[StepReport]:
        assert self.reward is not None
        s = self.setting
        recorded: FakeScorer[FloatArray] = FakeScorer(lambda event, tokens, version: event.response.logprobs)
        graph = grpo(
            policy=self.policy,
            reward=self.reward,
            trainer=self.trainer,
            admission=self.admission or s.admission,
            samples=s.samples,
            advantage=GroupRelative("centred"),
            select=self.select,
            proximal=recorded if self.proximal else None,
            chunks=s.chunks,
        )
        return graph.replace(update=replace(graph.stage("update", Update), after=s.after))


def played(setting: Setting, *, proximal: bool = False) -> Selected:
    pipeline = Selected(setting, proximal=proximal)
    run_virtual(pipeline.run)
    return pipeline


@pytest.mark.schedules
@given(motions().map(lambda setting: replace(setting, samples=setting.samples + 1)))
@example(CARRIED)
@example(replace(CARRIED, prompts=7))
@example(replace(CARRIED, lookahead=2))
@example(replace(CARRIED, lookahead=2, refill=True, in_flight=True, extra=4))
@example(replace(CARRIED, lookahead=1, refill=True, extra=1, prompts=7))
def test_every_prompt_is_trained_or_rejected_exactly_once_and_batches_count_accepted_groups(setting: Setting) -> None:
    pipeline = played(setting, proximal=True)
    trained = [rollout for batch in pipeline.batches for rollout in batch.rollouts]
    rejected = [drop.rollout for batch in pipeline.batches for drop in batch.dropped]
    assert {drop.reason for batch in pipeline.batches for drop in batch.dropped} <= {REJECTED}
    taken = sorted(trained + rejected)
    assert max(Counter(taken).values(), default=1) == 1
    last = {event.rollout for event in pipeline.batches[-1].deferred} if pipeline.batches else set[int]()
    assert sorted(last | set(taken)) == list(range(len(taken) + len(last))), "no prompt is left out"
    short = [len(batch) < setting.batch * setting.samples for batch in pipeline.batches]
    if any(short):
        assert len(taken) + len(last) == setting.prompts * setting.samples, "a batch is short when the data has ended"
    for batch in pipeline.batches:
        scores = batch.scores.reshape(-1, setting.samples)
        assert all(every_third(group) for group in scores)
        assert len(scores) <= setting.batch
        assert len(batch.deferred) <= setting.most_carried
    for number, batch in enumerate(pipeline.batches):
        lag = number - batch.versions
        assert lag.max(initial=0) <= setting.max_deferrals + setting.lookahead


@pytest.mark.schedules
@given(groups())
@example(replace(CARRIED, lookahead=1))
def test_what_is_selected_does_not_depend_on_the_speed_of_anything(setting: Setting) -> None:
    streamed = replace(setting, paces=())
    assert same_batches(played(streamed).batches, played(on_policy(streamed)).batches)


@pytest.mark.schedules
@given(groups(prompts=(1_000,)))
@example(CARRIED)
def test_a_run_interrupted_at_every_checkpoint_selects_the_same(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting
) -> None:
    setting = replace(setting, paces=())
    directory, whole = tmp_path_factory.mktemp("state"), Selected(setting)
    run_virtual(whole.run_part, 0, setting.steps, directory)
    parts = []
    for first in range(0, setting.steps, setting.checkpoint_every):
        parts.append(part := Selected(setting))
        run_virtual(part.run_part, first, min(first + setting.checkpoint_every, setting.steps), directory)
    assert same_batches([batch for part in parts for batch in part.batches], whole.batches)


def test_rounds_are_counted_and_a_complete_group_without_a_place_comes_before_new_prompts() -> None:
    pipeline = played(CARRIED)
    counted = [report.metrics["selection/rejected"] for report in pipeline.reports]
    dropped = [len(report.dropped) / CARRIED.samples for report in pipeline.reports]
    assert counted == dropped
    assert max(counted) > 0
    assert max(report.metrics["selection/rounds"] for report in pipeline.reports) > 1


def test_groups_that_are_always_rejected_end_the_run_with_their_share() -> None:
    pipeline = Selected(CARRIED, select=Selection(lambda scores: False, max_rounds=3))
    with pytest.raises(NothingTrained, match=r"12 of 12 groups \(100%\) were rejected in the 3 rounds of step 0, and"):
        run_virtual(pipeline.run)
    assert not pipeline.batches


def test_where_all_prompts_are_rejected_the_run_ends_with_an_empty_batch() -> None:
    pipeline = Selected(replace(CARRIED, prompts=3), select=Selection(lambda scores: False))
    run_virtual(pipeline.run)
    assert [(len(batch), len(batch.dropped)) for batch in pipeline.batches] == [(0, 6)]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (None, r"Generate\(..., select=selection\), and that of this graph has none"),
        (Selection(), "reads no scores: add it to the graph"),
    ],
)
def test_a_selection_belongs_to_a_graph_and_its_generate(asked: Selection | None, sentence: str) -> None:
    @dataclass
    class Halved(Selected):
        def graph(self) -> Graph[StepReport]:
            stages = super().graph()
            return stages.replace(generate=replace(stages.stage("generate", Generate), select=asked))

    with pytest.raises(ConfigError, match=sentence):
        run_virtual(Halved(CARRIED).run)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_rounds"):
        Selection(max_rounds=0)
    with pytest.raises(ConfigError, match="TailBatched restarts what is late"):
        Generate(FakePolicy(), TailBatched(4), samples=2, select=Selection())
    assert isinstance(
        grpo(
            policy=FakePolicy(),
            reward=FakeScorer(fake_scalar),
            trainer=FakeTrainer(),
            admission=Overcommit(4),
            select=Selection(differ),
        ),
        Graph,
    )
