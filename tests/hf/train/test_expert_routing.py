"""Routing replay: updates take the experts that were chosen while decoding, and routers learn of their own scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from oppo.errors import ConfigError, ModelError, ModelRefused
from oppo.events import Batch, Prompt, Response, RoutedExperts, TokenColumns
from oppo.hf.expert_routing import LoadBalancing, RouterReplay, recorded_routes, replaying, router_metrics, routers
from oppo.hf.loading import load_causal
from oppo.hf.lora import add_lora
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.train.actor_critic import value_model_on
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import SharedModel
from oppo.losses import ClippedLoss
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.train.test_trainer import SAMPLING, rollouts, trainer_of
from tests.kit.dialogues import at_once, dialogue, turns_answered
from tests.kit.known import known

NAMES = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3")
"""Routers that choose by probabilities, by probabilities not renormalised, by logits, and by biased groups."""
RoutedIds: TypeAlias = NDArray[np.uint8]
PROMPTS = [Prompt(n, n, np.arange(5 + 7 * n, 8 + 7 * n + n % 4, dtype=np.int32), group=n) for n in range(5)]


async def decoded(
    model: PreTrainedModel, thread: Thread, *, deterministic: bool = False, prefill_tokens: int = 7
) -> list[Response]:
    policy = HfPolicy(
        model,
        sampling=Sampling(max_new_tokens=12, stop=tuple(range(1, 12)), seed=3),
        place=thread,
        deterministic=deterministic,
        prefill_tokens=prefill_tokens,
        routed_experts=True,
    )
    responses = {prompt.rollout: Response.empty(prompt) for prompt in PROMPTS}
    decodes = await policy.open(PROMPTS)
    for cut in (lambda _: True, lambda _: False):
        going = [decode for decode in decodes if not decode.ended]
        async with policy.decoding(going, cut):
            for decode in going:
                responses[decode.prompt.rollout] = responses[decode.prompt.rollout].then(await decode.read(1000))
    return list(responses.values())


def batch_of(responses: Sequence[Response]) -> Batch:
    tokens = np.concatenate([each.tokens for each in responses])
    return Batch(
        responses=tuple(responses),
        reasons=tuple("stop" for _ in responses),
        scores=np.zeros(len(responses), np.float32),
        offsets=np.cumsum([0, *map(len, responses)]),
        tokens=tokens,
        versions=np.zeros(len(tokens), np.int32),
        sampled=np.ones(len(tokens), np.bool_),
        logprobs=np.concatenate([each.logprobs for each in responses]),
        advantages=np.random.default_rng(5).standard_normal(len(tokens)).astype(np.float32),
    )


@tiny.apart
@torch.no_grad()
def routes_of(model: PreTrainedModel, response: Response) -> Tensor:
    ids = torch.tensor(np.concatenate((response.prompt.tokens, response.tokens)), dtype=torch.long)[None, :-1]
    with recorded_routes() as routes:
        model(ids)
    return torch.stack([known(route.experts) for route in routes], 1)


def disturbed(name: str) -> PreTrainedModel:
    """Return a mixture whose routers choose otherwise than those of :func:`mixture` do."""
    model = mixture(name)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(9)
        for module, _ in routers(model):
            for weight in module.parameters():
                weight.add_(torch.randn_like(weight))
    return model


@pytest.mark.parametrize("deterministic", [False, True], ids=["ragged", "deterministic"])
@pytest.mark.parametrize("name", [*NAMES, "granite-hybrid"])
async def test_each_position_carries_the_experts_that_it_was_read_with(
    name: str, deterministic: bool, thread: Thread
) -> None:
    model = mixture(name)
    responses = await decoded(model, thread, deterministic=deterministic)
    assert min(map(len, responses)) < max(map(len, responses))
    for response in responses:
        routed, start = response.extra[RoutedExperts], len(response.prompt.tokens)
        assert routed.positions().tolist() == list(range(-start, len(response) - 1))
        assert routed.counts.tolist() == [start, *[1] * (len(response) - 1)]
        assert routed.ids.dtype == np.uint8
        assert np.array_equal(routed.ids, routes_of(model, response))


async def test_after_a_tool_its_answer_is_carried_by_the_next_token(thread: Thread) -> None:
    model = mixture("mixtral")
    policy = HfPolicy(
        model, sampling=Sampling(max_new_tokens=40, stop=tuple(range(1, 30)), seed=3), place=thread, routed_experts=True
    )
    talk = await dialogue(policy, PROMPTS[:3], at_once, [1])
    for response in talk.responses():
        assert turns_answered(response) == 2
        routed, start = response.extra[RoutedExperts], len(response.prompt.tokens)
        last = int(np.flatnonzero(response.sampled)[-1])
        assert routed.positions().tolist() == list(range(-start, last))
        assert np.array_equal(routed.ids, routes_of(model, response)[: start + last])


async def test_a_response_that_is_resumed_has_no_position_twice(thread: Thread) -> None:
    model = mixture("mixtral")
    whole = (await decoded(model, thread, deterministic=True))[2]
    half = Response.of(whole.prompt, [whole.chunk(0, 4)])
    assert half.extra[RoutedExperts].known(half.prompt) == len(whole.prompt.tokens) + 3
    policy = HfPolicy(
        model,
        sampling=Sampling(max_new_tokens=12, stop=tuple(range(1, 12)), seed=3),
        place=thread,
        deterministic=True,
        routed_experts=True,
    )
    (decode,) = await policy.open([half])
    async with policy.decoding([decode], lambda _: False):
        again = half.then(await decode.read(1000))
    assert np.array_equal(again.tokens, whole.tokens)
    for name in ("ids", "counts"):
        assert np.array_equal(getattr(again.extra[RoutedExperts], name), getattr(whole.extra[RoutedExperts], name))


@pytest.mark.parametrize("name", NAMES)
async def test_under_the_weights_that_decoded_a_replay_changes_no_bit(name: str, thread: Thread) -> None:
    batch = batch_of(await decoded(mixture(name), thread))
    free, before = await learned(thread, mixture(name), None, batch)
    found, after = await learned(thread, mixture(name), None, batch, router_replay=True)
    assert before["train/micro_batches"] > 1
    assert after == {**before, "router/replay_mismatch": 0.0}
    assert found.keys() == free.keys()
    for key, gradient in free.items():
        assert torch.equal(found[key], gradient), key


def _by_probability(module: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.softmax(-1).gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True) if getattr(module, "norm_topk_prob", True) else weights


def _by_logit(module: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    del module
    return logits.gather(-1, experts).softmax(-1)


def _by_sigmoid(module: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True) * float(str(module.routed_scaling_factor))


WEIGHTS: Mapping[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "mixtral": _by_probability,
    "qwen3-moe": _by_probability,
    "gpt-oss": _by_logit,
    "deepseek-v3": _by_sigmoid,
}


@tiny.apart
def by_hand(model: PreTrainedModel, name: str, batch: Batch) -> dict[str, Tensor]:
    """Return the gradient of the clipped loss, a row a pass, by routers that are told whom to choose."""
    losses, row = [], dict[str, Tensor]()
    for layer, (module, _) in enumerate(routers(model)):

        def forward(hidden: Tensor, module: nn.Module = module, layer: int = layer) -> tuple[Tensor, Tensor, Tensor]:
            weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
            logits = nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
            experts = row["experts"][:, layer]
            return logits, WEIGHTS[name](module, logits, experts), experts

        module.forward = forward
    for response, span in zip(batch.responses, batch.rows(), strict=True):
        row["experts"] = torch.tensor(response.extra[RoutedExperts].ids, dtype=torch.long)
        ids = torch.tensor(np.concatenate((response.prompt.tokens, response.tokens)), dtype=torch.long)[None]
        start = len(response.prompt.tokens)
        logprobs = model(ids[:, :-1]).logits[0, start - 1 :].log_softmax(-1)
        ratio = (logprobs.gather(-1, ids[0, start:, None]).squeeze(-1) - torch.tensor(batch.logprobs[span])).exp()
        advantages = torch.tensor(known(batch.advantages)[span])
        losses.append(torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)))
    torch.cat(losses).mean().backward()
    return {key: weight.grad.clone() for key, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("checkpointing", [0, 1], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", NAMES)
async def test_other_routers_are_trained_with_the_experts_that_were_chosen(
    name: str, checkpointing: int, thread: Thread
) -> None:
    batch, model = batch_of(await decoded(mixture(name), thread)), disturbed(name)
    wanted = by_hand(disturbed(name), name, batch)
    taken = list[Tensor]()
    for module in (each for key, each in model.named_modules() if key.endswith("mlp.experts")):
        module.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[1]) if len(inputs[1]) > 8 else None)
    found, metrics = await learned(
        thread, model, None, batch, router_replay=True, gradient_checkpointing=checkpointing, micro_batch_tokens=10_000
    )
    longest_first = sorted(range(len(batch)), key=lambda row: -_read(batch, row))
    lengths = [_read(batch, row) for row in longest_first]
    packed = len(taken[0]) == sum(lengths)
    chosen = RouterReplay.of(mixture(name)).chosen(batch, longest_first, lengths, packed=packed)
    passes = int(metrics["train/micro_batches"]) * (1 + checkpointing)
    layers = len(routers(model))
    assert (passes, len(taken)) == (1 + checkpointing, passes * layers)
    order = [*range(layers), *reversed(range(layers))][: len(taken)]
    for layer, ids in zip(order, taken, strict=True):
        replayed = (chosen[layer] >= 0).all(-1)
        assert torch.equal(ids[replayed], chosen[layer][replayed])
    assert 0.1 < metrics["router/replay_mismatch"] <= 1
    free, _ = await learned(thread, disturbed(name), None, batch)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5)
    gates = [key for key in wanted if key.endswith(("gate.weight", "router.weight"))]
    assert gates
    assert all(wanted[key].norm() > 0 for key in gates)
    assert not all(torch.allclose(free[key], wanted[key], rtol=1e-3) for key in gates)


def _read(batch: Batch, row: int) -> int:
    response = batch.responses[row]
    return len(response.prompt.tokens) + len(response) - 1


@pytest.mark.parametrize("name", [name for name in tiny.MIXTURES if name != "jetmoe"])
def test_each_family_whose_routers_choose_by_topk_can_replay(name: str) -> None:
    found = RouterReplay.of(mixture(name))
    assert found.layers == {"glm4-moe": (1,), "deepseek-v3": (1,)}.get(name, (0, 1))
    assert found.depth == 2
    assert (found.experts, found.k) == {
        "gpt-oss": (6, 4), "glm4-moe": (4, 2), "deepseek-v3": (4, 2), "granite-hybrid": (4, 2)
    }.get(name, (6, 2))  # fmt: skip


def test_a_model_that_cannot_replay_is_refused_by_name(thread: Thread) -> None:
    for model, why in ((tiny.causal(), "has no routers"), (mixture("jetmoe"), "JetMoeTopKGating")):
        with pytest.raises(ModelRefused, match=rf"{type(model).__name__} .*{why}.*trainer.router_replay = false"):
            trainer_of(model, None, thread, {"router_replay": True})
        with pytest.raises(ModelRefused, match="router_replay"):
            HfPolicy(model, sampling=Sampling(max_new_tokens=3), place=thread, routed_experts=True)


def test_a_router_that_does_not_ask_topk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixture("mixtral")
    by_sorting = staticmethod(lambda scores, k, dim: torch.sort(scores, dim, descending=True).indices[:, :k])

    def forward(self: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden, self.get_parameter("weight"))
        experts = by_sorting(logits, 2, -1)
        return logits, logits.gather(-1, experts), experts

    monkeypatch.setattr(type(routers(model)[0][0]), "forward", forward)
    with pytest.raises(ModelRefused, match="MixtralTopKRouter"):
        RouterReplay.of(model)


async def test_a_router_that_is_called_twice_in_a_pass_is_an_error(thread: Thread) -> None:
    model = mixture("mixtral")
    layers = cast("nn.ModuleList", model.get_submodule("model.layers"))
    layers.append(layers[0])
    model.config.num_hidden_layers = 3
    with pytest.raises(ModelError, match=r"routers \[0, 0, 1\].*each of 2 once.*trainer.router_replay = false"):
        await decoded(model, thread)


async def test_experts_are_those_of_their_layers_in_whatever_order_routers_are_called(thread: Thread) -> None:
    model, expected = mixture("mixtral"), await decoded(mixture("mixtral"), thread)
    layers = model.get_submodule("model.layers")
    first, second = layers._modules.pop("0"), layers._modules.pop("1")
    layers._modules.update({"1": second, "0": first})  # modules() has the second first

    def numbered(self: nn.ModuleList) -> Iterator[nn.Module | None]:
        return iter([first, second])

    ordered = type("Ordered", (type(layers),), {"__iter__": numbered, "__getitem__": lambda self, _: [first, second]})
    layers.__class__ = ordered
    assert RouterReplay.of(model).layers == (0, 1)
    for ours, theirs in zip(await decoded(model, thread), expected, strict=True):
        assert np.array_equal(ours.tokens, theirs.tokens)
        assert np.array_equal(ours.extra[RoutedExperts].ids, theirs.extra[RoutedExperts].ids)
    batch = batch_of(await decoded(model, thread))
    _, metrics = await learned(thread, model, None, batch, router_replay=True)
    assert metrics["router/replay_mismatch"] == 0


@tiny.apart
def _read_replaying(model: PreTrainedModel, experts: Tensor) -> None:
    with replaying(experts), torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.long))


def test_experts_that_do_not_fit_a_pass_are_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixture("mixtral")
    RouterReplay.of(model)
    _read_replaying(model, torch.zeros(2, 3, 2, dtype=torch.long))
    for tokens, k in ((4, 2), (3, 1)):
        with pytest.raises(ModelError, match=rf"router 0 \(MixtralTopKRouter\).*\[{tokens}, {k}\].*\[3, 2\]"):
            _read_replaying(model, torch.zeros(2, tokens, k, dtype=torch.long))
    monkeypatch.setattr("oppo.hf.expert_routing._TOPK", ())
    with pytest.raises(ModelError, match=r"router 0 .*topk"):
        _read_replaying(model, torch.zeros(2, 3, 2, dtype=torch.long))


async def test_a_batch_without_experts_is_refused_and_one_with_some_is_trained(thread: Thread) -> None:
    model = mixture("mixtral")
    responses = await decoded(model, thread)
    without = [replace(each, extra=TokenColumns()) for each in responses]
    trainer = trainer_of(model, None, thread, {"router_replay": True})
    with pytest.raises(ConfigError, match=r"routed_experts=True.*trainer.router_replay = false"):
        await trainer.update(batch_of(without))
    metrics = (await trainer.update(batch_of([*without[:2], *responses[2:]]))).metrics
    assert metrics["router/replay_mismatch"] == 0


def test_positions_without_experts_are_left_to_the_router() -> None:
    replay = RouterReplay((0, 2), 3, 4, 1)
    prompt = Prompt(0, 0, np.array([5, 6, 7], np.int32))
    floats, ints = np.zeros(4, np.float32), np.zeros(4, np.int32)
    some = RoutedExperts(np.array([[[1], [2]], [[3], [0]]], np.uint8), np.array([1, 0, 0, 1], np.int32))
    response = Response(prompt, ints, floats, ints, np.array([True, True, False, True]), extra=TokenColumns(some))
    chosen = replay.chosen(batch_of([response]), [0], [8])
    assert chosen.shape == (2, 8, 1)
    assert chosen[..., 0].tolist() == [[-1, -1, 1, -1, -1, 3, -1, -1], [-1, -1, 2, -1, -1, 0, -1, -1]]
    of_all = RoutedExperts(np.array([[[1], [9], [2]], [[3], [9], [0]]], np.uint8) % 4, some.counts)
    assert torch.equal(replay.chosen(batch_of([replace(response, extra=TokenColumns(of_all))]), [0], [8]), chosen)


@pytest.mark.parametrize(
    ("ids", "counts", "message"),
    [
        (np.zeros((1, 5, 1), np.uint8), [1, 0], r"\[1, 5, 1\].*\[n, 2 or 3, 1\]"),
        (np.zeros((1, 2, 2), np.uint8), [1, 0], r"\[1, 2, 2\]"),
        (np.full((1, 2, 1), 4, np.uint8), [1, 0], "up to 4.*below 4"),
        (np.zeros((4, 2, 1), np.uint8), [4, 0], "from position -1 on"),
    ],
    ids=["layers", "choices", "experts", "positions"],
)
def test_experts_of_another_model_are_refused(ids: RoutedIds, counts: list[int], message: str) -> None:
    prompt, ints = Prompt(7, 7, np.array([5, 6, 7], np.int32)), np.zeros(2, np.int32)
    routed = RoutedExperts(ids, np.array(counts, np.int32))
    response = Response(prompt, ints, np.zeros(2, np.float32), ints, np.ones(2, np.bool_), extra=TokenColumns(routed))
    with pytest.raises(ModelError, match=rf"rollout 7 .*{message}"):
        RouterReplay((0, 2), 3, 4, 1).chosen(batch_of([response]), [0], [8])


BALANCED = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss", "ernie4.5-moe", "granite-hybrid", "jetmoe")
"""Those of which transformers has a load-balancing loss."""
LORA = (pytest.param(False, id="all weights"), pytest.param(True, id="adapters", marks=pytest.mark.adapters))
ATTENDING = tuple(name for name in tiny.MIXTURES if name not in {"qwen3-next", "granite-hybrid"})


def mixture(name: str, *, lora: bool = False, **config: object) -> PreTrainedModel:
    model = tiny.mixture(name, seed=1, **config)
    model.train(mode=False)
    if lora:
        add_lora(model, 4, 8, seed=3)
    return model


def mixture_batch(name: str) -> Batch:
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
def balanced_by_hand(model: PreTrainedModel, batch: Batch, weight: float) -> tuple[dict[str, Tensor], Tensor]:
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
    trainer = trainer_of(actor, critic, thread, {"max_grad_norm": math.inf, "micro_batch_tokens": 40} | settings)
    found: dict[str, Tensor] = {}

    def step() -> None:
        found.update({name: p.grad.clone() for name, p in actor.named_parameters() if p.grad is not None})

    tiny.apart(lambda: trainer.core.optimisation)().step = step  # type: ignore[method-assign] # of this one
    return found, (await trainer.update(batch)).metrics


@pytest.mark.parametrize("critic", [True, False], ids=["ppo", "grpo"])
@pytest.mark.parametrize("lora", LORA)
@pytest.mark.parametrize("weight", [0.0, 0.1])
async def test_a_step_is_what_transformers_and_autograd_say(
    weight: float, lora: bool, critic: bool, thread: Thread
) -> None:
    batch, name = mixture_batch("mixtral"), "mixtral"
    wanted, auxiliary = balanced_by_hand(mixture(name, lora=lora), batch, weight)
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
    batch = mixture_batch(name)
    weight = 0.1 if name in BALANCED else 0.0
    wanted, auxiliary = balanced_by_hand(mixture(name), batch, weight)
    found, metrics = await learned(thread, mixture(name), None, batch, router_aux_loss=weight)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics.get("loss/aux", 0.0) == pytest.approx(float(auxiliary), rel=1e-4)
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"micro_batch_tokens": 10_000}, {"micro_batch_tokens": 1}, {"checkpointing": 1}])
async def test_neither_micro_batches_nor_recomputing_change_the_gradient(
    settings: dict[str, int], thread: Thread
) -> None:
    batch = mixture_batch("qwen2-moe")
    if "checkpointing" in settings:
        settings = {"gradient_checkpointing": settings["checkpointing"]}
    usual, _ = await learned(thread, mixture("qwen2-moe"), None, batch, router_aux_loss=0.1)
    found, _ = await learned(thread, mixture("qwen2-moe"), None, batch, router_aux_loss=0.1, **settings)
    for key, gradient in usual.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-6)


async def test_a_critic_on_the_trunk_changes_nothing_about_the_auxiliary_loss(thread: Thread) -> None:
    batch, actor = mixture_batch("mixtral"), mixture("mixtral")
    _, alone = await learned(thread, mixture("mixtral"), None, batch, router_aux_loss=0.1)
    _, shared = await learned(thread, actor, tiny.apart(value_model_on)(actor), batch, router_aux_loss=0.1)
    for name in ("loss/aux", "router/max_load", "router/load_entropy"):
        assert shared[name] == pytest.approx(alone[name], rel=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek-v3", "glm4-moe"])
async def test_the_metrics_count_the_tokens_that_each_expert_gets(name: str, thread: Thread) -> None:
    batch, model = mixture_batch(name), mixture(name)
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
        await trainer.accumulate(mixture_batch("mixtral"))


async def test_a_mixture_whose_config_asks_for_router_logits_is_served_trained_and_saved(
    thread: Thread, tmp_path: Path
) -> None:
    mixture("mixtral", output_router_logits=True, router_aux_loss_coef=0.1).save_pretrained(tmp_path / "model")
    actor = tiny.apart(load_causal)(tmp_path / "model")
    batch = mixture_batch("mixtral")
    SharedModel(actor).__reduce__()  # it can cross to another process
    trainer = trainer_of(actor, None, thread, {})
    metrics = (await trainer.update(batch)).metrics
    assert metrics["loss/aux"] == pytest.approx(float(balanced_by_hand(mixture("mixtral"), batch, 0.1)[1]), rel=1e-5)
    await trainer.save(tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved" / "actor").output_router_logits


def test_a_mean_over_layers_of_the_busiest_expert_and_of_the_entropy() -> None:
    loads = torch.tensor([[3, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
    entropy = (-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4) + 1) / 2
    assert router_metrics(loads) == pytest.approx({"router/max_load": 2.0, "router/load_entropy": entropy})
