"""PPO-style RLHF as a streaming graph of async stages.

A step is a graph: the actor generates, the reward, reference and critic models read its tokens while they are being
written, advantages are estimated, the weights are updated. Stragglers are carried into later steps, work intact.
Everything here is importable without torch; the models live in :mod:`oppo.hf`, fakes for tests in
:mod:`oppo.testing`.
"""

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
from oppo.chunking import ChunkSize, Fixed, Tuned, WholeRollout
from oppo.errors import OppoError
from oppo.estimators import AdaptiveKL, FixedKL
from oppo.events import (
    Batch,
    Chunk,
    Defer,
    Drop,
    Finish,
    Given,
    Prompt,
    Response,
    Scored,
    StepReport,
    merge_chunks,
    rollout_of,
)
from oppo.graph import Graph, GraphBuilder, Receiver, Run, Sender, Step, Stream, join, where
from oppo.models import Decode, Follower, Piece, Policy, Sampling, Scorer, Trained, Trainer, Weights
from oppo.placement import Process, Thread
from oppo.recipes import ppo
from oppo.shaping import ScoreShaping
from oppo.stages import GAE, Generate, Score, Update
from oppo.support import Support

__all__ = [
    "GAE",
    "AdaptiveKL",
    "Admission",
    "AdmitView",
    "Batch",
    "Chunk",
    "ChunkSize",
    "CutView",
    "Decode",
    "Defer",
    "Drop",
    "Finish",
    "Fixed",
    "FixedKL",
    "Follower",
    "Generate",
    "Given",
    "Graph",
    "GraphBuilder",
    "Observation",
    "OppoError",
    "Overcommit",
    "Piece",
    "Policy",
    "Process",
    "Prompt",
    "Receiver",
    "Response",
    "Run",
    "Sampling",
    "Score",
    "ScoreShaping",
    "Scored",
    "Scorer",
    "Sender",
    "SlopeAdaptive",
    "Step",
    "StepReport",
    "Stream",
    "Support",
    "Synchronous",
    "TailAdaptive",
    "TailBatched",
    "Thread",
    "Trained",
    "Trainer",
    "Tuned",
    "Update",
    "Weights",
    "WholeRollout",
    "join",
    "merge_chunks",
    "ppo",
    "rollout_of",
    "where",
]
