"""The theorem on staleness (``oppo/stages/update.py``) and what it rests on, under every schedule together.

Deferral, steps in flight, weights that come in flight, units that join while others are decoded, and units that are
rejected: any of them, in any run.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from oppo.testing import run_virtual
from tests.kit.pipelines import Pipeline, Setting, motions
from tests.stages.test_dynamic_sampling import CARRIED, Selected

SCHEDULES = int(os.environ["OPPO_SCHEDULES"])
"""As many as are asked for, not a share of them."""

ALL = replace(CARRIED, lookahead=2, refill=True, in_flight=True, extra=4, update=0.5)


@pytest.mark.schedules
@settings(max_examples=SCHEDULES)
@given(motions(), st.booleans())
@example(ALL, True)
@example(ALL, False)
@example(replace(ALL, extra=1, max_deferrals=1, lookahead=3), True)
@example(replace(ALL, prompts=7, steps=4), True)
def test_no_token_is_older_than_deferral_and_lookahead_allow(setting: Setting, rejects: bool) -> None:
    setting = replace(setting, samples=setting.samples + rejects)
    pipeline = Selected(setting) if rejects else Pipeline(setting)
    run_virtual(pipeline.run)
    ended: Counter[int] = Counter()
    for step, (batch, report) in enumerate(zip(pipeline.batches, pipeline.reports, strict=True)):
        staleness = step - batch.versions[batch.sampled]
        assert 0 <= staleness.min(initial=0) <= staleness.max(initial=0) <= setting.max_deferrals + setting.lookahead
        assert report.metrics.get("staleness/max", 0) == staleness.max(initial=0)
        assert len(batch) <= setting.batch * setting.samples
        assert len(batch.deferred) <= setting.most_carried
        assert max((event.age for event in batch.deferred), default=0) <= setting.max_deferrals
        ended.update([*batch.rollouts, *(drop.rollout for drop in batch.dropped)])
    assert max(ended.values(), default=1) == 1, "none is trained or rejected twice"
    carried = {event.rollout for event in pipeline.batches[-1].deferred} if pipeline.batches else set[int]()
    assert sorted({*ended, *carried}) == list(range(len(ended) + len(carried))), "none is left out"
    assert np.all([len(batch) == setting.batch * setting.samples for batch in pipeline.batches[:-1]]) or rejects
