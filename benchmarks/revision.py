"""The code of another commit of this repository, for comparisons with it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import CHECKOUT
from oppo.errors import ConfigError


@contextmanager
def checkout(revision: str | None, folder: Path) -> Iterator[Path]:
    """Yield a folder that holds a commit; the working tree without one.

    Raises:
        ConfigError: the repository has no such commit.
    """
    if revision is None:
        yield CHECKOUT
        return
    command = ["git", "worktree", "add", "--quiet", "--detach", str(folder), revision]
    made = subprocess.run(command, cwd=CHECKOUT, check=False, capture_output=True, text=True)
    if made.returncode != 0:
        raise ConfigError(f"commit {revision!r} cannot be checked out: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=CHECKOUT, check=True)
