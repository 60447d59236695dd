"""What users import, pinned: a name more or less is a decision, not an accident."""

from __future__ import annotations

from inspect import isclass, isfunction

import oppo
from oppo import graph, hf, stages, testing

NAMES = [
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
    "GAE",
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


def test_the_public_names_are_these() -> None:
    assert sorted(oppo.__all__) == sorted(NAMES)
    assert all(hasattr(oppo, name) for name in NAMES)


def test_every_public_name_says_what_it_is() -> None:
    undocumented = [
        f"{module.__name__}.{name}"
        for module in (oppo, graph, hf, stages, testing)
        for name in module.__all__
        if (isclass(getattr(module, name)) or isfunction(getattr(module, name)))
        and not (getattr(module, name).__doc__ or "").strip()
    ]
    assert not undocumented
