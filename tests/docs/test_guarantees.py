"""``docs/guarantees.md``: the tests that it names are there, and so are enough reports of faults elsewhere."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
ELSEWHERE = PAGE.partition("\n## Issue elsewhere, test here\n")[2].partition("\n## ")[0]


@cache
def functions(file: str) -> frozenset[str]:
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_file_that_is_named_is_there() -> None:
    files = re.findall(r"`(tests/[\w/]+\.py)(?:::\w+)?`", PAGE)
    assert len(files) > 80
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert [f"{file}::{name}" for file, name in named if name not in functions(file)] == []


def test_every_report_has_a_test_and_is_named_once() -> None:
    rows = [line for line in ELSEWHERE.splitlines() if line.startswith("| [")]
    reports = [re.findall(r"https://github\.com/([\w./-]+/(?:issues|pull)/\d+)", row) for row in rows]
    assert [row for row, found in zip(rows, reports, strict=True) if len(found) != 1 or "::test_" not in row] == []
    assert len({found[0] for found in reports}) == len(rows) >= 25
