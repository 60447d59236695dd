"""Models and tokenizers by directory or hub name, read from safetensors, and probed before first use.

Loading makes three passes: over the files (:mod:`oppo.hf.model_files`); over names and shapes, on the device ``meta``
that allocates nothing; and over the weights. Errors of the libraries about a damaged or foreign file become one
message that names the file.

Pickles are refused unless they are allowed; then tensors are read from them, and no other objects are built.

A :class:`ModelRecipe` crosses to another process or machine in place of a model, which is loaded and probed there. A
directory must be found under its path on each machine; a hub name is fetched there. No code and no weights cross.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypedDict, TypeVar, Unpack, cast
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from oppo.errors import ConfigError, OppoError, one_line
from oppo.hf.devices import CPU, device_of, ran_out
from oppo.hf.kv.attention import CHOICES, COSTS, Choice
from oppo.hf.lora import Quantization, add_lora, allow_threads, load_lora, quantise_base, require_peft
from oppo.hf.model_files import (
    CAUSAL,
    CONFIG,
    MAKING,
    OBJECTS,
    OBSOLETE,
    PROCESS,
    SCALAR,
    AutoClass,
    Kind,
    entries_of,
    located,
    processor_files,
    quiet,
    read_object,
    require_adapter,
    require_data,
    require_no_code,
)
from oppo.hf.model_parts import longest, only_whole, reach, vocabulary
from oppo.hf.processor import Processor
from oppo.hf.servable import probe
from oppo.hf.vision import let_see
from oppo.hf.weights import ALIGNMENT, SentWeights, SharedModel, changing
from oppo.log import logger, routed

T = TypeVar("T")

DTYPES: dict[str, torch.dtype | Literal["auto"]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}
"""The dtypes of weights, by their names in settings; ``auto``: the checkpoint's."""


class LoadOptions(TypedDict, total=False):
    """How a model is loaded.

    Attributes:
        dtype: ``float32`` (the default), ``bfloat16``, ``float16`` or ``auto`` (the checkpoint's).
        device: of the returned model; the CPU by default.
        trust_remote_code: run code that comes with the model.
        allow_pickle: without safetensors, read tensors from pickles (``weights_only``).
        ignore_unused: leave out weights that the model does not use.
        attention: by default ``auto``: the fastest kind that serves the model exactly (:mod:`oppo.hf.kv.attention`).
        quantization: of the layers that adapters are added to (:func:`oppo.hf.lora.quantise_base`).
    """

    dtype: str
    device: torch.device | str
    trust_remote_code: bool
    allow_pickle: bool
    ignore_unused: bool
    attention: Choice
    quantization: Quantization


def load_causal(path: str | Path, **options: Unpack[LoadOptions]) -> PreTrainedModel:
    """Return the causal language model at a directory or hub name, in evaluation mode, probed.

    Args:
        path: a directory with ``config.json`` and safetensors, or with an adapter for such a model, or a hub name.
        options: see :class:`LoadOptions`.

    Raises:
        ConfigError: there is no such model, a file of it is damaged, or its weights are not those that its
            ``config.json`` describes; or the dtype or the kind of attention is unknown.
        ModelRefused: the architecture has no such model, or it cannot be served exactly.
    """
    return load(CAUSAL, path, **options)


def load_scalar(path: str | Path, *, new_head: bool = False, **options: Unpack[LoadOptions]) -> PreTrainedModel:
    """Return the sequence-classification model with one label at a directory or hub name, in evaluation mode, probed.

    A head for logits in the checkpoint is left out. Other arguments and errors as for :func:`load_causal`.

    Args:
        path: likewise.
        new_head: start with a head of zeros if the checkpoint has none: for a critic, never for a reward.
        options: likewise.

    Raises:
        ConfigError: also if the checkpoint has no scalar head, and none may be new.
        ModelRefused: also if the model has no ``score`` layer.
    """
    return load(SCALAR, path, new_head=new_head, **options)


def load_process(path: str | Path, **options: Unpack[LoadOptions]) -> PreTrainedModel:
    """Return the token-classification model at a directory or hub name, in evaluation mode, probed.

    Arguments and errors as for :func:`load_causal`.

    Raises:
        ModelRefused: also if the model has no linear head.
    """
    return load(PROCESS, path, **options)


