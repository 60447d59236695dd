"""Paths of a settings file: relative to its folder, absolute once they are resolved."""

from __future__ import annotations

from pathlib import Path

from oppo.errors import ConfigError


def resolved(text: str, folder: Path) -> str:
    """Return a path of a file in ``folder`` as an absolute one.

    Raises:
        ConfigError: it cannot be followed.
    """
    try:
        return str((folder / Path(text).expanduser()).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, an unknown ~user, a NUL
        raise ConfigError(f"{text!r} is no path that can be followed: {error}") from error
