"""One run of one schedule: the real graph of stages, from prompts to updates, with models of cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio
import numpy as np
from numpy.typing import NDArray

from oppo.admission import Admission, Restarting
from oppo.chunking import Fixed
from oppo.events import Finish, FloatArray, Prompt, StepReport, merge_chunks, rollout_of
from oppo.graph import Graph, GraphBuilder
from oppo.stages import GAE, Generate, Score, Update
from oppo.stages.hold import Hold
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, run_virtual


class Workload(Protocol):
    """What is trained."""

    @property
    def batch(self) -> int:
        """Rollouts in a batch."""

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""

    @property
    def cap(self) -> int:
        """Tokens of the longest response."""

    @property
    def reward(self) -> str | None:
        """The reward model; ``None``: a rule that costs nothing."""

    def lengths(self, count: int, seed: int) -> NDArray[np.int64]:
        """Return the lengths of the responses to ``count`` prompts, in tokens."""


class Work(Protocol):
    """The costs of a workload in seconds; lengths are of responses, in tokens."""

    @property
    def regime(self) -> Workload:
        """The workload."""

    @property
    def grain(self) -> int:
        """Tokens for which a fake token stands: lengths are divided by it, decode steps take as many times longer."""

    @property
    def chunk(self) -> int:
        """Tokens in a chunk."""

    @property
    def call(self) -> float:
        """Seconds of one call of the reward model."""

    @property
    def publish(self) -> float:
        """Seconds until the weights have arrived."""

    def decoding(self, rows: int, context: float, steps: int) -> float:
        """Return the seconds of ``steps`` decode steps of ``rows`` live rows with ``context`` tokens at the start."""

    def reading(self, start: int, stop: int) -> float:
        """Return the seconds in which the reward model reads positions ``start .. stop`` of a row."""

    def forward(self, lengths: NDArray[np.int64]) -> float:
        """Return the seconds in which the reference and the critic read whole rows."""

    def training(self, lengths: NDArray[np.int64]) -> float:
        """Return the seconds of an update of actor and critic."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """The cost of restarted rollouts.

    Attributes:
        waste: discarded tokens for each trained token.
        swing: standard deviation of the batches' mean lengths, over their mean.
    """

    waste: float
    swing: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Statistics of a run without its first steps.

    Attributes:
        seconds: mean of a step, until the next could begin.
        lag: mean versions between a rollout's first token and its update.
        longest_lag: the largest.
        extra: mean of the controller's choices.
        predicted: mean predicted seconds of a step over the mean measured ones; NaN without predictions.
        spread: root mean square of the predictions' relative errors.
        extras: the choices, step by step.
        restarts: of a controller that restarts rollouts; ``None`` for the others.
    """

    seconds: float
    lag: float
    longest_lag: int
    extra: float
    predicted: float
    spread: float
    extras: tuple[int, ...]
    restarts: Restarts | None = None


