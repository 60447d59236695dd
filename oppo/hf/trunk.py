"""Actor and critic over one trunk: the policy's backbone, read once, with a head for logits and a head for values.

::

    tokens ── trunk ── hidden states ─┬─ the actor's own head ── logits
                                      └─ score ───────────────── values

The critic is an ordinary sequence-classification model whose backbone *is* the actor's: whatever serves, saves or
loads such a model does so with this one.
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
"""Largest difference allowed between an actor's logits and those of its head alone, in units of the largest logit."""


def value_model_on(actor: PreTrainedModel) -> PreTrainedModel:
    """Return a critic whose trunk is the ``actor``'s own module, with a value head of zeros, in evaluation mode.

    Raises:
        ModelRefused: transformers has no sequence-classification model of this architecture, or none with one head; or
            the actor's head cannot be told from its trunk.
    """
    trunk, config = backbone(actor), copy.deepcopy(actor.config)
    config.num_labels = 1
    require_own_head(actor)
    try:
        with torch.device("meta"):  # a second trunk that takes no memory, and is thrown away
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
    strange = [name for name, parameter in critic.named_parameters() if parameter.is_meta]
    if strange:
        raise ModelRefused(
            f"{type(critic).__name__} has {', '.join(strange)} between trunk and score: expected a head that is one "
            "layer; set models.shared_trunk = false"
        )
    critic.train(mode=False)
    return critic


def shares_trunk(actor: PreTrainedModel, critic: PreTrainedModel) -> bool:
    """Return whether the two are heads on one trunk."""
    return actor.base_model is critic.base_model


class OwnHead:
    """What a causal language model does with the hidden states of its trunk, as a function of them: its logits.

    It runs the model's own forward pass over a trunk that gives back what it is given, so that whatever the
    architecture does on the way from hidden states to logits (scaling, softcapping) is done here too. Whether it can
    be told from the trunk, :func:`require_own_head` finds out.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        shell = copy.copy(model)
        shell._modules = {**model._modules, model.base_model_prefix: _Echo()}  # noqa: SLF001 - the model keeps its own
        self._shell = shell

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, q, V] of hidden states [n, q, D]."""
        logits: Tensor = self._shell(inputs_embeds=hidden, use_cache=False).logits
        return logits


@torch.no_grad()
def require_own_head(model: PreTrainedModel) -> None:
    """Return only if :class:`OwnHead` of ``model``, tried on a few tokens, says what the model says.

    Raises:
        ModelRefused: it does not, because the model reads its trunk in a way that cannot be followed.
    """
    ids = torch.arange(4, device=model.device)[None]
    mask = torch.ones_like(ids)
    try:
        got = OwnHead(model)(backbone(model)(ids, attention_mask=mask, use_cache=False).last_hidden_state).float()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ModelRefused(
            f"the head of {type(model).__name__} cannot be told from its trunk, so it shares it with no critic: "
            f"set models.shared_trunk = false ({error!r})"
        ) from error
    want = model(ids, attention_mask=mask, use_cache=False).logits.float()
    difference = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
    if not difference <= AGREEMENT:
        raise ModelRefused(
            f"the head of {type(model).__name__}, put on the hidden states of its trunk, differs from the model's own "
            f"logits by {difference:.1e} of the largest; at most {AGREEMENT:.0e} is allowed: set "
            "models.shared_trunk = false"
        )


class _Read(BaseModelOutputWithPastAndCrossAttentions):
    """What any kind of trunk returns, with nothing but hidden states in it."""

    router_logits: None = None


class _Echo(nn.Module):
    """A trunk that has read already: it gives back the hidden states it is given as embeddings."""

    @property
    def decoder(self) -> nn.Module:
        """The trunk of OPT, which is inside of the model's base model."""
        return self

    def forward(self, *ids: object, inputs_embeds: Tensor, **options: object) -> _Read:
        """Return ``inputs_embeds`` as last hidden states."""
        del ids, options
        return _Read(last_hidden_state=inputs_embeds)
