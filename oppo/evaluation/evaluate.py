"""Evaluation: held-out prompts answered and scored by a graph of a few stages, beside training or outside of it."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, TypeAlias, TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray

from oppo.admission import Synchronous
from oppo.admission.chunking import ChunkSize, Fixed
from oppo.declared import PositiveCount, Threshold, validated
from oppo.errors import DataError, ProtocolError
from oppo.events import (
    Drop,
    Finish,
    FloatArray,
    Prompt,
    Response,
    RolloutEvent,
    Scored,
    StepReport,
    merge_chunks,
    rollout_of,
)
from oppo.graph import Graph, GraphBuilder, Receiver, Sender, Step
from oppo.log import logger
from oppo.models import Decode, Policy, Scorer
from oppo.observe import Observer, WorkContext, working_for
from oppo.stages import Generate, Score, ScoredRollout, ScoredRollouts
from oppo.stages.metrics import Averaged
from oppo.turns import Environment

T = TypeVar("T")

Progress: TypeAlias = Callable[[int, int], None]  # `f(done, total)`: how many of the responses have ended

Asking: TypeAlias = Callable[[Sequence[Prompt]], Iterable[Prompt] | AsyncIterable[Prompt]]
"""``f(prompts)``: what is answered in their place, with their numbers, such as what agents of them ask first."""


def unseen(done: int, total: int) -> None:
    del done, total


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """The responses to some prompts.

    Attributes:
        rollouts: with their scores, in the order of the prompts, those to one prompt side by side; without branches.
        dropped: responses that have no score; without branches.
        measured: the reward's own metrics, one number for each response.
    """

    rollouts: Sequence[ScoredRollout] = ()
    dropped: Sequence[Drop] = ()
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
@validated()
class Answering:
    """How prompts are answered.

    Attributes:
        samples: responses to each prompt.
        batch: prompts that are answered at a time.
        environment: answers the turns of a response.
        asking: such as ``prompts`` of an :class:`oppo.agents.Agents` that is the environment.
        chunks: tokens per chunk.
        progress: called with the counts whenever a response has ended.
    """

    samples: PositiveCount = 1
    batch: PositiveCount = 64
    environment: Environment | None = None
    asking: Asking = iter
    chunks: ChunkSize = field(default_factory=Fixed)
    progress: Progress = unseen

    def builder(self) -> GraphBuilder[Prompt]:
        capacity = max(16, 4 * self.batch * self.samples)
        return GraphBuilder("evaluation", capacity=capacity, merge=merge_chunks, key=rollout_of)

    def generate(self, policy: Policy) -> Generate:
        admission = Synchronous(self.batch)
        return Generate(policy, admission, self.chunks, self.samples, environment=self.environment)

    def rollouts(self, prompts: Sequence[Prompt]) -> frozenset[int]:
        """Return the rollout numbers of the responses to prompts; branches have other numbers."""
        return frozenset(each.rollout for prompt in prompts for each in prompt.samples(self.samples))

    async def run(self, graph: Graph[StepReport], prompts: Sequence[Prompt]) -> None:
        """Answer the prompts."""
        if not prompts:
            raise DataError("expected at least one prompt to answer, got none")
        counting = _Counting(self.rollouts(prompts), self.progress)
        async with graph.open(self.asking(prompts), observers=[counting]) as run:
            async for _ in run.steps(math.ceil(len(prompts) / self.batch)):
                pass


async def respond(policy: Policy, prompts: Sequence[Prompt], how: Answering | None = None) -> list[Finish]:
    """Return the responses of a policy to prompts, in their order.

    Raises:
        DataError: there is no prompt.
        ProtocolError: the policy broke its protocol.
    """
    how = how or Answering()
    g, keep = how.builder(), _Keep()
    await how.run(g.build(g.add("collect", keep, g.add("generate", how.generate(policy), g.prompts))), prompts)
    return sorted(keep.finished, key=lambda event: event.rollout)


async def examine(
    policy: Policy,
    reward: Scorer[float | Drop],
    prompts: Sequence[Prompt],
    how: Answering | None = None,
    *,
    reference: Scorer[FloatArray] | None = None,
) -> Answers:
    """Return the scored responses of a policy to prompts, in their order.

    It decodes while nothing else does, and changes nothing that training depends on. Responses are scored while they
    are written, as in training.

    Args:
        policy: draws by its own sampling; :class:`oppo.models.VariesSampling` gives the same one with other sampling.
        reward: the score of a finished response, or a ``Drop``.
        prompts: their numbers are unique, also among the rollouts that a scorer has not finished.
        how: by default one response to each, 64 prompts at a time.
        reference: log-probs of a reference model, which the answers then have.

    Raises:
        DataError: there is no prompt.
        ProtocolError: a model broke its protocol.
    """
    how = how or Answering()
    g, collect = how.builder(), Collect(how.rollouts(prompts))
    rollout = g.add("generate", how.generate(policy), g.prompts)
    score = g.add("reward", Score(reward), rollout)
    ref = None if reference is None else g.add("ref_logp", Score(reference), rollout)
    await how.run(g.build(g.add("collect", collect, rollout, score, reference=ref)), prompts)
    return collect.answers()


@dataclass(eq=False)
class Collect:
    wanted: frozenset[int]
    _rollouts: list[ScoredRollout] = field(default_factory=list, init=False)
    _dropped: list[Drop] = field(default_factory=list, init=False)
    _measured: dict[str, list[float]] = field(default_factory=dict, init=False)

    async def run(
        self,
        rollout: Receiver[RolloutEvent],
        score: Receiver[Scored[float] | Drop],
        /,
        *,
        out: Sender[StepReport],
        step: Step,
        reference: Receiver[Scored[FloatArray] | Drop] | None = None,
    ) -> None:
        scored = await ScoredRollouts.of(rollout, score, reference=reference)
        self._rollouts += [each for each in scored.rollouts if each.rollout in self.wanted]
        self._dropped += [each for each in scored.dropped if each.rollout in self.wanted]
        for _, each in step.recorded(Averaged):
            for name, values in each.values.items():
                self._measured.setdefault(name, []).extend(values)
        await out.send(_report(step, [each.rollout for each in scored.rollouts], scored.dropped))

    def answers(self) -> Answers:
        return Answers(sorted(self._rollouts, key=lambda each: each.rollout), tuple(self._dropped), self._measured)


@dataclass(eq=False)
class _Keep:
    finished: list[Finish] = field(default_factory=list)

    async def run(self, rollout: Receiver[RolloutEvent], /, *, out: Sender[StepReport], step: Step) -> None:
        own = [event async for event in rollout if isinstance(event, Finish)]
        self.finished += own
        await out.send(_report(step, [event.rollout for event in own]))


def _report(step: Step, rollouts: Sequence[int], dropped: Sequence[Drop] = ()) -> StepReport:
    return StepReport(step.index, 0, tuple(rollouts), tuple(dropped), (), math.nan, 0.0, {})


class _Counting(Observer):
    def __init__(self, wanted: frozenset[int], progress: Progress) -> None:
        self._done, self._wanted, self._progress = 0, wanted, progress
        progress(0, len(wanted))

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        del step, at
        if stage == "generate" and isinstance(item, Finish | Drop) and item.rollout in self._wanted:
            self._done += 1
            self._progress(self._done, len(self._wanted))


PREFIX: Final = "eval/"
"""Prefix of a reward's or environment's metric of held-out responses, before its name in training."""

Z: Final = 1.96  # standard deviations on either side of the mean that hold 95% of a normal distribution


def half_width(means: Sequence[float]) -> float:
    """Return half the width of the 95% confidence interval of a mean over prompts; NaN for fewer than two.

    The standard error is computed from the prompts' own means, since the responses to one prompt are no independent
    draws (Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640, section 2.2), and the interval assumes a normal
    distribution.

    Example:
        >>> round(half_width([0.0, 1.0, 1.0, 0.0]), 3)
        0.566
    """
    count = len(means)
    return Z * float(np.std(np.asarray(means, np.float64), ddof=1)) / math.sqrt(count) if count > 1 else math.nan


def pass_at_k(count: int, passed: int, k: int) -> float:
    """Return the probability that at least one of ``k`` responses to a prompt passes, estimated without bias.

    It is 1 - C(n - c, k) / C(n, k) for ``c`` of ``n`` responses that passed: the share of all choices of ``k`` among
    these that hold one (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv 2107.03374,
    equation 1).

    Raises:
        ValueError: ``k`` is not in 1 .. ``count``, or ``passed`` not in 0 .. ``count``.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    if not (1 <= k <= count and 0 <= passed <= count):
        raise ValueError(f"expected 1 <= k <= count and 0 <= passed <= count, got {k=}, {count=}, {passed=}")
    return 1 - math.comb(count - passed, k) / math.comb(count, k)


