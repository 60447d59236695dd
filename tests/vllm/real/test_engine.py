"""Engines that are started and ended: what they say and where, their arguments, weights and processes."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from oppo.atomic_files import temporary
from oppo.errors import ConfigError, ModelError, ModelLost
from oppo.events import Prompt
from oppo.hf.lora import add_lora, merged
from oppo.log import routed
from oppo.models import Sampling, Weights
from oppo.vllm import VllmEngine, VllmPolicy
from oppo.vllm.arguments import OWNED, SETTINGS, VALUES, check_arguments, known_arguments
from oppo.vllm.sync import FileSender, WeightFiles
from tests.vllm.real.conftest import VOCABULARY, engine_processes
from tests.vllm.real.rollouts import assert_of, respond, some, whole

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


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


PROMPT = Prompt(0, 0, np.arange(5, 15, dtype=np.int32))


async def assert_serves(policy: VllmPolicy, model: PreTrainedModel, version: int) -> None:
    pieces = await respond(policy, PROMPT)
    assert {each for piece in pieces for each in piece.versions.tolist()} == {version}
    await assert_of([model] * (1 + version), [PROMPT], [pieces])


async def test_it_tells_what_it_does_and_writes_to_its_log(second: VllmEngine, told: list[str], folder: Path) -> None:
    assert told[0] == "starting vLLM with actor"
    assert told[-1].startswith("vLLM is ready after ")
    assert "EngineCore" in (folder / "vllm.log").read_text()
    assert (second.vocabulary, second.longest) == (VOCABULARY, 2048)
    assert len(second.pids) == 1


async def test_tied_weights_are_synced_whole(second: VllmEngine) -> None:
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=40, seed=2))
    for version in range(1, 4):
        model = tied_actor(version)
        await policy.load(Weights(version, model.state_dict()))
        await assert_serves(policy, model, version)


async def test_adapters_are_synced_merged(second: VllmEngine) -> None:
    model = tied_actor(5)
    add_lora(model, 4, 8, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=40, seed=2))
    await policy.load(Weights(1, model.state_dict(), merge=partial(merged, model)))
    await assert_serves(policy, model, 1)


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
    await assert_serves(policy, before, 1)


async def test_an_update_that_the_workers_refuse_ends_the_run(
    second: VllmEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file cannot be read; it is read whole before anything changes, but of that nobody can be sure."""
    policy = VllmPolicy(second, sampling=Sampling(max_new_tokens=8, seed=2))
    monkeypatch.setattr(WeightFiles, "write", lambda files, tensors, version: tmp_path / "nothing")
    monkeypatch.setattr(second, "sender", FileSender())
    with pytest.raises(ModelLost, match="could not load the weights"):
        await policy.load(Weights(1, tied_actor(7).state_dict()))
    (decode,) = await policy.open([PROMPT])
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
    decodes = await policy.open([replace(PROMPT, rollout=k, admission=k) for k in range(3)])

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


EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
}


def mixture(name: str, seed: int) -> PreTrainedModel:
    config = AutoConfig.for_model(
        name,
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **EXPERTS[name],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train(mode=False)
    return model


async def synced(engine: VllmEngine, trained: PreTrainedModel) -> None:
    """Check that tokens after a weight sync are those of the trained model."""
    policy = VllmPolicy(engine, sampling=Sampling(max_new_tokens=16, stop=(2,), seed=1))
    await policy.load(Weights(1, trained.state_dict()))
    prompts = some(3)
    await assert_of([trained, trained], prompts, await whole(policy, prompts))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
async def test_experts_are_synced(name: str, tmp_path: Path) -> None:
    mixture(name, seed=0).save_pretrained(tmp_path)
    with VllmEngine.start(tmp_path, arguments={"max_model_len": 128}, cores=1, log=tmp_path / "vllm.log") as engine:
        await synced(engine, mixture(name, seed=1))


async def test_an_engine_that_passes_over_weights_is_lost_and_names_the_layer(tmp_path: Path) -> None:
    """vLLM's loader of GPT-OSS writes past the reload of layers."""
    mixture("gpt_oss", seed=0).save_pretrained(tmp_path)
    with (
        VllmEngine.start(tmp_path, arguments={"max_model_len": 128}, cores=1, log=tmp_path / "vllm.log") as engine,
        pytest.raises(ModelLost, match=r"GptOssForCausalLM took no weights for \d+ layers, model\.layers\.0"),
    ):
        await synced(engine, mixture("gpt_oss", seed=1))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder for temporary files, with room for a socket's name after its own."""
    with temporary("test") as folder:
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        yield folder


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    before = engine_processes()
    yield
    gc.collect()
    assert engine_processes() <= before


def test_arguments_are_those_of_the_installed_version() -> None:
    check_arguments({"max_num_seqs": 4, "tensor_parallel_size": 1, "quantization": None})
    with pytest.raises(ConfigError, match=r"vllm\.max_num_seq: .* did you mean vllm\.max_num_seqs\?"):
        check_arguments({"max_num_seq": 4})
    assert known_arguments() >= OWNED.keys() | SETTINGS.keys() | VALUES.keys(), "nothing is refused that is no more"


@pytest.mark.parametrize("named", [True, False], ids=["a file of its own", "a temporary file"])
@pytest.mark.usefixtures("nothing_is_left")
def test_an_engine_that_cannot_start_says_why_and_where_it_said_more(
    directory: Path, tmp_path: Path, short: Path, named: bool
) -> None:
    log = tmp_path / "failed.log" if named else None
    with pytest.raises(ConfigError, match=r"^vLLM could not be started with .*; everything that it wrote is") as error:
        VllmEngine.start(directory, arguments={"kv_cache_memory_bytes": 1}, log=log)
    (written,) = [log] if log else short.rglob("*.log")
    assert str(error.value).endswith(str(written))
    assert "No available memory" in str(error.value), "what its process said, not that it ended"
    assert "Traceback" in written.read_text()


@pytest.mark.usefixtures("nothing_is_left")
def test_a_temporary_log_and_sockets_go_with_an_engine_that_ends_well(directory: Path, short: Path) -> None:
    with VllmEngine.start(directory, arguments={"max_num_seqs": 4}, cores=1) as engine:
        assert short in engine.log.parents
        assert "EngineCore" in engine.log.read_text()
        assert [path for path in engine.log.parent.iterdir() if path.is_socket()]
    assert not [path for path in short.iterdir() if not path.name.startswith("torchinductor")]


def test_an_argument_that_breaks_a_run_is_refused_in_a_program_too(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"vllm\.stream_interval is set by oppo, since a token must arrive before"):
        VllmEngine.start(directory, arguments={"stream_interval": 8})
    with pytest.raises(ConfigError, match=r"vllm\.enable_chunked_prefill = true ends vLLM's engine on a CPU"):
        VllmEngine.start(directory, arguments={"enable_chunked_prefill": True})
