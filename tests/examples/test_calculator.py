"""The example with a calculator: the policy learns to call it."""

from __future__ import annotations

from importlib import import_module

import anyio
import numpy as np

example = import_module("examples.07_calculator")


def test_the_policy_learns_to_call_the_calculator() -> None:
    scores = [report.score for report in anyio.run(example.train)]
    assert np.mean(scores[:3]) < 0.5
    assert np.mean(scores[-5:]) > 0.8
