"""The results of a study: one file, written after every run, that a later call goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from oppo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """What all runs of a study have in common.

    Attributes:
        steps: of PPO.
        batch: rollouts trained in a step.
        examined: held-out prompts that the final policy of every run answers.
        small: the demo's tiny models, for tests.
        jobs: runs made at a time, which share the cores: it decides how sums are rounded, and what seconds mean.
    """

    steps: int = 24
    batch: int = 32
    examined: int = 256
    small: bool = False
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over responses, and its standard error."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Answers:
    """Statistics of the answers to held-out prompts, sampled with the same noise for every policy.

    Attributes:
        score: the reward model's.
        kl: nats a response, from the base policy.
        length: tokens.
    """

    score: Estimate
    kl: Estimate
    length: Estimate


@dataclass(frozen=True, slots=True)
class OffPolicy:
    """How far what was trained was from the policy that was trained.

    Attributes:
        lags: mean versions between a token and its update, by step.
        samples: effective sample size of the tokens as importance samples, as a fraction of them, by step.
        largest: lag of any token.
        kl: of the policy that wrote a stale token to the one that was trained on it, nats a token, mean over the steps.
        clipped: fraction of the tokens whose loss was clipped, mean over the steps.
    """

    lags: tuple[float, ...]
    samples: tuple[float, ...]
    largest: float
    kl: float
    clipped: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Return what a record holds."""
        return cls(**{**record, **{name: tuple(record[name]) for name in ("lags", "samples")}})


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one run.

    Attributes:
        answers: of the final policy.
        seconds: of each step.
        scores: mean score of the rollouts that each step trained.
        extra: mean number of rollouts kept in flight beyond the batch.
        lag: mean versions between a token and its update.
        late: fraction of the trained rollouts that had been deferred.
        off_policy: ``None`` in files from before it was kept.
    """

    answers: Answers
    seconds: tuple[float, ...]
    scores: tuple[float, ...]
    extra: float
    lag: float
    late: float
    off_policy: OffPolicy | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Return the outcome that a record holds."""
        curves = {name: tuple(record[name]) for name in ("seconds", "scores")}
        off_policy = record.get("off_policy")
        parts = {
            "answers": answers_of(record["answers"]),
            "off_policy": None if off_policy is None else OffPolicy.of(off_policy),
        }
        return cls(**{**record, **curves, **parts})

    @property
    def known_off_policy(self) -> OffPolicy:
        """How far what was trained was from the policy that was trained.

        Raises:
            ValueError: it was not kept.
        """
        if self.off_policy is None:
            raise ValueError("this outcome is from before lags were kept for each step: make the run again")
        return self.off_policy


def answers_of(record: Mapping[str, Mapping[str, float]]) -> Answers:
    return Answers(**{name: Estimate(**each) for name, each in record.items()})


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run: a seed of prompts, noise and training, and the name of an arm."""

    seed: int
    arm: str


@dataclass(slots=True)
class Results:
    """The results so far.

    Attributes:
        arms: that make a seed whole, by name.
        machine: of the study.
        start: answers of the base policy; ``None`` before they are sampled.
    """

    arms: tuple[str, ...]
    plan: Plan
    machine: Mapping[str, object] = field(default_factory=dict)
    start: Answers | None = None
    outcomes: dict[Cell, Outcome] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path, arms: Iterable[str]) -> Self:
        """Return the results in a file."""
        content = json.loads(file.read_text(encoding="utf-8"))
        return cls(
            tuple(arms),
            Plan(**content["plan"]),
            content["machine"],
            None if content["start"] is None else answers_of(content["start"]),
            {Cell(**each["cell"]): Outcome.of(each["outcome"]) for each in content["runs"]},
        )

    @classmethod
    def go_on(cls, file: Path, arms: Iterable[str], plan: Plan) -> Self:
        """Return the results in a file; empty ones without the file.

        Raises:
            ConfigError: it is of another plan.
        """
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
        """The answers of the base policy.

        Raises:
            ValueError: it has not been examined.
        """
        if self.start is None:
            raise ValueError("the base policy has not been examined, so that nobody knows what was gained")
        return self.start

    def whole(self) -> list[int]:
        """Return the seeds of which every arm has been run; only they are compared."""
        seeds = sorted({cell.seed for cell in self.outcomes})
        return [seed for seed in seeds if all(Cell(seed, arm) in self.outcomes for arm in self.arms)]

    def of(self, arm: str) -> list[Outcome]:
        """Return the outcomes of an arm, by seed."""
        return [self.outcomes[Cell(seed, arm)] for seed in self.whole()]
