"""The directory of a model by name: a local one, or this machine's copy of a hub's.

A hub is asked once, with a short timeout, whether it has the model; files are fetched only from one that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, constants, is_offline_mode, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from oppo.errors import ConfigError, OppoError, did_you_mean_path, one_line
from oppo.hf.loading.directory import ADAPTER, CONFIG, PICKLED, SAFETENSORS, shards
from oppo.observe import silent

METADATA = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files of a hub that describe a model or its tokenizer."""


def located(
    name: str | Path,
    *,
    weights: bool,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = silent,
) -> Path:
    """Return the directory of a model or tokenizer, without checking its contents.

    Args:
        name: a directory, or a hub name.
        weights: fetch weights too from a hub.
        allow_pickle: fetch pickles if the hub has no other weights.
        trust_remote_code: fetch code too.
        tell: receives a sentence when a hub is contacted, or a local copy is used instead.

    Raises:
        ConfigError: there is no such directory, and no hub has a model of that name or can be reached.
    """
    try:
        directory = Path(name).expanduser()
        if directory.is_dir():
            return directory
        if (copy := _copy_without_hub(str(name), tell)) is not None:
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
    except HFValidationError:
        guess = did_you_mean_path(Path(name).expanduser().absolute())
        raise ConfigError(
            f"{str(name)!r} is no directory here{guess}, nor could it be the name of a model at a hub"
        ) from None
    except Exception as error:  # any kind: paths that no system has, networks, servers, disks
        raise ConfigError(f"{str(name)!r} could not be had ({one_line(error)})") from error
    return directory


def _fetch(name: str, directory: Path, weights: tuple[str, str], adapter: str) -> None:
    whole, index = weights
    snapshot_download(name, allow_patterns=[whole, adapter, *shards(directory / index)])


@cache
def _copy_without_hub(name: str, tell: Callable[[str], None]) -> Path | None:
    """Return this machine's copy if no hub can be asked for a model; ``None`` if a hub has the model.

    The answer holds for the life of the process, so that a run waits for it once per name.

    Raises:
        ConfigError: no hub can be asked, and there is no copy.
        HFValidationError: the name is not a valid hub name.
    """
    files = (CONFIG, ADAPTER, "tokenizer_config.json", "tokenizer.json")
    cached = [found for file in files if isinstance(found := try_to_load_from_cache(name, file), str)]
    copy = Path(cached[0]).parent if cached else None
    try:
        if not is_offline_mode():
            tell(f"{name} is no directory here: asking {constants.ENDPOINT} for it")
        HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # any kind: proxies, certificates, servers and their answers
        if copy is None:
            guess = did_you_mean_path(Path(name).absolute())
            raise ConfigError(
                f"{name!r} is no directory here{guess}, and as a hub name it could not be had ({one_line(error)})"
            ) from error
        if not is_offline_mode():
            tell(f"taking {name} as this machine's copy {copy} has it ({one_line(error)})")
        return copy
    return None
