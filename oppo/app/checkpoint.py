"""Checkpoints: a directory that is there as a whole, or not at all.

::

    checkpoints/
      step-000040/
        state.json            plain values of the run's state
        state.safetensors     its arrays, under their paths in it
        ...                   what else the writer put in: models by ``save_pretrained``, an optimizer's tensors
        COMPLETE              digest of every file above; written last
      .step-000060.partial/   what a run that was killed was writing; swept by the next

A checkpoint is written aside, digests last, every file is brought to the disk, and only then does the directory get its
name (:func:`oppo.durable.whole`). So after a crash at any moment the newest named checkpoint is whole; one that was
damaged later does not match its digests, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from oppo.durable import whole, writing
from oppo.errors import CheckpointError, OppoError
from oppo.observe import silent

Array: TypeAlias = NDArray[Any]
State: TypeAlias = Mapping[str, Any]
"""A tree of plain values (text, numbers, booleans, ``None``), arrays, lists and mappings with text as keys.

What is in it is checked when it is written; who reads it knows what it wrote.
"""

COMPLETE = "COMPLETE"
_ARRAY = "$array"
_NAME = re.compile(r"^step-(\d{6,})$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk.

    Attributes:
        step: steps that were over when it was written.
        score: what told how good the run was then; NaN where nothing did.
    """

    path: Path
    step: int
    score: float

    def state(self) -> State:
        """Return the run's state.

        Raises:
            CheckpointError: it cannot be read.
        """
        return read_state(self.path)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: holds them; made by the first.
        keep_last: how many of the newest are kept; older ones are deleted after a new one is whole.
        keep_best: whether the one of the highest score is kept beside them.
        tell: told, in a sentence, of a checkpoint that cannot be used.

    Raises:
        CheckpointError: ``keep_last`` is less than 1.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 2,
        keep_best: bool = False,
        tell: Callable[[str], None] = silent,
    ) -> None:
        if keep_last < 1:
            raise CheckpointError(f"keep_last must be at least 1, not {keep_last}: a run without one cannot be resumed")
        self._directory = directory
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._tell = tell
        self._unusable: set[Path] = set()

    @contextmanager
    def writing(self, step: int, score: float = math.nan) -> Iterator[Path]:
        """Yield a directory to write into; when the context ends well it becomes the checkpoint of ``step``.

        Then older ones than are kept are deleted, and those of later steps: they are of a past that was given up.

        Raises:
            CheckpointError: there is one of that step already, or it could not be written; nothing half-written stays.
        """
        path = self._directory / _named(step)
        if path.exists():
            self._discard_damaged(path)
        try:
            with whole(path) as aside:
                yield aside
                _seal(aside, step, score)
        except OppoError:
            raise
        except Exception as error:  # whatever the body writes with has errors of its own
            raise CheckpointError(
                f"the checkpoint {path} could not be written, and nothing half-written is left there: "
                f"{getattr(error, 'strerror', None) or error}"
            ) from error
        self._prune(path)

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; ``tell`` hears of each newer one that is not."""
        for path in reversed(self._paths()):
            try:
                return verified(path)
            except CheckpointError as error:
                self._unusable.add(path)
                self._tell(f"{error}; the one before it is tried")
        return None

    @property
    def begun(self) -> bool:
        """Whether anything has ever been saved here, whole or not, but for what killed runs have left half-written."""
        return any(not path.name.endswith(".partial") for path in self._directory.glob("*"))

    @property
    def sealed(self) -> bool:
        """Whether there is a checkpoint that was completed; whether it is still whole nobody has looked."""
        return any(_sealed(path) for path in self._paths())

    def _discard_damaged(self, path: Path) -> None:
        """Delete a checkpoint that is in the way of a new one, unless it is whole."""
        try:
            verified(path)
        except CheckpointError:
            shutil.rmtree(path)
        else:
            raise CheckpointError(f"there is a checkpoint {path} already: each step has one at most")

    def _paths(self) -> list[Path]:
        """Return the named checkpoints, whole or not, oldest first."""
        found = [path for path in self._directory.glob("step-*") if _NAME.match(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def _prune(self, newest: Path) -> None:
        paths = self._paths()
        past = [path for path in paths[: paths.index(newest) + 1] if path not in self._unusable or path == newest]
        kept = set(past[-self._keep_last :])
        if self._keep_best:
            scored = [sealed for sealed in map(_sealed, past) if sealed is not None and not math.isnan(sealed.score)]
            kept |= {max(scored, key=lambda sealed: sealed.score).path} if scored else set()
        for path in paths:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)


def write_state(directory: Path, state: State) -> None:
    """Write a state as ``state.json`` and ``state.safetensors``.

    Raises:
        CheckpointError: a value has no place in a state.
    """
    arrays: dict[str, Array] = {}
    plain = _split(state, "", arrays)
    with writing(directory / "state.json"):
        (directory / "state.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    file = directory / "state.safetensors"
    with writing(file):
        save_file({path: np.ascontiguousarray(array) for path, array in arrays.items()}, file)


def read_state(directory: Path) -> State:
    """Return what :func:`write_state` wrote; sequences come back as lists.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        plain: object = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        arrays = load_file(directory / "state.safetensors")
    except Exception as error:  # safetensors raises an error of its own
        raise CheckpointError(f"the state in {directory} cannot be read: {error}") from error
    whole = _joined(plain, arrays)
    if not isinstance(whole, Mapping):
        raise CheckpointError(f"the state in {directory} should be a JSON object, but is {type(whole).__name__}")
    return whole


