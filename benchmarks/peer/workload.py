"""Reads a workload directory with the standard library alone.

::

    actor/ reward/ critic/   models with their tokenizer, as save_pretrained writes them
    prompts.jsonl            {"tokens": [ids], "length": tokens the actor was trained to answer with, its EOS included}
    spec.json                batch, epochs, learning rates, ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Final

TOLERANCE: Final = 0.02
"""Most relative difference between trained and announced tokens in a valid comparison."""


@dataclass(frozen=True, slots=True)
class Spec:
    """The keys of a workload's ``spec.json`` that concern a peer.

    Attributes:
        batch: prompts a step takes.
        epochs: passes over a step's batch.
        minibatches: optimizer steps an epoch.
        max_new_tokens: the cap on a response.
        reward: ``model`` for the one in ``reward/``, ``rule`` for a function.
    """

    workload: str
    batch: int
    epochs: int
    minibatches: int
    max_new_tokens: int
    learning_rate: float
    critic_learning_rate: float
    temperature: float
    eos: int
    pad: int
    seed: int
    kl: float
    gamma: float
    lam: float
    reward: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the length of the response they announce."""

    tokens: tuple[int, ...]
    length: int


def read_spec(directory: Path) -> Spec:
    """Return the spec in ``directory/spec.json``.

    Raises:
        ValueError: a key is missing, lengths are scripted, or the reward is neither a model nor a rule.
    """
    path = directory / "spec.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    if missing := [name for name in Spec.__dataclass_fields__ if name not in content]:
        raise ValueError(f"{path} has no {', '.join(missing)}: it was made for another version of the ruler")
    spec = Spec(**{name: content[name] for name in Spec.__dataclass_fields__})
    if content.get("lengths") == "scripted":
        raise ValueError(f"{path} scripts its lengths, and a peer's responses end where its actor ends them")
    if spec.reward not in {"model", "rule"}:
        raise ValueError(f"{path} asks for the reward {spec.reward!r}: expected 'model' or 'rule'")
    return spec


def read_prompts(directory: Path) -> tuple[Prompt, ...]:
    lines = (directory / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    records = (json.loads(line) for line in lines if line.strip())
    return tuple(Prompt(tuple(record["tokens"]), record["length"]) for record in records)


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
    if abs(trained - announced) <= TOLERANCE * announced:
        return ""
    return (
        f"trained on {trained} response tokens where the prompts announce {announced}: "
        f"more than {TOLERANCE:.0%} apart, so its seconds say nothing about the same work"
    )
