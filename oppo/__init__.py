"""PPO-style RLHF as a streaming graph of async stages.

A step is a graph: the actor generates, the reward, reference and critic models prefill its tokens meanwhile, advantages
are estimated, the weights are updated. Stragglers are deferred to later steps, work intact. Everything here can be
imported without torch; the models are in :mod:`oppo.hf`, fakes for tests in :mod:`oppo.testing`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from oppo.admission import Admission, Overcommit, Synchronous
from oppo.algorithms.distill import distill
from oppo.algorithms.group import grpo
from oppo.algorithms.ppo import ppo, wrap
from oppo.data import PromptStream, read_prompts
from oppo.errors import OppoError
from oppo.events import (
    Batch,
    Chunk,
    Defer,
    Drop,
    Finish,
    Prompt,
    Response,
    StepReport,
    ToolTokens,
    merge_chunks,
    rollout_of,
)
from oppo.graph import Graph, GraphBuilder, Run, join
from oppo.models import Policy, Sampling, Scorer, Trainer, Weights
from oppo.placement import Process, Thread
from oppo.rewards import FunctionReward, Rewards
from oppo.stages import GAE, Generate, GroupRelative, Score, Update, synced_models
from oppo.training import TrainerSettings

if TYPE_CHECKING:
    from oppo.config.load import load_settings
    from oppo.run.train import evaluate, resume, train

__all__ = [
    "GAE",
    "Admission",
    "Batch",
    "Chunk",
    "Defer",
    "Drop",
    "Finish",
    "FunctionReward",
    "Generate",
    "Graph",
    "GraphBuilder",
    "GroupRelative",
    "OppoError",
    "Overcommit",
    "Policy",
    "Process",
    "Prompt",
    "PromptStream",
    "Response",
    "Rewards",
    "Run",
    "Sampling",
    "Score",
    "Scorer",
    "StepReport",
    "Synchronous",
    "Thread",
    "ToolTokens",
    "Trainer",
    "TrainerSettings",
    "Update",
    "Weights",
    "distill",
    "evaluate",
    "grpo",
    "join",
    "load_settings",
    "merge_chunks",
    "ppo",
    "read_prompts",
    "resume",
    "rollout_of",
    "synced_models",
    "train",
    "wrap",
]


_LATE = {
    "evaluate": "oppo.run.train",
    "load_settings": "oppo.config.load",
    "resume": "oppo.run.train",
    "train": "oppo.run.train",
}
"""Names by their modules, which are imported when a name is used: they take longer to import than all others."""


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
