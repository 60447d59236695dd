"""The transformers backend: a slab cache, the policy, the scorers and the trainer.

Importing it is quick. What it holds is imported when it is used, and all but the tokenizer and its chat formats load
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from oppo.libraries import warn_of_untested

warn_of_untested()  # first: the imports of what it holds may fail for lack of it

if TYPE_CHECKING:
    from oppo.hf.as_text.streamed import Bridge, BridgedReward, BridgedTeacher
    from oppo.hf.as_text.whole import ClassifierReward, SimilarityReward, load_encoder
    from oppo.hf.chat import ChatFormat, chatting
    from oppo.hf.devices import DeviceThread
    from oppo.hf.loading import load_causal, load_process, load_scalar, load_tokenizer
    from oppo.hf.model_parts import end_ids
    from oppo.hf.servable import probe
    from oppo.hf.serve.policy import HfPolicy
    from oppo.hf.serve.scorers import (
        AveragedTeacher,
        ProcessRewardModel,
        ProximalLogprobs,
        RecomputedLogprobs,
        ReferenceLogprobs,
        RewardModel,
        SelfTeacher,
        TeacherLogprobs,
        ValueModel,
    )
    from oppo.hf.tokenizer import HfTokenizer
    from oppo.hf.train.actor_critic import value_model_on
    from oppo.hf.train.trainer import HfTrainer

__all__ = [
    "AveragedTeacher",
    "Bridge",
    "BridgedReward",
    "BridgedTeacher",
    "ChatFormat",
    "ClassifierReward",
    "DeviceThread",
    "HfPolicy",
    "HfTokenizer",
    "HfTrainer",
    "ProcessRewardModel",
    "ProximalLogprobs",
    "RecomputedLogprobs",
    "ReferenceLogprobs",
    "RewardModel",
    "SelfTeacher",
    "SimilarityReward",
    "TeacherLogprobs",
    "ValueModel",
    "chatting",
    "end_ids",
    "load_causal",
    "load_encoder",
    "load_process",
    "load_scalar",
    "load_tokenizer",
    "probe",
    "value_model_on",
]

_MODULES = {
    "as_text.streamed": ("Bridge", "BridgedReward", "BridgedTeacher"),
    "as_text.whole": ("ClassifierReward", "SimilarityReward", "load_encoder"),
    "chat": ("ChatFormat", "chatting"),
    "devices": ("DeviceThread",),
    "loading": ("load_causal", "load_process", "load_scalar", "load_tokenizer"),
    "model_parts": ("end_ids",),
    "servable": ("probe",),
    "serve.policy": ("HfPolicy",),
    "serve.scorers": (
        "AveragedTeacher",
        "ProcessRewardModel",
        "ProximalLogprobs",
        "RecomputedLogprobs",
        "ReferenceLogprobs",
        "RewardModel",
        "SelfTeacher",
        "TeacherLogprobs",
        "ValueModel",
    ),
    "tokenizer": ("HfTokenizer",),
    "train.actor_critic": ("value_model_on",),
    "train.trainer": ("HfTrainer",),
}
"""Modules, with the names here that are theirs."""


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
