"""What is made once is there whole or not at all, and what a killed process has left of it goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from oppo.cli import main
from oppo.demo.assets import made_once
from oppo.report.records import Lock
from tests.forked import Program


def build(aside: Path) -> None:
    (aside / "made").touch()


def fail(aside: Path) -> None:
    build(aside)
    raise ZeroDivisionError


def test_what_a_killed_process_has_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    code = (
        "import sys, threading\nfrom pathlib import Path\nfrom oppo.demo.assets import made_once\n"
        "made_once(Path(sys.argv[1]), lambda aside: (print(aside, flush=True), threading.Event().wait()))"
    )
    with Program(code, [str(tmp_path / "one")]) as program:
        left = Path(program.stdout.readline().strip()).parent
        made_once(tmp_path / "other", build)
        assert left.is_dir(), "its process lives"
        program.kill()
    assert left.is_dir()
    made_once(tmp_path / "third", build)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other", "third"]


def test_one_that_builds_within_another_leaves_it_alone(tmp_path: Path) -> None:
    def both(aside: Path) -> None:
        made_once(tmp_path / "inner", build)
        build(aside)

    made_once(tmp_path / "outer", both)
    assert [(tmp_path / name / "made").exists() for name in ("outer", "inner")] == [True, True]


def test_a_folder_that_somebody_holds_stays(tmp_path: Path) -> None:
    held = tmp_path / ".building-held"
    held.mkdir()
    lock = Lock(held)
    made_once(tmp_path / "one", build)
    assert held.is_dir()
    lock.release()


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        made_once(tmp_path / "one", fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--seed", str(2**63)], "--seed must be less than 2**63, not 9223372036854775808"),
        (["--seed", "one"], 'Invalid value for --seed: unable to convert "one"'),
        (["--directory", "file"], "file is no directory; choose another"),
        (["--directory", "/proc/1/fdinfo/runs"], "the run directory /proc/1/fdinfo/runs/demo-1 cannot be used"),
    ],
)
def test_what_the_demo_cannot_be_asked_for_is_refused_before_anything_is_made(
    options: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPPO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").touch()
    assert main(["demo", "--short", *options]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
