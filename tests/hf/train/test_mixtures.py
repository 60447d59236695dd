"""Mixtures of experts in training: as transformers' own forward pass and autograd have it, and their routers' loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from oppo.admission.chunking import Fixed
from oppo.errors import ConfigError, ModelRefused
from oppo.events import Batch
from oppo.hf.devices import use_cores
from oppo.hf.loading import load_causal
from oppo.hf.lora import add_lora, share_base
from oppo.hf.routers import LoadBalancing, Route, router_metrics, routers
from oppo.hf.shared_memory import SharedModel
from oppo.hf.train.actor_critic import value_model_on
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.losses import ClippedLoss
from oppo.placement import Thread
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.train.test_trainer import SAMPLING, restored_between_updates, rollouts, trainer_of
from tests.invariants import test_equivalence as equivalence
from tests.known import known

BALANCED = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss", "ernie4.5-moe", "granite-hybrid", "jetmoe")
"""Those of which transformers has a load-balancing loss."""

LORA = (pytest.param(False, id="all weights"), pytest.param(True, id="adapters", marks=pytest.mark.adapters))

ATTENDING = tuple(name for name in tiny.MIXTURES if name not in {"qwen3-next", "granite-hybrid"})


@pytest.fixture
def thread() -> Iterator[Thread]:
    use_cores(1)
    with Thread("train", setup=lambda: use_cores(1)) as thread:
        yield thread


def mixture(name: str, *, lora: bool = False, **config: object) -> PreTrainedModel:
    model = tiny.mixture(name, seed=1, **config)
    model.train(mode=False)
    if lora:
        add_lora(model, 4, 8, seed=3)
    return model


def batch_of(name: str) -> Batch:
    """Return rollouts of a mixture; advantages are whitened."""
    return rollouts(mixture(name), tiny.scalar(seed=2))


def padded(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the tokens that are read, and which of them are no padding: [n, L]."""
    rows = [np.concatenate((each.prompt.tokens, each.tokens))[:-1] for each in batch.responses]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    read = np.arange(ids.shape[1]) < np.array([len(each) for each in rows])[:, None]
    return torch.tensor(ids), torch.tensor(read)


@tiny.apart
def by_hand(model: PreTrainedModel, batch: Batch, weight: float) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradient of the policy loss at ratio 1, a row a pass, and of the family's auxiliary loss; and that."""
    losses = []
    for row, span in zip(batch.responses, batch.rows(), strict=True):
        ids = torch.tensor(np.concatenate((row.prompt.tokens, row.tokens)), dtype=torch.long)[None]
        logprobs = model(ids).logits[0, len(row.prompt.tokens) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(-1, ids[0, len(row.prompt.tokens) :, None]).squeeze(-1)
        advantages = torch.tensor(known(batch.advantages)[span])
        losses.append(-(advantages * (chosen - chosen.detach()).exp()))
    loss, auxiliary = torch.cat(losses).mean(), torch.zeros(())
    if weight:
        ids, read = padded(batch)
        auxiliary = model(ids, attention_mask=read.long(), output_router_logits=True, use_cache=False).aux_loss
    (loss + weight * auxiliary).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, auxiliary.detach()


async def learned(
    thread: Thread, actor: PreTrainedModel, critic: PreTrainedModel | None, batch: Batch, **settings: object
) -> tuple[dict[str, Tensor], Mapping[str, float]]:
    """Return the gradient of an update of one minibatch, and its metrics."""
    trainer = trainer_of(actor, critic, thread, {"max_grad_norm": math.inf, "micro_batch_tokens": 40} | settings)
    found: dict[str, Tensor] = {}

    def step() -> None:
        found.update({name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None})

    tiny.apart(lambda: trainer.core.optimisation)().step = step  # type: ignore[method-assign] # of this one
    return found, (await trainer.update(batch)).metrics


@pytest.mark.parametrize("critic", [True, False], ids=["ppo", "grpo"])
@pytest.mark.parametrize("lora", LORA)
@pytest.mark.parametrize("weight", [0.0, 0.1])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
async def test_a_step_is_what_transformers_and_autograd_say(
    name: str, weight: float, lora: bool, critic: bool, thread: Thread
) -> None:
    batch = batch_of(name)
    wanted, auxiliary = by_hand(mixture(name, lora=lora), batch, weight)
    value = tiny.scalar(seed=2) if critic else None
    found, metrics = await learned(thread, mixture(name, lora=lora), value, batch, router_aux_loss=weight)
    assert metrics["train/micro_batches"] > 1
    assert metrics["mismatch/kl_current"] == pytest.approx(0, abs=1e-9)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-5)
    assert metrics.get("loss/aux", 0.0) == pytest.approx(float(auxiliary), rel=1e-5)
    assert ("loss/aux" in metrics) == bool(weight)
    if not lora:
        for part in ("mlp.gate", "experts.gate_up_proj", "experts.down_proj"):
            assert all(gradient.norm() > 0 for key, gradient in found.items() if part in key)
            assert any(part in key for key in found)


