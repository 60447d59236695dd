"""Examinations, and evaluations while a run goes on: they see the weights of their step and change no bit of it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import mean, stdev

import anyio
import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from oppo.admission.chunking import Fixed, WholeRollout
from oppo.errors import DataError, GraphError, RewardError
from oppo.evaluation import (
    Answering,
    Answers,
    Evaluate,
    Evaluated,
    Evaluation,
    compare,
    examine,
    half_width,
    pass_at_k,
    respond,
)
from oppo.evaluation.evaluate import BEFORE, of_greedy, of_sampled
from oppo.events import Chunk, Drop, Finish, Prompt, Response, StepReport, ToolTokens
from oppo.graph import Graph
from oppo.models import Cut, Decode, Decoding, Scorer, Weights
from oppo.observe import WorkContext, work_context
from oppo.stages import ScoredRollout, Update
from oppo.testing import FakePolicy, FakeScorer, fake_per_token, fake_scalar, prompts, run_virtual
from oppo.turns import Answer, Turn
from tests.kit.known import known
from tests.kit.pipelines import Pipeline, Setting, same_batches, settings

HELD_OUT = [Prompt(i, i, np.array([7 + i, 3], np.int32)) for i in range(5)]


def examined(policy: FakePolicy, **options: object) -> Answers:
    async def main() -> Answers:
        how = Answering(**options)  # type: ignore[arg-type]  # each of the type of its name
        return await examine(policy, FakeScorer(fake_scalar), HELD_OUT, how)

    return run_virtual(main)


@given(
    samples=st.integers(1, 3),
    batch=st.integers(1, 7),
    chunk=st.sampled_from([Fixed(1), Fixed(4), WholeRollout()]),
    pace=st.booleans(),
)
def test_answers_depend_on_neither_batches_nor_chunks(
    samples: int, batch: int, chunk: Fixed | WholeRollout, pace: bool
) -> None:
    paced: Callable[[Prompt], float] | None = (lambda prompt: 1.0 + prompt.sample) if pace else None
    found = examined(FakePolicy(pace=paced), samples=samples, batch=batch, chunks=chunk)
    whole = examined(FakePolicy(), samples=samples)
    for answers in (found, whole):
        places = [(each.group, each.finish.response.prompt.sample) for each in answers.rollouts]
        assert places == [(prompt, sample) for prompt in range(5) for sample in range(samples)]
    assert [each.score for each in found.rollouts] == [each.score for each in whole.rollouts]
    for one, other in zip(found.rollouts, whole.rollouts, strict=True):
        assert one.finish.response.tokens.tolist() == other.finish.response.tokens.tolist()


def test_a_reference_and_progress_come_with_an_examination() -> None:
    told: list[tuple[int, int]] = []

    async def main() -> Answers:
        return await examine(
            FakePolicy(),
            FakeScorer(fake_scalar),
            HELD_OUT,
            Answering(samples=2, progress=lambda done, total: told.append((done, total))),
            reference=FakeScorer(fake_per_token),
        )

    answers = run_virtual(main)
    assert all(len(known(each.reference)) == len(each.finish.response) for each in answers.rollouts)
    assert told == [(done, 10) for done in range(11)]


class Once:
    """An environment that answers the first turn of each response."""

    async def answer(self, turn: Turn) -> Answer | None:
        await anyio.sleep(0.3)
        return None if turn.number else Answer(np.array([1, 2], np.int32))


def test_responses_with_turns_are_examined_with_their_answers() -> None:
    policy = FakePolicy(length=lambda prompt: 9, turns=lambda prompt: (3, 6))
    answers = examined(policy, environment=Once(), batch=2)
    assert [int((~each.finish.response.sampled).sum()) for each in answers.rollouts] == [2] * 5


def test_a_reward_that_drops_or_fails_does_so_as_in_training() -> None:
    def odd(event: Finish, tokens: object, version: int) -> float | Drop:
        return Drop(event.rollout, "too odd") if event.response.prompt.admission % 2 else 1.0

    async def dropping() -> Answers:
        return await examine(FakePolicy(), FakeScorer(odd), HELD_OUT)

    answers = run_virtual(dropping)
    assert [each.score for each in answers.rollouts] == [1.0] * 3
    assert [each.reason for each in answers.dropped] == ["too odd"] * 2

    def failing(event: Finish, tokens: object, version: int) -> float:
        raise RewardError("the judge is out")

    pipeline = Pipeline(Setting(steps=2))
    graph = evaluating(pipeline, every=1, reward=FakeScorer(failing))
    with pytest.raises(RewardError, match="the judge is out") as caught:
        play(pipeline, graph)
    notes = " ".join(caught.value.__notes__)
    assert "stage 'reward' of graph 'evaluation', step 1" in notes
    assert "stage 'evaluate' of graph 'ppo', step 1" in notes


def test_responses_alone_are_those_of_an_examination() -> None:
    with pytest.raises(DataError, match="at least one prompt"):
        run_virtual(lambda: respond(FakePolicy(), []))

    def made(batch: int) -> list[tuple[int, list[int]]]:
        how = Answering(samples=2, batch=batch)
        finished = run_virtual(lambda: respond(FakePolicy(), HELD_OUT, how))
        return [(event.rollout, event.response.tokens.tolist()) for event in finished]

    examined_too = examined(FakePolicy(), samples=2).rollouts
    assert made(2) == made(9) == [(each.rollout, each.finish.response.tokens.tolist()) for each in examined_too]


@dataclass
class Exclusive:
    """A scorer of which two calls must not overlap."""

    inner: Scorer[float | Drop]
    calls: int = 0
    version: int = 0

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        assert not self.calls, "two calls overlap"
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        async with self.alone():
            await self.inner.extend(events)

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float | Drop]:
        async with self.alone():
            scores: Sequence[float | Drop] = await self.inner.finish(finished)
            return scores

    async def forget(self, rollouts: Sequence[int]) -> None:
        async with self.alone():
            await self.inner.forget(rollouts)


@dataclass(eq=False)
class Guarded(FakePolicy):
    """A policy that decodes one thing at a time, and whose weights stay while an evaluation goes on."""

    decodes: int = 0
    evaluating: bool = False
    seen: list[tuple[int, int]] = field(default_factory=list)

    async def load(self, weights: Weights) -> None:
        assert not self.decodes, "weights come while it decodes"
        assert not self.evaluating, "weights come while it is evaluated"
        await super().load(weights)

    @asynccontextmanager
    async def _guarded(self, live: Sequence[Decode], cut: Cut) -> AsyncIterator[Decoding]:
        assert not self.decodes, "two decode at once"
        self.decodes += 1
        try:
            async with super().decoding(live, cut) as decoding:
                yield decoding
        finally:
            self.decodes -= 1

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        return self._guarded(live, cut)


@dataclass(frozen=True, kw_only=True, eq=False)
class Marked(Evaluation):
    """Tells the policy when it begins and ends."""

    async def measure(self, step: int, progress: Callable[[int, int], None] = lambda done, total: None) -> Evaluated:
        policy = self.greedy
        assert isinstance(policy, Guarded)
        policy.evaluating = True
        try:
            found = await super().measure(step, progress)
        finally:
            policy.evaluating = False
        policy.seen.append((step, found.version))
        return found


def evaluating(
    pipeline: Pipeline, every: int, *, samples: int = 1, reward: object = None, batch: int = 3
) -> Graph[StepReport]:
    """Return the graph of a pipeline with evaluations after every so many steps."""
    scorer = reward or pipeline.reward
    evaluation = (Marked if isinstance(pipeline.policy, Guarded) else Evaluation)(
        prompts=HELD_OUT,
        reward=scorer,  # type: ignore[arg-type]  # a scorer of floats
        greedy=pipeline.policy,
        sampled=pipeline.policy if samples > 1 else None,
        samples=samples,
        batch=batch,
        pass_score=0.0,
    )
    graph = pipeline.graph()
    graph = graph.replace(update=replace(graph.stage("update", Update), held=["evaluate"]))
    return graph.then("evaluate", Evaluate(evaluation, lambda index: (index + 1) % every == 0))


def play(pipeline: Pipeline, graph: Graph[StepReport]) -> list[Evaluated]:
    """Run a pipeline's steps; return what the observers were told of evaluations."""

    async def main() -> None:
        setting = pipeline.setting
        source = prompts(setting.prompts)
        async with graph.open(source, observers=[pipeline.tap], lookahead=setting.lookahead) as run:
            async for report in run.steps(setting.steps, drain_after=lambda index: (index + 1) % 3 == 0):
                pipeline.reports.append(report)

    run_virtual(main)
    return [item for _, stage, item in pipeline.tap.items if stage == "evaluate" and isinstance(item, Evaluated)]


