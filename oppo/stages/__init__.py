"""The stages of a PPO step: generate, score, advantage, update. Each is a small object with one ``run``."""

from oppo.stages.advantage import GAE, Distillation, GroupRelative, RoleBaseline
from oppo.stages.batch import BatchStage, Gather, ScoredRollout, ScoredRollouts, finished_rollout
from oppo.stages.dynamic_sampling import DynamicSampling
from oppo.stages.generate import Generate
from oppo.stages.hold import InParts, Siblings
from oppo.stages.metrics import run_metrics
from oppo.stages.score import Score, synced_models
from oppo.stages.update import Update

__all__ = [
    "GAE",
    "BatchStage",
    "Distillation",
    "DynamicSampling",
    "Gather",
    "Generate",
    "GroupRelative",
    "InParts",
    "RoleBaseline",
    "Score",
    "ScoredRollout",
    "ScoredRollouts",
    "Siblings",
    "Update",
    "finished_rollout",
    "run_metrics",
    "synced_models",
]