@pytest.mark.parametrize("name", ATTENDING)
async def test_each_family_learns_what_autograd_says(name: str, thread: Thread) -> None:
    batch = batch_of(name)
    weight = 0.1 if name in BALANCED else 0.0
    wanted, auxiliary = by_hand(mixture(name), batch, weight)
    found, metrics = await learned(thread, mixture(name), None, batch, router_aux_loss=weight)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics.get("loss/aux", 0.0) == pytest.approx(float(auxiliary), rel=1e-4)
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"micro_batch_tokens": 10_000}, {"micro_batch_tokens": 1}, {"checkpointing": 1}])
async def test_neither_micro_batches_nor_recomputing_change_the_gradient(
    settings: dict[str, int], thread: Thread
) -> None:
    batch = batch_of("qwen2-moe")
    if "checkpointing" in settings:
        settings = {"gradient_checkpointing": settings["checkpointing"]}
    usual, _ = await learned(thread, mixture("qwen2-moe"), None, batch, router_aux_loss=0.1)
    found, _ = await learned(thread, mixture("qwen2-moe"), None, batch, router_aux_loss=0.1, **settings)
    for key, gradient in usual.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-6)


async def test_a_critic_on_the_trunk_changes_nothing_about_the_auxiliary_loss(thread: Thread) -> None:
    batch, actor = batch_of("mixtral"), mixture("mixtral")
    _, alone = await learned(thread, mixture("mixtral"), None, batch, router_aux_loss=0.1)
    _, shared = await learned(thread, actor, tiny.apart(value_model_on)(actor), batch, router_aux_loss=0.1)
    for name in ("loss/aux", "router/max_load", "router/load_entropy"):
        assert shared[name] == pytest.approx(alone[name], rel=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek-v3", "glm4-moe"])
async def test_the_metrics_count_the_tokens_that_each_expert_gets(name: str, thread: Thread) -> None:
    batch, model = batch_of(name), mixture(name)
    if not routers(model):
        pytest.skip("this transformers does not say which experts the routers choose")
    given: dict[int, list[Tensor]] = {}
    for layer, (_, module) in enumerate(each for each in model.named_modules() if each[0].endswith("mlp.experts")):
        module.register_forward_pre_hook(lambda _, inputs, at=layer: given.setdefault(at, []).append(inputs[1]))
    for row in batch.responses:
        tiny.apart(model)(torch.tensor(np.concatenate((row.prompt.tokens, row.tokens)), dtype=torch.long)[None, :-1])
    experts = 4 if name in {"deepseek-v3", "glm4-moe"} else 6
    loads = torch.stack([torch.bincount(torch.cat(ids).flatten(), minlength=experts + 2) for ids in given.values()])
    _, metrics = await learned(thread, mixture(name), None, batch)
    expected = router_metrics(loads)
    assert expected["router/max_load"] > 1
    assert 0 < expected["router/load_entropy"] < 1
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


async def test_other_models_have_no_metrics_of_routers(thread: Thread) -> None:
    actor = tiny.causal(seed=1)
    _, metrics = await learned(thread, actor, None, rollouts(actor, tiny.scalar(seed=2)))
    assert not [name for name in metrics if name.startswith("router/") or name == "loss/aux"]


def equivalence_models(*, lora: bool) -> dict[str, PreTrainedModel]:
    models: dict[str, PreTrainedModel] = equivalence.oracle().tiny_models()
    models["actor"] = mixture("qwen3-moe", vocab_size=256)
    models["reference"] = share_base(models["actor"]) if lora else mixture("qwen3-moe", vocab_size=256)
    if lora:
        add_lora(models["actor"], 4, 64)
    return models


@pytest.mark.parametrize("lora", LORA)
def test_streamed_and_serial_runs_of_a_mixture_agree_bit_for_bit(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(equivalence.SETTINGS, router_aux_loss=0.1)
    monkeypatch.setattr(equivalence, "SETTINGS", settings)
    use_cores(1)
    ours, theirs = equivalence_models(lora=lora), equivalence_models(lora=lora)
    prompts = equivalence.prompts()
    serial = anyio.run(
        equivalence.oracle().serial_ppo, theirs, prompts, equivalence.BATCH, equivalence.SAMPLING, settings
    )
    equivalence.assert_same(serial, anyio.run(equivalence.streamed, ours, Fixed(7)))
    trained = weights_digest(ours["actor"])
    assert trained == weights_digest(theirs["actor"]) != weights_digest(equivalence_models(lora=lora)["actor"])


@pytest.mark.parametrize("lora", LORA)
async def test_a_restored_trainer_goes_on_bit_for_bit(lora: bool, thread: Thread, tmp_path: Path) -> None:
    def made() -> HfTrainer:
        return trainer_of(mixture("mixtral", lora=lora), None, thread, {"router_aux_loss": 0.1, "minibatches": 2})

    await restored_between_updates(made, batch_of("mixtral"), tmp_path)


def test_the_loss_is_off_unless_a_setting_or_the_config_asks_for_it() -> None:
    assert LoadBalancing.of(mixture("olmoe"), None) == LoadBalancing()
    asking = mixture("olmoe", output_router_logits=True)
    assert LoadBalancing.of(asking, None) == LoadBalancing(0.01, 6, 2)
    assert LoadBalancing.of(asking, 0.0) == LoadBalancing()
    assert LoadBalancing.of(mixture("olmoe"), 0.5) == LoadBalancing(0.5, 6, 2)
    assert LoadBalancing.of(tiny.causal(), None) == LoadBalancing()


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_a_loss_that_the_family_does_not_have_is_refused(name: str, thread: Thread) -> None:
    for model, weight in ((mixture(name, output_router_logits=True), None), (mixture(name), 0.1)):
        named = rf"{type(model).__name__}.*transformers has none .*trainer.router_aux_loss = 0"
        with pytest.raises(ModelRefused, match=named):
            trainer_of(model, None, thread, {"router_aux_loss": weight})
    trainer_of(mixture(name, output_router_logits=True), None, thread, {"router_aux_loss": 0.0})


def test_a_loss_of_another_kind_and_a_model_without_experts_are_refused(thread: Thread) -> None:
    doge = tiny.of(tiny.build(AutoConfig.for_model, {"model_type": "doge"}, tiny.GROUPED, output_router_logits=True))
    for model in (doge, tiny.causal()):
        with pytest.raises(ModelRefused, match=rf"{type(model).__name__}.*trainer.router_aux_loss = 0"):
            trainer_of(model, None, thread, {"router_aux_loss": 0.1})


async def test_a_batch_in_parts_has_no_auxiliary_loss(thread: Thread) -> None:
    settings = TrainerSettings(epochs=1, router_aux_loss=0.1)
    trainer = HfTrainer(mixture("mixtral"), sampling=SAMPLING, place=thread, settings=settings, loss=ClippedLoss())
    with pytest.raises(ConfigError, match="do not stream updates"):
        await trainer.accumulate(batch_of("mixtral"))


async def test_a_mixture_whose_config_asks_for_router_logits_is_served_trained_and_saved(
    thread: Thread, tmp_path: Path
) -> None:
    mixture("mixtral", output_router_logits=True, router_aux_loss_coef=0.1).save_pretrained(tmp_path / "model")
    actor = tiny.apart(load_causal)(tmp_path / "model")
    batch = batch_of("mixtral")
    SharedModel(actor).__reduce__()  # it can cross to another process
    trainer = trainer_of(actor, None, thread, {})
    metrics = (await trainer.update(batch)).metrics
    assert metrics["loss/aux"] == pytest.approx(float(by_hand(mixture("mixtral"), batch, 0.1)[1]), rel=1e-5)
    await trainer.save(tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved" / "actor").output_router_logits


def test_choices_leave_padding_out_and_count_each_layer() -> None:
    balancing = LoadBalancing(1.0, 3, 1)
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [9.0, 0.0, 0.0]])
    read = torch.tensor([[True, True, False]])
    choices = balancing.choices([Route(layer, logits, None) for layer in range(2)], read)
    assert choices.tolist() == [2, 2, 0, 4]


def test_a_mean_over_layers_of_the_busiest_expert_and_of_the_entropy() -> None:
    loads = torch.tensor([[3, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
    entropy = (-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4) + 1) / 2
    assert router_metrics(loads) == pytest.approx({"router/max_load": 2.0, "router/load_entropy": entropy})
