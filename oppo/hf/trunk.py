"""Actor and critic over one trunk: the policy's backbone, computed once, with a head for logits and a head for values.

::

    tokens ── trunk ── hidden states ─┬─ the actor's own head ── logits
                                      └─ score ───────────────── values

The critic is an ordinary sequence-classification model whose backbone *is* the actor's, and is served, saved and
loaded like any other.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from oppo.errors import ModelRefused
from oppo.hf.introspection import backbone, score_head

AGREEMENT = 1e-4
"""Largest difference between an actor's logits and those of :class:`OwnHead`, in units of the largest logit."""


def value_model_on(actor: PreTrainedModel) -> PreTrainedModel:
    """Return a critic whose trunk is the ``actor``'s own module, with a value head of zeros, in evaluation mode.

    Raises:
        ModelRefused: transformers has no sequence-classification model of this architecture with a head of one layer,
            or the actor's head cannot run apart from its trunk.
    """
    trunk, config = backbone(actor), copy.deepcopy(actor.config)
    config.num_labels = 1
    if actor.device.type != "meta":  # without weights there are no logits to compare
        require_own_head(actor)
    try:
        with torch.device("meta"):  # the trunk built here is dropped, so it takes no memory
            critic = cast("PreTrainedModel", AutoModelForSequenceClassification.from_config(config, dtype=actor.dtype))
    except ValueError as error:
        raise ModelRefused(
            f"transformers has no sequence-classification model of type {config.model_type!r} to put a value head on "
            "the policy's trunk with: set models.shared_trunk = false and name a models.critic of another architecture"
        ) from error
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
    """Return whether actor and critic are heads on one trunk."""
    return actor.base_model is critic.base_model


class OwnHead:
    """The head of a causal language model: logits as a function of the trunk's hidden states.

    It runs the model's own forward pass over a trunk that returns its input, so it includes what the architecture does
    between hidden states and logits (scaling, softcapping). :func:`require_own_head` checks that a model allows this.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        shell = copy.copy(model)
        shell._modules = {**model._modules, model.base_model_prefix: _Identity()}  # noqa: SLF001 - the model keeps its own
        self._shell = shell

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, q, V] of hidden states [n, q, D]."""
        logits: Tensor = self._shell(inputs_embeds=hidden, use_cache=False).logits
        return logits


@torch.no_grad()
def require_own_head(model: PreTrainedModel) -> None:
    """Check on a few tokens that :class:`OwnHead` of ``model`` computes the model's logits.

    Raises:
        ModelRefused: it does not: the model uses its trunk in another way.
    """
    ids = torch.arange(4, device=model.device)[None]
    mask = torch.ones_like(ids)
    try:
        apart = OwnHead(model)(backbone(model)(ids, attention_mask=mask, use_cache=False).last_hidden_state).float()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ModelRefused(
            f"the head of {type(model).__name__} cannot run apart from its trunk, so no critic can share the trunk: "
            f"set models.shared_trunk = false ({error!r})"
        ) from error
    expected = model(ids, attention_mask=mask, use_cache=False).logits.float()
    difference = float((apart - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    if not difference <= AGREEMENT:
        raise ModelRefused(
            f"the head of {type(model).__name__}, run on the hidden states of its trunk, differs from the model's own "
            f"logits by {difference:.1e} of the largest; at most {AGREEMENT:.0e} is allowed: set "
            "models.shared_trunk = false"
        )


class _HiddenStates(BaseModelOutputWithPastAndCrossAttentions):
    """The output of any kind of trunk, with hidden states only."""

    router_logits: None = None


class _Identity(nn.Module):
    """A trunk whose hidden states are its input embeddings."""

    @property
    def decoder(self) -> nn.Module:
        """The trunk of OPT, one level below the model's base model."""
        return self

    def forward(self, *ids: object, inputs_embeds: Tensor, **options: object) -> _HiddenStates:
        del ids, options
        return _HiddenStates(last_hidden_state=inputs_embeds)
