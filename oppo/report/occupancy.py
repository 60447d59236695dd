"""Whether a new run may write a run directory: one that is unused, or holds what a run has left that made no step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import cast

from oppo.errors import ConfigError
from oppo.report.lock import LOCK, is_locked, taken
from oppo.report.records import read

METRICS, SAMPLES, REPORT = "metrics.jsonl", "samples.jsonl", "report.html"

SUMMARY = "summary.json"
"""Written last, however the run ends; :func:`ended` reads it."""

STEPLESS = frozenset(
    {
        "config.toml",
        METRICS,
        SAMPLES,
        "journal.jsonl",
        "trace.json",
        SUMMARY,
        REPORT,
        "log.jsonl",
        "hang-report.json",
    }
)
"""What a run may leave that has made no step."""


def ended(path: Path) -> int | None:
    """Return after how many steps a run came to its end, everything it learned saved; ``None``: it has not."""
    try:
        facts: dict[str, object] = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        return cast("int", facts["steps"]) if facts["complete"] is True else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def require_unused(path: Path) -> None:
    """Check that a run could write ``path``: nothing of another run's steps is in it, and it can be made.

    Raises:
        ConfigError: it is used, is being written by another run, is no directory, or cannot be written.
    """
    try:
        there = next(each for each in (path, *path.parents) if each.exists())
        fit = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        if fit and there == path:
            if is_locked(path):
                raise ConfigError(taken(path))
            require_stepless(path)
    except OSError as error:
        raise ConfigError(f"the run directory {path} cannot be used: {error.strerror or error}") from error
    if not fit:
        what = "cannot be written to" if there.is_dir() else "is no directory"
        raise ConfigError(f"the run directory {path} cannot be used: {there} {what}; choose another run.directory")


def require_stepless(path: Path) -> None:
    """Check that nothing is in a directory but what a run has left that made no step.

    Raises:
        ConfigError: it is used.
    """
    used = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
    if STEPLESS.issuperset(used) and next(read(path / METRICS), None) is None:
        return
    resumable = any(path.glob("checkpoints/step-*"))
    advice = [f"go on with `oppo resume {path}`"] if resumable else []
    raise ConfigError(
        f"the run directory {path} is already used (it holds {', '.join(used[:3])}"
        f"{', ...' if len(used) > 3 else ''}): {', '.join([*advice, 'choose another run.name'])}, or remove it"
    )


def clear(path: Path) -> None:
    """Delete what a run has left that made no step, but for its log, which goes on.

    Raises:
        OSError: a file cannot be deleted.
    """
    for name in STEPLESS - {"log.jsonl"}:
        (path / name).unlink(missing_ok=True)
