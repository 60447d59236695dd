"""Actor and critic as one module with one forward pass."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf.introspection import keeps_logits
from oppo.hf.train.packing import MicroBatch
from oppo.hf.trunk import OwnHead, shares_trunk


class ActorCritic(nn.Module):
    """The models that are trained, as one module, so that one call prepares, and would shard, both.

    A trunk that the two models share is read once. Pickled or copied, the models share what they shared before.
    """

    def __init__(self, actor: PreTrainedModel, critic: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.actor = actor
        self.critic = critic
        self._keeps = keeps_logits(actor)
        self._own_head = OwnHead(actor) if critic is not None and shares_trunk(actor, critic) else None

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self.actor, self.critic)

    def trained(self) -> list[list[nn.Parameter]]:
        """Return the parameters that are trained: the actor's, a shared trunk included, and the critic's.

        Raises:
            ModelRefused: a model has none or is in float16, or the critic has no single-label ``score`` head.
        """
        actor = _trained(self.actor, "actor")
        if self.critic is None:
            return [actor]
        _require_value_head(self.critic)
        return [actor, _trained(self.critic, "critic", but=self.actor)]

    def copied(self, device: torch.device | None = None) -> ActorCritic:
        """Return a copy with its own trained parameters; the others stay shared where the device stays.

        Args:
            device: of the copy; that of the models when ``None``.
        """
        held: dict[int, Tensor] = {}
        for tensor in (*self.parameters(), *self.buffers()):
            is_parameter = isinstance(tensor, nn.Parameter)
            if device is not None and tensor.device != device:
                moved = tensor.detach().to(device)
                held[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
            elif is_parameter and not tensor.requires_grad:
                held[id(tensor)] = tensor
        return copy.deepcopy(self, held)

    def forward(self, batch: MicroBatch, *, actor_learns: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return logits and values at the position before each response token: [T, V] and float32 [T].

        Values are ``None`` without a critic. The actor's pass records no gradient unless ``actor_learns``.
        """
        inputs = {"position_ids": batch.positions, "use_cache": False}  # no mask: see MicroBatch

        def read(model: PreTrainedModel) -> Tensor:
            hidden: Tensor = model.base_model(batch.ids, **inputs).last_hidden_state[:, batch.keep]
            return hidden

        with torch.set_grad_enabled(actor_learns):
            if self._own_head is None:
                kept = {"logits_to_keep": batch.keep} if self._keeps else {}
                logits: Tensor = self.actor(batch.ids, **kept, **inputs).logits
                logits = logits if self._keeps else logits[:, batch.keep]
            else:
                hidden = read(self.actor)
                logits = self._own_head(hidden)
        if self.critic is None:
            return logits[batch.row, batch.column], None
        if self._own_head is None:
            hidden = read(self.critic)
        values: Tensor = self.critic.get_submodule("score")(hidden).squeeze(-1)
        return logits[batch.row, batch.column], values[batch.row, batch.column].float()


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


def _require_value_head(critic: PreTrainedModel) -> None:
    name, labels = type(critic).__name__, critic.config.num_labels
    if not isinstance(getattr(critic, "score", None), nn.Module):
        raise ModelRefused(
            f"the critic {name} has no 'score' head: load it with AutoModelForSequenceClassification, num_labels=1"
        )
    if labels != 1:
        raise ModelRefused(f"the critic {name} must have one label, a value, but has {labels}")
