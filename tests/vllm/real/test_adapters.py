"""Adapters alone on vLLM's engine: it computes what the trainer does, and notices an adapter that has not arrived."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import anyio
import pytest
import torch

from oppo.errors import ModelLost
from oppo.models import Sampling
from oppo.vllm import VllmEngine, VllmPolicy
from oppo.vllm.sync import WeightFiles
from tests.vllm.real.conftest import tiny_actor
from tests.vllm.real.rollouts import adapters_arrive_alone, respond, some, weights

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("adapted")
    tiny_actor().save_pretrained(folder / "actor")
    with VllmEngine.start(folder / "actor", cores=1, adapters=4, log=folder / "vllm.log") as engine:
        yield engine


@pytest.mark.parametrize("kv_on_sync", ["recompute", "keep"])
async def test_tokens_have_the_log_probs_of_the_adapters_that_made_them(
    second: VllmEngine, kv_on_sync: Literal["recompute", "keep"]
) -> None:
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=300, seed=2), kv_on_sync=kv_on_sync)
    await adapters_arrive_alone(policy, kept=kv_on_sync == "keep")


async def test_an_adapter_that_has_not_arrived_ends_the_run(
    second: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=8, seed=2))
    await policy.load(weights(1))

    async def nothing(lora_request: object) -> bool:
        return True

    with monkeypatch.context() as patched:
        patched.setattr(second.llm, "add_lora", nothing)
        with pytest.raises(ModelLost, match=r"could not load the weights of version .*vLLM does not serve"):
            await policy.load(weights(2))


async def test_an_adapter_that_was_changed_on_its_way_is_named(
    second: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=8, seed=2))
    write = WeightFiles.write

    def other(folder: WeightFiles, tensors: dict[str, torch.Tensor], version: str) -> Path:
        return write(folder, {name: each + 1 for name, each in tensors.items()}, version)

    monkeypatch.setattr(WeightFiles, "write", other)
    with pytest.raises(ModelLost, match=r"are not those that the trainer sent: .*lora_A"):
        await policy.load(weights(1))
    with anyio.fail_after(5), pytest.raises(ModelLost, match="nothing is decoded any more"):
        await respond(policy, some(1)[0])
