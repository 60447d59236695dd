"""Checkpoints: directories that are complete or absent.

::

    checkpoints/
      step-000040/
        state.json            plain values of the run's state
        state.safetensors     its arrays, under their paths in it
        ...                   the writer's other files: models by ``save_pretrained``, the optimizer's tensors
        COMPLETE              digest of every file above; written last
      .step-000060.partial/   left by a run that was killed while it wrote; swept by the next

A checkpoint is written under another name, its digests last, and gets its own name once every file is on the disk
(:func:`oppo.durable.whole`). So after a crash at any moment the newest named checkpoint is whole. One that is damaged
later does not match its digests, and resumption uses the one before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from oppo.durable import whole, writing
from oppo.errors import CheckpointError, OppoError, one_line
from oppo.log import logger

Array: TypeAlias = NDArray[Any]
State: TypeAlias = Mapping[str, Any]
"""A tree of plain values (text, numbers, booleans, ``None``), arrays, lists and mappings with text as keys.

It is checked when it is written.
"""

COMPLETE = "COMPLETE"
_ARRAY = "$array"
_NAME = re.compile(r"^step-(\d{6,})$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk.

    Attributes:
        step: steps that the run had made.
        score: of the last of them; NaN without one.
        measure: what that is a score of; only scores of the same are compared.
    """

    path: Path
    step: int
    score: float
    measure: str = "score"

    def state(self) -> State:
        """Return the run's state.

        Raises:
            CheckpointError: the state cannot be read.
        """
        return read_state(self.path)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: holds them; made with the first.
        keep_last: how many of the newest are kept; older ones are deleted once a new one is whole.
        keep_best: keep the one of the highest score too, among those of what the newest is a score of.

    Raises:
        CheckpointError: ``keep_last`` is less than 1.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_last: int = 2,
        keep_best: bool = False,
    ) -> None:
        if keep_last < 1:
            raise CheckpointError(f"keep_last must be at least 1, not {keep_last}: a run without one cannot be resumed")
        self._directory = directory
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._unusable: set[Path] = set()

    @contextmanager
    def writing(self, step: int, score: float = math.nan, measure: str = "score") -> Iterator[Path]:
        """Yield a directory to write into; it becomes the checkpoint of ``step`` if no error ends the context.

        Older checkpoints than are kept are deleted then, and so are those of later steps, which a resumed run gave up.

        Raises:
            CheckpointError: that step has one already, or it could not be written; nothing half-written stays.
        """
        path = self._directory / _named(step)
        if path.exists():
            self._discard_damaged(path)
        try:
            with whole(path) as aside:
                yield aside
                _seal(aside, step, score, measure)
        except OppoError:
            raise
        except Exception as error:  # the body's libraries raise errors of their own
            raise CheckpointError(
                f"the checkpoint {path} could not be written, and nothing half-written is left there: "
                f"{getattr(error, 'strerror', None) or error}"
            ) from error
        self._prune(path)

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole and can be read; log each newer one."""
        for path in reversed(self._paths()):
            try:
                found = verified(path)
                found.state()
            except CheckpointError as error:
                self._unusable.add(path)
                logger.warning(f"{error}; the one before it is tried")
            else:
                return found
        return None

    @property
    def begun(self) -> bool:
        """Whether a checkpoint has ever been named here, whole or not; the models of ``final`` are none."""
        return bool(self._paths())

    @property
    def sealed(self) -> bool:
        """Whether a checkpoint was completed here; its digests are not compared."""
        return any(_sealed(path) for path in self._paths())

    def _discard_damaged(self, path: Path) -> None:
        try:
            verified(path)
        except CheckpointError:
            shutil.rmtree(path)
        else:
            raise CheckpointError(f"there is a checkpoint {path} already: each step has one at most")

    def _paths(self) -> list[Path]:
        found = [path for path in self._directory.glob("step-*") if _NAME.match(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

    def _prune(self, newest: Path) -> None:
        paths = self._paths()
        past = [path for path in paths[: paths.index(newest) + 1] if path not in self._unusable or path == newest]
        kept = set(past[-self._keep_last :])
        if self._keep_best:
            kept |= {best.path} if (best := self._best(past, newest)) is not None else set()
        for path in paths:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _best(self, past: Sequence[Path], newest: Path) -> Checkpoint | None:
        sealed = [found for found in map(_sealed, past) if found is not None]
        measure = next((each.measure for each in sealed if each.path == newest), "")
        scored = [each for each in sealed if each.measure == measure and not math.isnan(each.score)]
        return max(scored, key=lambda each: each.score, default=None)


def write_state(directory: Path, state: State) -> None:
    """Write a state as ``state.json`` and ``state.safetensors``.

    Raises:
        CheckpointError: a value is of a type that no state holds.
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
        CheckpointError: a file cannot be read.
    """
    try:
        plain: object = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        state = _joined(plain, load_file(directory / "state.safetensors"))
    except Exception as error:  # safetensors raises errors of its own, and an array may be missing
        raise CheckpointError(f"the state in {directory} cannot be read: {one_line(error)}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the state in {directory} should be a JSON object, but is {type(state).__name__}")
    return state


def verified(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path`` after comparing every file with its digest.

    Raises:
        CheckpointError: the checkpoint is missing, was never completed, or a file differs from its digest.
    """
    sealed = _sealed(path)
    if sealed is None:
        raise CheckpointError(
            f"{path} is no complete checkpoint: its file {COMPLETE} is missing, unreadable or of another step"
        )
    expected = _digests(json.loads((path / COMPLETE).read_text(encoding="utf-8")))
    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {COMPLETE}
    wrong = sorted(expected.keys() ^ found)
    wrong += [name for name in sorted(expected.keys() & found) if _digest(path / name) != expected[name]]
    if wrong:
        raise CheckpointError(f"{path} is damaged: {', '.join(wrong)} missing, unexpected or changed since written")
    return sealed


def _sealed(path: Path) -> Checkpoint | None:
    try:
        seal = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        _digests(seal)
        score = math.nan if seal["score"] is None else float(seal["score"])
        step = int(seal["step"])
        measure = str(seal.get("measure", "score"))
        return Checkpoint(path, step, score, measure) if path.name == _named(step) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _named(step: int) -> str:
    return f"step-{step:06d}"


def _digests(seal: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return dict(seal["sha256"])


def _seal(directory: Path, step: int, score: float, measure: str = "score") -> None:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    seal = {
        "step": step,
        "score": score if math.isfinite(score) else None,
        "measure": measure,
        "sha256": {file.relative_to(directory).as_posix(): _digest(file) for file in files},
    }
    (directory / COMPLETE).write_text(json.dumps(seal, indent=1) + "\n", encoding="utf-8")


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _split(value: object, path: str, arrays: dict[str, Array]) -> object:
    if isinstance(value, np.ndarray):
        arrays[path] = value
        return {_ARRAY: path}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"a key of a state is text; at {path!r} came {key!r}")
        return {  # a key that could be taken for the mark of an array is escaped
            f"${key}" if key.startswith("$") else key: _split(each, f"{path}/{key}", arrays)
            for key, each in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_split(each, f"{path}/{at}", arrays) for at, each in enumerate(value)]
    raise CheckpointError(
        f"a state holds plain values, arrays, lists and mappings; at {path!r} came {type(value).__name__}"
    )


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
