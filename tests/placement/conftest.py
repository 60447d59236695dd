"""Children are new interpreters here, as they are for users."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="package")
def _children_are_forked() -> None:
    """Leave them as they are."""
