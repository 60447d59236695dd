"""Actor and critic: a shared trunk is computed once and trained as two models are; recomputed layers change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CoherePreTrainedModel,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from oppo.errors import ModelRefused
from oppo.events import Batch, Support, TokenColumns
from oppo.hf.head import OwnHead
from oppo.hf.kv.attention import window_of
from oppo.hf.lora import add_lora
from oppo.hf.model_parts import score_head
from oppo.hf.servable import probe
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ValueModel
from oppo.hf.train.actor_critic import ActorCritic, recompute, shares_trunk, value_model_on
from oppo.hf.train.packing import MicroBatch, longest_read, pack
from oppo.hf.train.trainer import HfTrainer, HfTrainerCore
from oppo.hf.weights import weights_digest
from oppo.losses import ClippedLoss, Input, PPOLoss, Whole, masked_mean, policy_losses, token_logprobs, value_loss
from oppo.placement import Thread
from oppo.placement.trainer import TrainerCounts
from oppo.testing import check_trainer
from oppo.training import Surrogate, TrainerSettings
from tests.hf import child, tiny
from tests.hf.train.test_trainer import SAMPLING, Served, rollouts, trainer_of

ADAPTED = [pytest.param(name, True, marks=pytest.mark.adapters) for name in ("llama", "gpt2")]


def over(actor: PreTrainedModel) -> PreTrainedModel:
    """Return a critic on the actor's trunk whose head says something."""
    critic = value_model_on(actor)
    with torch.no_grad():
        score_head(critic).get_parameter("weight").normal_(0, 0.3, generator=torch.Generator().manual_seed(7))
    return critic