@quiet()
def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer at a directory or hub name.

    Raises:
        ConfigError: there is no such tokenizer, a file of it is damaged, or it needs code that is not trusted.
    """
    directory = located(path, weights=False, trust_remote_code=trust_remote_code)
    require_no_code(directory, trusted=trust_remote_code)
    with reading(directory, f"{directory / CONFIG} cannot be used"), suppress(OSError, ValueError):  # it may lack one
        AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    failure = (
        f"no tokenizer could be loaded: the directory {str(directory)!r} holds {entries_of(directory)}; looked for "
        "tokenizer.json or a vocabulary"
    )
    with reading(directory, failure):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code
        )
        tokenizer.name_or_path = str(path)
        if not tokenizer.get_vocab().keys() - tokenizer.added_tokens_encoder.keys():
            raise ConfigError(failure)
    return tokenizer


@contextmanager
def reading(directory: Path, failure: str) -> Iterator[None]:
    # Errors of the libraries become one message: on the damaged file, or `failure`.
    try:
        yield
    except OppoError:
        raise
    except Exception as error:  # any kind: a file reaches deep into several libraries before one of them notices
        if ran_out(error):
            raise
        if type(error).__name__ == "UnpicklingError":  # by its name, since nothing here imports pickle
            raise ConfigError(
                f"the pickles at {str(directory)!r} are damaged, or hold more than tensors, and nothing else is built "
                "from them: expected weights as save_pretrained() writes them"
            ) from None  # torch would advise to build whatever they hold
        for file in filter(Path.is_file, (directory / name for name in OBJECTS)):
            read_object(file)  # damaged, it says so
        raise ConfigError(f"{failure} ({one_line(error)})") from error


@quiet()
def load(
    kind: Kind,
    path: str | Path,
    *,
    dtype: str = "float32",
    device: torch.device | str = CPU,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    ignore_unused: bool = False,
    attention: Choice = "auto",
    quantization: Quantization = "none",
    new_head: bool = False,
) -> PreTrainedModel:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if attention not in CHOICES:
        raise ConfigError(f"attention must be one of {', '.join(CHOICES)}, not {attention!r}")
    find = partial(located, weights=True, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    directory = find(path)
    adapter = require_adapter(directory, allow_pickle=allow_pickle)
    if adapter is not None:
        require_peft(f"the adapter in {directory}")
    base = directory if adapter is None else find(adapter.base)
    with reading(base, f"no model can be made of {base / CONFIG} and the weights beside it"):
        tensors = require_data(base, trusted=trust_remote_code, allow_pickle=allow_pickle)
        auto = auto_of(kind, base, tensors, trusted=trust_remote_code)
        options = _options(kind, dtype, attention, trusted=trust_remote_code, allow_pickle=allow_pickle)
        with MAKING:
            trial, info = cast(
                "tuple[PreTrainedModel, Info]",
                auto.from_pretrained(base, device_map="meta", output_loading_info=True, **options),
            )
        kind.require(trial)
        given = () if adapter is None else adapter.tensors
        missing, left_out = require_fit(
            kind, trial, info, path, given=given, new_head=new_head, ignore_unused=ignore_unused
        )
        with MAKING:
            model = cast("PreTrainedModel", auto.from_pretrained(base, **options))
        _freeze_beside_text(model)
        if getattr(model.config, "rescale_every", 0):
            model.config.rescale_every = 0  # RWKV would scale its weights in place: those that are trained and saved
        _leave_out_router_logits(model)
        with torch.no_grad():
            for name in missing:
                model.get_parameter(name).zero_()
        require_finite(model, path)
        if quantization != "none":
            quantise_base(model, quantization, torch.device(device))
        if adapter is not None:
            left_out += _adapted(kind, model, directory, path, ignore_unused=ignore_unused)
            require_finite(model, path)
        model.name_or_path = model.config.name_or_path = str(path if adapter is None else adapter.base)
        if type(model.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and processor_files(base):
            let_see(model, Processor(model.name_or_path))
        _align(model)
        torch.nn.Module.to(model, device=device)
        served_by = probe(model, attention=attention) if kind.streamed else "segmented"
    if served_by == "whole":
        logger.info(f"{path} reads whole responses, each when it has ended: {only_whole(model)}")
    elif served_by != "segmented" and attention == "auto":
        logger.info(f"{path} is served with attention {served_by!r}: {COSTS[served_by]}")
    if left_out:
        logger.info(f"{path} has {first_of(left_out)}, left out since {type(model).__name__} does not use that")
    if missing:
        logger.info(f"{path} has no {first_of(missing)}: the head is new, and begins at zero")
    return model


def _options(kind: Kind, dtype: str, attention: Choice, *, trusted: bool, allow_pickle: bool) -> dict[str, Any]:
    return {
        "dtype": DTYPES[dtype],
        "trust_remote_code": trusted,
        "use_safetensors": None if allow_pickle else True,
        "weights_only": True,
        "ignore_mismatched_sizes": True,  # require_fit() reports them, in one message
        **kind.options,
        **({"attn_implementation": "eager"} if attention == "eager" else {}),
    }


def _adapted(
    kind: Kind, model: PreTrainedModel, directory: Path, path: str | Path, *, ignore_unused: bool
) -> list[str]:
    # The adapter is frozen. The weights that the model does not use are returned.
    with reading(directory, f"the adapter in {directory} cannot be used"):
        info = model.load_adapter(
            str(directory),
            use_safetensors=(directory / "adapter_model.safetensors").is_file(),
            weights_only=True,
            dtype=model.dtype,
            ignore_mismatched_sizes=True,
        ).to_dict()
        allow_threads(model)
        return require_fit(kind, model, info, path, ignore_unused=ignore_unused)[1]


def _freeze_beside_text(model: PreTrainedModel) -> None:
    # Of a vision-language model only the language model reads text, and is trained. It is saved whole.
    if type(model.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        read = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
        text = {id(weight) for part in read if part is not None for weight in part.parameters()}
        towers = [part for part in model.modules() if getattr(part, "main_input_name", "") == "pixel_values"]
        images = {id(weight) for tower in towers if tower is not model for weight in tower.parameters()}
        for weight in model.base_model.parameters():
            weight.requires_grad_(id(weight) in text - images)


def _leave_out_router_logits(model: PreTrainedModel) -> None:
    # Where the config asks for them, each pass computes an auxiliary loss, which fails on the masks that serve.
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        for part in {model, model.base_model}:
            part.register_forward_pre_hook(_without_router_logits, with_kwargs=True)


def _without_router_logits(_: object, inputs: object, options: dict[str, object]) -> tuple[object, dict[str, object]]:
    return inputs, {"output_router_logits": False, **options}


@torch.no_grad()
def _align(model: PreTrainedModel) -> None:
    # The bits of a product depend on the address of a matrix. Aligned, they depend neither on the length of the mapped
    # file's header nor on a later move of the weights, for example into shared memory.
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


HEADS = ("lm_head.", "embed_out.")
"""Prefixes of the weights of a language model's head, which a critic made of it does not use."""


