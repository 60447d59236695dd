"""Engines that are started and ended: their arguments, their weights, their processes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from oppo.errors import ModelError, ModelLost
from oppo.events import Chunk, FloatArray, Prompt
from oppo.hf.lora import add_lora, merged
from oppo.log import routed
from oppo.models import Sampling, Weights
from oppo.vllm import VllmEngine, VllmPolicy
from oppo.vllm.sync import FileSender, WeightFiles
from tests.kit.responses import read_chunk
from tests.vllm.real import reference
from tests.vllm.real.conftest import VOCABULARY

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

TOLERANCE = 1e-4


def tied_actor(seed: int, *, intermediate_size: int = 128, num_hidden_layers: int = 2) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        actor: PreTrainedModel = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=intermediate_size,
                num_hidden_layers=num_hidden_layers,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=2048,
                initializer_range=0.2,
                tie_word_embeddings=True,
                bos_token_id=1,
                eos_token_id=2,
            )
        )
    actor.eval()
    return actor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    tied_actor(0).save_pretrained(folder / "actor")
    return folder


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def second(folder: Path, told: list[str]) -> Iterator[VllmEngine]:
    """An engine of its own: the last test kills it."""
    with routed(told.append), VllmEngine.start(folder / "actor", cores=1, log=folder / "vllm.log") as engine:
        yield engine


async def respond(policy: VllmPolicy, prompt: Prompt) -> Chunk:
    (decode,) = await policy.open([prompt])
    async with policy.decoding([decode], lambda ended: False):
        return await read_chunk(decode, 1000)


async def logprobs(model: PreTrainedModel, prompt: Prompt, piece: Chunk) -> FloatArray:
    return await reference.logprobs([model] * (1 + int(piece.versions.max())), prompt, [piece])


async def test_it_tells_what_it_does_and_writes_to_its_log(second: VllmEngine, told: list[str], folder: Path) -> None:
    assert told[0] == "starting vLLM with actor"
    assert told[-1].startswith("vLLM is ready after ")
    assert "EngineCore" in (folder / "vllm.log").read_text()
    assert (second.vocabulary, second.longest) == (VOCABULARY, 2048)
    assert len(second.pids) == 1


async def test_tied_weights_are_synced_whole(second: VllmEngine) -> None:
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=40, seed=2))
    prompt = Prompt(0, 0, np.arange(5, 15, dtype=np.int32))
    for version in range(1, 4):
        model = tied_actor(version)
        await policy.load(Weights(version, model.state_dict()))
        piece = await respond(policy, prompt)
        assert set(piece.versions.tolist()) == {version}
        assert np.allclose(piece.logprobs, await logprobs(model, prompt, piece), atol=TOLERANCE)


async def test_adapters_are_synced_merged(second: VllmEngine) -> None:
    model = tied_actor(5)
    add_lora(model, 4, 8, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=40, seed=2))
    await policy.load(Weights(1, model.state_dict(), merge=partial(merged, model)))
    prompt = Prompt(0, 0, np.arange(5, 15, dtype=np.int32))
    piece = await respond(policy, prompt)
    assert np.allclose(piece.logprobs, await logprobs(model, prompt, piece), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_hidden_layers": 1}, "12 missing (model.layers.1."),
        ({"num_hidden_layers": 3}, "12 unknown (model.layers.2."),
        ({"intermediate_size": 96}, "6 of another shape (model.layers.0.mlp.gate_proj.weight [96, 64], not [128, 64]"),
    ],
    ids=["fewer layers", "more layers", "other shapes"],
)
async def test_weights_of_another_model_are_refused_and_the_old_ones_served(
    second: VllmEngine, changes: dict[str, int], fault: str
) -> None:
    before, other = tied_actor(7), tied_actor(8, **changes)
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=8, seed=2))
    await policy.load(Weights(1, before.state_dict()))
    with pytest.raises(ModelError, match=rf"^these are not the weights of actor, .*{re.escape(fault)}"):
        await policy.load(Weights(2, other.state_dict()))
    prompt = Prompt(0, 0, np.arange(5, 15, dtype=np.int32))
    piece = await respond(policy, prompt)
    assert set(piece.versions.tolist()) == {1}
    assert np.allclose(piece.logprobs, await logprobs(before, prompt, piece), atol=TOLERANCE)


async def test_an_update_that_the_workers_refuse_ends_the_run(
    second: VllmEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file cannot be read; it is read whole before anything changes, but of that nobody can be sure."""
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=8, seed=2))
    monkeypatch.setattr(WeightFiles, "write", lambda files, tensors, version: tmp_path / "nothing")
    monkeypatch.setattr(second, "sender", FileSender())
    with pytest.raises(ModelLost, match="could not load the weights"):
        await policy.load(Weights(1, tied_actor(7).state_dict()))
    (decode,) = await policy.open([Prompt(0, 0, np.arange(5, 15, dtype=np.int32))])
    with pytest.raises(ModelLost, match="nothing is decoded any more"):
        async with policy.decoding([decode], lambda ended: False):
            await decode.read(1)


async def test_the_weights_of_another_update_are_not_served(
    second: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a file system of several machines goes on reading what a name once held."""
    policy, write = VllmPolicy(second, sampling=Sampling(max_new_tokens=8, seed=2)), WeightFiles.write
    stale = {name: tensor + (name == "model.norm.weight") for name, tensor in tied_actor(7).state_dict().items()}
    monkeypatch.setattr(WeightFiles, "write", lambda files, tensors, version: write(files, stale, version))
    monkeypatch.setattr(second, "sender", FileSender())
    with pytest.raises(ModelLost, match=r"tensors are not those that the trainer sent: model\.norm\.weight is float32"):
        await policy.load(Weights(1, tied_actor(7).state_dict()))


async def test_an_engine_killed_while_it_decodes_is_a_lost_model(second: VllmEngine) -> None:
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=1500, seed=2))
    decodes = await policy.open([Prompt(k, k, np.arange(5, 15, dtype=np.int32)) for k in range(3)])

    async def decode_and_kill() -> None:
        async with policy.decoding(decodes, lambda ended: False):
            await decodes[0].read(5)
            (core,) = second.pids
            os.kill(core, signal.SIGKILL)
            await decodes[0].read(1000)

    with (
        anyio.fail_after(60),
        pytest.raises(ModelLost, match=rf"go on from the newest checkpoint .* is in {re.escape(str(second.log))}"),
    ):
        await decode_and_kill()
    with pytest.raises(ModelLost):
        await policy.load(Weights(1, {}))
    for decode in decodes:
        await decode.aclose()
