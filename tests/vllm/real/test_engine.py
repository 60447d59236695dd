"""Engines that are started and ended: their arguments, their weights, their processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from oppo.errors import ConfigError, ModelLost
from oppo.events import Prompt
from oppo.hf.lora import add_lora, merged
from oppo.models import Piece, Sampling, Weights
from oppo.vllm import VllmEngine, VllmPolicy
from oppo.vllm.arguments import require_arguments
from tests.vllm.real.conftest import VOCABULARY

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

TOLERANCE = 1e-4


def tied_actor(seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        actor: PreTrainedModel = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=256,
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
    with VllmEngine.start(folder / "actor", cores=1, log=folder / "vllm.log", tell=told.append) as engine:
        yield engine


async def respond(policy: VllmPolicy, prompt: Prompt) -> Piece:
    (decode,) = await policy.open([prompt])
    async with policy.decoding([decode], lambda ended: False):
        return await decode.read(1000)


async def logprobs(model: PreTrainedModel, prompt: Prompt, piece: Piece) -> list[float]:
    @torch.no_grad()
    def forward() -> list[float]:
        sequence = torch.tensor([[*prompt.tokens.tolist(), *piece.tokens.tolist()]])
        every = model(sequence).logits[0, len(prompt.tokens) - 1 : -1].log_softmax(-1)
        return [float(each) for each in every[range(len(piece.tokens)), piece.tokens.tolist()]]

    return await anyio.to_thread.run_sync(forward)


def test_arguments_are_those_of_the_installed_version() -> None:
    require_arguments({"max_num_seqs": 4, "tensor_parallel_size": 1, "quantization": None})
    with pytest.raises(ConfigError, match=r"vllm\.max_num_seq: .* did you mean vllm\.max_num_seqs\?"):
        require_arguments({"max_num_seq": 4})
    with pytest.raises(ConfigError, match=r"vllm\.logprobs_mode is set by oppo, since log-probs are over the ids"):
        require_arguments({"logprobs_mode": "raw_logprobs"})


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(folder: Path) -> None:
    log = folder / "failed.log"
    with pytest.raises(
        ConfigError, match=r"vLLM could not be started with .*; everything that it wrote is in"
    ) as error:
        VllmEngine.start(folder / "actor", arguments={"max_model_len": 100_000}, log=log)
    assert "max_model_len" in str(error.value)
    assert children() == {}


def test_it_tells_what_it_does_and_writes_to_its_log(second: VllmEngine, told: list[str], folder: Path) -> None:
    assert told[0] == "starting vLLM with actor"
    assert told[-1].startswith("vLLM is ready after ")
    assert "EngineCore" in (folder / "vllm.log").read_text()
    assert (second.vocabulary, second.longest) == (VOCABULARY, 256)
    assert len(second.pids) == 1


async def test_tied_weights_are_published_whole(second: VllmEngine) -> None:
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=40, seed=2))
    prompt = Prompt(0, 0, np.arange(5, 15, dtype=np.int32))
    for version in range(1, 4):
        model = tied_actor(version)
        await policy.load(Weights(version, model.state_dict()))
        piece = await respond(policy, prompt)
        assert set(piece.versions.tolist()) == {version}
        assert np.allclose(piece.logprobs, await logprobs(model, prompt, piece), atol=TOLERANCE)


async def test_adapters_are_published_merged(second: VllmEngine) -> None:
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


async def test_weights_of_another_model_end_the_run(second: VllmEngine) -> None:
    """They are refused before anything is loaded: the file cannot be read."""
    before = tied_actor(7)
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=8, seed=2))
    await policy.load(Weights(1, before.state_dict()))
    missing = Path("/nowhere/weights.safetensors")
    with pytest.raises(ModelLost, match="could not load the weights"):
        await second.sender._load(second.llm, missing, "broken")  # type: ignore[attr-defined]  # the file's own step
    prompt = Prompt(0, 0, np.arange(5, 15, dtype=np.int32))
    piece = await respond(policy, prompt)
    assert np.allclose(piece.logprobs, await logprobs(before, prompt, piece), atol=TOLERANCE), (
        "the weights that it had are still served"
    )


async def test_a_killed_engine_is_a_lost_model_within_five_seconds(second: VllmEngine) -> None:
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=200, seed=2))
    decodes = await policy.open([Prompt(k, k, np.arange(5, 15, dtype=np.int32)) for k in range(3)])
    killed: list[float] = []

    async def decode_and_kill() -> None:
        async with policy.decoding(decodes, lambda ended: False):
            await decodes[0].read(5)
            (core,) = second.pids
            os.kill(core, signal.SIGKILL)
            killed.append(time.monotonic())
            await decodes[0].read(1000)

    with pytest.raises(ModelLost, match="go on from the newest checkpoint"):
        await decode_and_kill()
    assert time.monotonic() - killed[0] < 5
    with pytest.raises(ModelLost):
        await policy.load(Weights(1, {}))
    for decode in decodes:
        await decode.aclose()


def children() -> dict[int, str]:
    """Return the processes below this one that belong to an engine, by id."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            status = (entry / "status").read_text() if entry.name.isdecimal() else ""
        except OSError:  # it has ended meanwhile
            continue
        name = status.partition("\n")[0]
        if "VLLM" in name and f"PPid:\t{os.getpid()}\n" in status:
            found[int(entry.name)] = name
    return found
