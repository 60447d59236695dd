"""The files of a model: found by directory or hub name, and checked before a library reads them.

A hub is asked once, with a short timeout, whether it has the model; files are fetched only from one that has it. What
is read is complete data inside of the directory, and no code.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from oppo.atomic_files import content, read_text
from oppo.errors import ConfigError, ModelRefused, OppoError, one_line
from oppo.hf.head import scored
from oppo.hf.model_parts import score_head, token_head
from oppo.hf.tokenizer import copy_without_hub

MAKING: Final = threading.RLock()
"""Held while transformers makes a model: it changes its own classes for that time.

Models of two threads that were made at once could have heads that are not tied to their embeddings, now and ever after.
"""

METADATA = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files of a hub that describe a model or its tokenizer."""


def located(name: str | Path, *, weights: bool, allow_pickle: bool = False, trust_remote_code: bool = False) -> Path:
    # Fetched from a hub if need be; pickles only if it has nothing else.
    try:
        directory = Path(name).expanduser()
        if directory.is_dir():
            return directory
        if (copy := copy_without_hub(str(name))) is not None:
            return copy
        directory = Path(
            snapshot_download(str(name), allow_patterns=[*METADATA, *(["*.py"] if trust_remote_code else [])])
        )
        if weights:
            _fetch(str(name), directory, SAFETENSORS, "adapter_model.safetensors")
        if weights and allow_pickle and not any(directory.glob("*.safetensors")):
            _fetch(str(name), directory, PICKLED, "adapter_model.bin")
    except OppoError:
        raise
    except Exception as error:  # any kind: paths that no system has, networks, servers, disks
        raise ConfigError(f"{str(name)!r} could not be had ({one_line(error)})") from error
    return directory


def _fetch(name: str, directory: Path, weights: tuple[str, str], adapter: str) -> None:
    whole, index = weights
    snapshot_download(name, allow_patterns=[whole, adapter, *shards(directory / index)])


@contextmanager
def quiet() -> Iterator[None]:
    # transformers' progress bars and load reports: this package reports the same in its own words.
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


AutoClass: TypeAlias = type[
    AutoModel
    | AutoModelForCausalLM
    | AutoModelForImageTextToText
    | AutoModelForSequenceClassification
    | AutoModelForTokenClassification
    | PreTrainedModel  # a class of ours
]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model, by the classes that load it and the config classes of which transformers has such a model."""

    # Code of a checkpoint's own is for the last of the autos. require: refuses a model without the layers that serving
    # needs. optional: prefixes of weights that may be missing. on_any_trunk: a causal model may be given a score layer.

    autos: Mapping[AutoClass, Container[type[PreTrainedConfig]]]
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    require: Callable[[PreTrainedModel], object] = lambda model: None
    streamed: bool = True
    optional: tuple[str, ...] = ()
    on_any_trunk: bool = False

    def auto(self, config: PreTrainedConfig) -> AutoClass:
        for auto, configs in self.autos.items():
            if type(config) in configs:
                return auto
        if auto.__name__ in getattr(config, "auto_map", ()):
            return auto
        if self.on_any_trunk and (causal := _causal_class(config)) is not None:
            return scored(causal)
        raise ModelRefused(
            f"the model at {config.name_or_path!r} is of type {config.model_type!r}, of which transformers has no "
            f"{self.name}: take one of another architecture"
        )

    def made(self, config: PreTrainedConfig, **options: object) -> PreTrainedModel:
        auto: Any = self.auto(config)
        with MAKING:
            model: PreTrainedModel = auto.from_config(config, **options)
        return model


def _causal_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    for classes in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in classes:
            return cast("type[PreTrainedModel]", classes[type(config)])
    return None


CAUSAL: Final = Kind(
    {
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,  # whole, as it is to be saved
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    },
    "causal language model",
)
SCALAR: Final = Kind(
    {AutoModelForSequenceClassification: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING},
    "sequence classification model with one label",
    {"num_labels": 1},
    score_head,
    on_any_trunk=True,
)
PROCESS: Final = Kind(
    {AutoModelForTokenClassification: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING},
    "token classification model",
    require=token_head,
)
CLASSIFIER: Final = Kind(SCALAR.autos, "sequence classification model", streamed=False)
EMBEDDER: Final = Kind({AutoModel: MODEL_MAPPING}, "text encoder", streamed=False, optional=("pooler.",))

CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"

MODULES = "modules.json"
"""The parts of a sentence encoder, in the order of their application, as sentence-transformers writes them."""

OBJECTS = (
    *(CONFIG, GENERATION, ADAPTER, "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
)
"""Files that hold one JSON object each."""

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""Where transformers looks for weights, in this order; an index names the files that hold them."""

PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")  # where transformers looks next, if pickles are allowed
PICKLES = ("bin", "pt", "pth", "ckpt", "pkl")  # suffixes of pickled weights


OBSOLETE = (".attn.bias", ".attention.bias", ".masked_bias", ".attn.embed_positions", "decoder.version")
"""Suffixes of constants in older checkpoints of GPT-2, GPT-J, GPT-NeoX and OPT; models compute them today."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The base's name, and names of an adapter's weights; those that replace a weight of the base have its name."""

    base: str
    tensors: frozenset[str]


def read_object(file: Path) -> dict[str, object]:
    try:
        found: object = json.loads(read_text(file, linked=True))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(found).__name__}")
    return found


def entries_of(directory: Path) -> str:
    return ", ".join(sorted(entry.name for entry in directory.glob("*"))) or "nothing"


def processor_files(directory: Path) -> dict[str, bytes]:
    files = [*directory.glob("*processor*.json"), *directory.glob("chat_template.json")]
    return {file.name: content(file, linked=True) for file in files}


def holds_tokenizer(directory: Path) -> bool:
    return any(True for pattern in ("*token*", "vocab*", "*.model") for _ in directory.glob(pattern))


def require_data(directory: Path, *, trusted: bool, allow_pickle: bool) -> list[str]:
    # All is data. The names of tensors are returned, without those in pickles.
    if not (directory / CONFIG).is_file():
        raise _without_model(directory)
    if (directory / ADAPTER).exists():
        raise ConfigError(f"{directory} holds an adapter beside a model: expected either in a directory of its own")
    require_no_code(directory, trusted=trusted)
    if quantised := read_object(directory / CONFIG).get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"the weights at {directory} are quantised ({method}), and neither trained nor served exactly: expected "
            "those they were made from, in float32, bfloat16 or float16"
        )
    if (file := directory / GENERATION).is_file():  # transformers would ignore it if damaged
        ends = read_object(file).get("eos_token_id")
        if not all(type(each) is int for each in (ends if isinstance(ends, list) else [ends]) if ends is not None):
            raise ConfigError(f"{file}: expected token ids under eos_token_id, got {ends!r}")
    return _weights(directory, allow_pickle=allow_pickle)


def require_no_code(directory: Path, *, trusted: bool) -> None:
    config = directory / CONFIG
    if trusted or not config.is_file():
        return
    described = read_object(config)
    kind = described.get("model_type")
    if described.get("auto_map") and not (isinstance(kind, str) and kind in CONFIG_MAPPING):
        code = ", ".join(sorted(entry.name for entry in directory.glob("*.py"))) or "another repository"
        raise ConfigError(
            f"{directory} is a {kind!r}, which transformers does not know, and would run code of "
            f"its own ({code}): read it, and if you trust it set models.trust_remote_code = true"
        )


def require_adapter(directory: Path, *, allow_pickle: bool | None) -> Adapter | None:
    if not (file := directory / ADAPTER).is_file() or (directory / CONFIG).exists():
        return None
    base = read_object(file).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise ConfigError(f"{file}: expected the model that it is for under base_model_name_or_path, got {base!r}")
    safetensors, pickle = "adapter_model.safetensors", "adapter_model.bin"
    pickled = not (directory / safetensors).is_file() and (directory / pickle).is_file()
    if pickled and allow_pickle is None:
        raise ConfigError(
            f"{directory} holds its weights as a pickle ({pickle}), and models.allow_pickle is not for an adapter that "
            f"is trained: expected {safetensors}, as PEFT's save_pretrained() writes it"
        )
    names = _tensors(directory, [pickle if pickled else safetensors], allow_pickle=bool(allow_pickle))
    return Adapter(base, frozenset(name.removeprefix("base_model.model.") for name in names))


def shards(index: Path) -> list[str]:
    if not index.is_file():
        return []
    described = read_object(index)
    names = described.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"{index}: expected a weight_map from the name of each tensor to that of its file")
    if not isinstance(described.get("metadata"), dict):
        raise ConfigError(f"{index}: expected metadata beside the weight_map, an object that may be empty")
    return sorted(set(names.values()))


