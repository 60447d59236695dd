"""The fake passes what the real engine passes; one that dies never answers what it owes, and is a lost model."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from oppo.errors import ModelError, ModelLost
from oppo.models import Weights
from oppo.testing import run_virtual
from oppo.vllm.engine import LOOK
from oppo.vllm.processes import failure
from tests.vllm import scenario
from tests.vllm.bench import WEIGHTS, Bench, varied
from tests.vllm.fake_engine import BLOCK, FakeAsyncLLM, engine_of, running


@pytest.mark.parametrize(("overrun", "late"), [(0, 0.0), (2, 0.0), (0, 0.002)])
def test_the_fake_generates_as_vllm_does(overrun: int, late: float) -> None:
    llm = FakeAsyncLLM(length=lambda prompt: 1, overrun=overrun, late=late)

    async def main() -> None:
        async with running(llm):
            await scenario.generating(engine_of(llm), {})

    run_virtual(main)


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_the_fake_scores_and_reads_prompts_as_vllm_does(seconds: float) -> None:
    async def main() -> None:
        engines = [engine_of(FakeAsyncLLM(answers_after=seconds)) for _ in range(2)]
        await scenario.pooling(engines[0], BLOCK, anyio.lowlevel.checkpoint)
        await scenario.reading(engines[1], BLOCK)

    run_virtual(main)


class Silent(FakeAsyncLLM):
    """Dies in a call, which returns no more."""

    def __init__(self, last: str) -> None:
        super().__init__()
        setattr(self, last, self._die)

    async def _die(self, *_: object, **__: object) -> None:
        await anyio.sleep(0.05)
        self.die()
        await anyio.sleep_forever()


@pytest.mark.parametrize("call", ["add_request", "resume_generation", "pause_generation"])
def test_decoding_ends_when_the_engine_dies_in_a_call(call: str) -> None:
    bench = Bench(Silent(call))

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(3)), cut_at=1)

    with pytest.raises(ModelLost, match=r"vLLM has (died|failed).*go on from the newest checkpoint"):
        bench.run(main)


@pytest.mark.parametrize("call", ["reset_prefix_cache", "pause_generation"])
def test_syncing_ends_when_the_engine_dies_in_a_call(call: str) -> None:
    bench = Bench(Silent(call))

    async def main() -> None:
        with anyio.CancelScope(shield=True):
            await bench.policy.load(Weights(1, WEIGHTS))

    with pytest.raises(ModelLost, match="vLLM has died"):
        bench.run(main)


def test_a_call_that_is_answered_takes_no_time_and_raises_its_own_error() -> None:
    async def main() -> None:
        engine, start = engine_of(FakeAsyncLLM()), anyio.current_time()
        async with engine.answered():
            await anyio.sleep(3 * LOOK)
        assert anyio.current_time() == pytest.approx(start + 3 * LOOK)
        with pytest.raises(ModelError, match="its own"):
            async with engine.answered():
                raise ModelError("its own")
        with pytest.raises(ModelLost, match="KeyError: 'unknown'"):
            async with engine.answered(shield=True):
                raise KeyError("unknown")

    run_virtual(main)


def test_a_cancellation_from_outside_waits_for_a_shielded_call_only() -> None:
    async def main() -> None:
        for shield, took in ((False, 1.0), (True, 5.0)):
            start = anyio.current_time()
            with anyio.move_on_after(1.0):
                async with engine_of(FakeAsyncLLM()).answered(shield=shield):
                    await anyio.sleep(5.0)
            assert anyio.current_time() == pytest.approx(start + took)

    run_virtual(main)


def test_an_engine_without_its_share_of_a_gpu_names_the_setting(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("[core] ValueError: Free memory on device is less than desired GPU memory utilization (0.92)\n")
    said = failure("actor", RuntimeError("it ended"), log)
    assert "Free memory on device" in said
    assert "lower vllm.gpu_memory_utilization" in said
