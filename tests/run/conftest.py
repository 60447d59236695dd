"""A workplace for each module of tests of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.workplace import furnish


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("workplace"))
