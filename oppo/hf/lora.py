"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) through PEFT, added to the actor once and never switched.

The reference is a second module over the same base parameters: both are served at once, and the base is in memory once.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.pytorch_utils import Conv1D
from transformers.utils.peft_utils import check_peft_version

from oppo.errors import ConfigError, ModelRefused, one_line
from oppo.hf.model_files import ADAPTER
from oppo.hf.model_parts import has_experts
from oppo.libraries import require

if TYPE_CHECKING:
    from peft import LoraConfig

# It warns of a kernel for CPUs, when PEFT imports it, whether or not a weight has 4 bits.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

Quantization: TypeAlias = Literal["none", "nf4", "fp4"]  # the type of a base's weights: as they are, or 4 bits

CHANGES_BASE: Final = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Ways to begin a LoRA adapter after which its base is not the model of that name any more."""

ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"  # the file of an adapter's matrices, beside its configuration


def share_base(model: PreTrainedModel) -> PreTrainedModel:
    shared = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared)


def quantise_base(model: PreTrainedModel, kind: Quantization, device: torch.device) -> None:
    # In blocks of 64, whose scales are 8 bits. Layers move to the device one by one, the others stay; products are in
    # the dtype that the weights had. On meta they have as many bytes.
    chosen = {name: layer for name, layer in _linear(model)[1].items() if isinstance(layer, nn.Linear)}
    left = set(_read_past_adapters(model))
    chosen = {name: layer for name, layer in chosen.items() if name not in left}
    if not chosen:
        raise ModelRefused(
            f"{type(model).__name__} has no linear layers that could be quantised: leave models.quantization out"
        )
    if device.type == "meta":
        for name, layer in chosen.items():
            model.set_submodule(name, _OutlineOf4Bits(layer))
        return
    require("quantization", f"models.quantization = {kind!r}", module="bitsandbytes")
    import bitsandbytes.nn  # noqa: PLC0415 - an extra

    layers: Any = bitsandbytes.nn
    for name, layer in chosen.items():
        with torch.device("meta"):
            made: Any = layers.Linear4bit(
                layer.in_features, layer.out_features, layer.bias is not None, layer.weight.dtype
            )
        made.support_avx512bf16_for_cpu = False  # it would pack the weights anew in the midst of another's pass
        weight = layers.Params4bit(layer.weight.detach(), requires_grad=False, quant_type=kind, module=made)
        made.weight, made.bias = weight.to(device), layer.bias
        model.set_submodule(name, made)
    vars(model)["is_loaded_in_4bit"] = True  # PEFT asks for it


class _OutlineOf4Bits(nn.Linear):
    def __init__(self, layer: nn.Linear) -> None:
        inputs, outputs = layer.in_features, layer.out_features
        super().__init__(inputs, outputs, layer.bias is not None, "meta", layer.weight.dtype)
        stored = inputs * outputs // 2 + inputs * outputs // 64
        self.weight = nn.Parameter(torch.empty(stored, dtype=torch.uint8, device="meta"), requires_grad=False)
        vars(self.weight)["quant_state"] = layer.weight

    def forward(self, given: Tensor) -> Tensor:
        return nn.functional.linear(given, given.new_empty(self.out_features, self.in_features), self.bias)


OWNED: Final[Mapping[str, str]] = {
    "r": "models.lora_rank sets it",
    "lora_alpha": "models.lora_alpha sets it",
    "target_parameters": "models.lora_experts sets it",
    "lora_dropout": "a trained token would not have the log-prob with which it was sampled",
    "task_type": "the policy is a causal language model",
    "peft_type": "it is LORA",
    "inference_mode": "the adapter is trained",
    "base_model_name_or_path": "models.policy is the base",
}
"""Keys of PEFT's ``LoraConfig`` that :func:`add_lora` does not take, and why."""


