"""Layers that are run again in the backward pass: the same gradients, and a served model notices nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from oppo.errors import ModelRefused
from oppo.hf.probe import probe
from oppo.hf.train.actor_critic import recompute
from tests.hf import tiny

IDS = torch.arange(3, 23).reshape(2, 10)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def counted(model: PreTrainedModel) -> list[int]:
    """Return a list to which each run of a layer's inner parts adds the layer's number."""
    runs: list[int] = []
    for number, layer in enumerate(layers(model)):
        part = next(
            child for child in layer.modules() if isinstance(child, nn.Linear) or "Conv1D" in type(child).__name__
        )
        part.register_forward_hook(lambda *_, number=number: runs.append(number))
    return runs


def layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, use_cache=False).logits.float().logsumexp(-1).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "gemma2", "opt", "qwen3-moe"])
def test_gradients_are_the_same_and_layers_run_twice(name: str, every: int) -> None:
    model = tiny.causal(name).train(mode=False)
    plain = gradients(model)
    names = list(model.state_dict())
    runs = counted(model)
    recompute(model, every)
    again = gradients(model)
    assert sorted(runs) == ([0, 0, 1, 1] if every == 1 else [0, 0, 1])
    assert plain.keys() == again.keys()
    for parameter, gradient in plain.items():
        assert torch.equal(gradient, again[parameter])
    assert list(model.state_dict()) == names
    assert not any(module.training for module in model.modules())


def test_where_no_gradient_is_recorded_a_layer_runs_once_and_its_cache_grows() -> None:
    model = tiny.causal("llama").train(mode=False)
    with torch.inference_mode():
        expected = model(IDS, use_cache=True)
        runs = counted(model)
        recompute(model)
        outputs = model(IDS, use_cache=True)
    assert runs == [0, 1]
    assert torch.equal(outputs.logits, expected.logits)
    assert outputs.past_key_values.get_seq_length() == IDS.shape[1]
    probe(model)


def test_a_copy_runs_its_own_layers() -> None:
    model = tiny.causal("llama").train(mode=False)
    recompute(model)
    share_base = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in share_base.parameters():
            parameter.mul_(1.1)
    expected = tiny.causal("llama").train(mode=False)
    expected.load_state_dict(share_base.state_dict())
    assert torch.equal(share_base(IDS).logits, expected(IDS).logits)


def test_a_model_without_such_layers_is_refused() -> None:
    model = tiny.causal("llama")
    del model.model.layers[:]
    with pytest.raises(
        ModelRefused, match="no layers that transformers can checkpoint: set gradient_checkpointing = 0"
    ):
        recompute(model)
