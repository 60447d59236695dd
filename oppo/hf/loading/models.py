"""Models and tokenizers by directory or hub name, read from safetensors, and probed before first use.

Loading makes three passes: over the files (:mod:`oppo.hf.loading.directory`); over names and shapes, on the device
``meta`` that allocates nothing; and over the weights. Errors of the libraries about a damaged or foreign file become
one sentence that names the file.

Pickles are refused unless they are allowed; then tensors are read from them, and no other objects are built.

transformers chooses the attention implementation, SDPA for models that support it, unless eager attention is chosen.
The probe finds the kind of attention (:mod:`oppo.hf.kv.attention`) that serves the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypedDict, Unpack, cast

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from oppo.errors import ConfigError, OppoError, one_line
from oppo.hf.device import CPU
from oppo.hf.kv.attention import CHOICES, COSTS, Choice
from oppo.hf.loading.directory import CONFIG, entries_of, require_adapter, require_data, require_json, require_no_code
from oppo.hf.loading.fit import Info, first_of, require_finite, require_fit, require_kind
from oppo.hf.loading.hub import located
from oppo.hf.loading.kinds import CAUSAL, PROCESS, SCALAR, Kind
from oppo.hf.lora import require_peft
from oppo.hf.out_of_memory import ran_out
from oppo.hf.probe import probe
from oppo.hf.shared_memory import ALIGNMENT
from oppo.observe import silent

DTYPES: dict[str, torch.dtype | Literal["auto"]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}
"""The types of weights, by their names in settings; ``auto``: that of the checkpoint."""


class LoadOptions(TypedDict, total=False):
    """The arguments of :func:`load_causal`, for loaders that have the same."""

    dtype: str
    device: torch.device | str
    trust_remote_code: bool
    allow_pickle: bool
    ignore_unused: bool
    attention: Choice
    tell: Callable[[str], None]


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and load reports: this module reports the same in its own words."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_causal(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: torch.device | str = CPU,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    ignore_unused: bool = False,
    attention: Choice = "auto",
    tell: Callable[[str], None] = silent,
) -> PreTrainedModel:
    """Return the causal language model at a directory or hub name, in evaluation mode, probed.

    Args:
        path: a directory with ``config.json`` and safetensors, or with an adapter for such a model, or a hub name.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``auto`` (the checkpoint's).
        device: of the returned model.
        trust_remote_code: run code that comes with the model.
        allow_pickle: without safetensors, read tensors from pickles (``weights_only``).
        ignore_unused: leave out weights that the model does not use.
        attention: the kind of attention; ``auto``: the fastest that serves it exactly (:mod:`oppo.hf.kv.attention`).
        tell: receives a sentence when a hub is contacted, weights are left out, a head is new, or attention is of a
            slower kind.

    Raises:
        ConfigError: there is no such model, a file of it is damaged, or its weights are not those that its
            ``config.json`` describes; or the dtype or the kind of attention is unknown.
        ModelRefused: the architecture has no such model, or it cannot be served exactly.
    """
    return load(
        CAUSAL,
        path,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        ignore_unused=ignore_unused,
        attention=attention,
        tell=tell,
    )


def load_scalar(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: torch.device | str = CPU,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    ignore_unused: bool = False,
    attention: Choice = "auto",
    new_head: bool = False,
    tell: Callable[[str], None] = silent,
) -> PreTrainedModel:
    """Return the sequence-classification model with one label at a directory or hub name, in evaluation mode, probed.

    A head for logits in the checkpoint is left out. The other arguments and errors are those of :func:`load_causal`.

    Args:
        new_head: start with a head of zeros if the checkpoint has none: for a critic, never for a reward.

    Raises:
        ConfigError: also if the checkpoint has no scalar head, and none may be new.
        ModelRefused: also if the model has no ``score`` layer.
    """
    return load(
        SCALAR,
        path,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        ignore_unused=ignore_unused,
        attention=attention,
        tell=tell,
        new_head=new_head,
    )


def load_process(path: str | Path, **options: Unpack[LoadOptions]) -> PreTrainedModel:
    """Return the token-classification model at a directory or hub name, in evaluation mode, probed.

    Arguments and errors are those of :func:`load_causal`.

    Raises:
        ModelRefused: also if the model has no linear head.
    """
    return load(PROCESS, path, **options)


@quiet()
def load_tokenizer(
    path: str | Path, *, trust_remote_code: bool = False, tell: Callable[[str], None] = silent
) -> PreTrainedTokenizerBase:
    """Return the tokenizer at a directory or hub name; ``tell`` receives a sentence when a hub is contacted.

    Raises:
        ConfigError: there is no such tokenizer, a file of it is damaged, or it needs code that is not trusted.
    """
    directory = located(path, weights=False, trust_remote_code=trust_remote_code, tell=tell)
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
    """Turn library errors about the files of a directory into one sentence: on the damaged file, or ``failure``.

    Raises:
        ConfigError: for any error except running out of memory.
    """
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
        require_json(directory)
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
    tell: Callable[[str], None] = silent,
    new_head: bool = False,
) -> PreTrainedModel:
    """Return a model of a kind; arguments and errors are those of :func:`load_causal` and :func:`load_scalar`."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if attention not in CHOICES:
        raise ConfigError(f"attention must be one of {', '.join(CHOICES)}, not {attention!r}")
    find = partial(located, weights=True, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, tell=tell)
    directory = find(path)
    adapter = require_adapter(directory, allow_pickle=allow_pickle)
    if adapter is not None:
        require_peft(f"the adapter in {directory}")
    base = directory if adapter is None else find(adapter.base)
    with reading(base, f"no model can be made of {base / CONFIG} and the weights beside it"):
        tensors = require_data(base, trusted=trust_remote_code, allow_pickle=allow_pickle)
        require_kind(kind, base, tensors, trusted=trust_remote_code)
        options = _options(kind, dtype, attention, trusted=trust_remote_code, allow_pickle=allow_pickle)
        trial, info = cast(
            "tuple[PreTrainedModel, Info]",
            kind.auto.from_pretrained(base, device_map="meta", output_loading_info=True, **options),
        )
        kind.require(trial)
        given = () if adapter is None else adapter.tensors
        missing, left_out = require_fit(
            kind, trial, info, path, given=given, new_head=new_head, ignore_unused=ignore_unused
        )
        model = cast("PreTrainedModel", kind.auto.from_pretrained(base, **options))
        with torch.no_grad():
            for name in missing:
                model.get_parameter(name).zero_()
        if adapter is not None:
            left_out += _adapted(kind, model, directory, path, ignore_unused=ignore_unused)
        model.name_or_path = model.config.name_or_path = str(path if adapter is None else adapter.base)
        require_finite(model, path)
        _align(model)
        torch.nn.Module.to(model, device=device)
        served_by = probe(model, attention=attention) if kind.streamed else "segmented"
    if served_by != "segmented" and attention == "auto":
        tell(f"{path} is served with attention {served_by!r}: {COSTS[served_by]}")
    if left_out:
        tell(f"{path} has {first_of(left_out)}, left out since {type(model).__name__} does not use that")
    if missing:
        tell(f"{path} has no {first_of(missing)}: the head is new, and begins at zero")
    return model


def _options(kind: Kind, dtype: str, attention: Choice, *, trusted: bool, allow_pickle: bool) -> dict[str, object]:
    """Return the options of ``from_pretrained``."""
    return {
        "dtype": DTYPES[dtype],
        "trust_remote_code": trusted,
        "use_safetensors": None if allow_pickle else True,
        "weights_only": True,
        "ignore_mismatched_sizes": True,  # require_fit() reports them, in one sentence
        **kind.options,
        **({"attn_implementation": "eager"} if attention == "eager" else {}),
    }


def _adapted(
    kind: Kind, model: PreTrainedModel, directory: Path, path: str | Path, *, ignore_unused: bool
) -> list[str]:
    """Load a directory's adapter into a model, frozen; return the weights that the model does not use."""
    with reading(directory, f"the adapter in {directory} cannot be used"):
        info = model.load_adapter(
            str(directory),
            use_safetensors=(directory / "adapter_model.safetensors").is_file(),
            weights_only=True,
            dtype=model.dtype,
            ignore_mismatched_sizes=True,
        ).to_dict()
        return require_fit(kind, model, info, path, ignore_unused=ignore_unused)[1]


@torch.no_grad()
def _align(model: PreTrainedModel) -> None:
    """Copy tensors of the mapped file, which begin where its header ends, into aligned memory.

    The bits of a product depend on the address of a matrix. Aligned, they depend neither on the length of the header
    nor on a later move of the weights, for example into shared memory.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
