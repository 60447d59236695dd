"""The directory that a model's name stands for: one that is there, or this machine's copy of what a hub has.

A hub is asked once, briefly, whether it has the model at all; only from one that has are files fetched, patiently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, constants, is_offline_mode, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from oppo.errors import ConfigError, OppoError, one_line
from oppo.hf.loading.directory import ADAPTER, CONFIG, PICKLED, SAFETENSORS, shards
from oppo.observe import silent

DESCRIBING = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files of a hub that describe a model, or its tokenizer."""


def located(
    name: str | Path,
    *,
    weights: bool,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = silent,
) -> Path:
    """Return the directory that holds a model, or the tokenizer of one; what it holds is not looked at.

    Args:
        name: a directory, or a hub name.
        weights: fetch those too from a hub.
        allow_pickle: as pickles, where the hub has no others.
        trust_remote_code: fetch code too.
        tell: told, in a sentence, that a hub is asked, and what becomes of that.

    Raises:
        ConfigError: there is no such directory, and the name is none of a hub's, or no hub can be asked for it.
    """
    try:
        directory = Path(name).expanduser()
        if directory.is_dir():
            return directory
        if (kept := _asked(str(name), tell)) is not None:
            return kept
        directory = Path(
            snapshot_download(str(name), allow_patterns=[*DESCRIBING, *(["*.py"] if trust_remote_code else [])])
        )
        if weights:
            _fetch(str(name), directory, SAFETENSORS, "adapter_model.safetensors")
        if weights and allow_pickle and not any(directory.glob("*.safetensors")):
            _fetch(str(name), directory, PICKLED, "adapter_model.bin")
    except OppoError:
        raise
    except HFValidationError:
        raise ConfigError(f"{str(name)!r} is no directory here, nor could it be the name of a model at a hub") from None
    except Exception as error:  # any kind: paths that no system has, networks, servers, disks
        raise ConfigError(f"{str(name)!r} could not be had ({one_line(error)})") from error
    return directory


def _fetch(name: str, directory: Path, weights: tuple[str, str], adapter: str) -> None:
    one, index = weights
    snapshot_download(name, allow_patterns=[one, adapter, *shards(directory / index)])


@cache
def _asked(name: str, tell: Callable[[str], None]) -> Path | None:
    """Return the copy that this machine has where no hub can be asked for a model; ``None``: a hub has it.

    The answer holds for the life of the process, so that all models of a run have the patience of one.
    """
    kept = _kept(name)
    try:
        if not is_offline_mode():
            tell(f"{name} is no directory here: asking {constants.ENDPOINT} for it")
        HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # any kind: proxies, certificates, servers and their answers
        if kept is None:
            raise ConfigError(
                f"{name!r} is no directory here, and as a hub name it could not be had ({one_line(error)})"
            ) from error
        if not is_offline_mode():
            tell(f"taking {name} as this machine's copy {kept} has it ({one_line(error)})")
        return kept
    return None


def _kept(name: str) -> Path | None:
    """Return this machine's copy of what a hub had, if there is one.

    Raises:
        HFValidationError: no hub has models of such names.
    """
    for file in (CONFIG, ADAPTER, "tokenizer_config.json", "tokenizer.json"):
        if isinstance(found := try_to_load_from_cache(name, file), str):
            return Path(found).parent
    return None
