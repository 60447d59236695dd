"""What a model's process is told first, so that it computes as the tests' own process does; importable by name."""

from __future__ import annotations

import pytest

from oppo.hf.devices import use_cores

SEGMENT_BYTES = 2048
"""Rows of the suite's tiny models are segmented as those of real ones are."""


CHUNK = 4 * 96 * 7
"""Bytes of the logits of seven tokens of the suite's tiny models."""


def in_chunks() -> None:
    """Compute on one core, and the logits of an update seven tokens at a time."""
    use_cores(1)
    pytest.MonkeyPatch().setattr("oppo.hf.head.LOGITS_BYTES", CHUNK)


def set_up() -> None:
    """Compute on one core and in segments, as in tests."""
    use_cores(1)
    pytest.MonkeyPatch().setattr("oppo.hf.kv.attention.SEGMENT_BYTES", SEGMENT_BYTES)