def of_greedy(answers: Answers, pass_score: float | None) -> Mapping[str, float]:
    rollouts = answers.rollouts
    scores = [each.score for each in rollouts]
    metrics = {"eval/dropped": float(len(answers.dropped)), **_mean("eval/score", "eval/score_ci95", scores)}
    if rollouts:
        metrics["eval/response_length"] = float(np.mean([len(each.finish.response) for each in rollouts]))
        metrics["eval/capped"] = float(np.mean([each.finish.reason == "length" for each in rollouts]))
        if pass_score is not None:
            metrics["eval/passed"] = float(np.mean([score >= pass_score for score in scores]))
    measured = {name: values for name, values in answers.measured.items() if len(values)}
    return metrics | {PREFIX + name: float(np.mean(values)) for name, values in measured.items()}


def of_sampled(answers: Answers, samples: int, pass_score: float | None) -> Mapping[str, float]:
    # A prompt counts as much as any other, however many of its responses were dropped; towards pass@k if it has k left.
    groups = [[each.score for each in group] for _, group in groupby(answers.rollouts, lambda each: each.group)]
    metrics = _mean("eval/sampled_score", "eval/sampled_score_ci95", [float(np.mean(each)) for each in groups])
    if pass_score is None:
        return metrics
    for k in _sizes(samples):
        known = [
            pass_at_k(len(scores), int(np.sum(np.asarray(scores) >= pass_score)), k)
            for scores in groups
            if len(scores) >= k
        ]
        if known:
            metrics[f"eval/pass_at_{k}"] = float(np.mean(known))
    return metrics


