"""The stages of a PPO step: generate, score, advantage, update. Each is a small object with one ``run``."""

from oppo.stages.batch_stage import BatchStage
from oppo.stages.gae import GAE
from oppo.stages.gather import Gather
from oppo.stages.generate import Generate
from oppo.stages.group import GroupRelative
from oppo.stages.in_parts import InParts
from oppo.stages.publishing import followers
from oppo.stages.run_metrics import run_metrics
from oppo.stages.score import Score
from oppo.stages.scored_rollouts import ScoredRollout, ScoredRollouts, finished_rollout
from oppo.stages.selection import Selection
from oppo.stages.update import Update

__all__ = [
    "GAE",
    "BatchStage",
    "Gather",
    "Generate",
    "GroupRelative",
    "InParts",
    "Score",
    "ScoredRollout",
    "ScoredRollouts",
    "Selection",
    "Update",
    "finished_rollout",
    "followers",
    "run_metrics",
]
