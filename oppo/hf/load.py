"""Models and tokenizers by directory or hub name, from safetensors, probed before anybody relies on them.

Weights that come as pickles are refused unless they are asked for; then tensors are read, and nothing else is built.

The attention implementation is transformers' own choice: SDPA where a model supports it, eager otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, cast

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from oppo.errors import ConfigError, ModelRefused
from oppo.hf.device import CPU
from oppo.hf.probe import probe

if TYPE_CHECKING:
    from collections.abc import Collection

_DTYPES: dict[str, torch.dtype | Literal["auto"]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}


ALIGNMENT = 64
"""Bytes: tensors of torch's own begin at multiples on a CPU. Kernels round otherwise where they do not."""


class _Info(TypedDict):
    """What transformers says of a checkpoint: names, and names with the shape that came and the one wanted."""

    missing_keys: Collection[str]
    mismatched_keys: Collection[tuple[str, Collection[int], Collection[int]]]


def load_causal(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: torch.device | str = CPU,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> PreTrainedModel:
    """Return the causal language model at a directory or hub name, in evaluation mode, probed.

    Args:
        path: a directory with ``config.json`` and safetensors, or a hub name.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``auto`` (the checkpoint's).
        device: where it is moved to.
        trust_remote_code: run code that comes with the model.
        allow_pickle: where there are no safetensors, read tensors from pickles (``weights_only``).

    Raises:
        ConfigError: there is no such model, it has no safetensors, or the dtype is unknown.
        ModelRefused: there is no such model of its architecture, or it cannot be served exactly.
    """
    model, missing = _load(
        AutoModelForCausalLM,
        path,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    if missing:
        raise ConfigError(
            f"the checkpoint at {str(path)!r} has no {', '.join(missing)}: expected that of a causal language model, "
            f"not of {_architecture(model)}"
        )
    probe(model)
    return model


def load_scalar(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: torch.device | str = CPU,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    new_head: bool = False,
) -> PreTrainedModel:
    """Return the model at a directory or hub name as one that gives one number, in evaluation mode, probed.

    Args:
        path: a directory with ``config.json`` and safetensors, or a hub name.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``auto`` (the checkpoint's).
        device: where it is moved to.
        trust_remote_code: run code that comes with the model.
        allow_pickle: where there are no safetensors, read tensors from pickles (``weights_only``).
        new_head: let the checkpoint lack a scalar head and begin with one of zeros: for a critic, never for a reward.

    Raises:
        ConfigError: there is no such model, it has no safetensors or no scalar head, or the dtype is unknown.
        ModelRefused: there is no such model of its architecture, or it cannot be served exactly.
    """
    model, missing = _load(
        AutoModelForSequenceClassification,
        path,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        num_labels=1,
    )
    backbone = [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]
    if backbone:
        raise ConfigError(f"the checkpoint at {str(path)!r} has no {', '.join(backbone)}: it is incomplete")
    if missing and not new_head:
        raise ConfigError(
            f"the checkpoint at {str(path)!r} has no {', '.join(missing)}: expected a sequence classification model "
            "with one label; a reward from an untrained head would be noise"
        )
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
    probe(model)
    return model


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer at a directory or hub name.

    Raises:
        ConfigError: there is no such tokenizer.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(_not_found("tokenizer", path, error)) from error
    return tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and load reports off the terminal; what they say, this module says itself."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _load(
    kind: type[AutoModelForCausalLM | AutoModelForSequenceClassification],
    path: str | Path,
    *,
    dtype: str,
    device: torch.device | str,
    trust_remote_code: bool,
    allow_pickle: bool,
    num_labels: int | None = None,
) -> tuple[PreTrainedModel, list[str]]:
    """Return a model and the names of its parameters that the checkpoint does not have."""
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
    try:
        with quiet():
            loaded = kind.from_pretrained(
                path,
                dtype=_DTYPES[dtype],
                trust_remote_code=trust_remote_code,
                use_safetensors=None if allow_pickle else True,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # said below, in one sentence
                **({} if num_labels is None else {"num_labels": num_labels}),
            )
    except Exception as error:  # what is no safetensors, config or pickle of tensors is refused by many kinds of error
        if type(error).__name__ == "UnpicklingError":  # by its name, since nothing here imports pickle
            raise ConfigError(
                f"the pickles at {str(path)!r} are damaged, or hold more than tensors, and nothing else is built from "
                "them: expected weights as save_pretrained() writes them"
            ) from None  # torch would advise to build whatever they hold
        if not isinstance(error, OSError | ValueError | RuntimeError):
            raise
        if (lacking := _lacking(kind, path)) is not None:
            raise ModelRefused(lacking) from error
        raise ConfigError(_not_found("model", path, error)) from error
    model, info = cast("tuple[PreTrainedModel, _Info]", loaded)
    if info["mismatched_keys"]:
        wrong = [f"{name} is {list(came)}, not {list(wanted)}" for name, came, wanted in info["mismatched_keys"]]
        raise ConfigError(
            f"the checkpoint at {str(path)!r} does not fit {type(model).__name__}: {', '.join(sorted(wrong)[:3])}"
        )
    _align(model)
    torch.nn.Module.to(model, device=device)
    return model, sorted(info["missing_keys"])


@torch.no_grad()
def _align(model: PreTrainedModel) -> None:
    """Move tensors that lie in the mapped file, wherever its header ends, into memory of torch's own.

    The bits of a product depend on where a matrix begins: so they do not depend on the length of a header, and stay
    what they are when the weights move on, into memory that processes share for example.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


def _lacking(kind: type[AutoModelForCausalLM | AutoModelForSequenceClassification], path: str | Path) -> str | None:
    """Return a sentence if transformers knows the architecture at ``path``, but not as a model of this kind."""
    try:
        with quiet():
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError):
        return None
    if kind is AutoModelForCausalLM:
        mapping, wanted = MODEL_FOR_CAUSAL_LM_MAPPING, "causal language model"
    else:
        mapping, wanted = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "sequence classification model"
    if type(config) in mapping:
        return None
    return (
        f"the model at {str(path)!r} is of type {config.model_type!r}, of which transformers has no {wanted}: "
        "take one of another architecture"
    )


def _not_found(what: str, path: str | Path, error: Exception) -> str:
    """Return a sentence that says what was looked for, where, and why it could not be had."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        there = sorted(entry.name for entry in directory.iterdir())
        where = f"the directory {str(directory)!r} holds {', '.join(there) or 'nothing'}"
    else:
        where = f"{str(path)!r} is no directory here, and as a hub name it could not be had"
    wanted = "config.json and *.safetensors" if what == "model" else "tokenizer.json or a vocabulary"
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"no {what} could be loaded: {where}; looked for {wanted} ({reason})"


def _architecture(model: PreTrainedModel) -> str:
    return ", ".join(getattr(model.config, "architectures", None) or ["an unknown architecture"])
