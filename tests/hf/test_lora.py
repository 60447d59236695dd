"""Adapters on the actor: the reference stays what it was, streaming stays exact, and what was learned can be loaded."""

from __future__ import annotations

import copy
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from oppo.admission.chunking import Fixed
from oppo.errors import ConfigError, ModelError, ModelRefused
from oppo.events import Chunk, Finish, Prompt, Response
from oppo.hf.devices import ModelPlace
from oppo.hf.kv.states import CONTINUED
from oppo.hf.loading import ModelRecipe, load_causal, outline
from oppo.hf.lora import (
    adapter_matrices,
    adapter_rounding_loss,
    add_lora,
    load_lora,
    merged,
    outline_lora,
    quantise_base,
    rank_of,
    rounding_loss,
    share_base,
)
from oppo.hf.model_files import CAUSAL
from oppo.hf.servable import probe
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import SelfTeacher
from oppo.hf.weights import SentWeights, SharedModel, changing, weights_digest
from oppo.models import Sampling, Weights
from oppo.placement import Process
from oppo.placement.child import Call, pack_with_blocks, unpack
from oppo.scheduling import Priority
from tests.hf import tiny
from tests.invariants import test_equivalence as equivalence
from tests.kit.known import deep, known
from tests.kit.responses import read_chunk

pytestmark = pytest.mark.adapters
IDS = torch.arange(3, 23).reshape(2, 10)


def adapted(name: str = "llama", *, fresh: bool = False) -> tuple[PreTrainedModel, PreTrainedModel]:
    actor = tiny.causal(name, seed=1).train(mode=False)
    reference = share_base(actor)
    add_lora(actor, 4, 8, seed=3)
    return actor if fresh else tiny.shaken(actor), reference