@dataclass(eq=False)
class Course:
    """A graph of paced models; the first ``skipped`` of its steps do not count."""

    work: Work
    admission: Admission
    steps: int = 120
    skipped: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        work, regime, grain = self.work, self.work.regime, self.work.grain
        tokens = regime.lengths((self.steps + 1) * regime.batch, self.seed)
        self._lengths = np.maximum(1, np.round(tokens / grain)).astype(np.int64).tolist()
        self._noise = np.random.default_rng(self.seed + 999).standard_normal(self.steps + 1) * 0.1
        prompt = regime.prompt

        def reading(start: int, stop: int) -> float:
            first = 0 if start == 0 else prompt + grain * start  # the prompt is read with the first chunk
            return work.reading(first, prompt + grain * stop) if stop else 0.0

        self.policy = FakePolicy(
            lambda prompt_: self._lengths[prompt_.admission],
            lambda rows, tokens: work.decoding(rows, grain * tokens + rows * prompt, grain),
            cap=regime.cap // grain,
        )
        self.trainer = FakeTrainer(lambda batch: work.training(grain * np.diff(batch.offsets)), publishing=work.publish)
        self.reward = FakeScorer(
            lambda event, read, version: self._score(),
            reading if regime.reward else 0.0,
            work.call if regime.reward else 0.0,
            answering=lambda finished: 0.0,
        )
        self.reference = FakeScorer(_zeros, answering=lambda finished: work.forward(grain * _lengths(finished)))
        self.critic = FakeScorer(_zeros)

    def graph(self) -> Graph[StepReport]:
        """Return the graph: the reward model reads along, the reference and the critic wait for the cut."""
        capacity = 4 * self.work.regime.batch
        g: GraphBuilder[Prompt] = GraphBuilder("ppo", capacity=capacity, merge=merge_chunks, key=rollout_of)
        rollout = g.add(
            "generate", Generate(self.policy, self.admission, Fixed(self.work.chunk // self.work.grain)), g.prompts
        )
        held = g.add("held", Hold(), rollout)
        ref = g.add("ref_logp", Score(self.reference), held)
        score = g.add("reward", Score(self.reward), rollout)
        value = g.add("value", Score(self.critic), held)
        batch = g.add("advantage", GAE(), rollout, score, reference=ref, value=value)
        return g.build(g.add("update", Update(self.trainer, publish=[self.policy]), batch))

    def run(self) -> Outcome:
        """Run it in virtual time."""
        return run_virtual(self._run)

    async def _run(self) -> Outcome:
        reports: list[StepReport] = []
        ends: list[float] = []
        prompts = [Prompt(n, n, np.zeros(1, np.int32), group=n) for n in range(len(self._lengths))]
        async with self.graph().open(prompts) as run:
            async for report in run.steps(self.steps):
                reports.append(report)
                ends.append(anyio.current_time())
        # The last steps admit only what can still be trained, so they are shorter.
        last = self.steps - 3
        counted = reports[self.skipped : last]
        batches = self.trainer.batches[self.skipped : last]
        lags = [
            self.skipped + version - int(response.versions[0])
            for version, batch in enumerate(batches)
            for response in batch.responses
        ]
        seconds = np.diff(ends)[self.skipped - 1 : last - 1]
        predicted = np.array([report.metrics.get("deferral/predicted_seconds", math.nan) for report in counted])
        extras = tuple(int(report.metrics.get("deferral/extra", 0)) for report in reports)
        return Outcome(
            seconds=float(seconds.mean()),
            lag=float(np.mean(lags)),
            longest_lag=max(lags),
            extra=float(np.mean(extras[self.skipped : last])),
            predicted=float(predicted.mean() / seconds.mean()),
            spread=float(np.sqrt(np.mean((predicted / seconds - 1) ** 2))),
            extras=extras,
            restarts=self._restarts(reports, last) if isinstance(self.admission, Restarting) else None,
        )

    def _restarts(self, reports: Sequence[StepReport], last: int) -> Restarts:
        lengths = [np.diff(batch.offsets) for batch in self.trainer.batches[self.skipped : last]]
        discarded = [report.metrics.get("deferral/discarded_tokens", 0.0) for report in reports[self.skipped : last]]
        means = np.array([each.mean() for each in lengths])
        return Restarts(
            waste=float(sum(discarded) / sum(each.sum() for each in lengths)), swing=float(means.std() / means.mean())
        )

    def _score(self) -> float:
        """Return a score that rises to a plateau; the noise is of the step's mean."""
        step = self.trainer.version
        return 4.1 * (1 - math.exp(-step / 100)) + float(self._noise[min(step, self.steps)])


def _lengths(finished: Sequence[Finish]) -> NDArray[np.int64]:
    return np.array([len(event.response) for event in finished])


def _zeros(event: Finish, _read: tuple[int, ...], _version: int) -> FloatArray:
    return np.zeros(len(event.response), np.float32)
