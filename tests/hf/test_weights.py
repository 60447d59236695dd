"""The digest of a model's weights."""

from __future__ import annotations

import copy
import os
import signal
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oppo.errors import ModelError, ModelLost, ModelRefused, ProtocolError
from oppo.events import Prompt
from oppo.hf.devices import ModelPlace
from oppo.hf.lora import add_lora, share_base
from oppo.hf.servable import probe
from oppo.hf.serve.scorers import ReferenceLogprobs, RewardModel, ValueModel
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import SharedModel, share, weights_digest
from oppo.models import Sampling, Scorer, Weights
from oppo.placement import Place, Process, Thread
from oppo.placement.child import pack_with_blocks, unpack
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.child import AT, ONE, deadly
from tests.hf.stories import graph_of
from tests.kit.responses import chunk, responses, stream


def test_a_digest_sees_one_bit_in_any_type() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(2, 2).to(dtype)
        before = weights_digest(model)
        assert weights_digest(copy.deepcopy(model)) == before
        with torch.no_grad():
            model.bias[0] = torch.nextafter(model.bias[0].float(), torch.tensor(9.0)) if dtype == torch.float32 else 9.0
        assert weights_digest(model) != before


IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def crossed(model: PreTrainedModel) -> PreTrainedModel:
    packet = pack_with_blocks(SharedModel(model))
    assert len(packet.data) < 200_000, "the weights are in the pickle"
    return cast("SharedModel[PreTrainedModel]", unpack(packet)).load()


@tiny.apart
@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    found: Tensor = model.train(False)(IDS).logits
    return found


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
def test_a_model_crosses_and_follows_what_is_changed_in_place(name: str) -> None:
    for model in (tiny.causal(name), tiny.scalar(name)):
        before, parameters = logits(model), list(model.parameters())
        other = crossed(model)
        assert type(other) is type(model)
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True)), "optimizers hold these"
        assert torch.equal(logits(other), before)
        assert torch.equal(logits(model), before)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.7)
        assert not torch.equal(logits(model), before)
        assert torch.equal(logits(other), logits(model))


def test_tied_weights_stay_tied() -> None:
    config = tiny.CONFIGS["llama"]()
    config.tie_word_embeddings = True
    other = crossed(tiny.of(config))
    assert other.get_input_embeddings().weight is other.get_output_embeddings().weight


def test_what_is_shared_already_is_shared_as_it_is() -> None:
    model = tiny.scalar()
    first = crossed(model)
    before = addresses(model)
    second = crossed(model)
    assert addresses(model) == before
    with torch.no_grad():
        model.get_parameter("score.weight").fill_(3)
    assert all(bool((each.get_parameter("score.weight") == 3).all()) for each in (first, second))


@pytest.mark.adapters
def test_a_reference_over_the_base_of_an_actor_with_adapters_crosses_without_them() -> None:
    actor = tiny.causal()
    reference = share_base(actor)
    add_lora(actor, 4, 8)
    expected = logits(reference)
    other = crossed(reference)
    assert torch.equal(logits(other), expected)
    assert torch.equal(logits(actor), expected)
    shared = set(addresses(reference).values())
    base = {name: address for name, address in addresses(actor).items() if "lora_" not in name}
    assert set(base.values()) <= shared, "the base is in memory once"


def test_tensors_that_overlap_go_on_doing_so() -> None:
    whole = torch.arange(12.0)
    tensors = [whole, whole[4:8], whole.view(3, 4).T, whole[::2]]
    before = [tensor.clone() for tensor in tensors]
    blocks, lying = share(tensors)
    assert len(blocks) == 1
    found = [each.tensor(blocks) for each in lying]
    for tensor, same, expected in zip(tensors, found, before, strict=True):
        assert torch.equal(tensor, expected)
        assert torch.equal(same, expected)
    whole[4] = 100
    assert tensors[1][0] == tensors[2][0, 1] == tensors[3][2] == found[1][0] == 100


def test_a_tensor_keeps_its_alignment_on_which_roundings_depend() -> None:
    buffers = [bytearray(400) for _ in range(6)]
    tensors = [torch.frombuffer(buffer, dtype=torch.float32, offset=0)[k:] for k, buffer in enumerate(buffers)]
    before = [tensor.data_ptr() % 64 for tensor in tensors]
    share(tensors)
    assert [tensor.data_ptr() % 64 for tensor in tensors] == before


def test_a_model_is_trained_in_shared_memory_as_elsewhere() -> None:
    @tiny.apart
    def step(model: PreTrainedModel) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model.train(False)(IDS, labels=IDS).loss.backward()
        optimizer.step()

    alone, shared = tiny.causal(), tiny.causal()
    other = crossed(shared)
    step(alone)
    step(shared)
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), other.parameters(), strict=True))


def test_a_tensor_that_is_not_on_the_cpu_is_refused() -> None:
    with pytest.raises(ModelRefused, match="a model on meta cannot be shared with another process"):
        share([torch.empty(3, device="meta")])


async def assert_same(one: Scorer[object], other: Scorer[object]) -> None:
    made = responses()
    a, b = await stream(one, made, seed=1), await stream(other, made, seed=2)
    for rollout, value in a.items():
        assert np.array_equal(np.asarray(value), np.asarray(b[rollout]))


