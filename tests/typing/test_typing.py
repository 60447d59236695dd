"""mypy accepts the files of ``accept``, and in those of ``reject`` errs on the lines marked ``# E`` only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted([*(HERE / "accept").glob("*.py"), *(HERE / "reject").glob("*.py")])


@pytest.fixture(scope="module")
def errors() -> set[tuple[str, int]]:
    """The file and line of every error, from one run of the type checker, in the cache that `make types` has filled."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary"]
    checked = subprocess.run([*command, *map(str, FILES)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    found = re.findall(r"^(?:.*/)?(\w+\.py):(\d+): error: ", checked.stdout, re.MULTILINE)
    return {(name, int(line)) for name, line in found}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_exactly_the_marked_lines_are_errors(path: Path, errors: set[tuple[str, int]]) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# E")}
    assert {line for name, line in errors if name == path.name} == marked
    assert bool(marked) == (path.parent.name == "reject")