class Info(TypedDict):
    missing_keys: Collection[str]
    unexpected_keys: Collection[str]
    mismatched_keys: Collection[tuple[str, Collection[int], Collection[int]]]


def auto_of(kind: Kind, directory: Path, tensors: Sequence[str], *, trusted: bool) -> AutoClass:
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    auto = kind.auto(config)
    depth = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if 0 < len(tensors) < depth:  # first: building that many layers may take hours, even without memory
        raise ConfigError(
            f"{directory / 'config.json'} describes {depth} layers, but there are {len(tensors)} tensors in all: "
            "expected the weights of that model"
        )
    return auto


def require_fit(
    kind: Kind,
    model: PreTrainedModel,
    info: Info,
    path: str | Path,
    *,
    given: Collection[str] = (),
    new_head: bool = False,
    ignore_unused: bool,
) -> tuple[list[str], list[str]]:
    """Check a checkpoint's weights by name and shape; return the missing ones of a new head, and the unused ones."""
    # An adapter's weights, `given`, are not missing. Constants that the model computes are not unused, nor are weights
    # that transformers ignores itself.
    checkpoint, has_logits = f"the checkpoint at {str(path)!r}", model.get_output_embeddings() is not None
    if info["mismatched_keys"]:
        wrong = [f"{name} is {list(found)}, not {list(wanted)}" for name, found, wanted in info["mismatched_keys"]]
        raise ConfigError(f"{checkpoint} does not fit {type(model).__name__}: {', '.join(sorted(wrong)[:3])}")
    missing = sorted(each for each in info["missing_keys"] if each not in given and not each.startswith(kind.optional))
    if backbone := [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]:
        raise ConfigError(f"{checkpoint} has no {first_of(backbone)}: it is incomplete")
    if missing and not new_head:
        why = "; a reward from an untrained head would be noise"
        if kind is CAUSAL:
            why = f", not {', '.join(model.config.architectures or ['an unknown one'])}"
        raise ConfigError(f"{checkpoint} has no {first_of(missing)}: expected a {kind.name}{why}")
    buffers = {name for name, _ in model.named_buffers()}
    unused = sorted(name for name in info["unexpected_keys"] if name not in buffers and not name.endswith(OBSOLETE))
    droppable = () if has_logits else getattr(model, "left_out", HEADS)
    # a part of what is read beside text may come before the head's name, as older checkpoints have it
    unknown = [name for name in unused if not any(f".{prefix}" in f".{name}" for prefix in droppable)]
    if unknown and not ignore_unused:
        raise ConfigError(
            f"{checkpoint} has {first_of(unknown)}, which {type(model).__name__} does not use: expected the weights of "
            "the model that config.json describes, and of this kind; if it may do without, set "
            "models.ignore_unused_weights = true"
        )
    return missing, unused


