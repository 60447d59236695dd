"""The demo on vLLM, as ``oppo demo --engine vllm --short``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.vllm.real.program import Program

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_it_trains_and_examines_and_leaves_nothing(tmp_path: Path) -> None:
    with Program(["demo", "--engine", "vllm", "--short"], tmp_path) as program:
        assert program.wait(600) == 0, program.said
        assert program.leaves_nothing()
    gain = re.search(r"gain \+([\d.]+) \+- ([\d.]+)", program.said)
    assert gain is not None, program.said
    assert float(gain[1]) > 2 * float(gain[2]), "the score rises"
    folder = tmp_path / "runs" / "demo-1"
    assert json.loads((folder / "summary.json").read_text())
    assert 'engine = "vllm"' in (folder / "config.toml").read_text()
    assert "EngineCore" in (folder / "vllm.log").read_text()
