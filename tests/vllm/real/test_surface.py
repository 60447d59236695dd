"""vLLM's engine does what the fakes of the other tests do, by the same scripts."""

from __future__ import annotations

import pytest
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from oppo.vllm import VllmEngine
from oppo.vllm.scorers import ScoringCollector, ScoringLLM
from oppo.vllm.surface import AsyncEngine, Collector
from oppo.vllm.sync import WeightFile, fingerprints, untied
from tests.vllm import scenario
from tests.vllm.real.conftest import tiny_actor

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_it_has_the_calls_that_are_made() -> None:
    for real, protocol in (
        (AsyncLLM, AsyncEngine),
        (AsyncLLM, ScoringLLM),
        (RequestOutputCollector, Collector),
        (RequestOutputCollector, ScoringCollector),
    ):
        assert scenario.differences(real, protocol) == []


@pytest.mark.asyncio(loop_scope="session")
async def test_it_does_what_the_fake_does(engine: VllmEngine) -> None:
    file = WeightFile()
    sent = tiny_actor().state_dict()
    file.write(sent)
    update = {"path": str(file.path), "prints": fingerprints(untied(sent))}
    weights = WeightTransferUpdateRequest(update_info=update)
    block = int(engine.config.cache_config.block_size)
    await scenario.generating(scenario.Engine(engine.llm, engine.params, block, weights))
