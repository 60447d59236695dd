"""The example of vLLM: a real model learns what its reward says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]


def test_the_score_rises() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "04_vllm.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    steps = re.findall(r"step \d+: score ([\d.]+), deferred (\[.*?\]), .* mismatch (\S+)", ran.stdout)
    scores = [float(score) for score, _, _ in steps]
    assert scores[0] < 0.6
    assert sum(scores[-2:]) / 2 > 0.85
    assert any(deferred != "[]" for _, deferred, _ in steps)
    assert all(float(mismatch) < 1e-6 for _, _, mismatch in steps)
