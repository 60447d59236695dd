"""vLLM as a backend; an extra."""

from oppo.vllm.reward import VllmReward

__all__ = ["VllmReward"]
