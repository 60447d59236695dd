"""The example of GRPO: a real model learns what its reward says, without a critic."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module

import numpy as np

from oppo import StepReport

train: Callable[[int], Awaitable[list[StepReport]]] = import_module("examples.03_grpo").train


async def test_the_score_rises() -> None:
    reports = await train(12)
    scores = [report.score for report in reports]
    assert scores[0] < 0.6
    assert np.mean(scores[-2:]) > 0.85
    assert any(report.deferred for report in reports)
    for report in reports:
        groups = {rollout // 8 for rollout in report.trained}
        assert report.trained == tuple(8 * group + k for group in sorted(groups) for k in range(8))
        assert report.metrics["policy/kl_avg"] >= 0
        assert "loss/value_avg" not in report.metrics
