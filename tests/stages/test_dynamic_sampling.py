"""Dynamic sampling: groups are accepted or rejected by their scores, and rejected ones are replaced in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import example, given

from oppo.admission import Overcommit
from oppo.algorithms.group import grpo
from oppo.errors import GraphError, NothingTrained
from oppo.events import FloatArray, StepReport
from oppo.graph import Graph
from oppo.stages import DynamicSampling, Generate, GroupRelative, Update
from oppo.stages.dynamic_sampling import Round, Rounds, differ
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, noise, run_virtual
from tests.invariants.test_groups import Grouped, groups
from tests.kit.pipelines import Setting, on_policy, same_batches

CARRIED = Setting(lengths=(5, 9, 3, 30, 21, 7, 8, 60), extra=2, steps=4, samples=2, reward=0.03)


def every_third(scores: FloatArray) -> bool:
    return int(np.abs(scores).sum() * 1_000) % 3 > 0


@dataclass
class Selected(Grouped):
    """The recipe on fakes, with a selection."""

    select: DynamicSampling = field(default_factory=lambda: DynamicSampling(every_third, max_rounds=100))

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
@given(groups())
@example(replace(CARRIED, lookahead=1))
def test_what_is_selected_does_not_depend_on_the_speed_of_anything(setting: Setting) -> None:
    streamed = replace(setting, paces=())
    assert same_batches(played(streamed).batches, played(on_policy(streamed)).batches)


def test_rounds_are_counted_and_a_complete_group_without_a_place_comes_before_new_prompts() -> None:
    pipeline = played(CARRIED)
    counted = [report.metrics["selection/rejected"] for report in pipeline.reports]
    dropped = [len(report.dropped) / CARRIED.samples for report in pipeline.reports]
    assert counted == dropped
    assert max(counted) > 0
    assert max(report.metrics["selection/rounds"] for report in pipeline.reports) > 1


def test_groups_that_are_always_rejected_end_the_run_with_their_share() -> None:
    pipeline = Selected(CARRIED, select=DynamicSampling(lambda scores: False, max_rounds=3))
    with pytest.raises(NothingTrained, match=r"12 of 12 groups \(100%\) were rejected in the 3 rounds of step 1, and"):
        run_virtual(pipeline.run)
    assert not pipeline.batches


def test_where_all_prompts_are_rejected_the_run_ends_with_an_empty_batch() -> None:
    pipeline = Selected(replace(CARRIED, prompts=3), select=DynamicSampling(lambda scores: False))
    run_virtual(pipeline.run)
    assert [(len(batch), len(batch.dropped)) for batch in pipeline.batches] == [(0, 6)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (None, "'select' is a DynamicSampling that no stage asks: give the Generate of this graph the same one"),
        (DynamicSampling(), "'generate' has a DynamicSampling that reads no scores: add the same one after the reward"),
    ],
)
def test_a_graph_whose_selection_is_not_that_of_its_generate_cannot_be_built(
    asked: DynamicSampling | None, message: str
) -> None:
    graph = Selected(CARRIED).graph()
    with pytest.raises(GraphError, match=message):
        graph.replace(generate=replace(graph.stage("generate", Generate), select=asked))
    with pytest.raises(GraphError, match="'generate' has a DynamicSampling that reads no scores"):
        graph.replace(select=DynamicSampling())


def test_a_recipe_takes_a_selection() -> None:
    assert isinstance(
        grpo(
            policy=FakePolicy(),
            reward=FakeScorer(fake_scalar),
            trainer=FakeTrainer(),
            admission=Overcommit(4),
            select=DynamicSampling(differ),
        ),
        Graph,
    )


@dataclass
class Group:
    """A group of the bookkeeping below: its number, its age, and how many tokens each response lacks."""

    number: int
    lacking: list[int]
    age: int = 0


@dataclass
class Bookkeeping:
    """Who is trained in which step, found token by token, with a list for everything and no channel anywhere.

    Places are taken in the order of ending: earlier decode steps first, then lower numbers. A complete group that finds
    no place waits. At the cut the groups with a place are judged; a place that becomes free is taken by the groups that
    wait, deferred ones first, then by new prompts, by number.
    """

    setting: Setting
    accepted: Callable[[int], bool]
    flying: list[Group] = field(default_factory=list)
    taken: int = 0

    def steps(self) -> list[tuple[list[int], list[int], list[int], list[Round]]]:
        """Return of each step the groups that are trained, rejected and carried, and its rounds."""
        return [self.step(left) for left in range(self.setting.steps, 0, -1)]

    def step(self, left: int) -> tuple[list[int], list[int], list[int], list[Round]]:
        s, placed, rejected, rounds = self.setting, list[Group](), list[int](), list[Round]()
        wanted = min(s.batch + s.extra, left * s.batch) - len(self.flying)
        self.admit(max(0, wanted))
        for group in self.flying:
            self.place(group, placed)
        while True:
            self.decode(placed)
            judged, refused = list(placed), [group for group in placed if not self.accepted(group.number)]
            rejected += [group.number for group in refused]
            placed[:] = [group for group in placed if group not in refused]
            self.flying = [group for group in self.flying if group not in refused]
            waiting = [group for group in self.flying if not any(group.lacking) and group not in placed]
            filled = [group for group in waiting if self.place(group, placed)]
            admitted = self.admit(len(refused) - len(filled))
            rounds.append(Round(*map(self.numbers, (judged, refused, filled, admitted))))
            if not refused or not (filled or admitted or any(any(group.lacking) for group in self.flying)):
                break
        carried = [group for group in self.flying if group not in placed]
        self.flying = sorted(carried, key=lambda group: -group.age)
        for group in self.flying:
            group.age += 1
        return sorted(group.number for group in placed), rejected, [g.number for g in self.flying], rounds

    def admit(self, wanted: int) -> list[Group]:
        numbers = range(self.taken, min(self.taken + wanted, self.setting.prompts))
        s = self.setting
        lengths = [[s.lengths[(n * s.samples + k) % len(s.lengths)] for k in range(s.samples)] for n in numbers]
        new = [Group(number, lacking) for number, lacking in zip(numbers, lengths, strict=True)]
        self.taken += len(new)
        self.flying += new
        return new

    def decode(self, placed: list[Group]) -> None:
        """Give every response a token at a time, until the batch is full and nobody that must be in it is missing."""
        while any(any(group.lacking) for group in self.flying) and not self.full(placed):
            ended = list[Group]()
            for group in self.flying:
                if any(group.lacking):
                    group.lacking = [max(0, tokens - 1) for tokens in group.lacking]
                    ended += [] if any(group.lacking) else [group]
            for group in sorted(ended, key=lambda group: group.number):
                self.place(group, placed)

    def full(self, placed: list[Group]) -> bool:
        return len(placed) >= self.setting.batch and not self.missing()

    def missing(self) -> list[Group]:
        """Return the groups that are being written and may not be carried again."""
        return [group for group in self.flying if any(group.lacking) and group.age >= self.setting.max_deferrals]

    def place(self, group: Group, placed: list[Group]) -> bool:
        if any(group.lacking) or group in placed:
            return False
        if group.age < self.setting.max_deferrals and len(placed) + len(self.missing()) >= self.setting.batch:
            return False
        placed.append(group)
        return True

    @staticmethod
    def numbers(groups: Sequence[Group]) -> tuple[int, ...]:
        return tuple(group.number for group in groups)


def drawn(number: int) -> bool:
    """Accept about half of all groups, by their numbers."""
    return noise(number) < 0.5


@pytest.mark.schedules
@given(groups())
@example(CARRIED)
@example(replace(CARRIED, prompts=7))
@example(replace(CARRIED, extra=4, max_deferrals=1))
def test_batches_are_filled_by_deferred_groups_and_then_by_new_prompts_in_the_order_of_their_numbers(
    setting: Setting,
) -> None:
    setting = replace(setting, paces=(), lookahead=0)
    told = Bookkeeping(setting, drawn).steps()
    by_number: FakeScorer[float] = FakeScorer(
        lambda event, tokens, version: float(drawn(event.response.prompt.group)) * (1 + event.rollout)
    )
    pipeline = Selected(
        setting, reward=by_number, select=DynamicSampling(lambda scores: bool(scores.any()), max_rounds=100)
    )
    run_virtual(pipeline.run)
    seen = [
        (
            sorted({rollout // setting.samples for rollout in report.trained}),
            {drop.rollout // setting.samples for drop in report.dropped},
            list(dict.fromkeys(event.rollout // setting.samples for event in report.deferred)),
        )
        for report in pipeline.reports
    ]
    rounds = [list(item) for _, stage, item in pipeline.tap.items if stage == "select" and isinstance(item, Rounds)]
    told = told[: len(seen)]  # a run ends with its data
    assert seen == [(trained, set(rejected), carried) for trained, rejected, carried, _ in told]
    assert rounds == [each for *_, each in told]