def add_lora(
    model: PreTrainedModel,
    rank: int,
    alpha: int,
    *,
    seed: int = 0,
    experts: bool = False,
    more: Mapping[str, object] | None = None,
) -> None:
    """Add an adapter to every linear layer that is trained but the last; from now on only adapters require a gradient.

    A mixture of experts gets adapters in its attention layers and, with ``experts``, in the tensors that hold a matrix
    for each expert; its routers stay. In a pass each layer then builds a second, full copy of its experts, products
    added. Of Mamba layers the input projection gets some: fused kernels read the weights of the others past an adapter.
    A new adapter changes no output: one of its matrices is zero. Adapters are float32, also on a 16-bit base, and are
    scaled by ``alpha / rank``. ``more``: further arguments of PEFT's ``LoraConfig``, such as ``target_modules``.
    """
    require_peft("models.lora_rank")
    from peft import LoraConfig  # noqa: PLC0415 - an extra, for adapters only

    of_every, linear, fused_experts = _adapted(model, rank, experts=experts)
    given: dict[str, Any] = {
        "target_modules": "all-linear" if of_every else list(linear),
        "exclude_modules": _read_past_adapters(model) or None,
        "fan_in_fan_out": any(isinstance(module, Conv1D) for module in linear.values()),
        **_checked(more or {}),
        "target_parameters": list(fused_experts) or None,
    }
    try:
        adapter = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, **given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"models.lora is refused by PEFT: {one_line(error)}") from error
    _check_base(what := "the adapter of models.lora", adapter)
    _add(model, adapter, seed, what=what, remedy="change models.lora" if more else "set models.lora_rank = 0")


def outline_lora(
    model: PreTrainedModel, rank: int, alpha: int, *, experts: bool = False, more: Mapping[str, object] | None = None
) -> None:
    """Add what has the shapes of the adapters of :func:`add_lora` to a model without weights.

    PEFT's import takes seconds, so it makes only those of experts, and those that ``more`` describes by other keys than
    ``target_modules``.
    """
    linear, wanted = _adapted(model, rank, experts=experts)[1], (more or {}).get("target_modules", "all-linear")
    fit = set(linear) - {*_read_past_adapters(model)}
    chosen = fit if wanted == "all-linear" else {name for name, _ in model.named_modules() if _is_named(name, wanted)}
    if experts or {*(more or {})} - {"target_modules"} or not chosen or chosen - fit:
        add_lora(model, rank, alpha, experts=experts, more=more)
        return
    model.requires_grad_(False)
    for name in chosen:
        model.set_submodule(name, _OutlineOfAdapter(linear[name], rank))


def _is_named(name: str, wanted: object) -> bool:
    # As PEFT reads `target_modules`.
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return isinstance(wanted, list | tuple) and any(f".{name}".endswith(f".{each}") for each in wanted)


class _OutlineOfAdapter(nn.Module):
    def __init__(self, layer: nn.Linear | Conv1D, rank: int) -> None:
        super().__init__()
        sides = _described(layer).shape
        outputs, inputs = sides[::-1] if isinstance(layer, Conv1D) else sides
        self.base_layer = layer
        self.lora_A = nn.Linear(inputs, rank, bias=False, device="meta")
        self.lora_B = nn.Linear(rank, outputs, bias=False, device="meta")

    def forward(self, given: Tensor) -> Tensor:
        # As PEFT's layer, which keeps as much for the backward pass, and as long.
        found: Tensor = self.base_layer(given)
        dtype, given = found.dtype, given.float()
        found = found + self.lora_B(self.lora_A(given)) * 2.0
        return found.to(dtype)


def _checked(more: Mapping[str, object]) -> Mapping[str, object]:
    from peft import LoraConfig  # noqa: PLC0415 - an extra

    known = [each.name for each in fields(LoraConfig) if each.init]
    for name in more:
        if name in OWNED:
            raise ConfigError(f"models.lora.{name}: {OWNED[name]}: leave it out")
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"models.lora.{name}: PEFT's LoraConfig has no such key{hint}")
    return more


