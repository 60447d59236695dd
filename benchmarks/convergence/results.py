"""The results of a study: one file, written after every run, that a later call goes on with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.convergence.arms import ARMS
from oppo.errors import ConfigError

FILE: Final = "results.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of every run of a study.

    Attributes:
        steps: of PPO.
        batch: rollouts trained in a step.
        examined: held-out prompts that the final policy of every run answers.
        small: the demo's tiny models, for tests.
    """

    steps: int = 24
    batch: int = 32
    examined: int = 256
    small: bool = False


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
class Outcome:
    """The outcome of one run.

    Attributes:
        answers: of the final policy.
        seconds: of each step.
        scores: mean score of the rollouts that each step trained.
        extra: mean number of rollouts kept in flight beyond the batch.
        lag: mean versions between a token and its update.
        late: fraction of the trained rollouts that had been carried over.
    """

    answers: Answers
    seconds: tuple[float, ...]
    scores: tuple[float, ...]
    extra: float
    lag: float
    late: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Return the outcome that a record holds."""
        curves = {name: tuple(record[name]) for name in ("seconds", "scores")}
        return cls(**{**record, **curves, "answers": answers_of(record["answers"])})


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
        machine: of the study.
        start: answers of the base policy; ``None`` before they are sampled.
    """

    plan: Plan
    machine: Mapping[str, object] = field(default_factory=dict)
    start: Answers | None = None
    outcomes: dict[Cell, Outcome] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Return the results in the file of ``directory``."""
        content = json.loads((directory / FILE).read_text(encoding="utf-8"))
        return cls(
            Plan(**content["plan"]),
            content["machine"],
            None if content["start"] is None else answers_of(content["start"]),
            {Cell(**each["cell"]): Outcome.of(each["outcome"]) for each in content["runs"]},
        )

    @classmethod
    def go_on(cls, directory: Path, plan: Plan) -> Self:
        """Return the results in the file of ``directory``; empty ones without the file.

        Raises:
            ConfigError: it is of another plan.
        """
        if not (directory / FILE).exists():
            return cls(plan)
        found = cls.load(directory)
        if found.plan != plan:
            raise ConfigError(
                f"{directory / FILE} is of {found.plan}, but this study is of {plan}, and the two cannot be put "
                "together: choose another --out"
            )
        return found

    def save(self, directory: Path) -> None:
        """Write the file, so that it is whole whenever the study is stopped."""
        runs = [{"cell": asdict(cell), "outcome": asdict(outcome)} for cell, outcome in sorted(self.outcomes.items())]
        head = {
            "plan": asdict(self.plan),
            "machine": dict(self.machine),
            "start": None if self.start is None else asdict(self.start),
        }
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        lines.append('"runs": [\n' + ",\n".join(json.dumps(run) for run in runs) + "\n]")
        directory.mkdir(parents=True, exist_ok=True)
        aside = directory / f".{FILE}.partial"
        aside.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
        aside.replace(directory / FILE)

    def whole(self) -> list[int]:
        """Return the seeds of which every arm has been run; only they are compared."""
        seeds = sorted({cell.seed for cell in self.outcomes})
        return [seed for seed in seeds if all(Cell(seed, arm) in self.outcomes for arm in ARMS)]

    def of(self, arm: str) -> list[Outcome]:
        """Return the outcomes of an arm, by seed."""
        return [self.outcomes[Cell(seed, arm)] for seed in self.whole()]
