"""The transformers backend: a slab cache, the policy, the scorers and the trainer. Importing it loads torch."""

# ruff: noqa: E402 - the check of versions comes first

from oppo.libraries import warn_of_untested

warn_of_untested()  # first: the imports below may fail for lack of it

from oppo.hf.as_text.streamed import Bridge, BridgedReward, BridgedTeacher
from oppo.hf.as_text.whole import ClassifierReward, SimilarityReward, load_encoder
from oppo.hf.chat import ChatFormat, chatting
from oppo.hf.devices import DeviceThread
from oppo.hf.loading import load_causal, load_process, load_scalar, load_tokenizer
from oppo.hf.model_parts import end_ids
from oppo.hf.servable import probe
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import (
    ProcessRewardModel,
    ProximalLogprobs,
    RecomputedLogprobs,
    ReferenceLogprobs,
    RewardModel,
    TeacherLogprobs,
    ValueModel,
)
from oppo.hf.tokenizer import HfTokenizer
from oppo.hf.train.actor_critic import value_model_on
from oppo.hf.train.trainer import HfTrainer

__all__ = [
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