def guarded(setting: Setting) -> Pipeline:
    pipeline = Pipeline(setting)
    reward = pipeline.reward
    assert reward is not None
    pipeline.policy = Guarded(setting.length, 0.01, setting.pace, kept=setting.kept)
    pipeline.generate = replace(pipeline.generate, policy=pipeline.policy)
    pipeline.reward = Exclusive(reward)
    return pipeline


@pytest.mark.schedules
@given(settings(lookaheads=(0, 0, 1, 2, 3)), st.integers(1, 3), st.integers(1, 3))
@example(Setting(extra=3, lookahead=2, steps=4, update=0.5, reward=0.03), 1, 1)
@example(Setting(lengths=(1,), batch=1, steps=4, lookahead=1, update=0.5), 2, 2)
def test_a_run_with_evaluations_trains_what_it_trains_without(setting: Setting, every: int, samples: int) -> None:
    setting = replace(setting, paces=())  # with paces, which rollouts are the first depends on timing
    plain, evaluated = Pipeline(setting), guarded(setting)
    play(plain, plain.graph())
    found = play(evaluated, evaluating(evaluated, every, samples=samples))
    assert same_batches(plain.batches, evaluated.batches)
    made = [report.index for report in evaluated.reports if (report.index + 1) % every == 0]
    assert [each.step for each in found] == made
    policy = evaluated.policy
    assert isinstance(policy, Guarded)
    assert policy.seen == [(step, step + 1) for step in made], "it is the weights after the step, at any lookahead"
    for each in found:
        assert all((answer.finish.response.versions == each.version).all() for answer in each.answers)
        report = evaluated.reports[each.step]
        assert {name: report.metrics[name] for name in each.metrics} == each.metrics
        assert not any("deferral" in name for name in each.metrics), "what the stages measured of a training step"
    for report in evaluated.reports:
        assert ("eval/score" in report.metrics) == (report.index in made)
        assert ("eval/pass_at_1" in report.metrics) == (report.index in made and samples > 1)


