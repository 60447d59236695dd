"""The stages of a PPO step: generate, score, advantage, update. Each is a small object with one ``run``."""

from oppo.stages.gae import GAE
from oppo.stages.gathered import Gathered, finished_rollout
from oppo.stages.generate import Generate
from oppo.stages.group import GroupRelative
from oppo.stages.rows import Row, unestimated
from oppo.stages.score import Score
from oppo.stages.update import Update, followers

__all__ = [
    "GAE",
    "Gathered",
    "Generate",
    "GroupRelative",
    "Row",
    "Score",
    "Update",
    "finished_rollout",
    "followers",
    "unestimated",
]
