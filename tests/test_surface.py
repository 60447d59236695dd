"""What users import, pinned: a name more or less is a decision, not an accident."""

from __future__ import annotations

from inspect import isclass, isfunction

import oppo
from oppo import graph, hf, losses, stages, testing

NAMES = [
    "Admission",
    "Batch",
    "Chunk",
    "Defer",
    "Drop",
    "Finish",
    "FunctionReward",
    "GAE",
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