def test_an_evaluation_counts_towards_no_step_without_lookahead() -> None:
    """A step's seconds end with its last weight sync."""
    plain, evaluated = Pipeline(Setting(update=0.5)), Pipeline(Setting(update=0.5))
    play(plain, plain.graph())
    play(evaluated, evaluating(evaluated, 1))
    assert [each.seconds for each in evaluated.reports] == pytest.approx([each.seconds for each in plain.reports])
    assert all(each.metrics["eval/seconds"] > 0 for each in evaluated.reports)


class Overheard(FakeScorer[float]):
    """Keeps for which step and in which role it was called."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.contexts: set[WorkContext] = set()

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        self.contexts.add(work_context())
        return await super().finish(finished)


def test_the_models_work_for_the_evaluation_and_not_for_steps_of_training_with_the_same_number() -> None:
    pipeline, scorer = Pipeline(Setting(steps=4)), Overheard(fake_scalar)
    play(pipeline, evaluating(pipeline, 2, reward=scorer))
    assert scorer.contexts == {WorkContext(1, "evaluate"), WorkContext(3, "evaluate")}
    scorer.contexts.clear()
    first = Evaluation(prompts=HELD_OUT, reward=scorer, greedy=FakePolicy())
    run_virtual(first.measure, BEFORE)
    assert scorer.contexts == {WorkContext(None, "evaluate")}, "before the first step it is part of none"


def test_a_stage_after_the_result_has_a_name_of_its_own_and_reads_what_it_sends() -> None:
    pipeline = Pipeline(Setting())
    graph = evaluating(pipeline, 1)
    assert graph.mermaid().splitlines()[-2:] == ["    update --> evaluate", "    evaluate --> result([result])"]
    with pytest.raises(GraphError, match="'evaluate'"):
        graph.then("evaluate", graph.stage("evaluate", Evaluate))
    assert math.isfinite(play(pipeline, graph)[0].metrics["eval/score_ci95"])


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_choices_of_k_that_hold_one_that_passed(passed: list[bool], k: int) -> None:
    if k > len(passed):
        with pytest.raises(ValueError, match="expected 1 <= k <= count"):
            pass_at_k(len(passed), sum(passed), k)
        return
    choices = list(combinations(passed, k))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=20))
def test_the_interval_is_that_of_the_mean_over_prompts(values: list[float]) -> None:
    assert half_width(values) == pytest.approx(1.96 * stdev(values) / math.sqrt(len(values)), abs=1e-9)
    assert math.isnan(half_width(values[:1]))


def answers(groups: list[list[float]], *, length: int = 3, dropped: int = 0) -> Answers:
    """Return responses with these scores, to a prompt each group."""
    rollouts = []
    for group, scores in enumerate(groups):
        for sample, score in enumerate(scores):
            number = 10 * group + sample
            tokens = np.arange(length + group, dtype=np.int32)
            prompt = Prompt(number, group, np.array([1], np.int32), sample, group)
            zeros = np.zeros(len(tokens), np.float32)
            response = Response(prompt, tokens, zeros, tokens * 0, np.ones(len(tokens), np.bool_))
            rollouts.append(ScoredRollout(Finish(number, response, "length" if group else "eos"), None, score))
    return Answers(rollouts, tuple(Drop(99, "no") for _ in range(dropped)), {"rewards/short/mean": [1.0, 0.0]})


def test_the_most_likely_responses_have_a_mean_an_interval_and_a_share_that_passed() -> None:
    metrics = of_greedy(answers([[1.0], [0.0], [1.0], [0.5]], dropped=2), 1.0)
    assert metrics == {
        "eval/dropped": 2,
        "eval/score": 0.625,
        "eval/score_ci95": pytest.approx(1.96 * stdev([1, 0, 1, 0.5]) / 2),
        "eval/response_length": mean([3, 4, 5, 6]),
        "eval/capped": 0.75,
        "eval/passed": 0.5,
        "eval/rewards/short/mean": 0.5,
    }
    assert not {"eval/passed", "eval/score_ci95"} & of_greedy(answers([[1.0]]), None).keys()
    assert of_greedy(Answers((), (Drop(1, "no"),)), 1.0) == {"eval/dropped": 1}


def test_sampled_responses_have_the_mean_over_prompts_and_pass_at_every_power_of_two() -> None:
    groups = [[1.0, 0.0, 0.0, 0.0, 1.0], [0.0] * 5, [1.0, 1.0]]
    metrics = of_sampled(answers(groups), 5, 1.0)
    assert metrics["eval/sampled_score"] == pytest.approx((0.4 + 0 + 1) / 3), "each prompt counts the same"
    assert metrics["eval/sampled_score_ci95"] == pytest.approx(1.96 * stdev([0.4, 0, 1]) / math.sqrt(3))
    assert metrics["eval/pass_at_1"] == pytest.approx((0.4 + 0 + 1) / 3)
    assert metrics["eval/pass_at_2"] == pytest.approx((1 - 3 / 10 + 0 + 1) / 3)
    assert metrics["eval/pass_at_4"] == pytest.approx((1 + 0) / 2), "of prompts with four responses left"
    assert metrics["eval/pass_at_5"] == pytest.approx((1 + 0) / 2)
    assert {name for name in metrics if "pass" in name} == {f"eval/pass_at_{k}" for k in (1, 2, 4, 5)}
    assert "eval/pass_at_1" not in of_sampled(answers(groups), 5, None)


def test_paired_scores_are_compared() -> None:
    before, after = np.array([0, 1, 2], np.float32), np.array([1, 1, 5], np.float32)
    found = compare(before, after)
    assert (found.before, found.spread) == (1, 1)
    assert found.gain == pytest.approx(4 / 3)
    assert found.half_width == pytest.approx(1.96 * stdev([1, 0, 3]) / math.sqrt(3))
    with pytest.raises(ValueError, match="two score arrays of one length"):
        compare(before[:1], after[:1])
