"""Compares the same steps in exact mode, serial and streamed through the graph: the tokens must be equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import anyio

from oppo.algorithms.ppo import PPO
from oppo.app.train import PreparedRun, prepare
from oppo.config.settings import Settings
from oppo.data import PromptStream
from oppo.errors import ConfigError
from oppo.events import Batch, Drop
from oppo.observe import Span
from oppo.stages.batch import ScoredRollout
from oppo.testing import respond_serially, score_serially

STEPS = 2
"""The tokens of the second step depend on the weights after the first."""

BATCH = 8


@dataclass(frozen=True, slots=True)
class Digests:
    """SHA-256 of all tokens that were trained, in hexadecimal."""

    serial: str
    streamed: str

    @property
    def identical(self) -> bool:
        """Whether both runs made the same tokens."""
        return self.serial == self.streamed


def compare_schedules(settings: Settings) -> Digests:
    """Return the digests of a serial and of a streamed run of a few steps, on transformers; writes nothing."""
    changes: Mapping[str, Mapping[str, object]] = {
        "models": {"engine": "transformers"},
        "algorithm": {"is_correction": "none"},  # of tokens that another engine would have made
        "run": {"exact": True, "steps": STEPS, "scorers": "thread", "name": f"{settings.run.name}-exactness"},
        "step": {"batch": BATCH, "extra": 0, "admission": "overcommit"},
    }
    exact = settings.changed(changes)
    with prepare(exact) as session:
        serial = anyio.run(serially, session)
    with prepare(exact) as session:
        streamed = anyio.run(through_the_graph, session)
    return Digests(tokens_digest(serial), tokens_digest(streamed))


async def serially(session: PreparedRun) -> list[Batch]:
    """Return the batches of a run that generates, scores and trains one after the other."""
    models, step, algorithm = session.assembly, session.settings.step, session.settings.algorithm
    critic, prompts = models.critic, cast("PromptStream", session.prompts)  # of a file
    if critic is None or not isinstance(algorithm, PPO):
        raise ConfigError(f"the serial run is one of PPO, and step.algorithm = {step.algorithm!r}: choose 'ppo'")
    estimator = algorithm.advantage()
    batches = []
    for _ in range(STEPS):
        finished = await respond_serially(models.policy, [next(prompts) for _ in range(step.batch)])
        unread = [None] * len(finished)
        reference = unread if models.reference is None else await score_serially(models.reference, finished)
        rewards = await score_serially(models.reward, finished)
        scores = [score for score in rewards if not isinstance(score, Drop)]
        values = await score_serially(critic, finished)
        rows = [ScoredRollout(*results) for results in zip(finished, reference, scores, values, strict=True)]
        batches.append(estimator.batch(rows))
        await models.trainer.update(batches[-1])
        await models.trainer.publish(models.policy, critic)
    return batches


async def through_the_graph(session: PreparedRun) -> list[Batch]:
    """Return the batches of a streamed run."""
    observer = Batches()
    async with session.graph.open(session.prompts, observers=[observer]) as run:
        async for _ in run.steps(STEPS):
            pass
    return observer.batches


class Batches:
    """An observer that keeps every batch."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Keep a batch."""
        del step, stage, at
        if isinstance(item, Batch):
            self.batches.append(item)

    def on_span(self, span: Span) -> None:
        """Ignore spans."""

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Ignore steps."""


def tokens_digest(batches: Sequence[Batch]) -> str:
    """Return the SHA-256 of the batches' rollout numbers and tokens."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(repr(batch.rollouts).encode())
        digest.update(batch.tokens.tobytes())
    return digest.hexdigest()
