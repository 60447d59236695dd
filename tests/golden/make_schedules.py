"""Writes ``schedules.json``: digests of whole runs of fakes without lookahead, made before steps could be in flight.

Recorded by commit b511c9a, of which the engine ran one step at a time. Fakes answer with hashes and sleep in virtual
time, so the digests are the same on every machine. The script uses only what that commit has too. To record again::

    git worktree add --detach before b511c9a && cp tests/golden/make_schedules.py before/tests/golden/
    cd before && python -m tests.golden.make_schedules
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

import oppo
from oppo.admission import Admission, Observation, Overcommit, SlopeAdaptive, TailAdaptive, TailBatched
from oppo.admission.chunking import ChunkSize, Fixed, WholeRollout
from oppo.data import PromptStream
from oppo.events import Batch, Chunk, Defer, Drop, Finish, FloatArray, Prompt, Scored, StepReport
from oppo.observe import Span
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer, fake_per_token, fake_scalar, prompts
from oppo.testing.virtual_time import run_virtual

PATH = Path(__file__).with_name("schedules.json")
LENGTHS = (2, 3, 8, 1, 4, 2, 12, 3, 1, 2, 6)
STEPS = 6
ARRAYS = (
    "tokens", "versions", "logprobs", "proximal", "reference", "values", "rewards", "advantages", "returns", "scores",
)  # fmt: skip
OBSERVED = (
    "step", "seconds", "decode_seconds", "decode_steps", "tokens", "rows", "finished", "capped", "deferred", "scoring",
    "rest_seconds", "score",
)  # fmt: skip


class Times(NamedTuple):
    """What was recorded of a scorer: a class that had no more."""

    stage: str
    before: float
    after: float

    def __repr__(self) -> str:
        return f"Scoring(stage={self.stage!r}, before={number(self.before)}, after={number(self.after)})"


@dataclass
class Models:
    policy: FakePolicy = field(default_factory=lambda: FakePolicy(length, 0.01))
    critic: FakeCritic = field(default_factory=lambda: FakeCritic(per_token=0.001, per_call=0.003))
    trainer: FakeTrainer = field(default_factory=lambda: FakeTrainer(0.02, syncing=0.005))

    async def restore(self, version: int) -> None:
        self.trainer.version = version
        await self.trainer.sync_weights(self.policy, self.critic)


def length(prompt: Prompt) -> int:
    return LENGTHS[prompt.rollout % len(LENGTHS)]


def pace(prompt: Prompt) -> float:
    return (0.5, 1.0, 3.0)[prompt.rollout % 3] * (1 + (prompt.rollout + 1) / 997)


def ppo(
    models: Models,
    admission: Admission,
    chunks: ChunkSize | None = None,
    proximal: FakeScorer[FloatArray] | None = None,
) -> oppo.Graph[StepReport]:
    return oppo.ppo(
        policy=models.policy,
        reference=FakeScorer(fake_per_token, 0.001, 0.003),
        reward=FakeScorer(fake_scalar, 0.002, 0.003),
        critic=models.critic,
        trainer=models.trainer,
        admission=admission,
        chunks=chunks or Fixed(3),
        proximal=proximal,
    )


def paced(models: Models) -> oppo.Graph[StepReport]:
    models.policy = FakePolicy(length, 0.01, pace)
    return ppo(models, Overcommit(3, overcommit=2))


def recomputed(models: Models) -> oppo.Graph[StepReport]:
    return ppo(models, Overcommit(3, overcommit=2), proximal=FakeScorer(fake_per_token, 0.001))


def groups(models: Models) -> oppo.Graph[StepReport]:
    return oppo.grpo(
        policy=models.policy,
        reward=FakeScorer(fake_scalar, 0.002, 0.003),
        trainer=models.trainer,
        admission=Overcommit(2, overcommit=1),
        samples=3,
        chunks=Fixed(3),
    )


Make = Callable[[Models], oppo.Graph[StepReport]]

CASES: Mapping[str, Make] = {
    "synchronous": lambda models: ppo(models, Overcommit(3)),
    "whole rollouts": lambda models: ppo(models, Overcommit(3), WholeRollout()),
    "overcommit": lambda models: ppo(models, Overcommit(3, overcommit=2)),
    "slope": lambda models: ppo(models, SlopeAdaptive(3, most=3, window=1)),
    "tail": lambda models: ppo(models, TailAdaptive(3, price=0.0, most=3)),
    "batched": lambda models: ppo(models, TailBatched(3, 1.5)),
    "each rollout at its own pace": paced,
    "recomputed log-probs": recomputed,
    "groups": groups,
}
RESUMED = ("overcommit", 3)  # A case that is made again in two parts, and the steps of the first


@dataclass
class Tape:
    """An observer that keeps, as text, what each step has sent, under its stage, and its report."""

    sent: dict[int, dict[str, list[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        self.sent[step][stage].append(f"{number(at)} {told(item)}")

    def on_span(self, span: Span) -> None:
        """Leave spans out: their times are those of items."""

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        self.sent[step]["step"].append(told(result))


def told(item: object) -> str:
    match item:
        case Prompt():
            return f"prompt {item.rollout} {item.admission} {item.sample} {item.group} {bits(item.tokens)}"
        case Chunk():
            return f"chunk {item.rollout} {item.start} {bits(item.tokens)} {bits(item.logprobs)} {bits(item.versions)}"
        case Finish():
            return f"finish {item.rollout} {item.reason} {bits(item.response.tokens)} {bits(item.response.versions)}"
        case Defer():
            return f"defer {item.rollout} {item.age} {item.restart}"
        case Drop():
            return f"drop {item.rollout} {item.reason}"
        case Scored():
            return f"scored {item.rollout} {item.version} {bits(np.asarray(item.value))}"
        case Batch():
            arrays = [bits(array) for name in ARRAYS if (array := getattr(item, name)) is not None]
            return f"batch {item.rollouts} {item.reasons} {arrays}"
        case Observation():
            scoring = tuple(Times(each.stage, each.before, each.after) for each in item.scoring)
            seen = [scoring if name == "scoring" else getattr(item, name) for name in OBSERVED]
            return f"observed {list(map(number, seen))}"
        case StepReport():
            ended = (item.trained, [told(drop) for drop in item.dropped], [told(defer) for defer in item.deferred])
            return f"report {item.index} {item.version} {ended} {number(item.score)} {number(item.seconds)}"
    raise TypeError(f"nothing is recorded of a {type(item).__name__}")


def number(value: object) -> str:
    """Return the text of a value; a time to the nanosecond, which is the loop's resolution."""
    if not isinstance(value, float):
        return repr(value)
    return "nan" if math.isnan(value) else repr(round(value, 9))