def _mean(name: str, interval: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    width = half_width(values)
    found = {name: float(np.mean(np.asarray(values, np.float64)))}
    return found if math.isnan(width) else found | {interval: width}


def _sizes(samples: int) -> Iterator[int]:
    k = 1
    while k < samples:
        yield k
        k *= 2
    yield samples


@dataclass(frozen=True, slots=True)
class Comparison:
    """Scores of the same prompts before and after.

    Attributes:
        before, after: mean scores.
        spread: standard deviation of the scores before.
        gain: mean of the paired differences, after minus before.
        half_width: of the 95% confidence interval of the gain (normal approximation).
    """

    before: float
    after: float
    spread: float
    gain: float
    half_width: float


def compare(before: FloatArray, after: FloatArray) -> Comparison:
    """Return the change of scores that are paired by prompt.

    Args:
        before, after: float32 [N], N >= 2.

    Raises:
        ValueError: the arrays differ in length or hold fewer than two scores.
    """
    if before.shape != after.shape or before.ndim != 1 or len(before) < 2:
        raise ValueError(f"expected two score arrays of one length >= 2, got shapes {before.shape} and {after.shape}")
    difference: NDArray[np.float64] = after.astype(np.float64) - before
    return Comparison(
        before=float(before.mean(dtype=np.float64)),
        after=float(after.mean(dtype=np.float64)),
        spread=float(before.std(ddof=1, dtype=np.float64)),
        gain=float(difference.mean()),
        half_width=half_width(difference.tolist()),
    )


FIRST: Final = 10**12
"""The number of the first held-out prompt: above the prompts of training, so that scorers and noise tell them apart."""

BEFORE: Final = -1  # the step of an evaluation before the first


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """The outcome of one evaluation.

    Attributes:
        step: after which it was made; :data:`BEFORE` the first.
        version: of the weights.
        metrics: by the names that ``docs/metrics.md`` lists first.
        answers: the most likely response to each prompt, with its score.
    """

    step: int
    version: int
    metrics: Mapping[str, float]
    answers: Sequence[ScoredRollout] = ()

    @property
    def score(self) -> float | None:
        """The mean held-out score; ``None`` if no response has one."""
        return self.metrics.get("eval/score")


@dataclass(frozen=True, kw_only=True, eq=False)
@validated()
class Evaluation:
    """Held-out prompts, and how they are answered and scored.

    Attributes:
        prompts: at least one; they are numbered anew.
        reward: of training, for example.
        greedy: the policy, drawing the most likely tokens (a temperature of 0).
        sampled: the policy as it draws in training; ``None``: only the most likely responses are scored.
        samples: responses to each prompt by ``sampled``.
        batch: responses that are written at a time, at least one prompt's.
        pass_score: a response of at least this score passes; ``None``: there is no pass@k.
        environment: answers the turns of a response.
        asking: as of :class:`Answering`.
    """

    prompts: Sequence[Prompt]
    reward: Scorer[float | Drop]
    greedy: Policy
    sampled: Policy | None = None
    samples: PositiveCount = 1
    batch: PositiveCount = 64
    pass_score: Threshold | None = None
    environment: Environment | None = None
    asking: Asking = iter

    def __post_init__(self) -> None:
        numbered = [replace(prompt, admission=FIRST + number) for number, prompt in enumerate(self.prompts)]
        object.__setattr__(self, "prompts", numbered)

    async def measure(self, step: int, progress: Progress = unseen) -> Evaluated:
        """Return the held-out scores of the weights at hand; see :func:`examine`."""
        with working_for(WorkContext(None if step == BEFORE else step, "evaluate")):
            return await self._measured(step, progress)

    async def _measured(self, step: int, progress: Progress) -> Evaluated:
        start, version = anyio.current_time(), self.greedy.version
        total = len(self.prompts) * (1 + (self.samples if self.sampled else 0))

        def shown(before: int) -> Progress:
            return lambda done, _: progress(before + done, total)

        how = Answering(batch=self.batch, environment=self.environment, asking=self.asking, progress=shown(0))
        greedy = await examine(self.greedy, self.reward, self.prompts, how)
        metrics = of_greedy(greedy, self.pass_score)
        if self.sampled is not None:
            batch, progress_of_these = max(1, self.batch // self.samples), shown(len(self.prompts))
            how = replace(how, samples=self.samples, batch=batch, progress=progress_of_these)
            sampled = await examine(self.sampled, self.reward, self.prompts, how)
            metrics = {**metrics, **of_sampled(sampled, self.samples, self.pass_score)}
            metrics["eval/dropped"] += len(sampled.dropped)
        seconds = {"eval/seconds": anyio.current_time() - start}
        if self.greedy.version != version:
            logger.warning(
                f"weights of version {self.greedy.version} came while those of version {version} were evaluated, as "
                "the policy had lost its engines: the held-out score is of both"
            )
        return Evaluated(step, version, {**metrics, **seconds}, greedy.rollouts)


@dataclass(eq=False)
class Evaluate:
    """Adds held-out scores to the reports of steps; it reads what :class:`oppo.Update` sends.

    An evaluation begins when no stage uses the policy or the reward any more, in its own step and in those that are in
    flight beside it. ``Update(held=["evaluate"])`` syncs no other weights before it has ended.

    Attributes:
        evaluation: what is measured.
        due: whether it is measured after the step with this index.
        after: names of the stages that use the policy and the reward.
        progress: called with the counts whenever a response has ended.
    """

    evaluation: Evaluation
    due: Callable[[int], bool]
    after: Sequence[str] = ("generate", "reward")
    progress: Progress = unseen
    _found: dict[int, Evaluated] = field(default_factory=dict, init=False, repr=False)

    async def run(self, reports: Receiver[StepReport], /, *, out: Sender[StepReport], step: Step) -> None:
        async for report in reports:
            if not self.due(report.index):
                await out.send(report)
                continue
            await step.settled(*self.after)
            with step.working("other", "evaluate"):
                found = await self.evaluation.measure(report.index, self.progress)
            self._found[report.index] = found
            await out.send(replace(report, metrics={**report.metrics, **found.metrics}))

    def observe(self, report: StepReport, step: Step, /) -> Evaluated | None:
        del step
        return self._found.pop(report.index, None)


async def respond_serially(policy: Policy, prompts: Sequence[Prompt]) -> list[Finish]:
    """Return the finished rollouts of ``prompts``, in order, decoded as one batch without a graph."""
    decodes = await policy.open(prompts)
    finished: list[Finish | None] = [None] * len(prompts)

    async def read(k: int, prompt: Prompt, decode: Decode) -> None:
        chunk = await decode.read(sys.maxsize)
        match chunk.state:
            case "eos" | "stop" | "length" as reason:
                finished[k] = Finish(prompt.rollout, Response.empty(prompt).then(chunk), reason)
            case state:
                raise ProtocolError(f"rollout {prompt.rollout}: reading it whole ended with state {state!r}")
        await decode.aclose()

    async with policy.decoding(decodes, lambda _ended: False), anyio.create_task_group() as readers:
        for k, (prompt, decode) in enumerate(zip(prompts, decodes, strict=True)):
            readers.start_soon(read, k, prompt, decode)
    return [event for event in finished if event is not None]


async def score_serially(scorer: Scorer[T], finished: Sequence[Finish]) -> Sequence[T]:
    """Return the scorer's result for each finished rollout, each read as one piece."""
    await scorer.extend([part for event in finished for part in (event.response.prompt, event.response.chunk())])
    return await scorer.finish(finished)
