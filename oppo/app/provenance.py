"""Provenance of a run: settings, files by their content, libraries. Checkpoints record it.

The files are the prompts, and those of a reward function, an environment, an algorithm and other parts of one's own.
The modules that these import are left out, and so are model directories, which are too large to be read for this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from oppo.app.checkpoint import State
from oppo.config.load import OF_REWARDS, OLD, RENAMED
from oppo.config.settings import Settings
from oppo.errors import CheckpointError, DataError
from oppo.log import logger
from oppo.report.log import installed

CODE = ("rewards", "environment", "step.algorithm", "step.admission", "step.loss")
"""How the settings begin that name a file of code."""

HELD_OUT = "eval.prompts"
"""The setting of prompts that nothing is trained on."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Settings, files and libraries of a run, models apart.

    Attributes:
        settings: a digest of each, under ``section.key``.
        files: SHA-256 of each file, directory, or other source of prompts, under the setting that names it.
        libraries: their versions.
    """

    settings: Mapping[str, str]
    files: Mapping[str, str]
    libraries: Mapping[str, str]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return what a run with these settings is made of now."""
        return cls(fingerprints(settings), {name: digest(file) for name, file in settings.files.items()}, installed())

    def with_digests(self, digests: Mapping[str, str]) -> Provenance:
        """Return this with the digests of sources that are no files."""
        return replace(self, files={**self.files, **digests})

    @classmethod
    def restored(cls, state: State, settings: Settings) -> Self:
        """Return the provenance from :meth:`state`, of a run with these settings.

        Raises:
            CheckpointError: the state holds none.
        """
        try:
            recorded, files, libraries = (
                dict[str, str](state["provenance"][name]) for name in ("settings", "files", "libraries")
            )
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint does not say what its run was made of ({type(error).__name__}: {error}): it is of "
                "another version of oppo, or was edited; start a new run"
            ) from error
        return cls(under_todays_keys(recorded, settings), under_todays_keys(files, settings), libraries)

    def state(self) -> State:
        """Return this as plain values."""
        return {"provenance": asdict(self)}

    def changed(self, settings: Settings) -> list[Path]:
        """Return the files of ``settings`` whose content is no longer the recorded one."""
        return [file for name, file in settings.files.items() if digest(file) != self.files.get(name)]


def require_continued(before: Provenance, now: Provenance, settings: Settings, *, accept_changed_code: bool) -> None:
    """Check that a resumed run has the files it began with; report the differences that are accepted.

    Args:
        before: recorded in the checkpoint.
        accept_changed_code: accept another content of a file of code.

    Raises:
        DataError: a file has changed.
    """
    for name, digest_now in now.files.items():
        if before.files.get(name) == digest_now:
            continue
        file: object = settings.files.get(name, f"what {name} names")
        if name.startswith(HELD_OUT):
            logger.warning(
                f"{file} is not what it was when the run began: held-out scores from now on are of other prompts"
            )
            continue
        if not name.startswith(CODE) or not accept_changed_code:
            advice = ", or go on with it as it is now (--accept-changed-code)" if name.startswith(CODE) else ""
            raise DataError(
                f"{file} is not what it was when the run began, and a run goes on with the prompts and the code "
                f"that it had: put it back as it was{advice}, or start a new run"
            )
        logger.warning(f"{file} is not what it was when the run began; the run goes on with it as it is now")
    for name, was in before.libraries.items():
        if (version := now.libraries.get(name, "none")) != was:
            logger.warning(f"the run was made with {name} {was} so far, and goes on with {name} {version}")


def fingerprints(settings: Settings) -> dict[str, str]:
    """Return a digest of every setting, under ``section.key``: a value may hold a secret, in a URL for example.

    Those of the rewards are under ``rewards.0.key`` and so on; ``rewards`` is which there are.
    """
    flat = {f"{name}.{key}": value for name, values in settings.tables().items() for key, value in values.items()}
    flat["rewards"] = sorted(each.name or "" for each in settings.rewards)
    return {name: fingerprint(value) for name, value in flat.items()}


def under_todays_keys(before: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """Return digests that an earlier version recorded under the keys of today; those of today as they are.

    Args:
        settings: of the run, which say where each reward is.
    """
    homes = {f"models.reward.{each.name}": key for key, each in settings.reward_tables.items()}
    several = any(key.startswith("models.reward.") for key in before)
    found, absent = dict[str, str](), fingerprint(None)
    for key, value in sorted(before.items(), reverse=True):  # first what was for all rewards, models.reward_...
        table, _, last = key.rpartition(".")
        if key in homes:  # a file
            found[f"{homes[key]}.source"] = value
        elif table in homes:
            if value != absent:
                found[f"{homes[table]}.{OF_REWARDS.get(last, last)}"] = value
        elif key == "models.reward":
            found["rewards" if several else "rewards.0.source"] = value
        elif key in OLD and key not in RENAMED:
            found |= {OLD[key].replace("rewards.N", home): value for home in homes.values()}
        else:
            found[RENAMED.get(key, key)] = value
    return found


def fingerprint(value: object) -> str:
    """Return the digest of a setting's value."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or why it cannot be read; a pipe, which may never end, is not opened.

    That of a directory is the SHA-256 of its files' names and digests.
    """
    try:
        if path.is_dir():
            found = {file.relative_to(path).as_posix(): digest(file) for file in path.rglob("*") if file.is_file()}
            return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
        if not path.is_file():
            return "no regular file"
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return error.strerror or str(error)
