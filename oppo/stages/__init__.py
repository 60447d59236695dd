"""The stages of a PPO step: generate, score, advantage, update. Each is a small object with one ``run``."""

from oppo.stages.advantage import GAE, Gathered, ProximalGAE, Row, finished_rollout
from oppo.stages.generate import Generate
from oppo.stages.score import Score
from oppo.stages.update import Update, followers

__all__ = ["GAE", "Gathered", "Generate", "ProximalGAE", "Row", "Score", "Update", "finished_rollout", "followers"]