def first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def require_finite(model: PreTrainedModel, path: str | Path) -> None:
    # Otherwise the first symptom would be another error, much later.
    for name, weight in model.named_parameters():
        if weight.numel() and not torch.stack(torch.aminmax(weight.detach())).isfinite().all():
            raise ConfigError(
                f"{name} of the checkpoint at {str(path)!r} holds NaN or infinite numbers in {weight.dtype}: expected "
                "weights of a training that did not diverge"
            )


@quiet()
def outline(
    kind: Kind, path: str | Path, *, dtype: str = "float32", trust_remote_code: bool = False
) -> PreTrainedModel:
    with routed():  # loading the weights later logs the messages
        directory = located(path, weights=False, trust_remote_code=trust_remote_code)
        adapter = require_adapter(directory, allow_pickle=True)
        if adapter is not None:
            directory = located(adapter.base, weights=False, trust_remote_code=trust_remote_code)
    require_no_code(directory, trusted=trust_remote_code)
    with reading(directory, f"no model can be made of {directory / 'config.json'}"):
        weights = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
        if weights:
            tensors = require_data(directory, trusted=trust_remote_code, allow_pickle=True)
            auto_of(kind, directory, tensors, trusted=trust_remote_code)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, **kind.options)
        chosen = DTYPES[dtype]
        given = (config.dtype or torch.float32) if chosen == "auto" else chosen
        with torch.device("meta"):
            model = kind.made(config, dtype=given, trust_remote_code=trust_remote_code)
    _freeze_beside_text(model)
    _leave_out_router_logits(model)
    numbers, there = model.num_parameters(), sum(file.stat().st_size for file in weights)
    if weights and numbers > there:
        raise ConfigError(
            f"{directory / 'config.json'} describes {numbers} numbers, but the weights have {there} bytes: expected "
            "the weights of that model"
        )
    return model


def require_supported(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.float16 and device.type == "cpu":
        raise ConfigError(
            "float16 is not for a CPU, where it is slow and its gradients underflow: expected models.dtype = "
            "'float32' or 'bfloat16'"
        )
    if (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} does not compute in bfloat16 itself: expected models.dtype = "
            "'float32'"
        )


ModelKind: TypeAlias = Literal["causal", "scalar", "process"]

