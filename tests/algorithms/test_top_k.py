"""Distillation over a teacher's likeliest ids: the loss against plain float64, and the teacher that lists them."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import anyio
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from oppo.algorithms.distill import Distill
from oppo.algorithms.group import GRPO, GSPO
from oppo.algorithms.ppo import PPO
from oppo.config.load import with_correction
from oppo.errors import ConfigError, ModelError, ProtocolError
from oppo.events import Batch, Finish, Prompt, Response, Scored
from oppo.hf.head import OwnHead
from oppo.hf.serve.scorers import ReferenceLogprobs, TeacherLogprobs
from oppo.hf.train.trainer import HfTrainer
from oppo.losses import ClippedLoss, Input, Inputs, SequenceLoss, Whole, divergences, top_logprobs
from oppo.losses.base import require_inputs
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.returns import TopLogprobs
from oppo.stages import GAE, Distillation
from oppo.stages.batch import ScoredRollout, ScoredRollouts, scored_rollout
from oppo.training import Aggregation, TrainerSettings
from tests.hf import tiny
from tests.hf.train.test_trainer import SAMPLING as TRAINED, rollouts
from tests.kit.known import known
from tests.kit.responses import VOCABULARY, responses, stream

SAMPLING: Final = Sampling(temperature=0.7)
BETAS: Final = (0.0, 0.1, 0.5, 1.0)


@pytest.fixture
def thread() -> Iterator[Thread]:
    torch.set_num_threads(1)
    with Thread("teacher", setup=lambda: torch.set_num_threads(1)) as thread:
        yield thread


def softmax(logits: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    scaled = logits / temperature - (logits / temperature).max()
    powers = np.exp(scaled)
    return np.asarray(powers / powers.sum())


def by_hand(
    student: NDArray[np.float64], teacher: NDArray[np.float64], k: int, beta: float, temperature: float
) -> tuple[float, NDArray[np.float64]]:
    """Return the divergence at one token, of logits [V], and its derivative by the student's."""
    q, p = softmax(student, temperature), softmax(teacher, temperature)
    bucket = np.full(len(q), k)
    bucket[np.argsort(-teacher)[:k]] = np.arange(k)
    value, slopes = 0.0, np.zeros(k + 1)
    mass = np.zeros(k + 1)
    for b in range(k + 1):
        ours, theirs = float(q[bucket == b].sum()), float(p[bucket == b].sum())
        mass[b] = ours
        if beta == 0:
            value, slopes[b] = value + theirs * math.log(theirs / ours), -theirs / ours
        elif beta == 1:
            value, slopes[b] = value + ours * math.log(ours / theirs), math.log(ours / theirs) + 1
        else:
            mixed = beta * theirs + (1 - beta) * ours
            value += beta * theirs * math.log(theirs / mixed) + (1 - beta) * ours * math.log(ours / mixed)
            slopes[b] = (1 - beta) * math.log(ours / mixed)
    return value, q * (slopes[bucket] - (mass * slopes).sum()) / temperature


