"""The fakes of vLLM's engine pass what the real one passes in ``tests/vllm/real/test_surface.py``."""

from __future__ import annotations

from types import SimpleNamespace

import anyio

from oppo.testing import run_virtual
from oppo.vllm.scorers import ScoringCollector, ScoringLLM
from oppo.vllm.surface import AsyncEngine, Collector
from tests.vllm import fake_engine, fake_pooling, scenario
from tests.vllm.fake_engine import FakeAsyncLLM, running
from tests.vllm.fake_pooling import FakePooling, FakePrompts


def test_they_have_the_calls_that_are_made() -> None:
    assert scenario.differences(FakeAsyncLLM, AsyncEngine) == []
    assert scenario.differences(fake_engine.Collector, Collector) == []
    assert scenario.differences(FakePooling, ScoringLLM) == []
    assert scenario.differences(fake_pooling.Collector, ScoringCollector) == []


def test_a_difference_is_found() -> None:
    class Other:
        def abort(self, ids: object, reason: object) -> None:
            raise NotImplementedError

    found = scenario.differences(Other, ScoringLLM)
    assert found == [
        "Other has no errored",
        "Other has no add_request",
        "Other.abort: no parameter request_id",
        "Other.abort: needs ids",
        "Other.abort: needs reason",
        "Other.abort: is awaited in one of them only",
        "Other.abort: takes self, request_id in another order",
        "Other has no collective_rpc",
    ]


def test_the_fake_that_generates_does_what_vllm_does() -> None:
    for overrun, late in ((0, 0.0), (2, 0.0), (0, 0.002)):
        llm = FakeAsyncLLM(length=lambda prompt: 1, overrun=overrun, late=late)

        async def main(llm: FakeAsyncLLM = llm) -> None:
            async with running(llm):
                await scenario.generating(
                    scenario.Engine(llm, lambda keywords: SimpleNamespace(**keywords), fake_engine.BLOCK, None)
                )

        run_virtual(main)


def test_the_fake_that_scores_does_what_vllm_does() -> None:
    for seconds in (0.0, 0.1):
        params = fake_pooling.PoolingParams(task="classify", use_activation=False)
        run_virtual(
            scenario.pooling, FakePooling(seconds=seconds), params, fake_pooling.BLOCK, anyio.lowlevel.checkpoint
        )


def test_the_fake_that_reads_prompts_does_what_vllm_does() -> None:
    params = fake_pooling.SamplingParams(**scenario.READING)
    run_virtual(scenario.reading, FakePrompts(), params, fake_pooling.BLOCK)
