"""What the directory of a model must be before anything of it is read: data, never code."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import CONFIG_MAPPING

from oppo.errors import ConfigError

PICKLES = ("bin", "pt", "pth", "ckpt", "pkl")
"""Suffixes under which weights come as pickles."""


def require_no_code(path: str, *, trusted: bool) -> None:
    """Refuse a directory whose model needs code that comes with it, unless that is trusted.

    Raises:
        ConfigError: it does.
    """
    config = Path(path) / "config.json"
    if trusted or not config.is_file():
        return
    try:
        described: object = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{config} is not valid JSON: {error}") from error
    if isinstance(described, dict) and described.get("auto_map") and described.get("model_type") not in CONFIG_MAPPING:
        code = ", ".join(sorted(entry.name for entry in Path(path).glob("*.py"))) or "elsewhere"
        raise ConfigError(
            f"{path} is a {described.get('model_type')!r}, which transformers does not know, and would run code of "
            f"its own ({code}): read it, and if you trust it set models.trust_remote_code = true"
        )


def require_safetensors(path: str, *, allow_pickle: bool) -> None:
    """Refuse a directory that holds weights as pickles only, unless those are allowed: a pickle can hold any code.

    Raises:
        ConfigError: it does.
    """
    if allow_pickle:
        return
    directory = Path(path)
    pickles = sorted(each.name for suffix in PICKLES for each in directory.glob(f"*.{suffix}"))
    if pickles and not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"{path} holds its weights only as pickles ({', '.join(pickles[:3])}), which can run any code when they "
            "are read: expected *.safetensors. If you trust them, set models.allow_pickle = true, which reads tensors "
            "and builds nothing else, or write the model once with save_pretrained(), which makes safetensors"
        )
