"""A failure in a script says what it compared."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.vllm.scenario")