def _weights(directory: Path, *, allow_pickle: bool) -> list[str]:
    named = read_object(directory / CONFIG).get("transformers_weights")
    for name in (named,) if isinstance(named, str) else SAFETENSORS + (PICKLED if allow_pickle else ()):
        if (file := directory / name).is_file():
            names = shards(file) if name.endswith(".json") else [name]
            return _tensors(directory, names, allow_pickle=allow_pickle)
    pickles = sorted(each.name for suffix in PICKLES for each in directory.glob(f"*.{suffix}"))
    if pickles and not allow_pickle:
        raise _pickled(directory, pickles)
    raise _without_model(directory)


def _tensors(directory: Path, names: list[str], *, allow_pickle: bool) -> list[str]:
    # Tensors in pickles are left out. Names must stay inside of the directory. The files may be links, as they are in
    # the hub's cache.
    tensors: list[str] = []
    pickles = [name for name in names if not name.endswith(".safetensors")]
    for name in names:
        file = directory / name
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ConfigError(f"weights of {directory} are said to be in {name!r}, which is outside of that directory")
        if not file.is_file():
            raise ConfigError(f"{file} is not there, and should hold weights")
        if name in pickles and allow_pickle:
            continue
        if name in pickles:
            raise _pickled(directory, pickles)
        try:
            with safe_open(file, framework="pt") as opened:
                stored = {name: str(opened.get_slice(name).get_dtype()) for name in opened.keys()}  # noqa: SIM118 - it has keys, but cannot be iterated
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{file} is no safetensors file, or not the whole of one (a git clone has them after `git lfs pull`): "
                f"{error}"
            ) from error
        tensors += stored
        whole = [name for name, dtype in stored.items() if _is_quantised(name, dtype)]
        if whole:
            raise ConfigError(
                f"{file} holds {whole[0]} as {stored[whole[0]]}, without the quantization_config that says what its "
                "numbers mean: expected weights in float32, bfloat16 or float16"
            )
    return tensors


def _is_quantised(name: str, dtype: str) -> bool:
    # Its integers, or its 8 bits or fewer, would be read as if they were the weights.
    if dtype in {"F64", "F32", "F16", "BF16"} or name.endswith(OBSOLETE):
        return False
    return name.endswith(".weight") or dtype.startswith(("F", "I8", "U8"))


def _without_model(directory: Path) -> ConfigError:
    return ConfigError(
        f"no model could be loaded: the directory {str(directory)!r} holds {entries_of(directory)}; looked for "
        "config.json and *.safetensors"
    )


def _pickled(directory: Path, pickles: list[str]) -> ConfigError:
    return ConfigError(
        f"{directory} holds its weights only as pickles ({', '.join(pickles[:3])}), which can run any code when they "
        "are read: expected *.safetensors. If you trust them, set models.allow_pickle = true, which reads tensors "
        "and builds nothing else, or write the model once with save_pretrained(), which makes safetensors"
    )


RewardKind: TypeAlias = Literal["scalar", "process", "classifier", "similarity"]
"""One number at the last token, streamed; one at each step, streamed; a label's logit of the whole; a similarity."""


@quiet()
def reward_kind(directory: Path, *, trusted: bool = False) -> RewardKind:
    # A sequence classifier is scalar if transformers applies its head to the last token of a causal model, else a
    # classifier; an encoder without a head, or what sentence-transformers has written, is for similarity. All else is
    # scalar, to be refused when it is loaded.
    if (directory / MODULES).is_file():
        return "similarity"
    if (directory / ADAPTER).is_file() or not (directory / CONFIG).is_file():
        return "scalar"
    require_no_code(directory, trusted=trusted)
    architectures = read_object(directory / CONFIG).get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if name.endswith("ForTokenClassification"):
        return "process"
    if name.endswith("ForSequenceClassification"):
        return "scalar" if _scores_the_last_token(directory, trusted=trusted) else "classifier"
    headless = name.endswith("Model") and not name.endswith("LMHeadModel")
    return "similarity" if headless else "scalar"


def _scores_the_last_token(directory: Path, *, trusted: bool) -> bool:
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trusted, num_labels=1)
        with torch.device("meta"):
            score_head(SCALAR.made(config, trust_remote_code=trusted))
    except ModelRefused:
        return False
    except Exception as error:  # any kind: a damaged config reaches deep into transformers
        raise ConfigError(f"no model can be made of {directory / CONFIG}: {error}") from error
    return True
