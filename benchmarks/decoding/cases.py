"""Our decoder beside ``generate`` on a few models and batches, shown and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Final

from transformers import LlamaForCausalLM

from benchmarks.decoding.compare import DecodingComparison, compare_decoding, lognormal_lengths
from benchmarks.ladder.teach import config_of
from benchmarks.ladder.workloads import PAPER, Shape
from benchmarks.machine import Machine
from oppo.demo.assets import alone

VOCABULARY: Final = 640
POSITIONS: Final = 512
PROMPT: Final = 16
SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "deep and thin": PAPER.models.actor,
        "5M": Shape(hidden=256, intermediate=704, layers=6, heads=4),
    }
)
LENGTHS: Final[Mapping[str, Sequence[int]]] = MappingProxyType(
    {"32 ragged": lognormal_lengths(32), "32 equal": [96] * 32, "1": [192]}
)
"""Batches: lengths as of responses, equal lengths, with which ``generate`` wastes nothing, and one row."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model and one batch, compared."""

    model: str
    batch: str
    parameters: int
    found: DecodingComparison

    def line(self) -> str:
        """Return the case as a line of the table."""
        median, low, high = self.found.ratio
        ours, theirs = (sorted(speeds)[len(speeds) // 2] for speeds in (self.found.ours, self.found.generate))
        return (
            f"{self.model:<14} {self.parameters / 1e6:>5.1f}M  {self.batch:<10} {ours:>8,.0f} {theirs:>9,.0f}  "
            f"{median:>5.2f} ({low:.2f} - {high:.2f})  {self.found.cache.worst:>5.2f}"
        )


def measure(
    rounds: int, shapes: Mapping[str, Shape] = SHAPES, batches: Mapping[str, Sequence[int]] = LENGTHS
) -> Sequence[Case]:
    """Return every case, compared over ``rounds`` rounds."""
    return [
        Case(name, batch, *_compared(shape, lengths, rounds))
        for name, shape in shapes.items()
        for batch, lengths in batches.items()
    ]


def show(cases: Sequence[Case]) -> str:
    head = (
        f"{'model':<14} {'size':>6}  {'batch':<10} {'ours':>8} {'generate':>9}  {'ratio (min - max)':<20} {'cache':>5}"
    )
    foot = (
        "tokens a second on one thread; ratio above 1: ours is faster; cache: bytes taken over bytes needed, at worst"
    )
    return "\n".join([head, "-" * len(head), *(case.line() for case in cases), foot])


def as_json(cases: Sequence[Case], rounds: int) -> Mapping[str, object]:
    entries = [{**asdict(case), "ratio": case.found.ratio} for case in cases]
    return {"machine": asdict(Machine.here("cpu")), "threads": 1, "rounds": rounds, "cases": entries}


def _compared(shape: Shape, lengths: Sequence[int], rounds: int) -> tuple[int, DecodingComparison]:
    with alone(0):
        model = LlamaForCausalLM(config_of(shape, VOCABULARY, POSITIONS))
    model.train(mode=False)
    found = compare_decoding(model, lengths=lengths, prompts=[PROMPT] * len(lengths), rounds=rounds)
    return model.num_parameters(), found
