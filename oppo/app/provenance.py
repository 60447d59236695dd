"""What a run is made of beside its models: settings, files by their content, libraries; its checkpoints say it.

The files are the prompts and that of a reward function. What that imports is not looked at, nor are directories of
models, which are too large to be read for this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from oppo.app.checkpoint import State
from oppo.errors import CheckpointError, DataError
from oppo.report.log import installed

CODE = "models.reward"
"""The setting that names a file of code."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a run is made of.

    Attributes:
        settings: a digest of each, under ``section.key``.
        files: SHA-256 of each file under the setting that names it.
        libraries: their versions.
    """

    settings: Mapping[str, str]
    files: Mapping[str, str]
    libraries: Mapping[str, str]

    @classmethod
    def of(cls, settings: Mapping[str, str], files: Mapping[str, Path]) -> Self:
        """Return what a run is made of now: with a digest of each setting, files under the settings that name them."""
        return cls(settings, {name: digest(file) for name, file in files.items()}, installed())

    @classmethod
    def restored(cls, state: State) -> Self:
        """Return what :meth:`state` described.

        Raises:
            CheckpointError: it did not.
        """
        try:
            parts = (state["provenance"][name] for name in ("settings", "files", "libraries"))
            return cls(*(dict[str, str](part) for part in parts))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint does not say what its run was made of ({type(error).__name__}: {error}): it is of "
                "another version of oppo, or was edited; start a new run"
            ) from error

    def state(self) -> State:
        """Return this as plain values."""
        return {"provenance": asdict(self)}

    def changed(self, files: Mapping[str, Path]) -> dict[str, Path]:
        """Return those of the files, under the settings that name them, that are not what they were."""
        return {name: file for name, file in files.items() if digest(file) != self.files.get(name)}


def require_continued(
    before: Provenance,
    now: Provenance,
    files: Mapping[str, Path],
    tell: Callable[[str], None],
    *,
    accept_changed_code: bool,
) -> None:
    """Check that a run goes on with the files that it was made of; tell of what may differ and does.

    Args:
        before: what the checkpoint says.
        now: what it is made of now.
        files: of now, under the settings that name them.
        tell: called with a sentence about each difference that is accepted.
        accept_changed_code: go on with another file of code than the run began with.

    Raises:
        DataError: a file is another.
    """
    for name, file in files.items():
        if before.files.get(name) == now.files.get(name):
            continue
        if name != CODE or not accept_changed_code:
            advice = ", or go on with it as it is now (--accept-changed-code)" if name == CODE else ""
            raise DataError(
                f"{file} is not what it was when the run began, and a run goes on with the prompts and the reward "
                f"function that it had: put it back as it was{advice}, or start a new run"
            )
        tell(f"{file} is not what it was when the run began; the run goes on with it as it is now")
    for name, was in before.libraries.items():
        if (found := now.libraries.get(name, "none")) != was:
            tell(f"the run was made with {name} {was} so far, and goes on with {name} {found}")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, or why it cannot be read; what may never end, as a pipe, is not opened."""
    try:
        if not path.is_file():
            return "no regular file"
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return error.strerror or str(error)
