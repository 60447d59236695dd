"""Shared weights: the model that crosses computes the same and follows changes, and nothing is moved twice."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf.lora import add_lora, share_base
from oppo.hf.shared_memory import SharedModel, share
from oppo.placement.wire import pack_with_blocks, unpack
from tests.hf import tiny

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def crossed(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model as another process gets it."""
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


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_every_architecture_crosses_and_follows_what_is_changed_in_place(name: str) -> None:
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