def one_trunk(name: str = "llama", *, lora: bool = False) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return an actor, with adapters that change its outputs if so wished, and a critic on its trunk."""
    actor = tiny.causal(name, seed=1).train(mode=False)
    if lora:
        add_lora(actor, 4, 8, seed=3)
        tiny.shaken(actor)
    return actor, over(actor)


def make(thread: Thread, actor: PreTrainedModel, critic: PreTrainedModel, **settings: object) -> HfTrainer:
    return trainer_of(actor, critic, thread, settings)


def packed(actor: PreTrainedModel, critic: PreTrainedModel) -> MicroBatch:
    batch = rollouts(actor, critic, shift=0.1, given=True)
    return pack(batch, range(len(batch)), torch.device("cpu"), PPOLoss().reads)


def whole_logits(logits: Tensor, at: slice, again: bool) -> dict[Input, Tensor]:
    """Measure nothing: what a forward pass returns are then the logits."""
    del at, again
    return {"logprobs": logits}


def two_passes(actor: PreTrainedModel, critic: PreTrainedModel, part: MicroBatch) -> tuple[Tensor, Tensor]:
    inputs = {"position_ids": part.positions, "use_cache": False}
    logits = actor(part.ids, **inputs).logits[:, part.keep]
    values = score_head(critic)(critic.base_model(part.ids, **inputs).last_hidden_state[:, part.keep])
    return logits.flatten(0, 1)[part.at], values.flatten()[part.at]


@pytest.mark.parametrize(("name", "lora"), [*((name, False) for name in tiny.CONFIGS), *ADAPTED])
def test_one_pass_says_what_two_passes_say(name: str, lora: bool) -> None:
    actor, critic = one_trunk(name, lora=lora)
    part, both, reads = packed(actor, critic), ActorCritic(actor, critic), 0

    def count(*_: object) -> None:
        nonlocal reads
        reads += 1

    counted = actor.base_model.register_forward_pre_hook(count)
    with torch.no_grad():
        measured, values = both(part, whole_logits)
        counted.remove()
        assert reads == 1
        want_logits, want_values = two_passes(actor, critic, part)
    assert values.abs().max() > 0
    torch.testing.assert_close(measured["logprobs"], want_logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(values, want_values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "lora"), [("llama", False), ("gemma2", False), ("gpt2", False), ADAPTED[0]])
def test_the_gradient_is_that_of_the_sum_of_the_two_losses(thread: Thread, name: str, lora: bool) -> None:
    actor, critic = one_trunk(name, lora=lora)
    part, total = packed(actor, critic), 31.0
    trainer = make(thread, actor, critic, value_coefficient=0.3)
    trainer.core.backward(part, trainer.core.outputs(part), Whole(total, 1.0, 1.0, 1.0))
    learnt = {**dict(critic.named_parameters()), **dict(actor.named_parameters())}
    got = {name: p.grad.clone() for name, p in learnt.items() if p.grad is not None}
    for parameter in learnt.values():
        parameter.grad = None
    loss, given = PPOLoss(), part.given
    logits, values = two_passes(actor, critic, part)
    logprobs = token_logprobs(logits, part.tokens, SAMPLING.temperature)
    each = policy_losses(logprobs, part.behaviour, given["advantages"], part.mask, Surrogate.of(loss))
    policy = masked_mean(each.loss, part.mask, total)
    value = value_loss(values, given["old_values"], given["returns"], part.mask, loss.value_clip, total=total)
    (policy + 0.3 * value.loss).backward()
    assert any("score" in name for name in got)
    assert got.keys() == {name for name, p in learnt.items() if p.grad is not None}
    for weight, gradient in got.items():
        torch.testing.assert_close(gradient, learnt[weight].grad, rtol=1e-5, atol=1e-6)


def test_every_parameter_is_optimized_once_and_the_trunk_as_the_actors(thread: Thread) -> None:
    actor, critic = one_trunk("gpt2")
    trainer = make(thread, actor, critic, critic_learning_rate=4e-3)
    groups = trainer.core.optimisation.optimizer.param_groups
    rates: dict[object, float] = {p: group["lr"] for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rates)
    assert dict.fromkeys(actor.parameters(), 0.001) | dict.fromkeys(score_head(critic).parameters(), 0.004) == rates


def test_while_the_critic_is_warmed_up_only_its_head_learns(thread: Thread) -> None:
    actor, critic = one_trunk()
    trainer = make(thread, actor, critic, critic_warmup=1, entropy_coefficient=0.1, weight_decay=0.1)
    batch, before = rollouts(actor, critic), weights_digest(actor)
    head = score_head(critic).state_dict()["weight"].clone()
    trained = anyio.run(trainer.update, batch)
    assert weights_digest(actor) == before
    assert not torch.equal(score_head(critic).state_dict()["weight"], head)
    assert trained.metrics["train/grad_norm"] == 0
    anyio.run(trainer.update, batch)
    assert weights_digest(actor) != before


def test_trunk_and_head_are_clipped_apart(thread: Thread) -> None:
    actor, critic = one_trunk()
    trainer = make(thread, actor, critic, max_grad_norm=1e-3)
    norms = {}

    def note(*_: object) -> None:
        for name, model in (("actor", actor), ("head", score_head(critic))):
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norms[name] = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads])))

    trainer.core.optimisation.optimizer.optimizer.register_step_pre_hook(note)
    anyio.run(trainer.update, rollouts(actor, critic))
    assert norms == pytest.approx({"actor": 1e-3, "head": 1e-3}, rel=1e-2)


async def test_synced_models_in_shared_and_in_own_memory_get_both_heads_and_the_trunk(thread: Thread) -> None:
    actor, critic = tiny.apart(one_trunk)()
    trainer = make(thread, actor, critic)
    batch = rollouts(actor, critic)
    mine = HfPolicy(actor, sampling=SAMPLING, place=thread), ValueModel(critic, place=thread)
    copied = copy.deepcopy(actor), copy.deepcopy(critic)
    theirs = HfPolicy(copied[0], sampling=SAMPLING, place=thread), ValueModel(copied[1], place=thread)

    async def made() -> HfTrainer:
        return trainer

    await check_trainer(made, batch, (*mine, *theirs))
    assert [model.version for model in (*mine, *theirs)] == [trainer.version] * 4
    assert [weights_digest(model) for model in copied] == [weights_digest(actor), weights_digest(critic)]
    served = Served()
    await trainer.sync_weights(served)
    trunk = {name: tensor for name, tensor in served.weights.actor.items() if name.startswith("model.")}
    for name, tensor in trunk.items():
        other = served.weights.critic[name]
        assert isinstance(tensor, Tensor)
        assert isinstance(other, Tensor)
        assert tensor.data_ptr() == other.data_ptr()


@pytest.mark.parametrize(("name", "lora"), [("llama", False), ("gpt2", False), *ADAPTED])
def test_what_was_learned_loads_as_two_models(thread: Thread, tmp_path: Path, name: str, lora: bool) -> None:
    tiny.causal(name, seed=1).save_pretrained(tmp_path / "base")
    actor = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    if lora:
        add_lora(actor, 4, 8, seed=3)
    critic = over(actor)
    trainer = make(thread, actor, critic, learning_rate=1e-2, gradient_checkpointing=1)
    anyio.run(trainer.update, rollouts(actor, critic))
    anyio.run(trainer.save, tmp_path / "final")
    ids = torch.arange(3, 23).reshape(2, 10)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / "actor")
    values = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final" / "critic")
    assert values.config.num_labels == 1
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, actor(ids).logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values(ids).logits, critic(ids).logits, rtol=1e-5, atol=1e-5)
        assert values(ids).logits.abs().max() > 0


def test_a_new_value_head_says_zero_and_takes_no_second_trunk() -> None:
    actor = tiny.causal("llama", seed=1, dtype=torch.bfloat16)
    critic = value_model_on(actor)
    assert shares_trunk(actor, critic)
    own = [(name, p.dtype) for name, p in critic.named_parameters() if p not in set(actor.parameters())]
    assert own == [("score.weight", torch.bfloat16)]
    assert not score_head(critic).get_parameter("weight").any()
    assert not shares_trunk(actor, tiny.scalar("llama"))


def tied() -> PreTrainedModel:
    config = tiny.CONFIGS["llama"]()
    config.update({"tie_word_embeddings": True})
    model = tiny.of(config, seed=1)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return model


ACTORS: Mapping[str, Callable[[], PreTrainedModel]] = {
    **{name: partial(tiny.causal, name, seed=1) for name in ("llama", "gemma2", "cohere", "granite")},
    "tied": tied,
}


def truncated(batch: Batch) -> Batch:
    """Return the batch with tokens below 90, sampled from three ids, from all but two, or from all."""
    responses = []
    for row, span in zip(batch.responses, batch.rows(), strict=True):
        tokens, supports = np.minimum(batch.tokens[span], 89), []
        for at, token in enumerate(tokens.tolist()):
            others = np.array([(token + 1) % 90, (token + 50) % 90], np.int32)
            ids, count = ((np.array([token, *others], np.int32), 3), (others, -2), (others[:0], 0))[at % 3]
            supports.append((Support(ids, np.array([count], np.int32)), 1))
        responses.append(replace(row, tokens=tokens, extra=TokenColumns(Support.concatenate(supports))))
    return replace(batch, responses=tuple(responses), tokens=np.minimum(batch.tokens, 89))


@pytest.mark.parametrize("entropy", [0.0, 0.1])
@pytest.mark.parametrize("kind", [*ACTORS, "trunk", pytest.param("lora", marks=pytest.mark.adapters)])
def test_logits_in_chunks_say_and_teach_what_all_at_once_do(
    kind: str, entropy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = replace(SAMPLING, temperature=0.7, vocabulary=90)
    batch = truncated(rollouts(tiny.causal(seed=1), tiny.scalar(seed=2), shift=0.1, given=True))

    def learnt() -> tuple[dict[Input, Tensor], dict[str, Tensor]]:
        actor, critic = one_trunk(lora=kind == "lora") if kind in {"trunk", "lora"} else (ACTORS[kind](), None)
        loss = ClippedLoss(entropy_coefficient=entropy) if critic is None else PPOLoss(entropy_coefficient=entropy)
        core = HfTrainerCore(ActorCritic(actor, critic), sampling, TrainerSettings(), loss, TrainerCounts.new())
        part = pack(batch, range(len(batch)), torch.device("cpu"), loss.reads | loss.measures)
        outputs = core.outputs(part)
        core.backward(part, outputs, Whole(31.0, 1.0, 1.0, 1.0))
        grads = {name: p.grad for name, p in core.optimisation.models.named_parameters() if p.grad is not None}
        return {name: output.detach() for name, output in outputs.items()}, grads

    (outputs, grads), chunks = tiny.apart(learnt)(), list[int]()
    heads = OwnHead.__call__

    def counting(head: OwnHead, hidden: Tensor) -> Tensor:
        chunks.append(hidden.shape[:2].numel())
        return heads(head, hidden)

    monkeypatch.setattr("oppo.hf.head.LOGITS_BYTES", child.CHUNK)
    monkeypatch.setattr(OwnHead, "__call__", counting)
    in_chunks = tiny.apart(learnt)()
    assert max(chunks) == 7
    assert sum(chunks) >= 2 * len(batch.tokens), "forward, and again backward"
    torch.testing.assert_close(in_chunks[0], outputs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(in_chunks[1], grads, rtol=1e-6, atol=1e-6)


class Twisted(CoherePreTrainedModel):
    """A causal model whose logits depend on more than the hidden states of its trunk."""

    def __init__(self, other: PreTrainedModel) -> None:
        super().__init__(other.config)
        self.model = other.base_model
        self.other = other

    def forward(self, ids: Tensor | None = None, **options: object) -> object:
        if ids is None:
            return self.other(**options)
        return self.other(ids + 1, **options)


def test_of_a_head_that_cannot_be_told_apart_all_logits_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.hf.head.LOGITS_BYTES", child.CHUNK)
    twisted = Twisted(tiny.causal("cohere", seed=1).train(mode=False))
    both = ActorCritic(twisted)
    both.prepare()
    part = packed(tiny.causal("cohere", seed=1), tiny.scalar())
    part = replace(part, ids=part.ids.clamp(max=tiny.VOCABULARY - 2))
    assert len(both(part, whole_logits)[0]["logprobs"]) == len(part.tokens)


def learnt_from(part: MicroBatch, both: ActorCritic) -> tuple[Mapping[Input, Tensor], Tensor, dict[str, Tensor]]:
    """Return log-probs, values, and the gradient of a function of both."""
    both.zero_grad()

    def measure(logits: Tensor, at: slice, again: bool) -> dict[Input, Tensor]:
        del again
        return {"logprobs": token_logprobs(logits, part.tokens[at])}

    measured, values = both(part, measure)
    assert values is not None
    (measured["logprobs"].square().sum() + values.square().sum()).backward()
    return measured, values, {name: p.grad.clone() for name, p in both.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("trunk", [False, True], ids=["two trunks", "one trunk"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "gpt2"])
def test_packed_rows_say_and_teach_what_padded_ones_do(name: str, trunk: bool, recomputed: bool) -> None:
    actor = tiny.causal(name, seed=1).train(mode=False)
    critic = over(actor) if trunk else tiny.scalar(name, seed=2).train(mode=False)
    batch = rollouts(actor, critic, shift=0.1, given=True)
    both = ActorCritic(actor, critic).double()
    both.prepare()
    assert both.packs(longest_read(batch))
    if recomputed:
        for model in (actor, critic):
            recompute(model)
    padded, packed = (pack(batch, range(len(batch)), torch.device("cpu"), packed=each) for each in (False, True))
    assert packed.padding == 0 < padded.padding
    torch.testing.assert_close(learnt_from(packed, both), learnt_from(padded, both), rtol=1e-6, atol=1e-6)


def test_rows_that_a_window_or_a_state_would_mix_are_padded() -> None:
    window = ActorCritic(tiny.causal("qwen2-sliding", seed=1))
    window.prepare()
    reach = window_of(window.actor.config)
    assert reach is not None
    assert window.packs(reach)
    assert not window.packs(reach + 1)
    for model in (tiny.of(tiny.STATEFUL["falcon-h1"]()), tiny.causal("gemma2", seed=1)):
        other = ActorCritic(model)
        other.prepare()
        assert not other.packs(2)


def test_a_model_that_mixes_tokens_beside_its_attention_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.causal("llama", seed=1)
    mlp = model.get_submodule("model.layers.0.mlp")
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda hidden: forward(hidden + hidden.roll(1, dims=1)))
    both = ActorCritic(model)
    both.prepare()
    assert not both.packs(2)


IDS = torch.arange(3, 23).reshape(2, 10)


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
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
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
