"""PPO-style RLHF as a streaming graph of async stages.

A step is a graph: the actor generates, the reward, reference and critic models prefill its tokens meanwhile, advantages
are estimated, the weights are updated. Stragglers are deferred to later steps, work intact. Everything here can be
imported without torch; the models are in :mod:`oppo.hf`, fakes for tests in :mod:`oppo.testing`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from oppo.admission import (
    Admission,
    AdmitView,
    CutView,
    Observation,
    Overcommit,
    SlopeAdaptive,
    Synchronous,
    TailAdaptive,
    TailBatched,
)
from oppo.admission.chunking import ChunkSize, Fixed, Tuned, WholeRollout
from oppo.algorithms.distill import distill
from oppo.algorithms.group import grpo
from oppo.algorithms.ppo import ppo
from oppo.algorithms.wrapped import wrap
from oppo.data import PromptStream, read_prompts
from oppo.errors import OppoError
from oppo.events import (
    Batch,
    Chunk,
    Defer,
    Drop,
    Finish,
    FloatArray,
    Prompt,
    Response,
    RolloutEvent,
    RoutedExperts,
    Scored,
    StepReport,
    Support,
    ToolTokens,
    merge_chunks,
    rollout_of,
)
from oppo.graph import Graph, GraphBuilder, Receiver, Run, Sender, Step, Stream, join, where
from oppo.models import Decode, Piece, Policy, Sampling, Scorer, SyncedModel, Trained, Trainer, Weights
from oppo.placement import Inline, PolicyPool, Process, Ranks, Thread
from oppo.returns import AdaptiveKL, Correction, FixedKL, ScoreShaping
from oppo.rewards import FunctionReward, Rewards
from oppo.stages import (
    GAE,
    Distillation,
    Gather,
    Generate,
    GroupRelative,
    Score,
    ScoredRollout,
    ScoredRollouts,
    Selection,
    Update,
    finished_rollout,
    synced_models,
)
from oppo.training import FunctionTrainer, TrainerSettings

if TYPE_CHECKING:
    from oppo.liveness import watched
    from oppo.report import RunDirectory
    from oppo.run.train import train

__all__ = [
    "GAE",
    "AdaptiveKL",
    "Admission",
    "AdmitView",
    "Batch",
    "Chunk",
    "ChunkSize",
    "Correction",
    "CutView",
    "Decode",
    "Defer",
    "Distillation",
    "Drop",
    "Finish",
    "Fixed",
    "FixedKL",
    "FloatArray",
    "FunctionReward",
    "FunctionTrainer",
    "Gather",
    "Generate",
    "Graph",
    "GraphBuilder",
    "GroupRelative",
    "Inline",
    "Observation",
    "OppoError",
    "Overcommit",
    "Piece",
    "Policy",
    "PolicyPool",
    "Process",
    "Prompt",
    "PromptStream",
    "Ranks",
    "Receiver",
    "Response",
    "Rewards",
    "RolloutEvent",
    "RoutedExperts",
    "Run",
    "RunDirectory",
    "Sampling",
    "Score",
    "ScoreShaping",
    "Scored",
    "ScoredRollout",
    "ScoredRollouts",
    "Scorer",
    "Selection",
    "Sender",
    "SlopeAdaptive",
    "Step",
    "StepReport",
    "Stream",
    "Support",
    "SyncedModel",
    "Synchronous",
    "TailAdaptive",
    "TailBatched",
    "Thread",
    "ToolTokens",
    "Trained",
    "Trainer",
    "TrainerSettings",
    "Tuned",
    "Update",
    "Weights",
    "WholeRollout",
    "distill",
    "finished_rollout",
    "grpo",
    "join",
    "merge_chunks",
    "ppo",
    "read_prompts",
    "rollout_of",
    "synced_models",
    "train",
    "watched",
    "where",
    "wrap",
]


_LATE = {"RunDirectory": "oppo.report", "train": "oppo.run.train", "watched": "oppo.liveness"}
"""Names by their modules, which are imported when a name is used: they take longer to import than all others."""


def __getattr__(name: str) -> object:
    """Return a name of :data:`_LATE`."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
