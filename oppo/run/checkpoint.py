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
(:func:`oppo.atomic_files.whole`). So after a crash at any moment the newest named checkpoint is whole. One that is
damaged later does not match its digests, and resumption uses the one before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from oppo.atomic_files import is_plain, read_text, remove, whole, writing
from oppo.config.load import load_settings
from oppo.config.sections import RunSection
from oppo.config.settings import Settings, changeable
from oppo.errors import CheckpointError, ConfigError, DataError, OppoError, RunComplete, one_line
from oppo.log import logger
from oppo.report.log import installed
from oppo.report.records import METRICS, Lock, ended, read

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
    """A whole checkpoint on disk after ``step`` steps; scores are compared where their ``measure`` is the same."""

    path: Path
    step: int
    score: float
    measure: str = "score"

    def state(self) -> State:
        state = read_state(self.path)
        run = state.get("run")
        if isinstance(run, Mapping) and (made := run.get("steps", self.step)) != self.step:
            raise CheckpointError(f"{self.path} holds the state after {made!r} steps: it was edited")
        return state


class Checkpoints:
    """The checkpoints of one run: the newest ``keep_last`` and, with ``keep_best``, the one of the highest score."""

    def __init__(self, directory: Path, *, keep_last: int = 2, keep_best: bool = False) -> None:
        if keep_last < 1:
            raise CheckpointError(f"keep_last must be at least 1, not {keep_last}: a run without one cannot be resumed")
        self._directory = directory
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._unusable: set[Path] = set()

    @contextmanager
    def writing(self, step: int, score: float = math.nan, measure: str = "score") -> Iterator[Path]:
        # Then checkpoints beyond the number to keep are deleted, and checkpoints of later steps than a resumed run's.
        path = self._directory / _named(step)
        try:
            if os.path.lexists(path):
                self._discard_damaged(path)
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
        for path in reversed(self._paths()):
            try:
                checkpoint = _usable(path)
            except CheckpointError as error:
                self._unusable.add(path)
                logger.warning(f"{error}; the one before it is tried")
            else:
                return checkpoint
        return None

    @property
    def begun(self) -> bool:
        # a damaged checkpoint counts too
        return bool(self._paths())

    @property
    def sealed(self) -> bool:
        # without the digests of its files, which take time
        return any(_sealed(path) for path in self._paths())

    def _discard_damaged(self, path: Path) -> None:
        try:
            _usable(path)
        except CheckpointError:
            remove(path)
        else:
            raise CheckpointError(f"there is a checkpoint {path} already: each step has one at most")

    def _paths(self) -> list[Path]:
        paths = [path for path in self._directory.glob("step-*") if _NAME.match(path.name)]
        return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))

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
        sealed = [checkpoint for checkpoint in map(_sealed, past) if checkpoint is not None]
        measure = next((checkpoint.measure for checkpoint in sealed if checkpoint.path == newest), "")
        same = [checkpoint for checkpoint in sealed if checkpoint.measure == measure]
        scored = [checkpoint for checkpoint in same if not math.isnan(checkpoint.score)]
        return max(scored, key=lambda checkpoint: checkpoint.score, default=None)


def write_state(directory: Path, state: State) -> None:
    arrays: dict[str, Array] = {}
    plain = _split(state, "", arrays)
    with writing(directory / "state.json"):
        (directory / "state.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    file = directory / "state.safetensors"
    with writing(file):
        save_file({path: np.ascontiguousarray(array) for path, array in arrays.items()}, file)


def read_state(directory: Path) -> State:
    try:
        plain: object = json.loads(read_text(directory / "state.json"))
        state = _joined(plain, load_file(directory / "state.safetensors"))
    except Exception as error:  # safetensors raises errors of its own, and an array may be missing
        raise CheckpointError(f"the state in {directory} cannot be read: {one_line(error)}") from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"the state in {directory} should be a JSON object, but is {type(state).__name__}")
    return state


