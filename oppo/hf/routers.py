"""The routers of a mixture of experts: what they answer in a pass, how evenly they spread tokens, and their loss."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf.introspection import backbone, has_experts


def routers(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """Return the routers of a mixture of experts, and the index of the logits among the outputs of each."""
    trunk = backbone(model)
    known = (trunk._can_record_outputs or {}).get("router_logits", [])  # noqa: SLF001 - no public name says it
    recorders = known if isinstance(known, list) else [known]
    kinds = {getattr(each, "target_class", each): getattr(each, "index", 1) for each in recorders}
    return [(module, kinds[type(module)]) for module in trunk.modules() if type(module) in kinds]


class Route(NamedTuple):
    """The answer of a router: logits [N, E], and the experts of each token, int64 [N, k], unless others choose them."""

    logits: Tensor
    experts: Tensor | None


_routes: ContextVar[list[Route] | None] = ContextVar("routes", default=None)


@dataclass(frozen=True)
class _Records:
    # A forward hook that can be pickled. Other threads may serve the model meanwhile: their passes are not recorded.
    index: int

    def __call__(self, module: nn.Module, inputs: object, output: object) -> None:
        del module, inputs
        if (found := _routes.get()) is None:
            return
        parts = output if isinstance(output, tuple) else (output,) * (self.index + 1)
        logits = cast("Tensor", parts[self.index])
        chosen = [each for each in parts if isinstance(each, Tensor) and each.dtype == torch.int64]
        experts = next((each for each in chosen if each.ndim == 2 and len(each) == len(logits)), None)
        found.append(Route(logits, experts))


def record_routers(model: PreTrainedModel) -> None:
    """Let :func:`recorded_routes` record the routers of a mixture of experts; other models have none."""
    for module, index in routers(model) if has_experts(model) else ():
        if _Records(index) not in module._forward_hooks.values():  # noqa: SLF001 - a copy has it already
            module.register_forward_hook(_Records(index))


@contextmanager
def recorded_routes() -> Iterator[list[Route]]:
    """Record the answers of all routers, in the order of the layers, of the passes that this context makes."""
    found = list[Route]()
    token = _routes.set(found)
    try:
        yield found
    finally:
        _routes.reset(token)


@dataclass(frozen=True, slots=True)
class LoadBalancing:
    """The auxiliary loss of the routers as transformers has it (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6).

    That is ``E * sum(f * p)``: the mean number of times that an expert is among the first k, and its mean probability,
    over the tokens of a minibatch and all layers, padding left out. ``f`` has no gradient, so with ``f`` of the whole
    minibatch the loss is a sum over micro-batches.

    Attributes:
        weight: by which the loss is multiplied; 0: there is none.
        experts: E.
        k: experts of a token.
    """

    weight: float = 0.0
    experts: int = 0
    k: int = 0

    @classmethod
    def of(cls, actor: PreTrainedModel, weight: float | None) -> LoadBalancing:
        """Return that of a causal language model; weight ``None``: the config's, 0 unless it has output_router_logits.

        Raises:
            ModelRefused: transformers has no such loss for this model.
        """
        if weight is None:
            asked = getattr(actor.config.get_text_config(), "output_router_logits", False)
            named = [getattr(actor, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef")]
            weight = next((each for each in named if each is not None), None) if asked else 0.0
        if weight == 0:
            return cls()
        modules = [sys.modules[kind.__module__] for kind in type(actor).__mro__]
        loss = next(filter(None, (getattr(each, "load_balancing_loss_func", None) for each in modules)), None)
        taken = ["gate_logits", "num_experts", "top_k", "attention_mask"]
        known = loss is not None and [*inspect.signature(loss).parameters] == taken
        if weight is None or not known or not has_experts(actor):
            raise ModelRefused(
                f"trainer.router_aux_loss, or output_router_logits in the config of {type(actor).__name__}, asks for a "
                "load-balancing loss, and transformers has none for this model: set trainer.router_aux_loss = 0"
            )
        return cls(weight, int(cast("int", actor.num_experts)), int(cast("int", actor.num_experts_per_tok)))

    def choices(self, routes: Sequence[Route], read: Tensor) -> Tensor:
        """Return how often each expert was among the first k, and the number of tokens times layers: int64 [E + 1]."""
        counted = read.flatten().long()
        found = counted.new_zeros(self.experts)
        for route in routes:
            first = route.logits.detach().softmax(-1).topk(self.k, dim=-1).indices
            found.scatter_add_(0, first.flatten(), counted.repeat_interleave(self.k))
        return torch.cat((found, counted.sum()[None] * len(routes)))

    def loss(self, routes: Sequence[Route], read: Tensor, choices: Tensor) -> Tensor:
        """Return the part of a pass in the loss of the minibatch that made these ``choices``: float32, not weighted."""
        counted = read.flatten()[:, None]
        sums = torch.stack([(route.logits.softmax(-1).float() * counted).sum(0) for route in routes]).sum(0)
        share, total = choices[:-1] / choices[-1], choices[-1]
        return self.experts * (share * sums / total).sum()


def expert_loads(routes: Sequence[Route], read: Tensor) -> Tensor | None:
    """Return each expert's tokens, without padding, int64 [layers, E]; ``None`` if the routers do not say."""
    counted, loads = read.flatten().long(), list[Tensor]()
    for logits, experts in routes:
        if experts is not None:
            each = counted.repeat_interleave(experts.shape[-1])
            loads.append(counted.new_zeros(logits.shape[-1]).scatter_add_(0, experts.flatten(), each))
    return torch.stack(loads) if len({len(each) for each in loads}) == 1 else None


def router_metrics(loads: Tensor) -> dict[str, float]:
    """Return the metrics of loads [layers, E], each a mean over the layers."""
    share, experts = loads.double() / loads.sum(1, keepdim=True), loads.shape[1]
    entropy = -torch.special.xlogy(share, share).sum(1).mean()
    return {
        "router/max_load": float(share.max(1).values.mean()) * experts,
        "router/load_entropy": float(entropy) / math.log(experts),
    }