LOADERS: Final[dict[ModelKind, Callable[..., PreTrainedModel]]] = {
    "causal": load_causal,
    "scalar": load_scalar,
    "process": load_process,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecipe:
    """How a model is loaded, wherever that is done; arguments as for :func:`oppo.hf.load_causal`."""

    path: str
    kind: ModelKind = "causal"  # a policy, a reference; `scalar`: a reward model, a critic
    dtype: str = "float32"
    device: str = "auto"  # the first CUDA device of the process that loads it, or the CPU without one
    attention: Choice = "auto"
    trust_remote_code: bool = False
    allow_pickle: bool = False
    ignore_unused: bool = False
    quantization: Quantization = "none"
    new_head: bool = False
    lora_rank: int = 0  # of adapters that are added; 0: none
    lora_alpha: int = 32
    lora_seed: int = 0
    lora_experts: bool = False
    lora: Mapping[str, object] = field(default_factory=dict, hash=False)
    adapter: str = ""  # directory or hub name of one that is loaded and trained instead

    def load(self) -> PreTrainedModel:
        given: dict[str, Any] = {name: getattr(self, name) for name in LoadOptions.__annotations__}
        head = {"new_head": True} if self.new_head else {}
        with routed():  # each place that loads it would say the same
            model = LOADERS[self.kind](self.path, **{**given, "device": device_of(self.device)}, **head)
        require_supported(model.dtype, model.device)
        if self.lora_rank:
            rank, alpha, seed, experts = self.lora_rank, self.lora_alpha, self.lora_seed, self.lora_experts
            add_lora(model, rank, alpha, seed=seed, experts=experts, more=self.lora)
        if self.adapter:
            load_lora(model, located(self.adapter, weights=True))
        return model

    def config(self) -> PreTrainedConfig:
        # Of an adapter its base's.
        with routed():
            directory = located(self.path, weights=False, trust_remote_code=self.trust_remote_code)
            if (adapter := require_adapter(directory, allow_pickle=self.allow_pickle)) is not None:
                directory = located(adapter.base, weights=False, trust_remote_code=self.trust_remote_code)
        try:
            found: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the model at {self.path!r} has no configuration that can be read: {error}") from error
        return found


Loadable: TypeAlias = PreTrainedModel | ModelRecipe  # a model, or how it is loaded where it lives


_resident: Final[WeakValueDictionary[str, PreTrainedModel]] = WeakValueDictionary()
"""The models of this process that were loaded by a :class:`ResidentRecipe` and are in use, by key."""

_loading: Final = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRecipe(ModelRecipe):
    """The recipe of one model in each process: all that load it there by this recipe have the same."""

    key: str = field(default_factory=lambda: uuid4().hex)

    @classmethod
    def of(cls, model: Loadable) -> Loadable:
        if isinstance(model, PreTrainedModel | ResidentRecipe):
            return model
        return cls(**{each.name: getattr(model, each.name) for each in fields(model)})

    def load(self) -> PreTrainedModel:
        with _loading:
            model = _resident.get(self.key)
            if model is None:
                model = _resident[self.key] = ModelRecipe.load(self)
        return model


def name_of(model: Loadable) -> str:
    if isinstance(model, ModelRecipe):
        return str(next(iter(model.config().architectures or []), model.path))
    return type(model).__name__


def positions_of(model: Loadable) -> int:
    return reach(model.config()) if isinstance(model, ModelRecipe) else longest(model)


def vocabulary_of(model: Loadable) -> int:
    return int(model.config().get_text_config().vocab_size) if isinstance(model, ModelRecipe) else vocabulary(model)


def tensors(model: Loadable) -> frozenset[int]:
    if isinstance(model, ModelRecipe):  # it is loaded into memory of its own, which no trainer writes
        return frozenset()
    return frozenset(each.data_ptr() for each in model.parameters() if each.requires_grad and each.numel())


def sent(model: Loadable, actor: Mapping[str, object]) -> SentWeights:
    return SentWeights(changing(actor) if isinstance(model, ModelRecipe) else actor)


def worker_maker(kind: Callable[..., T], model: Loadable, *args: object) -> Callable[[], T]:
    return partial(_worker, kind, model if isinstance(model, ModelRecipe) else SharedModel(model), *args)


def _worker(kind: Callable[..., T], source: ModelRecipe | SharedModel[PreTrainedModel], *args: object) -> T:
    return kind(source.load(), *args)