def load_lora(model: PreTrainedModel, directory: Path, *, weights: bool = True, trained: bool = True) -> None:
    # Without `weights` it has the shapes of new ones. Not `trained`, it requires none, and may be on any layer.
    require_peft(what := f"the adapter in {directory}")
    from peft import PeftConfig  # noqa: PLC0415 - an extra, for adapters only

    try:
        config = PeftConfig.from_pretrained(str(directory))
        tensors = load_file(directory / ADAPTER_WEIGHTS) if weights else {}
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"the adapter in {directory} cannot be used ({one_line(error)}): expected {ADAPTER} and {ADAPTER_WEIGHTS}, "
            "as PEFT's save_pretrained writes them"
        ) from error
    if config.peft_type != "LORA":
        raise ConfigError(f"the adapter in {directory} is {config.peft_type}: expected LoRA")
    config.inference_mode, config.lora_dropout = False, 0.0
    _check_base(what, config)
    config.init_lora_weights = True
    _add(model, config, 0, what=what, remedy="leave models.adapter out", anywhere=not trained)
    added = {name: each for name, each in model.named_parameters() if each.requires_grad}
    given = {
        re.sub(r"\.(lora_[AB])\.", r".\1.default.", name.removeprefix("base_model.model.")): each
        for name, each in tensors.items()
    }
    wrong = sorted(name for name in {*given, *added} if _shape(given, name) != _shape(added, name)) if weights else []
    if wrong:
        raise ConfigError(
            f"the adapter in {directory} does not fit {type(model).__name__}: of {len(wrong)} tensors that differ the "
            f"first is {wrong[0]}, {_shape(given, wrong[0])} there and {_shape(added, wrong[0])} here: expected the "
            "matrices of LoRA, and nothing else, for this model"
        )
    with torch.no_grad():
        for name, each in given.items():
            added[name].copy_(each)
    for each in () if trained else added.values():
        each.requires_grad_(False)


def _check_base(what: str, adapter: LoraConfig) -> None:
    begun = adapter.init_lora_weights
    if isinstance(begun, str) and begun.startswith(CHANGES_BASE):
        raise ConfigError(
            f"{what} is LoRA begun with {begun}, whose base was changed: expected LoRA over the base as it is"
        )


def _shape(tensors: Mapping[str, Tensor], name: str) -> object:
    return list(tensors[name].shape) if name in tensors else "nothing"


def _read_past_adapters(model: nn.Module) -> list[str]:
    # Projections of Mamba layers whose weights fused kernels read.
    return [
        f"{name}.{part}"
        for name, module in model.named_modules()
        if hasattr(module, "time_step_limit") or (hasattr(module, "x_proj") and hasattr(module, "dt_proj"))
        for part in ("x_proj", "dt_proj", "out_proj")
    ]