def verified(path: Path) -> Checkpoint:
    sealed = _sealed(path)
    if sealed is None:
        raise CheckpointError(
            f"{path} is no complete checkpoint: its file {COMPLETE} is missing, unreadable or of another step"
        )
    expected = _digests(json.loads(read_text(path / COMPLETE)))
    there = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_symlink() or not file.is_dir()}
    wrong = sorted(expected.keys() ^ (there - {COMPLETE}))
    wrong += [name for name in sorted(expected.keys() & there) if digest(path / name, linked=False) != expected[name]]
    if wrong:
        raise CheckpointError(f"{path} is damaged: {', '.join(wrong)} missing, unexpected or changed since written")
    return sealed


def _usable(path: Path) -> Checkpoint:
    checkpoint = verified(path)
    checkpoint.state()
    return checkpoint


def _sealed(path: Path) -> Checkpoint | None:
    try:
        if path.is_symlink():
            return None
        seal = json.loads(read_text(path / COMPLETE))
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
        "sha256": {file.relative_to(directory).as_posix(): digest(file) for file in files},
    }
    (directory / COMPLETE).write_text(json.dumps(seal, indent=1) + "\n", encoding="utf-8")


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
            f"${key}" if key.startswith("$") else key: _split(held, f"{path}/{key}", arrays)
            for key, held in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_split(held, f"{path}/{at}", arrays) for at, held in enumerate(value)]
    raise CheckpointError(
        f"a state holds plain values, arrays, lists and mappings; at {path!r} came {type(value).__name__}"
    )


def _joined(plain: object, arrays: Mapping[str, Array]) -> object:
    if isinstance(plain, dict):
        if _ARRAY in plain:
            return arrays[plain[_ARRAY]]
        return {
            key.replace("$$", "$", 1) if key[:2] == "$$" else key: _joined(held, arrays) for key, held in plain.items()
        }
    if isinstance(plain, list):
        return [_joined(held, arrays) for held in plain]
    return plain


CODE = ("rewards", "environment", "agents", "step.algorithm", "step.admission", "step.loss")
"""How the settings begin that name a file of code."""

HELD_OUT = "eval.prompts"  # the setting of prompts that nothing is trained on


@dataclass(frozen=True, slots=True)
class Provenance:
    """Digests of a run's settings, by ``section.key``, and files, by the setting that names each; library versions."""

    settings: Mapping[str, str]
    files: Mapping[str, str]
    libraries: Mapping[str, str]

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(fingerprints(settings), {name: digest(file) for name, file in settings.files.items()}, installed())

    @classmethod
    def restored(cls, state: State) -> Self:
        try:
            recorded, files, libraries = (
                dict[str, str](state["provenance"][name]) for name in ("settings", "files", "libraries")
            )
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint does not say what its run was made of ({type(error).__name__}: {error}): it is of "
                "another version of oppo, or was edited; start a new run"
            ) from error
        return cls(recorded, files, libraries)

    def state(self) -> State:
        return {"provenance": asdict(self)}

    def changed(self, files: Mapping[str, Path]) -> list[Path]:
        return [file for name, file in files.items() if digest(file) != self.files.get(name)]


def require_continued(
    before: Provenance, now: Provenance, files: Mapping[str, Path], *, accept_changed_code: bool
) -> None:
    for name, digest_now in now.files.items():
        if before.files.get(name) == digest_now:
            continue
        file: object = files.get(name, f"what {name} names")
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
    """Return a digest of every setting, by ``section.key`` and ``rewards.0.key``; a value may hold a secret."""
    flat = {f"{name}.{key}": value for name, values in settings.tables().items() for key, value in values.items()}
    flat["rewards"] = sorted(reward.name or "" for reward in settings.rewards)
    return {name: fingerprint(value) for name, value in flat.items()}


