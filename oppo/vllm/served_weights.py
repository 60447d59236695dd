"""The weights that an engine's model has, by the names of transformers: others are refused before they are sent.

vLLM itself logs a warning about a layer that received no weights, and goes on with those that it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from oppo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SHOWN = 3
"""Names that an error lists."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """Names and shapes of a model's weights.

    Attributes:
        model: its name, for errors.
        shapes: of everything in its ``state_dict``.
        needed: names of parameters; of those that are tied to one another, one is enough.
    """

    model: str
    shapes: Mapping[str, tuple[int, ...]]
    needed: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, model: str, config: PretrainedConfig, *, trust_remote_code: bool = False) -> Self:
        """Return the weights that transformers makes for a configuration; this takes no memory for them.

        Raises:
            ValueError: transformers knows no causal language model of this kind.
        """
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds to import

        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        tied: dict[int, set[str]] = {}
        for name, parameter in made.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), set()).add(name)
        shapes = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
        return cls(model, shapes, tuple(frozenset(names) for names in tied.values()))

    def require(self, tensors: Mapping[str, Tensor]) -> None:
        """Check weights before they are sent.

        Raises:
            ModelError: a name is missing or unknown, or a shape differs.
        """
        missing = [min(names) for names in self.needed if not names & tensors.keys()]
        unknown = [name for name in tensors if name not in self.shapes]
        other = [
            f"{name} {list(tensors[name].shape)}, not {list(shape)}"
            for name, shape in self.shapes.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ]
        faults = {"missing": missing, "unknown": unknown, "of another shape": other}
        said = [f"{len(names)} {what} ({_some(names)})" for what, names in faults.items() if names]
        if said:
            raise ModelError(
                f"these are not the weights of {self.model}, which vLLM serves: {', '.join(said)}; it goes on with "
                "those that it has: publish the model that the engine was started with, or start it with the model "
                "that is trained"
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")
