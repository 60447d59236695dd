"""The models of these benchmarks, Llamas of random weights that are made once, their batch and their engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from transformers import LlamaForCausalLM

from benchmarks.decoding.compare import lognormal_lengths
from benchmarks.ladder.directory import cache_directory
from benchmarks.ladder.teach import config_of
from benchmarks.ladder.workloads import Shape
from oppo.demo.assets import alone, made_once

POSITIONS: Final = 512

LENGTHS: Final = lognormal_lengths(32)
"""Tokens of the responses of a batch."""

ARGUMENTS: Final[Mapping[str, object]] = MappingProxyType(
    {"dtype": "float32", "max_model_len": POSITIONS, "max_num_seqs": 64}
)
"""Of every engine, beside those that oppo sets and its defaults."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model.

    Attributes:
        tied: whether the output layer is the embedding.
    """

    name: str
    shape: Shape
    vocabulary: int
    tied: bool = False

    def model(self) -> LlamaForCausalLM:
        """Return the model in float32, its weights always the same."""
        config = config_of(self.shape, self.vocabulary, POSITIONS)
        config.tie_word_embeddings = self.tied
        with alone(0):
            return LlamaForCausalLM(config)

    def directory(self, cache: Path | None = None) -> Path:
        """Return the directory that the model is saved in; it is made once, in ``cache``."""
        return made_once((cache or cache_directory()) / f"vllm-{self.name}", self._save)

    def _save(self, directory: Path) -> None:
        self.model().save_pretrained(directory)


SIZES: Final[Mapping[str, Size]] = MappingProxyType(
    {
        "5m": Size("5m", Shape(hidden=256, intermediate=704, layers=6, heads=4), vocabulary=640),
        "135m": Size(
            "135m",
            Shape(hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3),
            vocabulary=49_152,
            tied=True,
        ),
    }
)
"""By name; the larger has the shape of SmolLM2-135M."""
