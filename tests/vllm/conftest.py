"""A failure in a script says what it compared; tests of the real engine are those of an environment that has it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytest.register_assert_rewrite("tests.vllm.scenario")

collect_ignore = [] if find_spec("vllm") else ["real"]
