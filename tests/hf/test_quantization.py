"""A base of 4 bits: adapters on it are trained and served, and engines without adapters get its products."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf.loading import load_causal, outline
from oppo.hf.lora import add_lora, load_lora, merged, rounding_loss
from oppo.hf.model_files import CAUSAL
from tests.hf import tiny
from tests.hf.test_lora import logits, trained

pytestmark = pytest.mark.adapters


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def quantised(folder: Path, name: str = "llama") -> PreTrainedModel:
    tiny.causal(name, seed=1).save_pretrained(folder / name)
    return load_causal(folder / name, quantization="nf4")


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with adapters whose products are not zero."""
    add_lora(model, 4, 8)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", ["llama", "neox", "qwen3-moe"])
def test_merged_weights_compute_what_the_quantised_base_and_its_adapters_do(name: str, tmp_path: Path) -> None:
    if name == "qwen3-moe":
        tiny.mixture(name, seed=1).save_pretrained(tmp_path / name)
        model, plain = load_causal(tmp_path / name, quantization="nf4"), tiny.mixture(name, seed=9)
    else:
        model, plain = quantised(tmp_path, name), tiny.causal(name, seed=9)
    before = logits(model)
    assert not torch.allclose(before, logits(load_causal(tmp_path / name)), atol=1e-4), "it is another model"
    state, whole = shaken(model).state_dict(), merged(model, torch.float32)
    assert not torch.allclose(logits(model), before, atol=1e-3)
    plain.load_state_dict(whole)
    assert torch.allclose(logits(plain.train(mode=False)), logits(model), atol=1e-5)
    assert rounding_loss(state, whole, torch.float32) == 0.0
    assert 0.0 < rounding_loss(state, whole, torch.bfloat16) < 0.1


def test_adapters_that_were_trained_on_it_are_saved_alone_and_load_on_it(tmp_path: Path) -> None:
    model = shaken(quantised(tmp_path))
    model.save_pretrained(tmp_path / "adapter")
    again = load_causal(tmp_path / "llama", quantization="nf4")
    load_lora(again, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    written = load_causal(tmp_path / "adapter", quantization="nf4")
    assert torch.equal(logits(written), logits(model))


def test_its_bytes_are_known_before_it_is_loaded(tmp_path: Path) -> None:
    def size(model: torch.nn.Module) -> int:
        return sum(each.nbytes for each in model.parameters())

    model = quantised(tmp_path)
    expected = outline(CAUSAL, tmp_path / "llama", quantization="nf4")
    add_lora(expected, 4, 8)
    add_lora(model, 4, 8)
    assert sorted(trained(expected)) == sorted(trained(model))
    scales = sum(each.nbytes for name, each in model.state_dict().items() if name.endswith("absmax"))
    assert size(expected) == pytest.approx(size(model) + scales, rel=0.05)
    assert size(expected) < 0.6 * size(tiny.causal("llama"))


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"GPT2LMHeadModel has no linear layers .* leave models.quantization out"):
        quantised(tmp_path, "gpt2")