@pytest.mark.parametrize("name", ["qwen3.5", "falcon-h1", "nemotron-h", "kimi-linear", "lfm2"])
async def test_a_model_with_states_that_was_probed_here_reads_in_a_process_as_in_a_thread(
    name: str, process: Process, thread: Thread
) -> None:
    model = tiny.of(tiny.STATEFUL[name]())
    assert tiny.apart(probe)(model) != "whole"
    one, other = (
        ReferenceLogprobs(model, sampling=Sampling(), place=place, deterministic=True) for place in (thread, process)
    )
    await assert_same(one, other)
    padded = await stream(ReferenceLogprobs(model, sampling=Sampling(), place=process), responses(), seed=3)
    for rollout, values in (await stream(one, responses(), seed=1)).items():
        assert np.allclose(np.asarray(values), np.asarray(padded[rollout]), rtol=1e-4, atol=1e-4)


async def test_the_critic_follows_shared_and_other_weights(process: Process, thread: Thread) -> None:
    model, other = tiny.scalar(seed=0), tiny.scalar(seed=1)
    critic, expected = (ValueModel(model, place=place, deterministic=True) for place in (process, thread))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    versions = [parameter._version for parameter in model.parameters()]
    await critic.load(Weights(1, critic=model.state_dict()))
    assert versions == [parameter._version for parameter in model.parameters()], "nothing was copied"
    await assert_same(critic, expected)
    await critic.load(Weights(2, critic=other.state_dict()))
    assert critic.version == 2
    await assert_same(critic, ValueModel(other, place=thread, deterministic=True))
    with pytest.raises(ModelError, match="cannot take these weights"):
        await critic.load(Weights(3))
    assert critic.version == 2


async def test_errors_name_what_was_wrong_and_the_process_goes_on(process: Process) -> None:
    scorer = RewardModel(tiny.scalar(), place=ModelPlace(process, "reward model", "lower step.batch"))
    prompt = Prompt(7, 7, np.array([5, 6], np.int32), columns={"judge": lambda: "cannot be pickled"})
    await scorer.extend([prompt])
    with pytest.raises(ProtocolError, match=r"rollout 7: .* expected tokens from 0 .* starts at 2"):
        await scorer.extend([chunk(7, 2, prompt.tokens)])
    with pytest.raises(ModelError, match=r"rollout 8 has token ids from 5 to 96"):
        await scorer.extend([Prompt(8, 8, np.array([5, 96], np.int32))])
    hosted = ModelPlace(process, "critic", "lower step.batch").host(partial(torch.Size, [1 << 50]))
    said = r"the critic ran out of memory while it did 'extend': lower step.batch \("
    with pytest.raises(ModelError, match=said):
        await hosted.call("extend", torch.empty)


async def trained(scoring: Place, *, kill_between_steps: bool = False) -> tuple[str, str]:
    """Make three deterministic steps of PPO, with rollouts deferred; return what actor and critic have become."""
    actor, critic = tiny.causal(seed=1), tiny.scalar(seed=3)
    sampling = Sampling(max_new_tokens=40, temperature=0.9, stop=tuple(range(3, 9)), seed=3)
    settings = TrainerSettings(learning_rate=1e-3, epochs=2, minibatches=2)
    prompts = [Prompt(n, n, np.arange(10 + n, 13 + n + n % 5, dtype=np.int32), group=n) for n in range(14)]
    with Thread("decode", setup=ONE) as decoding:
        trainer = HfTrainer(actor, critic, sampling=sampling, place=decoding, settings=settings)
        graph = graph_of(actor, critic, trainer=trainer, acting=decoding, scoring=scoring, sampling=sampling)
        async with graph.open(prompts) as run:
            carried = 0
            async for step in run.steps(3):
                carried += len(step.deferred)
                if kill_between_steps and step.index == 1 and isinstance(scoring, Process):
                    os.kill(scoring.pid, signal.SIGKILL)
    assert carried, "this run is meant to carry rollouts over"
    return weights_digest(actor), weights_digest(critic)


async def test_a_run_is_the_same_though_its_scorers_die_in_the_middle_of_a_call(thread: Thread, tmp_path: Path) -> None:
    (tmp_path / "finish").touch()  # as if it had died there already
    with Process("scorers", setup=partial(deadly, tmp_path), restarts=1) as process:
        assert await trained(process) == await trained(thread)
    assert (tmp_path / "extend").exists()


@pytest.mark.deep
async def test_a_run_is_the_same_though_its_scorers_die_in_extend_in_finish_and_between_steps(
    thread: Thread, tmp_path: Path, messages: list[str]
) -> None:
    undisturbed = await trained(thread)
    with Process("scorers", setup=partial(deadly, tmp_path), restarts=3) as process:
        assert await trained(process, kill_between_steps=True) == undisturbed
    assert len(messages) == 3, messages
    assert all((tmp_path / kind).exists() for kind in AT)
    assert [any(f"did '{kind}'" in message for message in messages) for kind in AT] == [True, True]


async def test_a_run_whose_scorers_are_lost_says_which_rollouts_they_were_at(tmp_path: Path) -> None:
    with Process("scorers", setup=partial(deadly, tmp_path)) as process:
        with pytest.raises(ModelLost, match=r"the process of 'scorers' \(pid \d+\) was killed by SIGKILL") as lost:
            await trained(process)
        (rollouts,) = [note for note in lost.value.__notes__ if "rollouts" in note]
        assert rollouts.startswith("while scoring rollouts [")
        assert not any("while closing" in note for note in lost.value.__notes__)
