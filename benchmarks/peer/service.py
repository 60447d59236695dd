"""A contestant's end of its pipes, with the standard library alone: it reads a workload and requests, and answers.

::

    actor/ reward/ critic/   models with their tokenizer, as save_pretrained writes them; GRPO has no critic
    prompts.jsonl            {"tokens": [ids], "length": tokens the actor was trained to answer with, its EOS included}
    spec.json                batch, epochs, learning rates, ...

====================  ==============================================================================================
written once, loaded  ``{"ready": {...}}``
read                  ``{"run": n}``
written               ``{"steps": [{"seconds", "tokens", "announced", "as_announced", "samples", "mean_length",
                      "capped"}, ...], "peak_rss_mb"}``, and ``"error"`` if the work is not the workload's; a program
                      that can tell its phases apart adds ``"decode"``, ``"score"`` and ``"update"``
end of input          ends the program
====================  ==============================================================================================
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import cycle, islice
from pathlib import Path
from types import MappingProxyType
from typing import Final, TextIO

TOLERANCE: Final = 0.02  # most relative difference between trained and announced tokens in a valid comparison


@dataclass(frozen=True, slots=True)
class Spec:
    """The keys of a workload's ``spec.json`` that concern a peer."""

    workload: str
    batch: int  # rollouts a step trains
    epochs: int  # passes over a step's batch
    minibatches: int  # optimizer steps an epoch
    max_new_tokens: int  # the cap on a response
    learning_rate: float
    critic_learning_rate: float
    temperature: float
    eos: int
    pad: int
    seed: int
    kl: float
    gamma: float
    lam: float
    reward: str  # `model` for the one in `reward/`, `rule` for a function, `reviews` for that of reviews.py
    samples: int = 0  # responses to each prompt, which GRPO compares; 0: one, and PPO
    dtype: str = "float32"  # of all models


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, the length of the response they announce, or 0, and what a review is to be about."""

    tokens: tuple[int, ...]
    length: int
    topic: str = ""


def read_spec(directory: Path) -> Spec:
    path = directory / "spec.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    if missing := [key.name for key in fields(Spec) if key.default is MISSING and key.name not in content]:
        raise ValueError(f"{path} has no {', '.join(missing)}: it was made for another version of the ladder")
    spec = Spec(**{key.name: content[key.name] for key in fields(Spec) if key.name in content})
    if spec.reward not in {"model", "rule", "reviews"}:
        raise ValueError(f"{path} asks for the reward {spec.reward!r}: expected 'model', 'rule' or 'reviews'")
    return spec


def read_prompts(directory: Path) -> tuple[Prompt, ...]:
    lines = (directory / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    records = (json.loads(line) for line in lines if line.strip())
    return tuple(Prompt(tuple(record["tokens"]), record["length"], record.get("topic", "")) for record in records)


def batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Yield ``size`` prompts at a time in order, endlessly, from the first again after the last."""
    if not prompts:
        raise ValueError("a workload without prompts cannot be run: its prompts.jsonl is empty")
    endless = cycle(prompts)
    while True:
        yield list(islice(endless, size))


def announced_tokens(prompts: Sequence[Prompt], cap: int) -> int:
    return sum(min(prompt.length, cap) for prompt in prompts)


def complaint(trained: int, announced: int) -> str:
    """Return why a comparison over these tokens would be void; empty if it is valid."""
    if not announced or abs(trained - announced) <= TOLERANCE * announced:
        return ""
    return (
        f"trained on {trained} response tokens where the prompts announce {announced}: "
        f"more than {TOLERANCE:.0%} apart, so its seconds say nothing about the same work"
    )


def peak_rss_mb() -> float:
    """Return the sum of the peak memory of this process and its children, in MB of 2**20 bytes.

    It avoids ``getrusage`` on Linux, where a process begins with the peak of its parent.
    """
    processes = Path("/proc/self").exists()
    if not processes:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    children = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    return sum(_peak_kb(Path("/proc") / pid) for pid in ("self", *children)) / 1024


def _peak_kb(process: Path) -> int:
    try:
        status = (process / "status").read_text(encoding="utf-8")
    except OSError:  # the process has ended meanwhile
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)


NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


class InputEnded(Exception):  # noqa: N818 - it says what happened
    """The requests have ended; raised to leave the peer's training loop."""


class Service:
    """Serves requests for steps; it blocks between them, and a step's clock stops while it reads or writes.

    ``spec`` defines a step; only answers are written to ``answers``; ``now`` returns monotonic seconds.
    """

    def __init__(
        self, spec: Spec, requests: TextIO, answers: TextIO, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec = spec
        self._requests = requests
        self._answers = answers
        self._now = now
        self._wanted = 0
        self._started = 0.0
        self._updates = 0
        self._announced = 0
        self._tokens = 0
        self._steps: list[dict[str, float]] = []

    def ready(self, facts: Mapping[str, object]) -> None:
        self._send({"ready": facts})

    def wait(self) -> None:
        line = self._requests.readline()
        if not line:
            raise InputEnded
        self._wanted = json.loads(line)["run"]
        if self._wanted < 1:
            raise ValueError(f"asked to run {self._wanted} steps: expected one or more")
        self._updates = 0
        self._steps = []
        self._started = self._now()

    def updated(self) -> None:
        """Count an optimizer step; an accumulated micro-batch is none."""
        self._updates += 1

    def lap(self) -> float:
        return self._now() - self._started

    def done(
        self, seconds: float, lengths: Sequence[int], prompts: Sequence[Prompt], phases: Mapping[str, float] = NOTHING
    ) -> None:
        """Record a step, answer after the last one of the request, and start the clock of the next.

        ``seconds`` are from :meth:`lap`, of the whole and of ``phases``; ``lengths`` are the trained tokens of each
        response, and ``prompts`` its prompt.
        """
        cap = self._spec.max_new_tokens
        as_announced = sum(n == min(p.length, cap) for n, p in zip(lengths, prompts, strict=True))
        announced, tokens = announced_tokens(prompts, cap), sum(lengths)
        self._announced += announced
        self._tokens += tokens
        self._steps.append(
            {
                "seconds": seconds,
                "tokens": tokens,
                "announced": announced,
                "as_announced": as_announced / len(prompts),
                "samples": len(lengths),
                "mean_length": tokens / len(lengths),
                "capped": sum(n >= cap for n in lengths),
                **phases,
            }
        )
        if len(self._steps) < self._wanted:
            self._started = self._now()
            return
        self._answer()
        self.wait()

    def _answer(self) -> None:
        # Tokens are compared over the whole life of the program: a single runaway response would exceed the tolerance
        # of a short request.
        faults = [complaint(self._tokens, self._announced)]
        expected = len(self._steps) * self._spec.epochs * self._spec.minibatches
        if self._updates != expected:
            faults.append(f"took {self._updates} optimizer steps where the workload asks for {expected}")
        error = "; ".join(filter(None, faults))
        answer: dict[str, object] = {"steps": self._steps, "peak_rss_mb": peak_rss_mb()}
        self._send(answer | ({"error": error} if error else {}))

    def _send(self, answer: Mapping[str, object]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)
