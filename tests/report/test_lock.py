"""One run writes a directory, and the system frees the lock of one that is gone."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

import pytest

from oppo.durable import put
from oppo.errors import ConfigError
from oppo.report import RunDirectory, RunLog
from oppo.report.records import LOCK, Lock, is_locked, require_unused, rewind, taken
from tests.report.synthetic import play


def test_a_directory_that_is_being_written_is_refused_by_the_process_that_does(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "x") as directory:
        play(directory)
        with pytest.raises(ConfigError, match=rf"being written by another run \(process {os.getpid()}\)"):
            RunDirectory(tmp_path / "x")
        with pytest.raises(ConfigError, match="being written by another run"):
            require_unused(tmp_path / "x")
    assert not (tmp_path / "x" / LOCK).exists()
    with pytest.raises(ConfigError, match="is already used"):
        require_unused(tmp_path / "x")


def test_two_that_come_at_once_cannot_both_have_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    with pytest.raises(ConfigError, match="being written by another run"):
        Lock(tmp_path)
    assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n", "the one that lost has changed nothing"
    lock.release()
    lock.release()
    Lock(tmp_path).release()


def test_a_lock_on_a_file_that_its_owner_has_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One opened the file, its owner removed and released it, a third made another: both thought they had it."""
    locking, owner = fcntl.flock, [Lock(tmp_path)]

    def flock(file: int, how: int) -> None:
        if owner:
            owner.pop().release()
        locking(file, how)

    monkeypatch.setattr("oppo.report.records.fcntl.flock", flock)
    mine = Lock(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(ConfigError, match="being written by another run"):
        Lock(tmp_path)
    mine.release()
    assert not (tmp_path / LOCK).exists()


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom pathlib import Path\nfrom oppo.report.records import Lock\n"
        f"lock = Lock(Path({str(tmp_path)!r}))\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert (tmp_path / LOCK).exists()
    assert not is_locked(tmp_path)
    require_unused(tmp_path)
    Lock(tmp_path).release()


WRITERS: dict[str, Callable[[Path], object]] = {
    LOCK: Lock,
    ".x.partial": lambda folder: put(folder / "x", ["text"]),
    "log.jsonl": lambda folder: RunLog(folder / "log.jsonl", "run"),
    "metrics.jsonl": RunDirectory,
    "x.damaged": lambda folder: rewind(folder / "x", 1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_link_in_a_run_directory_leads_to_is_left_alone(name: str, tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "run"
    target.write_text("precious\n")
    folder.mkdir()
    (folder / name).symlink_to(target)
    if name == "x.damaged":
        (folder / "x").write_text("damaged\n")
    with suppress(OSError, ConfigError), ExitStack() as stack:
        held = WRITERS[name](folder)
        if isinstance(held, Lock):
            stack.callback(held.release)
        elif isinstance(held, AbstractContextManager):
            stack.enter_context(held)
    assert target.read_text() == "precious\n"


def test_a_lock_that_is_a_link_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be"):
        RunDirectory(tmp_path)
    assert not (tmp_path / "target").exists()
    assert "process unknown" in taken(tmp_path)


@pytest.mark.parametrize("look", [is_locked, RunDirectory])
def test_a_lock_that_is_a_pipe_is_refused_and_nobody_waits_for_its_writer(
    look: Callable[[Path], object], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises((OSError, ConfigError), match=f"{LOCK} is no plain file"):
        look(tmp_path)


def test_what_a_killed_process_left_of_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".x.partial").write_text("half")
    put(tmp_path / "x", ["whole"])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x": "whole"}
