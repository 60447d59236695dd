"""A directory is there as a whole or not at all, and one that is replaced is there until the new one is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from oppo.atomic_files import make, put, sweep, temporary, whole
from oppo.report import RunDirectory
from oppo.report.run_dir import RECORDS


def written(path: Path, text: str) -> None:
    with whole(path) as aside:
        fill(aside, text)


def fill(folder: Path, text: str) -> None:
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text(text)


def there(folder: Path) -> dict[str, str]:
    """Return the text in each directory of a folder, by its name."""
    return {each.name: (each / "inner" / "file").read_text() for each in folder.iterdir()}


def test_what_is_written_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    for text in ("old", "new"):
        written(tmp_path / "deep" / "final", text)
        assert there(tmp_path / "deep") == {"final": text}


def test_what_cannot_be_written_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    def half() -> None:
        with whole(tmp_path / "final") as aside:
            (aside / "half").write_text("ha")
            raise KeyboardInterrupt

    written(tmp_path / "final", "old")
    with pytest.raises(KeyboardInterrupt):
        half()
    assert there(tmp_path) == {"final": "old"}


def test_what_cannot_be_given_its_name_stays_beside_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "final", "old")
    renaming = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == ".final.partial":
            raise PermissionError(13, "Permission denied")
        return renaming(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match=r"Permission denied; all that was written is in .*\.final\.partial"):
        written(tmp_path / "final", "new")
    assert there(tmp_path) == {"final": "old", ".final.partial": "new"}


@pytest.mark.parametrize(
    ("left", "comes"),
    [
        ({"final": "old", ".final.partial": "ne"}, "old"),
        ({".final.before": "old", ".final.partial": "new"}, "old"),
        ({".final.before": "old", "final": "new"}, "new"),
    ],
)
def test_a_kill_at_any_moment_leaves_one_of_the_two(tmp_path: Path, left: dict[str, str], comes: str) -> None:
    for name, text in left.items():
        fill(tmp_path / name, text)
    sweep(tmp_path)
    assert there(tmp_path) == {"final": comes}


@pytest.fixture
def operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reached the disk, in order, and what was renamed on the way; paths are relative to ``tmp_path``."""
    operations: list[str] = []
    syncing, renaming, replacing = os.fsync, Path.rename, Path.replace

    def fsync(descriptor: int) -> None:
        operations.append(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path).as_posix())
        syncing(descriptor)

    def rename(path: Path, target: Path) -> Path:
        operations.append(f"{path.name} -> {target.name}")
        return renaming(path, target)

    def replace(path: Path, target: Path) -> Path:
        operations.append(f"{path.name} -> {target.name}")
        return replacing(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(Path, "replace", replace)
    return operations


def test_all_of_a_directory_is_on_the_disk_before_it_has_its_name(tmp_path: Path, operations: list[str]) -> None:
    written(tmp_path / "deep" / "final", "new")
    aside = "deep/.final.partial"
    assert operations[0] == ".", "where deep was made"
    assert sorted(operations[1:4]) == [aside, f"{aside}/inner", f"{aside}/inner/file"]
    assert operations[4:] == [".final.partial -> final", "deep"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, operations: list[str]) -> None:
    put(tmp_path / "summary.json", ["{}"])
    assert operations == [".summary.json.partial", ".summary.json.partial -> summary.json", "."]


def test_records_that_are_settled_are_on_the_disk(tmp_path: Path, operations: list[str]) -> None:
    with RunDirectory(tmp_path / "x", trace=0) as directory:
        operations.clear()
        directory.flush()
        assert operations == [*(f"x/{name}" for name in RECORDS), "x"]


def test_directories_are_made_once(tmp_path: Path) -> None:
    for _ in range(2):
        make(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_temporary_directories_of_killed_processes_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    program = (
        "import os, signal\nfrom oppo.atomic_files import temporary\n"
        "with temporary('test') as folder:\n    print(folder, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    own = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    killed = subprocess.run([sys.executable, "-c", program], check=False, env=own, stdout=subprocess.PIPE)
    (left,) = tmp_path.iterdir()
    assert killed.stdout.decode().strip() == str(left)
    other = tmp_path / left.name.replace("test", "tent")
    other.mkdir()
    (tmp_path / f"{left.name}-link").symlink_to(other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        with temporary("test") as one, temporary("test") as two:
            assert not left.exists()
            assert other.exists()
            assert one.exists()
            assert two.exists()
    assert not one.exists()
    assert not two.exists()
