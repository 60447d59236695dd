"""vLLM as a backend; an extra."""

from oppo.vllm.async_llm import VllmEngine
from oppo.vllm.http import VllmServer
from oppo.vllm.logprobs import VllmLogprobs
from oppo.vllm.policy import VllmPolicy
from oppo.vllm.requests import VllmDecode
from oppo.vllm.reward import VllmReward

__all__ = ["VllmDecode", "VllmEngine", "VllmLogprobs", "VllmPolicy", "VllmReward", "VllmServer"]
