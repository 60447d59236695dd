"""One run writes a directory, and the system frees the lock of one that is gone."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oppo.errors import ConfigError
from oppo.report import RunDirectory
from oppo.report.files import require_unused
from oppo.report.lock import LOCK, Lock, is_locked
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

    monkeypatch.setattr("oppo.report.lock.fcntl.flock", flock)
    mine = Lock(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(ConfigError, match="being written by another run"):
        Lock(tmp_path)
    mine.release()
    assert not (tmp_path / LOCK).exists()


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom pathlib import Path\nfrom oppo.report.lock import Lock\n"
        f"lock = Lock(Path({str(tmp_path)!r}))\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert (tmp_path / LOCK).exists()
    assert not is_locked(tmp_path)
    require_unused(tmp_path)
    Lock(tmp_path).release()
