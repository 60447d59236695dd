"""A checkpoint is whole or not there, whatever happens to the run that writes it and to the disk afterwards."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from safetensors import SafetensorError

from oppo.errors import CheckpointError
from oppo.run.checkpoint import COMPLETE, Checkpoints, State, read_state, verified, write_state


def written(checkpoints: Checkpoints, step: int, score: float = math.nan) -> None:
    with checkpoints.writing(step, score) as directory:
        write_state(directory, {"step": step})
        (directory / "actor").mkdir()
        (directory / "actor" / "weights").write_bytes(bytes(range(step)))


def test_the_newest_checkpoint_is_what_was_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.newest() is None
    written(checkpoints, 3, 0.5)
    written(checkpoints, 7)
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.step, math.isnan(newest.score), newest.state()) == (7, True, {"step": 7})
    assert (newest.path / "actor" / "weights").read_bytes() == bytes(range(7))


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["$", "$$", "$array"]), inner)
)


@given(state=st.dictionaries(st.text("abc/", max_size=3), TREES))
def test_every_plain_state_comes_back(state: State, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("state")
    write_state(directory, state)
    assert read_state(directory) == state


def test_arrays_come_back_with_type_shape_and_bits_wherever_they_were(tmp_path: Path) -> None:
    arrays: list[NDArray[Any]] = [
        np.arange(3, dtype=np.int32),
        np.array([np.nan, -0.0, np.inf], np.float32),
        np.zeros((0, 4), np.float64),
        np.arange(6).reshape(2, 3).T,
        np.array([True, False]),
    ]
    write_state(tmp_path, {"rows": [{"tokens": array} for array in arrays], "loss": math.inf})
    state = read_state(tmp_path)
    assert state["loss"] == math.inf
    for row, array in zip(state["rows"], arrays, strict=True):
        assert row["tokens"].dtype == array.dtype
        np.testing.assert_array_equal(row["tokens"], array)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": b"bytes"}, "at '/a' came bytes"),
        ({"a": {1: 2}}, "a key of a state is text"),
        ({"a": [object()]}, "at '/a/0' came object"),
        ({"a": np.float32(1)}, "at '/a' came float32"),
    ],
)
def test_what_has_no_place_in_a_state_is_refused_by_its_path(tmp_path: Path, state: State, said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        write_state(tmp_path, state)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "actor/weights", COMPLETE])
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_used(
    tmp_path: Path, name: str, harm: Callable[[Path], None], messages: list[str]
) -> None:
    checkpoints = Checkpoints(tmp_path)
    written(checkpoints, 3)
    written(checkpoints, 4)
    harm(tmp_path / "step-000004" / name)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 3
    assert len(messages) == 1
    assert "step-000004" in messages[0]


@pytest.mark.parametrize(
    "text", ['{"a": {"$array": "/missing"}}', '{"a": {"$array": []}}', "[1]", "[" * 100_000, "\xff"], ids=range(5)
)
def test_a_state_that_cannot_be_read_is_told_and_the_checkpoint_before_it_used(
    tmp_path: Path, text: str, messages: list[str]
) -> None:
    checkpoints = Checkpoints(tmp_path)
    written(checkpoints, 3)
    with checkpoints.writing(4) as path:
        write_state(path, {"a": np.zeros(1)})
        (path / "state.json").write_bytes(text.encode("latin-1"))
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 3
    assert len(messages) == 1
    assert "step-000004" in messages[0]


def test_a_file_too_many_is_damage(tmp_path: Path) -> None:
    written(Checkpoints(tmp_path), 1)
    (tmp_path / "step-000001" / "more").write_text("")
    with pytest.raises(CheckpointError, match="more missing, unexpected or changed"):
        verified(tmp_path / "step-000001")


@pytest.mark.parametrize("step", [-3, 2, None])
def test_a_checkpoint_that_says_it_is_of_another_step_is_none(tmp_path: Path, step: object) -> None:
    written(Checkpoints(tmp_path), 1)
    seal = json.loads((tmp_path / "step-000001" / COMPLETE).read_text())
    (tmp_path / "step-000001" / COMPLETE).write_text(json.dumps(seal | {"step": step}))
    with pytest.raises(CheckpointError, match="is missing, unreadable or of another step"):
        verified(tmp_path / "step-000001")


@pytest.mark.parametrize("kind", [OSError, SafetensorError, Exception])
def test_an_error_while_writing_says_what_it_was_and_leaves_nothing(tmp_path: Path, kind: type[Exception]) -> None:
    checkpoints = Checkpoints(tmp_path)

    def half() -> None:
        with checkpoints.writing(1) as directory:
            (directory / "half").write_text("half")
            raise kind("the disk burns")

    with pytest.raises(CheckpointError, match=r"step-000001 could not be written, .*: the disk burns"):
        half()
    assert not list(tmp_path.iterdir())


def test_an_interruption_while_writing_is_none_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path).writing(1):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_swept_and_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    leftover = tmp_path / ".step-000009.partial"
    leftover.mkdir()
    (leftover / "state.json").write_text("{")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    written(checkpoints, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010"]


@pytest.mark.parametrize("name", [".step-000009.partial", ".final.partial", "final"])
def test_what_a_run_left_before_its_first_checkpoint_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    checkpoints = Checkpoints(tmp_path)
    assert not checkpoints.begun
    written(checkpoints, 10)
    assert checkpoints.begun
    assert {path.name for path in tmp_path.iterdir()} - {"final"} == {"step-000010"}


def test_whether_there_is_a_checkpoint_is_known_without_reading_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert not checkpoints.sealed
    written(checkpoints, 1)
    monkeypatch.setattr("oppo.run.checkpoint.digest", None)
    assert checkpoints.sealed
    (tmp_path / "step-000001" / COMPLETE).unlink()
    assert not checkpoints.sealed


def test_a_step_has_one_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    written(checkpoints, 1)
    with pytest.raises(CheckpointError, match="already"), checkpoints.writing(1):
        pass


def test_a_damaged_checkpoint_makes_room_for_another_of_its_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    written(checkpoints, 1)
    flip(tmp_path / "step-000001" / "state.json")
    written(checkpoints, 1)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.state() == {"step": 1}


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=True)
    for step, score in enumerate([0.1, 0.9, math.nan, 0.9, 0.3, 0.2], 1):
        written(checkpoints, step, score)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000005", "step-000006"]
    seal = json.loads((tmp_path / "step-000002" / COMPLETE).read_text())
    assert seal["score"] == 0.9


@pytest.mark.parametrize("step", [30, 50])
def test_a_checkpoint_that_was_damaged_takes_no_place_of_a_whole_one(tmp_path: Path, step: int) -> None:
    for each in (20, 40):
        written(Checkpoints(tmp_path), each)
    flip(tmp_path / "step-000040" / "state.json")
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest.step == 20
    written(checkpoints, step)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:06d}"]


def test_a_later_checkpoint_is_of_a_past_that_was_given_up_however_good_it_was(tmp_path: Path) -> None:
    for step, score in ((1, 0.1), (3, 0.9)):
        written(Checkpoints(tmp_path), step, score)
    written(Checkpoints(tmp_path, keep_best=True), 2, 0.2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_run_keeps_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep_last must be at least 1, not 0"):
        Checkpoints(tmp_path, keep_last=0)
