"""The files that a run is made of beside its settings, and whether they are still what they were.

These are the prompts and the file of a reward function. What that file imports is not looked at, nor are directories of
models, which are too large to be read for this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from oppo.config import Settings


def files_of(settings: Settings) -> dict[str, Path]:
    """Return each file under the setting that names it."""
    files = {"data.prompts": Path(settings.data.prompts)}
    if (function := settings.models.reward_file) is not None:
        files["models.reward"] = function
    return files


def digests(settings: Settings) -> dict[str, str]:
    """Return what tells one content of each file from another, under the setting that names the file."""
    return {setting: digest(file) for setting, file in files_of(settings).items()}


def changed(settings: Settings, before: Mapping[str, str], now: Mapping[str, str] | None = None) -> list[Path]:
    """Return the files that are not what they were.

    Args:
        settings: of the run.
        before: what :func:`digests` returned then.
        now: what it returned later; ``None``: what it returns at this moment.
    """
    now = digests(settings) if now is None else now
    return [file for setting, file in files_of(settings).items() if now.get(setting) != before.get(setting)]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or why it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return error.strerror or str(error)
