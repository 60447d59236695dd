"""Models at a hub: whether it has them, or this machine has a copy; asked without torch, before anything is loaded."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, constants, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, though not marked as exported

from oppo.errors import ConfigError, did_you_mean_path, one_line
from oppo.log import logger


def copy_without_hub(name: str) -> Path | None:
    """Return this machine's copy of a model that no hub has now, ``None`` if one has it; raise ``ConfigError`` without.

    The answer holds for the life of the process, so that a run waits for it once per name.
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        guess = did_you_mean_path(Path(name).expanduser().absolute())
        raise ConfigError(
            f"{name!r} is no directory here{guess}, nor could it be the name of a model at a hub"
        ) from None
    online = not is_offline_mode()
    if online:
        logger.once(f"{name} is no directory here: asking {constants.ENDPOINT} for it")
    copy, why = _copy_and_why(name)
    if copy is not None and online:
        logger.once(f"taking {name} as this machine's copy {copy} has it ({why})")
    return copy


@cache
def _copy_and_why(name: str) -> tuple[Path | None, str]:
    files = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")
    cached = [found for file in files if isinstance(found := try_to_load_from_cache(name, file), str)]
    copy = Path(cached[0]).parent if cached else None
    try:
        HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # any kind: proxies, certificates, servers and their answers
        if copy is None:
            guess = did_you_mean_path(Path(name).absolute())
            raise ConfigError(
                f"{name!r} is no directory here{guess}, and as a hub name it could not be had ({one_line(error)})"
            ) from error
        return copy, one_line(error)
    return None, ""