def trained(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@tiny.apart
@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    out: torch.Tensor = model(IDS).logits
    return out


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox"])
def test_the_reference_is_the_base_in_the_same_memory(name: str) -> None:
    plain = logits(tiny.causal(name, seed=1).train(mode=False))
    actor, reference = adapted(name, fresh=True)
    assert torch.equal(logits(actor), plain), "a fresh adapter changes nothing"
    actor, reference = adapted(name)
    assert not torch.allclose(logits(actor), plain, atol=1e-3)
    assert torch.equal(logits(reference), plain)
    base = {p.data_ptr() for n, p in actor.named_parameters() if not p.requires_grad}
    assert {p.data_ptr() for p in reference.parameters()} == base
    assert trained(actor)
    assert all("lora_" in n for n in trained(actor))
    probe(actor)


def test_adapters_of_a_16_bit_model_have_32_bits_and_serve_as_they_train() -> None:
    actor = tiny.causal("llama", seed=1, dtype=torch.bfloat16).train(mode=False)
    plain = logits(actor)
    add_lora(actor, 4, 8)
    assert {parameter.dtype for parameter in trained(actor).values()} == {torch.float32}
    assert torch.equal(logits(actor), plain)
    actor(IDS).logits.float().logsumexp(-1).mean().backward()
    assert any(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.any() for p in trained(actor).values())
    probe(actor)


MIXTURES = ("mixtral", "gpt-oss", "deepseek-v3", "jetmoe", "qwen3-next")


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_gets_adapters_in_its_attention_only(name: str, tmp_path: Path) -> None:
    def made() -> PreTrainedModel:
        model = tiny.mixture(name, seed=1)
        model.train(mode=False)
        return model

    if name == "qwen3-next" and not CONTINUED:
        pytest.skip("this transformers serves no recurrent layers")
    actor, plain = made(), logits(made())
    add_lora(actor, 4, 8, seed=3)
    assert torch.equal(logits(actor), plain), "a fresh adapter changes nothing"
    layers = {each.partition(".lora_")[0] for each in trained(actor)}
    assert layers
    assert all("attn" in each or "attention" in each for each in layers)
    assert not [each for each in layers if "experts" in each or "router" in each or "mlp" in each]
    tiny.shaken(actor)
    assert not torch.allclose(logits(actor), plain, atol=1e-3)
    state, whole = made().state_dict(), merged(actor)
    assert state.keys() == whole.keys()
    assert {key.removesuffix(".weight") for key in state if not torch.equal(state[key], whole[key])} == layers
    served = made()
    served.load_state_dict(whole)
    assert torch.allclose(logits(served), logits(actor), atol=1e-4)
    made().save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    actor.save_pretrained(tmp_path / "adapter")
    loaded.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(logits(loaded.train(mode=False)), logits(actor))


def with_experts(name: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a mixture whose adapters, of its experts too, change its outputs."""
    model = tiny.of(tiny.MIXTURES[name](), seed=1, dtype=dtype)
    model.train(mode=False)
    add_lora(model, 4, 8, seed=3, experts=True)
    return tiny.shaken(model)


STACKED = [
    *("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3"),
    *(["granite-hybrid"] if CONTINUED else []),  # of earlier transformers each expert is a module
]


@pytest.mark.parametrize("name", STACKED)
def test_the_experts_of_a_mixture_get_adapters_if_that_is_asked_for(name: str, tmp_path: Path) -> None:
    base, fresh = tiny.mixture(name, seed=1).train(mode=False), tiny.mixture(name, seed=1).train(mode=False)
    add_lora(fresh, 4, 8, seed=3, experts=True)
    assert torch.equal(logits(fresh), logits(base)), "a fresh adapter changes nothing"
    actor = with_experts(name)
    state, whole = base.state_dict(), merged(actor)
    assert state.keys() == whole.keys()
    changed = {key for key in state if not torch.equal(state[key], whole[key])}
    fused = {key for key, each in state.items() if each.ndim == 3 and "experts" in key}
    assert fused < changed
    assert not [key for key in changed if key.endswith(("gate.weight", "router.weight"))]
    served = tiny.mixture(name)
    served.load_state_dict(whole)
    assert torch.allclose(logits(served.train(mode=False)), logits(actor), atol=1e-5)
    assert not torch.allclose(logits(base), logits(actor), atol=1e-3)
    tiny.apart(lambda: actor(IDS).logits.logsumexp(-1).mean().backward())()
    gradients = {key: known(weight.grad) for key, weight in trained(actor).items()}
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())
    _require_gradients_of_merged(name, actor, gradients)
    base.save_pretrained(tmp_path / "base")
    actor.save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded.load_adapter(str(tmp_path / "adapter"))
    assert torch.allclose(logits(loaded.train(mode=False)), logits(actor), atol=1e-5), "PEFT's own forward pass"
    probe(actor)


def _require_gradients_of_merged(name: str, actor: PreTrainedModel, gradients: dict[str, torch.Tensor]) -> None:
    # With W + scale * B A, the gradient of B is scale * dW A^T, for each expert.
    plain = tiny.mixture(name)
    plain.load_state_dict(merged(actor))
    tiny.apart(lambda: plain.train(mode=False)(IDS).logits.logsumexp(-1).mean().backward())()
    of_weights = dict(plain.named_parameters())
    for wrapper_name, wrapper in actor.named_modules():
        if type(wrapper).__name__ == "ParamWrapper":
            a, b = (wrapper.get_submodule(f"lora_{each}.default").weight.detach() for each in "AB")
            b = b.clone().requires_grad_()
            delta = torch.func.functional_call(
                _Delta(wrapper), {"wrapper.lora_A.default.weight": a, "wrapper.lora_B.default.weight": b}, ()
            )
            weight = known(of_weights[f"{wrapper_name.replace('.base_layer', '')}.{wrapper.parameter_name}"].grad)
            (wanted,) = torch.autograd.grad(delta, b, weight)
            torch.testing.assert_close(gradients[f"{wrapper_name}.lora_B.default.weight"], wanted, rtol=1e-4, atol=1e-6)


class _Delta(torch.nn.Module):
    def __init__(self, wrapper: torch.nn.Module) -> None:
        super().__init__()
        self.wrapper = wrapper

    def forward(self) -> torch.Tensor:
        delta: torch.Tensor = self.wrapper.get_delta_weight("default")  # type: ignore[operator]  # PEFT's
        return delta


@pytest.mark.parametrize("from_files", [False, True], ids=["added", "loaded"])
def test_threads_may_read_with_adapted_experts_at_once_and_see_the_newest_weights(
    from_files: bool, tmp_path: Path
) -> None:
    actor = with_experts("mixtral")
    alone, changed = logits(actor), trained(actor).keys()
    if from_files:
        tiny.of(tiny.MIXTURES["mixtral"](), seed=1).save_pretrained(tmp_path / "base")
        actor.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
        actor.save_pretrained(tmp_path / "adapter")
        actor = tiny.apart(load_causal)(tmp_path / "adapter")
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda _: logits(actor), range(40)))
    assert all(torch.equal(each, alone) for each in together)
    assert actor.state_dict().keys() == with_experts("mixtral").state_dict().keys()
    with torch.no_grad():
        for name in changed:
            actor.get_parameter(name).mul_(2)
    assert not torch.allclose(logits(actor), alone, atol=1e-3)


def test_a_copy_has_adapters_of_experts_of_its_own_and_a_process_can_have_them() -> None:
    actor = with_experts("mixtral")
    alone, copied = logits(actor), copy.deepcopy(actor)
    assert torch.equal(logits(copied), alone)
    with torch.no_grad():
        for parameter in trained(copied).values():
            parameter.mul_(2)
    assert not torch.allclose(logits(copied), alone, atol=1e-3)
    assert torch.equal(logits(actor), alone)
    sent = cast("SharedModel[PreTrainedModel]", unpack(pack_with_blocks(SharedModel(actor)))).load()
    assert torch.equal(logits(sent), alone)
    assert torch.equal(logits(actor), alone)


def test_experts_in_16_bits_serve_what_is_merged_in_16_bits() -> None:
    actor = with_experts("qwen3-moe", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in trained(actor).values()} == {torch.float32}
    served = tiny.of(tiny.MIXTURES["qwen3-moe"](), dtype=torch.bfloat16)
    served.train(mode=False)
    served.load_state_dict(merged(actor))
    for key, wrapper in actor.named_modules():
        if key.endswith("layers.0.mlp.experts"):
            hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
            experts, gates = torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5, dtype=torch.bfloat16)
            ours, theirs = (tiny.apart(each)(hidden, experts, gates) for each in (wrapper, served.get_submodule(key)))
            assert torch.equal(ours, theirs)


def test_experts_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(ModelRefused, match=r"lora_experts = true .* LlamaForCausalLM has none .*lora_experts = false"):
        add_lora(tiny.causal("llama"), 4, 8, experts=True)


@pytest.mark.parametrize("experts", [False, True])
def test_a_model_whose_adapters_peft_refuses_is_refused_by_name(experts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("Cannot convert PEFT target(s) gate_proj")

    model = tiny.mixture("mixtral")
    monkeypatch.setattr(type(model), "add_adapter", refuse)
    with pytest.raises(ModelRefused, match=r"MixtralForCausalLM .*gate_proj.*models\.lora_rank = 0"):
        add_lora(model, 4, 8, experts=experts)


def test_a_mixture_without_attention_is_refused() -> None:
    model = tiny.mixture("mixtral")
    for layer in model.get_submodule("model.layers").children():
        layer.self_attn = torch.nn.Identity()
    with pytest.raises(ModelRefused, match=r"MixtralForCausalLM is a mixture of experts.*set models.lora_rank = 0"):
        add_lora(model, 4, 8)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt2", "falcon-h1", *deep("gemma3", "neox", "phi3", "olmo2")])
@pytest.mark.parametrize(
    "more",
    [{}, {"target_modules": ["q_proj", "c_attn", "qkv_proj", "query_key_value"]}, {"target_modules": ".*attn.*"}],
)
def test_adapters_without_weights_have_the_shapes_of_peft_s(name: str, more: dict[str, object]) -> None:
    """And train as many bytes; what PEFT refuses is refused."""

    def shapes(add: Any) -> object:
        with torch.device("meta"):
            model = tiny.of({**tiny.CONFIGS, **tiny.STATEFUL}[name]())
        try:
            add(model, 4, 8, more=more)
        except (ConfigError, ModelRefused) as error:
            return str(error)
        plain = {key.replace(".default", ""): (each.shape, each.dtype) for key, each in trained(model).items()}
        return plain, sum(each.nbytes for each in model.parameters())

    assert shapes(outline_lora) == shapes(add_lora)


def test_without_peft_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"models.lora_rank needs peft, .*: pip install 'oppo\[lora\]'"):
        add_lora(tiny.causal("llama"), 4, 8)


def test_adapters_depend_on_their_seed_only() -> None:
    def digest(seed: int) -> str:
        actor = tiny.causal("llama", seed=1)
        add_lora(actor, 4, 8, seed=seed)
        return weights_digest(actor)

    before = torch.get_rng_state()
    assert digest(1) == digest(1) != digest(2)
    assert torch.equal(torch.get_rng_state(), before)


def equivalence_models(kind: str) -> dict[str, PreTrainedModel]:
    models: dict[str, PreTrainedModel] = equivalence.oracle().tiny_models()
    if experts := kind == "experts":
        models["actor"] = tiny.mixture("qwen3-moe", seed=1, vocab_size=256).train(mode=False)
    if kind == "nf4":
        quantise_base(models["actor"], "nf4", torch.device("cpu"))
    models["reference"] = share_base(models["actor"])
    add_lora(models["actor"], 4, 64, experts=experts)
    return models


@pytest.mark.parametrize("kind", ["nf4", *deep("experts")])
def test_streamed_and_serial_runs_with_adapters_agree_bit_for_bit(kind: str) -> None:
    ours, theirs = equivalence_models(kind), equivalence_models(kind)
    base = weights_digest(theirs["reference"])
    serial = anyio.run(
        equivalence.oracle().serial_ppo,
        theirs,
        equivalence.prompts(),
        equivalence.BATCH,
        equivalence.SAMPLING,
        equivalence.SETTINGS,
    )
    equivalence.assert_same(serial, anyio.run(equivalence.streamed, ours, Fixed(7)))
    assert (
        weights_digest(ours["actor"])
        == weights_digest(theirs["actor"])
        != weights_digest(equivalence_models(kind)["actor"])
    )
    assert weights_digest(ours["reference"]) == weights_digest(theirs["reference"]) == base
    assert abs(serial[2].logprobs - serial[2].reference).max() > 1e-3, "the adapters have learned something"


def saved(folder: Path, name: str = "llama", **options: Any) -> Path:
    """Write an adapter that PEFT itself makes of a base, whose products are not zero."""
    from peft import LoraConfig

    model = tiny.causal(name, seed=1)
    given: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **options}
    model.add_adapter(LoraConfig(**given))
    tiny.shaken(model)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_dropout": 0.5}, {"rank_pattern": {"q_proj": 2}}])
def test_an_adapter_that_peft_has_saved_is_trained_on_in_float32(tmp_path: Path, options: dict[str, Any]) -> None:
    saved(tmp_path, **options)
    written = load_file(tmp_path / "adapter_model.safetensors")
    expected = tiny.causal("llama", seed=1)
    expected.load_adapter(str(tmp_path))
    model, half = tiny.causal("llama", seed=1), tiny.causal("llama", seed=1).bfloat16()
    base = share_base(model)
    for each in (model, half):
        load_lora(each, tmp_path)
        own = trained(each)
        assert {name.replace(".default", "") for name in own} == {
            name.removeprefix("base_model.model.") for name in written
        }
        assert all(parameter.dtype == torch.float32 for parameter in own.values())
        for name, tensor in written.items():
            assert torch.equal(
                own[name.removeprefix("base_model.model.").replace(".weight", ".default.weight")], tensor
            )
    assert torch.equal(logits(model), logits(expected.train(mode=False)))
    load_lora(base, tmp_path, trained=False)
    assert torch.equal(logits(base), logits(model)), "a reference is the policy as it begins"
    assert not trained(base)
    with torch.no_grad():
        next(iter(trained(model).values())).add_(1.0)
    assert torch.equal(logits(base), logits(expected)), "and stays so"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"modules_to_save": ["norm"]}, "norm"),
        ({"bias": "all", "target_modules": ["q_proj"]}, None),
        ({"init_lora_weights": "pissa"}, "begun with pissa, whose base was changed"),
    ],
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_adapters_that_change_more_than_inner_layers_are_refused(
    tmp_path: Path, options: dict[str, Any], said: str | None
) -> None:
    saved(tmp_path, **options)
    if said is None:  # a model without biases has none to train
        load_lora(tiny.causal("llama", seed=1), tmp_path)
        return
    with pytest.raises(ConfigError, match=said):
        load_lora(tiny.causal("llama", seed=1), tmp_path)


def test_an_adapter_of_another_shape_or_kind_is_refused_by_what_differs(tmp_path: Path) -> None:
    saved(tmp_path)
    written = load_file(tmp_path / "adapter_model.safetensors")
    name = min(name for name in written if "q_proj.lora_A" in name)
    save_file({**written, name: torch.zeros(4, 7)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        ConfigError, match=r"does not fit .* of 1 tensors .*q_proj.*, \[4, 7\] there and \[4, \d+\] here"
    ):
        load_lora(tiny.causal("llama", seed=1), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be used"):
        load_lora(tiny.causal("llama", seed=1), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        *({"r": wrong} for wrong in ("8", -1)),
        *({"target_modules": wrong} for wrong in (5, "(q_proj")),
        {"lora_alpha": "16"},
        {"rank_pattern": ["q_proj"]},
        {"peft_type": 3},
    ],
    ids=str,
)
def test_a_key_of_an_adapter_of_another_type_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    described = json.loads((saved(tmp_path) / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(described | changes))
    with pytest.raises((ConfigError, ModelRefused), match=r"cannot be used|PEFT cannot add adapters|does not fit"):
        load_lora(tiny.causal("llama", seed=1), tmp_path)


@pytest.mark.parametrize("spelled", [r".*\.self_attn\.[qv]_proj", r"(?i).*\.Self_Attn\.[qv]_proj"])
def test_modules_of_an_adapter_may_be_named_by_any_regular_expression_that_peft_takes(
    tmp_path: Path, spelled: str
) -> None:
    saved(tmp_path, target_modules=spelled)
    load_lora(model := tiny.causal("llama", seed=1), tmp_path)
    assert {name.split(".")[4] for name in trained(model)} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}])
def test_matrices_alone_are_by_the_names_of_peft_and_scaled(tmp_path: Path, options: dict[str, Any]) -> None:
    saved(tmp_path, **options)
    written = load_file(tmp_path / "adapter_model.safetensors")
    model = tiny.causal("llama", seed=1)
    before = model.state_dict()
    load_lora(model, tmp_path)
    found = adapter_matrices(model)
    assert found.keys() == written.keys()
    assert rank_of(found) == 4
    whole = merged(model)
    for name, first in found.items():
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
            product = found[name.replace(".lora_A.", ".lora_B.")] @ first
            assert torch.allclose(whole[weight] - before[weight], product, atol=1e-5)


def test_rounded_matrices_lose_what_their_products_do() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 30, generator=generator), torch.randn(20, 4, generator=generator)
    matrices = {"x.lora_A.weight": a, "x.lora_B.weight": b}
    rounded = (b.bfloat16().double() @ a.bfloat16().double() - b.double() @ a.double()).norm() / (b @ a).norm()
    assert adapter_rounding_loss(matrices, torch.bfloat16) == pytest.approx(float(rounded), rel=1e-3)
    assert adapter_rounding_loss(matrices, torch.bfloat16) < 0.01
    assert adapter_rounding_loss(matrices, torch.float32) == 0.0


def test_small_steps_of_adapters_reach_16_bit_weights_in_float32_only() -> None:
    actor = tiny.causal("llama", seed=1).bfloat16()
    add_lora(actor, 4, 8, seed=3)
    with torch.no_grad():
        for name, parameter in trained(actor).items():
            parameter.add_(1e-6 if "lora_B" in name else 0.0)
    state = actor.state_dict()
    name = next(each for each in state if ".base_layer." in each)
    plain = name.replace(".base_layer.", ".")
    whole = merged(actor, torch.float32)
    assert whole[plain].dtype == torch.float32
    assert not torch.equal(whole[plain], state[name].float())
    assert torch.equal(merged(actor)[plain], state[name]), "16 bits have lost the whole step"
    assert rounding_loss(state, whole, torch.bfloat16) > 0.9
    assert rounding_loss(state, whole, torch.float32) == 0.0


@pytest.mark.parametrize("name", ["falcon-h1", "qwen3.5", "zamba2"])
def test_a_model_with_states_is_served_with_adapters_as_it_is_trained(name: str) -> None:
    model = tiny.of(tiny.STATEFUL[name](), seed=1)
    model.train(mode=False)
    if not CONTINUED:
        with pytest.raises(ModelRefused, match=r"from transformers 5\.19 on|not causal"):  # its Zamba2 is not
            probe(model, attention="padded")
        return
    probe(model)  # whose hooks are on the layers that adapters go around
    add_lora(model, 4, 8, seed=3)
    with torch.no_grad():
        before = model(IDS, use_cache=False).logits
        assert not torch.allclose(tiny.shaken(model)(IDS, use_cache=False).logits, before, atol=1e-3)
    mamba = [each for each, module in model.named_modules() if hasattr(module, "time_step_limit")]
    assert not [key for key in trained(model) if any(key.startswith(f"{each}.out_proj") for each in mamba)]
    probe(model)


def test_a_mamba_layer_has_adapters_only_where_its_kernels_read_through_them() -> None:
    model = tiny.of(tiny.ONLY_WHOLE["mamba"](), seed=1)
    assert "Mamba 1" in tiny.why_whole(model)
    add_lora(model, 4, 8, seed=3)
    found = {name.partition(".lora_")[0].rpartition(".")[2] for name in trained(model)}
    assert found == {"in_proj"}
    assert probe(model) == "whole"
    model(IDS, use_cache=False).logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in trained(model).values())


def test_a_new_adapter_takes_further_arguments_of_peft() -> None:
    model = tiny.causal("llama", seed=1)
    chosen = {"target_modules": ["q_proj"], "layers_to_transform": [0], "use_rslora": True}
    add_lora(model, 4, 8, seed=3, more=chosen)
    own = trained(model)
    assert {name.partition(".lora_")[0].rpartition("layers.")[2] for name in own} == {"0.self_attn.q_proj"}
    (layer,) = [module for module in model.modules() if hasattr(module, "scaling") and hasattr(module, "lora_A")]
    assert layer.scaling == {"default": 8 / 4**0.5}
    weight = "model.layers.0.self_attn.q_proj.weight"
    before = merged(model)[weight].clone()
    with torch.no_grad():
        own[next(name for name in own if "lora_B" in name)].fill_(1.0)
    a = own[next(name for name in own if "lora_A" in name)]
    assert torch.allclose(merged(model)[weight] - before, 4.0 * a.sum(0).expand_as(before), atol=1e-5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"target_module": ["q_proj"]}, "models.lora.target_module: .* did you mean target_modules"),
        ({"r": 3}, r"models.lora.r: models.lora_rank sets it"),
        ({"lora_dropout": 0.1}, "models.lora.lora_dropout: a trained token"),
        ({"use_dora": True}, "of models.lora trains .*lora_magnitude_vector"),
        ({"modules_to_save": ["norm"]}, "of models.lora trains .*norm"),
        ({"target_modules": ["lm_head"]}, "of models.lora is on lm_head"),
        ({"init_lora_weights": "pissa"}, "begun with pissa, whose base was changed"),
        ({"layers_pattern": ["layers"]}, "refused by PEFT"),
    ],
)
def test_arguments_of_peft_that_a_new_adapter_does_not_take_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        add_lora(tiny.causal("llama"), 4, 8, more=more)


def test_a_policy_and_a_live_teacher_that_were_loaded_elsewhere_are_sent_the_adapters_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, actor = tiny.causal("llama", seed=1), tiny.causal("llama", seed=1)
    base.save_pretrained(tmp_path)
    add_lora(actor, 4, 8, seed=3)
    tiny.shaken(actor)
    load, sampling, sent = Process.load_in_child, Sampling(max_new_tokens=9), list[object]()
    prompt = Prompt(0, 0, np.array([5, 6, 7], np.int32))

    async def noted(place: Process, priority: Priority, instance: Any, call: Call, loaded: Any) -> None:
        sent.extend(call.args)
        await load(place, priority, instance, call, loaded)

    async def decoded() -> Chunk:
        with Process("policy") as process:
            policy = HfPolicy(recipe, sampling=sampling, place=ModelPlace(process, "policy", ""))
            teacher = SelfTeacher(recipe, sampling=sampling, place=ModelPlace(process, "teacher", ""))
            for model in (policy, teacher):
                await model.load(Weights(1, actor.state_dict()))
            (decode,) = await policy.open([prompt])
            async with policy.decoding([decode], lambda ended: False):
                piece = await read_chunk(decode, 9)
            await teacher.extend([prompt, piece])
            (taught,) = await teacher.finish([Finish(0, Response.of(prompt, [piece]), "length")])
            assert isinstance(taught, np.ndarray)
            assert np.allclose(taught, piece.logprobs, atol=1e-5)
            with pytest.raises(ModelError, match=r"1 missing \[.*lora_"):
                await policy.load(Weights(2, dict([*changing(actor.state_dict()).items()][1:])))
            assert policy.version == 1
        return piece

    monkeypatch.setattr(Process, "load_in_child", noted)
    recipe = ModelRecipe(path=str(tmp_path), lora_rank=4, lora_alpha=8, lora_seed=3, device="cpu")
    piece = anyio.run(decoded)
    adapters = [name for name in actor.state_dict() if ".lora_" in name]
    assert [[*each] for each in sent[:2] if isinstance(each, SentWeights)] == [adapters, adapters]
    with torch.no_grad():
        read = torch.tensor([[5, 6, 7, *piece.tokens.tolist()]])
        expected = actor.train(mode=False)(read).logits[0, 2:-1].log_softmax(-1)
    assert np.allclose(piece.logprobs, expected[range(len(piece.tokens)), piece.tokens.tolist()], atol=1e-5)


def quantised(folder: Path, name: str = "llama") -> PreTrainedModel:
    tiny.causal(name, seed=1).save_pretrained(folder / name)
    return load_causal(folder / name, quantization="nf4")


@pytest.mark.parametrize("name", ["llama", "neox", "qwen3-moe"])
def test_merged_weights_compute_what_the_quantised_base_and_its_adapters_do(name: str, tmp_path: Path) -> None:
    if name == "qwen3-moe":
        tiny.mixture(name, seed=1).save_pretrained(tmp_path / name)
        model, plain = load_causal(tmp_path / name, quantization="nf4"), tiny.mixture(name, seed=9)
    else:
        model, plain = quantised(tmp_path, name), tiny.causal(name, seed=9)
    before = logits(model)
    assert not torch.allclose(before, logits(load_causal(tmp_path / name)), atol=1e-4), "it is another model"
    add_lora(model, 4, 8)
    state, whole = tiny.shaken(model).state_dict(), merged(model, torch.float32)
    assert not torch.allclose(logits(model), before, atol=1e-3)
    plain.load_state_dict(whole)
    assert torch.allclose(logits(plain.train(mode=False)), logits(model), atol=1e-5)
    assert rounding_loss(state, whole, torch.float32) == 0.0
    assert 0.0 < rounding_loss(state, whole, torch.bfloat16) < 0.1


def test_adapters_on_a_quantised_base_are_saved_alone_and_load_on_it(tmp_path: Path) -> None:
    add_lora(model := quantised(tmp_path), 4, 8)
    tiny.shaken(model).save_pretrained(tmp_path / "adapter")
    again = load_causal(tmp_path / "llama", quantization="nf4")
    load_lora(again, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    written = load_causal(tmp_path / "adapter", quantization="nf4")
    assert torch.equal(logits(written), logits(model))


def test_the_bytes_of_a_quantised_base_are_known_before_it_is_loaded(tmp_path: Path) -> None:
    def size(model: torch.nn.Module) -> int:
        return sum(each.nbytes for each in model.parameters())

    model = quantised(tmp_path)
    quantise_base(expected := outline(CAUSAL, tmp_path / "llama"), "nf4", torch.device("meta"))
    add_lora(expected, 4, 8)
    add_lora(model, 4, 8)
    assert sorted(trained(expected)) == sorted(trained(model))
    scales = sum(each.nbytes for name, each in model.state_dict().items() if name.endswith("absmax"))
    assert size(expected) == pytest.approx(size(model) + scales, rel=0.05)
    assert size(expected) < 0.6 * size(tiny.causal("llama"))


def test_a_model_without_layers_to_quantise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"GPT2LMHeadModel has no linear layers .* leave models.quantization out"):
        quantised(tmp_path, "gpt2")
