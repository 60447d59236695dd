"""The demo's models learn on vLLM what they learn on transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.vllm.learning import SEEDS, measure

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_three_seeds_gain_half_of_what_transformers_gains_in_the_mean(tmp_path: Path) -> None:
    found = measure(tmp_path)
    assert len(found.gains) == SEEDS == 3
    assert found.seeds >= 5
    assert min(found.gains) >= found.transformers / 2, found
