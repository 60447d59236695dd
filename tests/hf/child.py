"""What a model's process is told first, so that it computes as the tests' own process does; importable by name."""

from __future__ import annotations

import pytest

from oppo.hf.devices import use_cores

SEGMENT_BYTES = 2048
"""Rows of the suite's tiny models are segmented as those of real ones are."""


def set_up() -> None:
    """Compute on one core and in segments, as in tests."""
    use_cores(1)
    pytest.MonkeyPatch().setattr("oppo.hf.kv.attention.SEGMENT_BYTES", SEGMENT_BYTES)