def fingerprint(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def digest(path: Path, *, linked: bool = True) -> str:
    """Return the SHA-256 of a file, or of a directory's names and digests; or why it cannot be read."""
    # a pipe may never end, and is not opened
    try:
        if path.is_dir():
            digests = {file.relative_to(path).as_posix(): digest(file) for file in path.rglob("*") if file.is_file()}
            return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
        if not (path.is_file() if linked else is_plain(path)):
            return "no regular file"
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return error.strerror or str(error)


CHECKPOINTS = "checkpoints"  # the checkpoints in a run directory
CLUSTER = "placement.cluster"  # it may change the rounding of sums by whether there is one, and not by its address
DRAINING = "run.checkpoint_every"
"""It may not change with ``step.lookahead``: it decides after which steps none is in flight."""

ENGINE_ARGUMENTS = "vllm."  # before the arguments of vLLM's engine: they may change, as another machine may need others


def settings_of(directory: Path, overrides: Sequence[str] = ()) -> Settings:
    file = directory / "config.toml"
    if not is_plain(file):
        raise ConfigError(f"there is no run to resume in {directory}: expected the file {file}")
    settings = load_settings(file, overrides)
    require_same(fingerprints(load_settings(file)), settings)
    if settings.run_directory.resolve() != directory.resolve():
        raise ConfigError(
            f"{file} is of the run in {settings.run_directory}: a run is resumed where it was, so move it back there"
        )
    return settings


def require_same(before: Mapping[str, str], settings: Settings, *, of: str = "") -> None:
    now = fingerprints(settings)
    changed = {
        key for key, value in before.items() if now.get(key, value) != value and not key.startswith(ENGINE_ARGUMENTS)
    }
    deterministic, schedule = settings.run.deterministic, settings.trainer.schedule
    free, rounding = changeable("free"), changeable("rounding")
    free -= {DRAINING} if settings.step.lookahead else set()
    where = f", and {of} was written with other values than config.toml has" if of else ""
    if refused := sorted(key for key in changed if of_rewards(key) not in free | rounding):
        raise ConfigError(
            f"{', '.join(refused)} cannot change when a run is resumed{where}: put it back as it was, or start a new "
            "run; docs/runs.md says what may change, and when"
        )
    if fingerprint("") not in (before.get(CLUSTER), now[CLUSTER]):
        changed -= {CLUSTER}
    if deterministic and (refused := sorted(key for key in changed if of_rewards(key) in rounding)):
        raise ConfigError(
            f"{', '.join(refused)} cannot change when a run is resumed that is deterministic{where}: sums would be "
            "rounded in another order, and every bit is to be that of an uninterrupted run; start a new run for that"
        )
    if "run.steps" in changed and not schedule.startswith("constant"):
        raise ConfigError(
            f"run.steps cannot change{where}: the {schedule} schedule of the learning rate is laid out over the steps "
            "of the run; start a new run whose models.policy is the actor of its last checkpoint"
        )


def of_rewards(key: str) -> str:
    return re.sub(r"^rewards\.\d+\.", "rewards.N.", key)


def locked(directory: Path) -> Lock:
    try:
        return Lock(directory)
    except OSError as error:
        raise ConfigError(f"the run directory {directory} cannot be written: {error.strerror or error}") from error


def newest(run: RunSection, directory: Path, checkpoints: Checkpoints) -> Checkpoint | None:
    # None: the run was killed before its first checkpoint and begins anew
    checkpoint = checkpoints.newest()
    if checkpoint is None:
        if not checkpoints.begun and 0 < run.checkpoint_every >= sum(1 for _ in read(directory / METRICS)):
            return None
        advice = "a run is resumed from one, and writes them if run.checkpoint_every is set"
        if every := run.checkpoint_every:
            advice = (
                f"a run is resumed from one, and those that this run wrote, after every {every} steps, are damaged or "
                "gone; start a new run"
            )
        raise CheckpointError(f"no checkpoint in {directory / CHECKPOINTS} can be used: {advice}")
    made = ended(directory)
    if made is not None and run.steps <= made:
        raise RunComplete(
            f"the run has made all of its {made} steps: with a constant learning rate, raise run.steps (--set "
            "run.steps=...) to go on"
        )
    return checkpoint
