"""What users import, pinned: a name more or less is a decision, not an accident."""

from __future__ import annotations

from inspect import isclass, isfunction

import oppo
from oppo import graph, hf, losses, stages, testing

NAMES = [
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
    "distill",
    "Distillation",
    "Drop",
    "Finish",
    "finished_rollout",
    "Fixed",
    "FixedKL",
    "FloatArray",
    "SyncedModel",
    "synced_models",
    "FunctionReward",
    "FunctionTrainer",
    "Gather",
    "GAE",
    "ScoredRollout",
    "ScoredRollouts",
    "Generate",
    "ToolTokens",
    "Graph",
    "GraphBuilder",
    "GroupRelative",
    "grpo",
    "Inline",
    "join",
    "merge_chunks",
    "Observation",
    "OppoError",
    "Overcommit",
    "Piece",
    "Policy",
    "PolicyPool",
    "ppo",
    "Process",
    "Prompt",
    "PromptStream",
    "Ranks",
    "read_prompts",
    "Receiver",
    "Response",
    "Rewards",
    "rollout_of",
    "RolloutEvent",
    "RoutedExperts",
    "Run",
    "RunDirectory",
    "Sampling",
    "Score",
    "Scored",
    "Scorer",
    "Selection",
    "ScoreShaping",
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
    "train",
    "Trained",
    "Trainer",
    "TrainerSettings",
    "Tuned",
    "watched",
    "Update",
    "Weights",
    "where",
    "WholeRollout",
    "wrap",
]


def test_the_public_names_are_these() -> None:
    assert sorted(oppo.__all__) == sorted(NAMES)
    assert all(hasattr(oppo, name) for name in NAMES)


def test_every_public_name_says_what_it_is() -> None:
    undocumented = [
        f"{module.__name__}.{name}"
        for module in (oppo, graph, hf, losses, stages, testing)
        for name in module.__all__
        if (isclass(getattr(module, name)) or isfunction(getattr(module, name)))
        and not (getattr(module, name).__doc__ or "").strip()
    ]
    assert not undocumented