@pytest.mark.parametrize("aggregation", ["tokens", "responses", "constant", "response_sums"])
@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_are_those_of_plain_float64(beta: float, aggregation: Aggregation) -> None:
    dice, k, temperature = np.random.default_rng(3), 4, 0.7
    student, teacher = dice.normal(size=(5, 12)) * 2, dice.normal(size=(5, 12)) * 2
    rows, mask = [0, 0, 1, 1, 2], [True, True, True, False, True]
    logits = torch.tensor(student, dtype=torch.float32, requires_grad=True)
    taught = torch.tensor(teacher, dtype=torch.float32)
    ids = taught.topk(k).indices
    given: dict[Input, torch.Tensor] = {
        **dict.fromkeys(("logprobs", "entropies", "behaviour", "advantages"), torch.zeros(5)),
        "top_logprobs": top_logprobs(logits, ids, temperature),
        "teacher_top": top_logprobs(taught, ids, temperature),
    }
    whole = Whole(tokens=4, rows=3, groups=3, cap=8)
    loss = ClippedLoss(distill=0.5, distill_beta=beta, aggregation=aggregation)
    assert {"top_logprobs", "teacher_top"} <= loss.reads
    found = loss(Inputs(torch.tensor(mask), torch.tensor(rows), torch.arange(3), whole, given))
    found.loss.backward()
    divisors: dict[str, list[float]] = {
        "tokens": [4.0, 4.0, 4.0],
        "responses": [3.0 * 2, 3.0 * 1, 3.0 * 1],
        "constant": [3.0 * 8] * 3,
        "response_sums": [3.0] * 3,
    }
    value, gradient = 0.0, np.zeros((5, 12))
    for t in range(5):
        if mask[t]:
            each, slope = by_hand(student[t], teacher[t], k, beta, temperature)
            value += 0.5 * each / divisors[aggregation][rows[t]]
            gradient[t] = 0.5 * slope / divisors[aggregation][rows[t]]
    assert found.loss.item() == pytest.approx(value, abs=1e-6)
    assert found.measured["loss/distill_avg"].item() == pytest.approx(2 * value, abs=1e-6)
    np.testing.assert_allclose(known(logits.grad).numpy(), gradient, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_it_is_0_at_the_teacher_itself_and_finite_where_nothing_is_left_or_possible(beta: float) -> None:
    logits = torch.tensor([[3.0, 1.0, -math.inf, 0.5], [80.0, -80.0, 0.0, 0.0]], requires_grad=True)
    for k in (1, 3, 4):
        ids = logits.topk(k).indices
        ours = top_logprobs(logits, ids)
        assert ours.exp().sum(-1).tolist() == pytest.approx([1, 1])
        each = divergences(ours, ours.detach(), beta)
        assert each.tolist() == pytest.approx([0, 0], abs=1e-6)
        (gradient,) = torch.autograd.grad(each.sum(), logits)
        assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_streamed_teacher_lists_what_one_forward_pass_does(
    name: str, deterministic: bool, thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnHead, "chunk", lambda self, updated=0: 7)
    model, made = tiny.causal(name), responses()
    given = {"sampling": SAMPLING, "place": thread, "deterministic": deterministic}
    values = await stream(TeacherLogprobs(model, top_k=5, **given), made, seed=1)  # type: ignore[arg-type]
    plain = await stream(ReferenceLogprobs(model, **given), made, seed=1)  # type: ignore[arg-type]
    for response in made:
        got = values[response.prompt.rollout]
        assert isinstance(got, TopLogprobs)
        assert got.ids.dtype == np.int32
        tokens = torch.from_numpy(np.concatenate((response.prompt.tokens, response.tokens)).astype(np.int64))
        with torch.no_grad():
            logits = tiny.apart(model)(tokens[None]).logits[0, len(response.prompt.tokens) - 1 : -1].double()
        expected = (logits / SAMPLING.temperature).softmax(-1)
        listed = expected.gather(-1, torch.from_numpy(got.ids).long())
        np.testing.assert_allclose(listed, expected.topk(5).values, rtol=1e-4)
        np.testing.assert_allclose(got.top[:, :-1], listed.log(), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got.top[:, -1], (1 - listed.sum(-1)).log(), rtol=1e-4, atol=1e-4)
        assert np.array_equal(got.tokens, np.asarray(plain[response.prompt.rollout]))


async def test_a_deterministic_teacher_lists_the_same_bits_for_any_arrival_and_none_for_an_empty_response(
    thread: Thread,
) -> None:
    teacher = TeacherLogprobs(tiny.causal("qwen2"), sampling=SAMPLING, place=thread, top_k=9, deterministic=True)
    made = responses(4)
    first = await stream(teacher, made, seed=0)
    for seed in range(1, 5):
        for rollout, value in (await stream(teacher, made if seed % 2 else made[:2], seed)).items():
            assert pickle.dumps(value) == pickle.dumps(first[rollout])
    empty = Response.empty(Prompt(0, 0, np.array([5, 6, 7], np.int32)))
    await teacher.extend([empty.prompt])
    (found,) = await teacher.finish([Finish(0, empty, "stop")])
    assert (found.tokens.shape, found.ids.shape, found.top.shape) == ((0,), (0, 9), (0, 10))
    for top_k in (0, VOCABULARY + 1):
        with pytest.raises(ConfigError, match=rf"expected 1 to {VOCABULARY}, .* got {top_k} "):
            TeacherLogprobs(tiny.causal(), sampling=SAMPLING, place=thread, top_k=top_k)


def taught(batch: Batch, k: int = 6) -> Batch:
    dice = torch.Generator().manual_seed(1)
    logits = torch.randn(len(batch.tokens), tiny.VOCABULARY, generator=dice)
    ids = logits.topk(k).indices
    return replace(batch, teacher_ids=ids.int().numpy(), teacher_top=top_logprobs(logits, ids).numpy())


def learned(thread: Thread, batch: Batch, loss: ClippedLoss, **settings: object) -> tuple[HfTrainer, dict[str, float]]:
    given = TrainerSettings(**{"learning_rate": 1e-3, "epochs": 1, **settings})  # type: ignore[arg-type]
    trainer = HfTrainer(tiny.causal(seed=1), sampling=TRAINED, place=thread, settings=given, loss=loss)
    return trainer, dict(anyio.run(partial(trainer.update, batch)).metrics)


def test_an_update_is_the_same_in_micro_batches_and_in_chunks_of_logits(
    thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = taught(replace(tiny.apart(rollouts)(tiny.causal(seed=1), tiny.scalar(seed=2)), values=None, returns=None))
    batch = replace(batch, advantages=np.zeros_like(known(batch.advantages)))
    loss = ClippedLoss(distill=1.0, distill_beta=0.5)
    whole, measured = learned(thread, batch, loss)
    before = torch.cat([each.detach().flatten() for each in tiny.causal(seed=1).parameters()])
    after = torch.cat([each.detach().flatten() for each in whole.core.actor.parameters()])
    for chunk, tokens in ((4, None), (1000, 40), (5, 40)):
        monkeypatch.setattr(OwnHead, "chunk", lambda self, updated=0, size=chunk: size)
        parts, found = learned(thread, batch, loss, micro_batch_tokens=tokens)
        assert found["loss/distill_avg"] == pytest.approx(measured["loss/distill_avg"], rel=1e-5)
        assert found["train/grad_norm"] == pytest.approx(measured["train/grad_norm"], rel=1e-4)
        other = torch.cat([each.detach().flatten() for each in parts.core.actor.parameters()])
        assert (other - after).norm() < 1e-2 * (after - before).norm()


def test_a_loss_without_its_teacher_or_with_ids_of_its_own_is_refused_before_training(thread: Thread) -> None:
    batch = tiny.apart(rollouts)(tiny.causal(seed=1), tiny.scalar(seed=2))
    with pytest.raises(ConfigError, match=r"reads the likeliest ids of a teacher, .* teacher=, for example"):
        require_inputs(ClippedLoss(distill=1.0), batch)
    require_inputs(ClippedLoss(distill=1.0), taught(batch))
    longer = replace(taught(batch), teacher_ids=known(taught(batch).teacher_ids) + tiny.VOCABULARY)
    with pytest.raises(ModelError, match=r"lists the id \d+, and the table of LlamaForCausalLM has 96 ids: give"):
        learned(thread, longer, ClippedLoss(distill=1.0))
    with pytest.raises(ProtocolError, match=r"Batch\.teacher_top must be a NumPy array with a row for each token"):
        replace(batch, teacher_top=batch.logprobs)


def row(rollout: int, k: int) -> tuple[Finish, TopLogprobs]:
    prompt, tokens = Prompt(rollout, rollout, np.arange(2, dtype=np.int32)), np.arange(3, dtype=np.int32)
    response = Response(prompt, tokens, -np.ones(3, np.float32), np.zeros(3, np.int32), np.ones(3, np.bool_))
    ids, top = np.tile(np.arange(k, dtype=np.int32), (3, 1)), np.full((3, k + 1), -math.log(k + 1), np.float32)
    return Finish(rollout, response, "eos"), TopLogprobs(np.full(3, -0.5, np.float32), ids, top)


def joined(rollout: int, k: int) -> ScoredRollout:
    finish, top = row(rollout, k)
    found = scored_rollout(finish, Scored(rollout, 1.0, 0), teacher=Scored(rollout, top, 0))
    assert isinstance(found, ScoredRollout)
    return found


def test_what_the_teacher_lists_reaches_the_batch_beside_its_log_probs() -> None:
    for stage in (Distillation(0.0), GAE(kl=0)):
        batch = stage.batch([joined(0, 2), joined(1, 2)])
        assert known(batch.teacher_ids).tolist() == [[0, 1]] * 6
        assert known(batch.teacher_top).shape == (6, 3)
        assert batch.metrics["objective/teacher_kl"] == pytest.approx(-1.5)
    assert not known(Distillation(0.0).batch([joined(0, 2)]).advantages).any()
    assert ScoredRollouts().batch().teacher_top is None
    with pytest.raises(ProtocolError, match="different numbers of likeliest ids"):
        Distillation(0.0).batch([joined(0, 2), joined(1, 3)])
    finish, top = row(0, 2)
    lost = replace(top, top=np.full_like(top.top, -np.inf))
    drop = scored_rollout(finish, Scored(0, 1.0, 0), teacher=Scored(0, lost, 0))
    assert getattr(drop, "reason", "") == "nonfinite log-prob of the teacher's likeliest ids"
    with pytest.raises(ProtocolError, match=r"integers \[n, k\] and floats \[n, k \+ 1\]; got an array of shape"):
        TopLogprobs(top.tokens, top.ids, top.top[:, 1:])


def test_the_settings_reach_stage_and_loss() -> None:
    on_vllm = {"models": {"engine": "vllm"}, "step": {"algorithm": "distill"}}
    assert with_correction(on_vllm)["algorithm"] == {"is_correction": "truncated"}
    listed = {**on_vllm, "algorithm": {"distill_top_k": 8}}
    assert with_correction(listed) == listed
    for chosen in (
        Distill(distill=2.0, distill_top_k=8, distill_beta=0.3),
        GRPO(distill=2.0, distill_top_k=8, distill_beta=0.3),
        GSPO(distill=2.0, distill_top_k=8, distill_beta=0.3),
        PPO(distill=2.0, distill_top_k=8, distill_beta=0.3),
    ):
        loss = chosen.loss()
        assert (loss.distill, loss.distill_beta, chosen.distill_advantage) == (2.0, 0.3, 0.0)
        assert chosen.distills
    assert PPO(distill=2.0, distill_top_k=8).advantage().distill == 0
    assert PPO(distill=2.0).advantage().distill == 2
    assert (Distill().distill_advantage, Distill().loss().distill) == (1.0, 0.0)
    assert isinstance(GSPO(distill=1.0, distill_top_k=2).loss(), SequenceLoss)
