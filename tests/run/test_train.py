"""From settings to the parts of a run, without its models."""

from __future__ import annotations

import pytest

from oppo.admission import Admission, Overcommit, SlopeAdaptive, TailAdaptive, TailBatched
from oppo.admission.chunking import ChunkSize, Fixed, Tuned, WholeRollout
from oppo.config.sections import StepSection
from oppo.run.graph import admission_of, chunks_of


@pytest.mark.parametrize(
    ("step", "admission"),
    [
        (StepSection(batch=16), Overcommit(16)),
        (StepSection(batch=16, overcommit=3, max_deferrals=1), Overcommit(16, 3, 1)),
        (StepSection(batch=16, admission="adaptive"), TailAdaptive(16, most=4)),
        (
            StepSection(batch=16, admission="adaptive", overcommit=6, staleness_price=0.5, max_deferrals=3),
            TailAdaptive(16, price=0.5, max_deferrals=3, most=6),
        ),
        (StepSection(batch=16, admission="slope"), SlopeAdaptive(16, most=4)),
        (
            StepSection(batch=16, admission="slope-algorithm1", overcommit=8),
            SlopeAdaptive(16, rule="algorithm1", most=8),
        ),
        (StepSection(batch=16, admission="tail-batched"), TailBatched(16)),
    ],
)
def test_settings_name_the_admission_policy(step: StepSection, admission: Admission) -> None:
    assert admission_of(step) == admission


@pytest.mark.parametrize(
    ("step", "chunks"),
    [
        (StepSection(chunk=16), Fixed(16)),
        (StepSection(chunk="whole"), WholeRollout()),
        (StepSection(chunk="tuned"), Tuned(cap=512)),
    ],
)
def test_settings_name_the_chunk_size(step: StepSection, chunks: ChunkSize) -> None:
    assert chunks_of(step, cap=512) == chunks