def bits(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> str:
    return f"{array.dtype.str}{array.shape}{array.tobytes().hex()}"


async def play(make: Make, first: int = STEPS) -> Tape:
    """Return the tape of a run; its steps after the ``first`` are made by another run, from the state of that one."""
    tape, source, models = Tape(), PromptStream(prompts(200), epochs=1), Models()
    async with make(models).open(source, observers=[tape]) as run:
        for left in range(STEPS, STEPS - first, -1):
            await run.step(remaining=left)
        state = run.state_dict()
    models = Models()
    async with make(models).open(source, observers=[tape]) as run:
        run.load_state_dict(state)
        await models.restore(first)
        for left in range(STEPS - first, 0, -1):
            await run.step(remaining=left)
    return tape


def digests(make: Make, first: int = STEPS) -> list[dict[str, str]]:
    sent = run_virtual(play, make, first).sent
    return [
        {stage: sha256("\n".join(lines).encode()).hexdigest()[:16] for stage, lines in sorted(sent[step].items())}
        for step in range(STEPS)
    ]


def recorded() -> dict[str, list[dict[str, str]]]:
    name, first = RESUMED
    whole = {each: digests(make) for each, make in CASES.items()}
    return {**whole, f"{name}, resumed": digests(CASES[name], first)}


if __name__ == "__main__":
    PATH.write_text(json.dumps(recorded(), indent=1) + "\n", encoding="utf-8")
