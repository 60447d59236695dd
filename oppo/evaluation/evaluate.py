"""Held-out scores while a run goes on: what is measured, and the stage that measures it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import anyio

from oppo.evaluation.examine import Answering, Progress, examine, unseen
from oppo.evaluation.measures import of_greedy, of_sampled
from oppo.events import Drop, Prompt, StepReport
from oppo.graph import Receiver, Sender, Step
from oppo.models import Policy, Scorer
from oppo.numeric import require_whole
from oppo.observe import WorkContext, working_for
from oppo.stages import ScoredRollout
from oppo.turns import Environment

FIRST: Final = 10**12
"""The number of the first held-out prompt: above those of training, so that scorers and noise tell them apart."""

BEFORE: Final = -1
"""The step of an evaluation before the first."""


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """The outcome of one evaluation.

    Attributes:
        step: after which it was made; :data:`BEFORE` the first.
        version: of the weights.
        metrics: under the names of ``metrics.jsonl``.
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
    """

    prompts: Sequence[Prompt]
    reward: Scorer[float | Drop]
    greedy: Policy
    sampled: Policy | None = None
    samples: int = 1
    batch: int = 64
    pass_score: float | None = None
    environment: Environment | None = None

    def __post_init__(self) -> None:
        require_whole("samples", self.samples, 1)
        require_whole("batch", self.batch, 1)
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

        how = Answering(batch=self.batch, environment=self.environment, progress=shown(0))
        greedy = await examine(self.greedy, self.reward, self.prompts, how)
        metrics = of_greedy(greedy, self.pass_score)
        if self.sampled is not None:
            batch, progress_of_these = max(1, self.batch // self.samples), shown(len(self.prompts))
            how = replace(how, samples=self.samples, batch=batch, progress=progress_of_these)
            sampled = await examine(self.sampled, self.reward, self.prompts, how)
            metrics = {**metrics, **of_sampled(sampled, self.samples, self.pass_score)}
            metrics["eval/dropped"] += len(sampled.dropped)
        seconds = {"eval/seconds": anyio.current_time() - start}
        return Evaluated(step, version, {**metrics, **seconds}, greedy.rollouts)


@dataclass(eq=False)
class Evaluate:
    """Adds held-out scores to the reports of steps; it reads what :class:`oppo.Update` sends.

    An evaluation begins when no stage uses the policy or the reward any more, in its own step and in those that are in
    flight beside it. ``Update(held=["evaluate"])`` publishes no other weights before it has ended.

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
        """Send the step's report, with held-out scores if they are due."""
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
        """Return the evaluation after a step, for the observers of the run."""
        del step
        return self._found.pop(report.index, None)
