"""Muon for the matrices of layers, AdamW for all else (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982).

Muon orthogonalises the momentum of a whole matrix, so that an update has the root mean square of AdamW's (0.2 lr) and
the learning rate is the same for both. Of a sharded matrix each rank gathers the weights and the momentum, one matrix
at a time, makes the same update, and keeps its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from oppo.hf.train.ranks import alike, whole

LIKE_ADAMW = "match_rms_adamw"
_BUFFER = "momentum_buffer"


def matrices(models: Sequence[PreTrainedModel]) -> Iterator[nn.Parameter]:
    """Yield the trained matrices of layers: no embeddings, heads, vectors, adapters, nor experts in one tensor."""
    for model in models:
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        apart = filter(None, [*tables, model.get_output_embeddings(), getattr(model, "score", None)])
        others = {id(each) for module in apart for each in module.parameters()}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.ndim == 2 and ".lora_" not in name and id(parameter) not in others:
                yield parameter


class Muon(torch.optim.Muon):
    """torch's, also of sharded matrices."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # untyped
        for group in self.param_groups:
            for shard in group["params"]:
                if isinstance(shard, DTensor) and shard.grad is not None:
                    self._step_of_shard(shard, group)
        return super().step(closure)

    def _step_of_shard(self, shard: DTensor, group: Mapping[str, Any]) -> None:
        momentum, state = group["momentum"], self.state[shard]
        if _BUFFER not in state:
            state[_BUFFER] = torch.zeros_like(shard.grad)
        buffer = state[_BUFFER].lerp_(shard.grad, 1 - momentum)
        matrix = nn.Parameter(whole(shard).clone())
        matrix.grad = whole(shard.grad.lerp(buffer, momentum) if group["nesterov"] else buffer)
        options = {name: value for name, value in group.items() if name in self.defaults}
        torch.optim.Muon([matrix], **{**options, "momentum": 0.0, "nesterov": False}).step()
        shard.copy_(alike(matrix.detach(), shard))
        shard.grad = None  # the rest of the step is of whole matrices


class MuonAndAdamW(torch.optim.Optimizer):
    """Both as one optimizer, of groups of parameters that are ``matrices`` and of ``others``."""

    def __init__(self, matrices: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], **options: Any) -> None:
        self._parts = [
            Muon(matrices, adjust_lr_fn=LIKE_ADAMW),
            torch.optim.AdamW(others, fused=True, **options),
        ]
        super().__init__([*matrices, *others], {})
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # untyped
        for part in self._parts:
            part.step()
        return None if closure is None else closure()
