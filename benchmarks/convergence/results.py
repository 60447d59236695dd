"""The results of a study: one file, written after every run, that a later call goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from oppo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    steps: int = 24  # of PPO
    batch: int = 32  # rollouts trained in a step
    examined: int = 256  # held-out prompts that the final policy of every run answers
    small: bool = False  # the demo's tiny models, for tests
    jobs: int = 1  # runs made at a time, which share the cores: it decides how sums are rounded, and what seconds mean


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over responses, and its standard error."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Answers:
    """Statistics of the answers to held-out prompts, sampled with the same noise for every policy."""

    score: Estimate  # the reward model's
    kl: Estimate  # nats a response, from the base policy
    length: Estimate  # tokens


@dataclass(frozen=True, slots=True)
class OffPolicy:
    """How far what was trained was from the policy that was trained."""

    lags: tuple[float, ...]  # mean versions between a token and its update, by step
    # effective sample size of the tokens as importance samples, as a fraction of them, by step
    samples: tuple[float, ...]
    largest: float  # lag of any token
    # of the policy that wrote a stale token to the one that was trained on it, nats a token, mean over the steps
    kl: float
    clipped: float  # fraction of the tokens whose loss was clipped, mean over the steps


@dataclass(frozen=True, slots=True)
class Outcome:
    answers: Answers  # of the final policy
    seconds: tuple[float, ...]  # of each step
    scores: tuple[float, ...]  # mean score of the rollouts that each step trained
    extra: float  # mean number of rollouts kept in flight beyond the batch
    lag: float  # mean versions between a token and its update
    late: float  # fraction of the trained rollouts that had been deferred
    off_policy: OffPolicy | None = None  # `None` in files from before it was kept

    @property
    def known_off_policy(self) -> OffPolicy:
        if self.off_policy is None:
            raise ValueError("this outcome is from before lags were kept for each step: make the run again")
        return self.off_policy


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run: a seed of prompts, noise and training, and the name of an arm."""

    seed: int
    arm: str


@dataclass(slots=True)
class Results:
    arms: tuple[str, ...]  # that make a seed whole, by name
    plan: Plan
    machine: Mapping[str, object] = field(default_factory=dict)  # of the study
    start: Answers | None = None  # answers of the base policy; `None` before they are sampled
    outcomes: dict[Cell, Outcome] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path, arms: Iterable[str]) -> Self:
        content = json.loads(file.read_bytes())
        start = None if content["start"] is None else TypeAdapter(Answers).validate_python(content["start"])
        runs = [(run["cell"], run["outcome"]) for run in content["runs"]]
        outcomes = dict(TypeAdapter(list[tuple[Cell, Outcome]]).validate_python(runs))
        return cls(tuple(arms), Plan(**content["plan"]), content["machine"], start, outcomes)

    @classmethod
    def go_on(cls, file: Path, arms: Iterable[str], plan: Plan) -> Self:
        """Return the results in a file; empty ones without the file."""
        if not file.exists():
            return cls(tuple(arms), plan)
        found = cls.load(file, arms)
        if found.plan != plan:
            raise ConfigError(
                f"{file} is of {found.plan}, but this study is of {plan}, and the two cannot be put together: choose "
                "another --out"
            )
        return found

    def save(self, file: Path) -> None:
        """Write the file, so that it is whole whenever the study is stopped."""
        runs = [{"cell": asdict(cell), "outcome": asdict(outcome)} for cell, outcome in sorted(self.outcomes.items())]
        head = {
            "plan": asdict(self.plan),
            "machine": dict(self.machine),
            "start": None if self.start is None else asdict(self.start),
        }
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        lines.append('"runs": [\n' + ",\n".join(json.dumps(run) for run in runs) + "\n]")
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_name(f".{file.name}.partial")
        aside.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
        aside.replace(file)

    @property
    def known_start(self) -> Answers:
        if self.start is None:
            raise ValueError("the base policy has not been examined, so that nobody knows what was gained")
        return self.start

    def whole(self) -> list[int]:
        """Return the seeds of which every arm has been run; only they are compared."""
        seeds = sorted({cell.seed for cell in self.outcomes})
        return [seed for seed in seeds if all(Cell(seed, arm) in self.outcomes for arm in self.arms)]

    def of(self, arm: str) -> list[Outcome]:
        return [self.outcomes[Cell(seed, arm)] for seed in self.whole()]
