"""The files of a run directory, and whether a new run may write it: it is unused, or its run made no step."""

from __future__ import annotations

import json
import os
from pathlib import Path

from oppo.errors import ConfigError
from oppo.report.lock import LOCK, is_locked, taken
from oppo.report.records import EVALUATIONS, read

METRICS, SAMPLES, WORK, REPORT = "metrics.jsonl", "samples.jsonl", "work.jsonl", "report.html"

SUMMARY = "summary.json"
"""Written last, however the run ends."""

STEPLESS = frozenset(
    {
        "config.toml",
        METRICS,
        SAMPLES,
        WORK,
        EVALUATIONS,
        "journal.jsonl",
        "trace.json",
        SUMMARY,
        REPORT,
        "log.jsonl",
        "hang-report.json",
        "vllm.log",
    }
)
"""The files that a run may leave without having made a step."""


def ended(path: Path) -> int | None:
    """Return the steps of a complete run, whose trained models are saved; ``None`` for any other."""
    try:
        facts: dict[str, object] = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        steps = facts["steps"] if facts["complete"] is True else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return steps if type(steps) is int else None


def require_unused(path: Path) -> None:
    """Check that a new run could write ``path``, which may have to be made.

    Raises:
        ConfigError: it holds steps of another run, is being written by one, is no directory, or cannot be written.
    """
    try:
        nearest = next(each for each in (path, *path.parents) if each.exists())
        writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
        if writable and nearest == path:
            if is_locked(path):
                raise ConfigError(taken(path))
            require_stepless(path)
    except OSError as error:
        raise ConfigError(f"the run directory {path} cannot be used: {error.strerror or error}") from error
    if not writable:
        fault = "cannot be written to" if nearest.is_dir() else "is no directory"
        raise ConfigError(f"the run directory {path} cannot be used: {nearest} {fault}; choose another run.directory")


def require_stepless(path: Path) -> None:
    """Check that a directory holds at most the files of a run that made no step.

    Raises:
        ConfigError: it holds others, or records of steps.
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
    """Delete the files of a run that made no step, except its logs, which the next run continues.

    Raises:
        OSError: a file cannot be deleted.
    """
    for name in STEPLESS - {"log.jsonl", "vllm.log"}:
        (path / name).unlink(missing_ok=True)