def _add(
    model: PreTrainedModel, adapter: LoraConfig, seed: int, *, what: str, remedy: str, anywhere: bool = False
) -> None:
    fit = _linear(model)[1].keys() - {*_read_past_adapters(model)}  # before any has adapters
    fit |= {name.rpartition(".")[0] for name in _fused_experts(model)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model.add_adapter(adapter)
        except Exception as error:  # any kind: a key of another type reaches deep into PEFT
            raise ModelRefused(
                f"PEFT cannot add adapters to {type(model).__name__} ({one_line(error)}): {remedy}"
            ) from error
    allow_threads(model)
    added = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if more := [name for name in added if not re.search(r"\.lora_[AB]\.\w+\.weight$", name)]:
        raise ConfigError(
            f"{what} trains {more[0]}: expected products of two matrices that are added to layers, without DoRA, "
            "biases and modules_to_save"
        )
    layers = {_plain(name.partition(".lora_")[0]) for name in added}
    if not anywhere and (other := sorted(layers - fit)):
        raise ConfigError(
            f"{what} is on {other[0]}{f' and {len(other) - 1} more' * (len(other) > 1)}, and "
            f"{type(model).__name__} has adapters on its inner linear layers only, as a mixture in its attention and "
            "on the tensors of its experts: expected an adapter on these"
        )
    for parameter in added.values():
        parameter.data = parameter.data.float()  # 16 bits would round small optimizer steps away
    model.train(mode=False)


def _adapted(
    model: PreTrainedModel, rank: int, *, experts: bool
) -> tuple[bool, dict[str, nn.Linear | Conv1D], dict[str, Tensor]]:
    # As `_linear`, and the tensors of experts.
    of_every, linear = _linear(model)
    if not linear and has_experts(model):
        raise ModelRefused(
            f"{type(model).__name__} is a mixture of experts without linear layers in its attention, the only ones of "
            "a mixture that get adapters: set models.lora_rank = 0"
        )
    fused_experts = _fused_experts(model) if experts else {}
    if experts and not fused_experts:
        raise ModelRefused(
            f"models.lora_experts = true adds adapters to experts that lie in one tensor, and {type(model).__name__} "
            "has none that are trained: set models.lora_experts = false"
        )
    layers = [_described(module) for module in linear.values()] + [each[0] for each in fused_experts.values()]
    if rank > (largest := max(min(each.shape) for each in layers)):
        raise ConfigError(
            f"models.lora_rank = {rank} is more than the rank of any layer of {type(model).__name__}, which is at most "
            f"{largest}: expected a lower one, or 0, which trains all weights"
        )
    return of_every, linear, fused_experts


def _linear(model: PreTrainedModel) -> tuple[bool, dict[str, nn.Linear | Conv1D]]:
    # Whether every linear layer but the last gets an adapter, and those that do, by name.
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not model.get_output_embeddings()
    }
    mixture = has_experts(model)
    chosen = {
        name: module for name, module in linear.items() if _is_trained(module) and (_of_attention(name) or not mixture)
    }
    return not mixture and all(map(_is_trained, linear.values())), chosen


def _is_trained(layer: nn.Linear | Conv1D) -> bool:
    return layer.weight.requires_grad or _described(layer) is not layer.weight


def _described(layer: nn.Linear | Conv1D) -> Any:
    # What has the shape of a layer's weights: of quantised ones, which are bytes, their state.
    return getattr(layer.weight, "quant_state", layer.weight)


def allow_threads(model: nn.Module) -> None:
    # PEFT's own forward pass changes the experts' module for its time.
    if has_adapters(model):
        for module in model.modules():
            if _of_tensor(module):
                module.forward = partial(_with_products, module)  # a partial, so that a deep copy calls its own layer


def _of_tensor(module: object) -> bool:
    from peft.tuners.lora import ParamWrapper  # noqa: PLC0415 - an extra, installed if there are adapters

    return isinstance(module, ParamWrapper)


def _fused_experts(model: PreTrainedModel) -> dict[str, Tensor]:
    # A matrix for each expert, [E, n, m], by the name of the tensor.
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and parameter.requires_grad and "experts" in name.split(".")[:-1]
    }


def _with_products(wrapper: Any, /, *args: object, **options: object) -> object:
    base, weights = wrapper, dict[str, Tensor]()
    while _of_tensor(base):  # one around another, each for one tensor
        weights[base.parameter_name] = _with_product(base.get_param(), base)
        base = base.base_layer
    changed = copy.copy(base)  # other threads may read with the module itself
    changed._parameters = {**base._parameters, **weights}  # noqa: SLF001 - they are no leaves, so they cannot be assigned
    return changed(*args, **options)


def _with_product(weight: Tensor, layer: Any, dtype: torch.dtype | None = None) -> Tensor:
    delta = torch.stack([layer.get_delta_weight(adapter) for adapter in layer.active_adapters]).sum(0)
    return (weight.float() + delta.float()).to(dtype or weight.dtype)


def _of_attention(name: str) -> bool:
    # A mixture of attention heads (JetMoE) has its router and its experts below the attention layer.
    *path, _ = name.split(".")
    return any("attn" in part or "attention" in part for part in path) and not {"experts", "router"} & {*path}


def require_peft(what: str) -> None:
    require("lora", what, module="peft")
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
        import peft  # noqa: F401, PLC0415 - it imports names of transformers that come and go
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{what}: peft {version('peft')} and transformers {version('transformers')} do not work together "
            f"({one_line(error)}): install versions that do with pip install 'oppo[lora]'"
        ) from error