def verified(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path`` after comparing every file with its digest.

    Raises:
        CheckpointError: it is not there, was never completed, or is not what was written.
    """
    sealed = _sealed(path)
    if sealed is None:
        raise CheckpointError(
            f"{path} is no complete checkpoint: its file {COMPLETE} is missing, unreadable or of another step"
        )
    expected = _digests(json.loads((path / COMPLETE).read_text(encoding="utf-8")))
    there = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {COMPLETE}
    wrong = sorted(expected.keys() ^ there)
    wrong += [name for name in sorted(expected.keys() & there) if _digest(path / name) != expected[name]]
    if wrong:
        raise CheckpointError(f"{path} is damaged: {', '.join(wrong)} missing, unexpected or changed since written")
    return sealed


def _sealed(path: Path) -> Checkpoint | None:
    """Return what ``COMPLETE`` says of a checkpoint, without looking at its other files."""
    try:
        seal = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        _digests(seal)
        score = math.nan if seal["score"] is None else float(seal["score"])
        step = int(seal["step"])
        return Checkpoint(path, step, score) if path.name == _named(step) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _named(step: int) -> str:
    return f"step-{step:06d}"


def _digests(seal: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return dict(seal["sha256"])


def _seal(directory: Path, step: int, score: float) -> None:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    seal = {
        "step": step,
        "score": score if math.isfinite(score) else None,
        "sha256": {file.relative_to(directory).as_posix(): _digest(file) for file in files},
    }
    (directory / COMPLETE).write_text(json.dumps(seal, indent=1) + "\n", encoding="utf-8")


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _split(value: object, path: str, arrays: dict[str, Array]) -> object:
    """Return ``value`` with its arrays moved to ``arrays``, each named by its path."""
    if isinstance(value, np.ndarray):
        arrays[path] = value
        return {_ARRAY: path}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"a key of a state is text; at {path!r} came {key!r}")
        return {_escaped(key): _split(each, f"{path}/{key}", arrays) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_split(each, f"{path}/{at}", arrays) for at, each in enumerate(value)]
    raise CheckpointError(
        f"a state holds plain values, arrays, lists and mappings; at {path!r} came {type(value).__name__}"
    )


def _escaped(key: str) -> str:
    """Return a key that is not taken for the mark of an array."""
    return f"${key}" if key.startswith("$") else key


def _joined(plain: object, arrays: Mapping[str, Array]) -> object:
    if isinstance(plain, dict):
        if _ARRAY in plain:
            return arrays[plain[_ARRAY]]
        return {
            key.replace("$$", "$", 1) if key[:2] == "$$" else key: _joined(each, arrays) for key, each in plain.items()
        }
    if isinstance(plain, list):
        return [_joined(each, arrays) for each in plain]
    if plain is None or isinstance(plain, bool | int | float | str):
        return plain
    raise CheckpointError(f"a state cannot hold {type(plain).__name__}")
