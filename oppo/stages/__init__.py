"""The stages of a PPO step: generate, score, advantage, update. Each is a small object with one ``run``."""

from oppo.stages.advantage import GAE, ProximalGAE
from oppo.stages.generate import Generate
from oppo.stages.score import Score
from oppo.stages.update import Update

__all__ = ["GAE", "Generate", "ProximalGAE", "Score", "Update"]
