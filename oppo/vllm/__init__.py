"""vLLM as a backend; an extra."""

from oppo.vllm.async_llm import VllmEngine
from oppo.vllm.engine import VllmDecode
from oppo.vllm.policy import VllmPolicy
from oppo.vllm.scorers import VllmLogprobs, VllmReward
from oppo.vllm.server import VllmServer

__all__ = ["VllmDecode", "VllmEngine", "VllmLogprobs", "VllmPolicy", "VllmReward", "VllmServer"]
