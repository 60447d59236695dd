"""Actor and critic as one module: forward pass, shared trunk, recomputed layers, and loading on another machine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from oppo.errors import ModelRefused
from oppo.hf.expert_routing import record_routers, replayed, replaying
from oppo.hf.head import Measure, OwnHead, require_own_head, separable_head, widen_head
from oppo.hf.kv.attention import Packed, packed_mask, packed_rows, packs, reads_packed, rows_apart
from oppo.hf.loading import ModelRecipe
from oppo.hf.model_files import SCALAR
from oppo.hf.model_parts import backbone, keeps_logits, score_head, takes
from oppo.hf.train.packing import MicroBatch
from oppo.hf.vision import WHOLE, Eyes, shown_to
from oppo.losses import Input


def value_model_on(actor: PreTrainedModel) -> PreTrainedModel:
    """Return a critic whose trunk is the ``actor``'s own module, with a value head of zeros, in evaluation mode.

    Raises:
        ModelRefused: the sequence-classification model of this architecture has more between trunk and score than a
            layer, or the actor's head cannot run apart from its trunk.
    """
    trunk, config = backbone(actor), copy.deepcopy(actor.config)
    config.num_labels = 1
    require_own_head(actor)
    with torch.device("meta"):  # the trunk built here is dropped, so it takes no memory
        critic = SCALAR.made(config, dtype=actor.dtype)
    head = score_head(critic)
    setattr(critic, critic.base_model_prefix, trunk)
    head.to_empty(device=actor.device)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    known = {*trunk.parameters(), *head.parameters()}
    if others := [name for name, parameter in critic.named_parameters() if parameter not in known]:
        raise ModelRefused(
            f"{type(critic).__name__} has {', '.join(others)} between trunk and score: expected a head that is one "
            "layer; set models.shared_trunk = false"
        )
    critic.train(mode=False)
    return critic


def shares_trunk(actor: PreTrainedModel, critic: PreTrainedModel) -> bool:
    return actor.base_model is critic.base_model


def recompute(model: PreTrainedModel, every: int = 1) -> None:
    # Its forward must be free of randomness: dropout is off in every model here.
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelRefused(
            f"{type(model).__name__} has no layers that transformers can checkpoint: set gradient_checkpointing = 0"
        )
    for layer in layers[::every]:
        layer.forward = partial(_recomputed, layer)  # a partial, so that a deep copy calls its own layer


def _recomputed(layer: nn.Module, /, *args: object, **kwargs: object) -> object:
    forward = partial(type(layer).forward, layer, **kwargs)
    if not torch.is_grad_enabled():
        return forward(*args)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    # Of a pass and of its second time, which the backward pass makes in any thread.
    return nullcontext(), _reading(packed_rows(), replayed())


@contextmanager
def _reading(packed: Packed | None, experts: Tensor | None) -> Iterator[None]:
    with rows_apart(packed), replaying(experts):
        yield


class ActorCritic(nn.Module):
    """The models that are trained, as one module, so that one call prepares, and would shard, both."""

    # A trunk that the two models share is read once. Pickled or copied, the models share what they shared before.

    def __init__(
        self,
        actor: PreTrainedModel,
        critic: PreTrainedModel | None = None,
        *,
        head_apart: bool = False,
        packs: bool = False,
    ) -> None:
        super().__init__()
        self.actor = actor
        self.critic = critic
        self._keeps = keeps_logits(actor)
        record_routers(actor)
        for model in filter(None, (actor, critic)):
            widen_head(model)
        self._one_trunk = critic is not None and shares_trunk(actor, critic)
        self._own_head = OwnHead(actor) if head_apart or self._one_trunk else None
        self._packs = packs
        self._eyes: dict[PreTrainedModel, Eyes] = {}

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        made = partial(type(self), head_apart=self._own_head is not None, packs=self._packs)
        return made, (self.actor, self.critic)

    def prepare(self) -> None:
        """Compute logits of response tokens only, in bounded memory, if the head can run apart from its trunk."""
        self._own_head = self._own_head or separable_head(self.actor)
        self._packs = self._own_head is not None and all(map(reads_packed, self.pretrained))

    def packs(self, longest: int, *, images: bool = False) -> bool:
        apart = images and any(model.config.model_type in WHOLE for model in self.pretrained)
        return self._packs and not apart and all(packs(model, longest) for model in self.pretrained)

    @property
    def pretrained(self) -> list[PreTrainedModel]:
        return [self.actor] if self.critic is None else [self.actor, self.critic]

    def trained(self) -> list[list[nn.Parameter]]:
        # A shared trunk is the actor's.
        actor = _trained(self.actor, "actor")
        if self.critic is None:
            return [actor]
        score_head(self.critic)  # refused without one
        return [actor, _trained(self.critic, "critic", but=self.actor)]

    def copied(self, device: torch.device | None = None) -> ActorCritic:
        held: dict[int, Tensor] = {}
        for tensor in (*self.parameters(), *self.buffers()):
            is_parameter = isinstance(tensor, nn.Parameter)
            if device is not None and tensor.device != device:
                moved = tensor.detach().to(device)
                held[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
            elif is_parameter and not tensor.requires_grad:
                held[id(tensor)] = tensor
        return copy.deepcopy(self, held)

    def forward(
        self, batch: MicroBatch, measure: Measure | None, *, actor_learns: bool = True
    ) -> tuple[Mapping[Input, Tensor], Tensor | None]:
        """Return ``measure`` of the response tokens, and values at the positions before them: float32 [T]."""
        # Values are None without a critic. Without a measure only the actor's trunk is read, as its routers need.

        def inputs(model: PreTrainedModel) -> dict[str, object]:
            placed = {"position_ids": batch.positions} if takes(model, "position_ids") else {}
            masked = {"attention_mask": packed_mask(model)} if batch.packed else {}  # else none: see MicroBatch
            return {"use_cache": False, **placed, **masked, **(self._seen(model, batch) if batch.prompts else {})}

        def read(model: PreTrainedModel) -> Tensor:
            trunk = backbone(model)
            hidden: Tensor = trunk(batch.ids, **inputs(trunk)).last_hidden_state[:, batch.keep]
            return hidden.flatten(0, 1)[batch.at]

        def logits() -> Tensor:
            kept = {"logits_to_keep": batch.keep} if self._keeps else {}
            found: Tensor = self.actor(batch.ids, **kept, **inputs(self.actor)).logits
            return (found if self._keeps else found[:, batch.keep]).flatten(0, 1)[batch.at]

        packed = Packed(batch.lengths) if batch.packed else None
        with torch.set_grad_enabled(actor_learns), _reading(packed, batch.routed_experts):
            if measure is None:
                read(self.actor)
                return {}, None
            if self._own_head is None:
                measured = measure(logits(), slice(0, len(batch.tokens)), False)
            else:
                hidden = read(self.actor)
                measured = self._own_head.measured(hidden, measure)
        if self.critic is None:
            return measured, None
        if not self._one_trunk:
            with _reading(packed, None):
                hidden = read(self.critic)
        values: Tensor = self.critic.get_submodule("score")(hidden).squeeze(-1)
        return measured, values.float()

    def _seen(self, model: PreTrainedModel, batch: MicroBatch) -> dict[str, object]:
        trunk = backbone(model)
        if trunk not in self._eyes:
            self._eyes[trunk] = Eyes(trunk, frozen=True)
        sights = [self._eyes[trunk].sight(each.tokens, each.images) for each in batch.prompts]
        return shown_to(sights, batch.lengths, batch.ids.device, packed=batch.packed)


def _trained(model: PreTrainedModel, name: str, *, but: PreTrainedModel | None = None) -> list[nn.Parameter]:
    if model.dtype == torch.float16:
        raise ModelRefused(
            f"{type(model).__name__} is in float16, in which most gradients of PPO underflow to 0, and losses are not "
            "scaled here: load what is trained with dtype = 'bfloat16' or 'float32'"
        )
    others = set() if but is None else set(but.parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in others]
    if not trained:
        raise ModelRefused(f"no parameter of the {name} requires a gradient, so there is nothing to train")
    return trained


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticRecipe:
    """How an actor and its critic, or a head on the actor's trunk, are loaded for a rank on another machine."""

    # The rank is sent the trained weights by rank 0, so a head that was new need not be the same.

    actor: ModelRecipe
    critic: ModelRecipe | None = None
    shared_trunk: bool = False

    def load(self) -> ActorCritic:
        actor = self.actor.load()
        if self.shared_trunk:
            return ActorCritic(actor, value_model_on(actor))
        return ActorCritic(actor, None if self.critic is None else self.critic.load())
