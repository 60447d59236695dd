"""vLLM as a backend; an extra."""

from oppo.vllm.engine import VllmEngine
from oppo.vllm.logprobs import VllmLogprobs
from oppo.vllm.policy import VllmPolicy
from oppo.vllm.requests import VllmDecode
from oppo.vllm.reward import VllmReward
from oppo.vllm.server import VllmServer

__all__ = ["VllmDecode", "VllmEngine", "VllmLogprobs", "VllmPolicy", "VllmReward", "VllmServer"]
