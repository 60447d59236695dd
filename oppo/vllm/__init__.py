"""vLLM as a backend; an extra."""

from oppo.vllm.reward import ScalarModel, VllmReward

__all__ = ["ScalarModel", "VllmReward"]