def has_adapters(model: nn.Module) -> bool:
    return any(".base_layer." in name for name, _ in model.named_parameters())


@torch.no_grad()
def merged(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    # 16 bits would round small products away.
    state: dict[str, Tensor] = model.state_dict()
    if not has_adapters(model):
        return state
    from peft.tuners.lora import LoraLayer  # noqa: PLC0415 - an extra, installed if there are adapters

    plain = {_plain(name): each for name, each in _dequantised(state).items() if ".lora_" not in name}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            key = _plain(f"{name}.{getattr(layer, 'parameter_name', 'weight')}")
            plain[key] = _with_product(plain[key], layer, dtype)
    return plain


def _dequantised(state: Mapping[str, Any]) -> Mapping[str, Any]:
    # A state_dict with quantised weights as they are computed with, without what says how they are quantised.
    described: dict[str, dict[str, Any]] = {name: {} for name in state if f"{name}.quant_map" in state}
    if not described:
        return state
    from bitsandbytes.functional import QuantState, dequantize_4bit  # noqa: PLC0415 - an extra

    whole = dict[str, Any]()
    for name, each in state.items():
        layer, _, part = name.rpartition(".weight.")
        described.get(f"{layer}.weight", whole)[part or name] = each
    for name, parts in described.items():
        whole[name] = dequantize_4bit(state[name], QuantState.from_dict(parts, state[name].device))
    return whole


def _plain(name: str) -> str:
    return name.replace(".base_layer", "")


@torch.no_grad()
def rounding_loss(state: Mapping[str, object], merged: Mapping[str, object], dtype: torch.dtype) -> float:
    added = lost = 0.0
    for name, weight in _dequantised(state).items():
        whole = merged.get(_plain(name))
        if ".base_layer." in name and isinstance(weight, Tensor) and isinstance(whole, Tensor):
            added += float((whole.float() - weight.float()).square().sum())
            lost += float((whole.to(dtype).float() - whole.float()).square().sum())
    return (lost / added) ** 0.5 if added else 0.0


@torch.no_grad()
def adapter_matrices(model: nn.Module) -> dict[str, Tensor]:
    """Return the matrices of a model's adapters by their names in PEFT's files, each B scaled."""
    from peft.tuners.lora import Linear  # noqa: PLC0415 - an extra, installed if there are adapters

    found = dict[str, Tensor]()
    for name, layer in model.named_modules():
        if _of_tensor(layer):
            raise ModelRefused(
                f"the adapters of the experts of {type(model).__name__} are on tensors, which vLLM does not load: set "
                "models.lora_sync = 'merged'"
            )
        if isinstance(layer, Linear):
            linear: Any = layer
            (adapter,) = linear.active_adapters
            path = f"base_model.model.{_plain(name)}"
            found[f"{path}.lora_A.weight"] = linear.lora_A[adapter].weight.detach()
            found[f"{path}.lora_B.weight"] = linear.lora_B[adapter].weight.detach() * linear.scaling[adapter]
    return found


def rank_of(matrices: Mapping[str, Tensor]) -> int:
    return max(each.shape[0] for name, each in matrices.items() if ".lora_A." in name)


@torch.no_grad()
def adapter_rounding_loss(matrices: Mapping[str, Tensor], dtype: torch.dtype) -> float:
    added = lost = 0.0
    for name, first in matrices.items():
        if ".lora_A." not in name:
            continue
        second = matrices[name.replace(".lora_A.", ".lora_B.")]
        a, b, rounded_a, rounded_b = (each.double() for each in (first, second, first.to(dtype), second.to(dtype)))
        left, right = torch.cat([b, -rounded_b], 1), torch.cat([a, rounded_a], 0)  # whose product is what is lost
        lost += float((left.T @ left * (right @ right.T)).sum())
        added += float((b.T @ b * (a @ a.T)).sum())
    return (max(lost, 0.0) / added) ** 0.5 if added else 0.0
