"""A stand-in for reasoning-gym with one of its tasks: the parts of its interface that ``oppo.rewards.tasks`` uses."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


@dataclass
class ChainSumConfig:
    min_terms: int = 2
    max_terms: int = 6
    min_digits: int = 1
    max_digits: int = 4
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        assert self.size > 0, "size must be positive"
        assert self.min_terms > 0, "min_terms must be positive"
        assert self.max_terms >= self.min_terms, "max_terms must be >= min_terms"


class ChainSumDataset:
    def __init__(self, config: ChainSumConfig) -> None:
        config.validate()
        self.config = config

    def __getitem__(self, number: int) -> dict[str, Any]:
        dice = random.Random((self.config.seed or 0) + number)
        most = 10**self.config.max_digits - 1
        terms = [dice.randint(0, most) for _ in range(dice.randint(self.config.min_terms, self.config.max_terms))]
        expression = str(terms[0]) + "".join(f" {dice.choice('+-')} {term}" for term in terms[1:])
        total = sum(int(sign + term) for sign, term in re.findall(r"([+-]?) ?(\d+)", expression))
        return {
            "question": f"State the final answer to the following arithmetic problem: {expression} =",
            "answer": str(total),
            "metadata": {"source_dataset": "chain_sum", "source_index": number, "expression": expression},
        }

    def score_answer(self, answer: str | None, entry: Mapping[str, Any]) -> float:
        wanted = entry["answer"]
        if not isinstance(answer, str) or wanted not in answer:
            return 0.0
        return 1.0 if answer == wanted else len(wanted) / len(answer)


def _create(name: str, **config: Any) -> ChainSumDataset:
    assert name in DATASETS
    return ChainSumDataset(ChainSumConfig(**config))


def _score_answer_fn(name: str) -> Callable[[str | None, Mapping[str, Any]], float]:
    return _create(name).score_answer


def _extract(completion: str) -> str | None:
    found = re.findall(r"<answer>\s?(.*?)\s?</answer>", completion, re.DOTALL)
    return found[-1].strip() if found else None


DATASETS = {"chain_sum": (ChainSumDataset, ChainSumConfig)}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it imported in the place of the library."""
    names = ("reasoning_gym", "reasoning_gym.factory", "reasoning_gym.utils")
    library, factory, utils = (ModuleType(name) for name in names)
    for name, module in zip(names, (library, factory, utils), strict=True):
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    parts = {"factory": factory, "utils": utils, "create_dataset": _create, "get_score_answer_fn": _score_answer_fn}
    vars(library).update(parts)
    vars(factory)["DATASETS"] = DATASETS
    vars(utils)["extract_answer"] = _extract
