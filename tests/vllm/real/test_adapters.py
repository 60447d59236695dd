"""Adapters alone on vLLM's engine: it computes what the trainer does, and notices an adapter that has not arrived."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oppo.errors import ModelLost
from oppo.events import Chunk, Prompt
from oppo.hf.lora import adapter_matrices, add_lora
from oppo.models import Sampling, Weights
from oppo.vllm import VllmEngine, VllmPolicy
from oppo.vllm.sync import WeightFiles
from tests.kit.responses import read_chunk
from tests.vllm.real import reference
from tests.vllm.real.conftest import tiny_actor

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("adapted")
    tiny_actor().save_pretrained(folder / "actor")
    with VllmEngine.start(folder / "actor", cores=1, adapters=4, log=folder / "vllm.log") as engine:
        yield engine


def adapted(version: int) -> PreTrainedModel:
    """Return the actor with an adapter that changes much of what it says, another in each version."""
    model = tiny_actor()
    add_lora(model, 4, 8, seed=version)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1, generator=generator)
    return model


def weights(version: int) -> Weights:
    model = adapted(version)
    return Weights(version, model.state_dict(), adapters=partial(adapter_matrices, model))


async def respond(policy: VllmPolicy, prompt: Prompt, *, load: Weights | None = None) -> list[Chunk]:
    pieces: list[Chunk] = []
    (decode,) = await policy.open([prompt])
    async with policy.decoding([decode], lambda ended: False):
        while not pieces or pieces[-1].state == "live":
            pieces.append(await read_chunk(decode, 20))
            if load is not None:
                await policy.load(load)
                load = None
    return pieces


@pytest.mark.parametrize("kv_on_sync", ["recompute", "keep"])
async def test_tokens_have_the_log_probs_of_the_adapters_that_made_them(second: VllmEngine, kv_on_sync: str) -> None:
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=300, seed=2), kv_on_sync=kv_on_sync)  # type: ignore[arg-type]
    models = [adapted(version) for version in range(3)]
    await policy.load(weights(1))
    prompt = Prompt(0, 0, np.arange(5, 15, dtype=np.int32))
    pieces = await respond(policy, prompt, load=weights(2))
    assert {int(version) for piece in pieces for version in piece.versions} == {1, 2}
    expected = await reference.logprobs(models, prompt, pieces, kept=kv_on_sync == "keep")
    assert np.allclose(np.concatenate([piece.logprobs for piece in pieces]), expected, atol=TOLERANCE)
    assert policy.sync_metrics["sync/bytes"] < 0.2 * sum(each.nbytes for each in tiny_actor().state_dict().values())
    assert policy.sync_metrics["sync/rounding_loss"] == 0.0


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
        await respond(policy, Prompt(0, 0, np.arange(5, 15, dtype=np.int32)))
