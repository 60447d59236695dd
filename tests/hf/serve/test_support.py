"""Truncated sampling, from the policy through the reference to the trainer: one support, one distribution."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ModelError
from oppo.events import Batch, Chunk, Finish, FloatArray, Prompt, Response, Support
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import RecomputedLogprobs, ReferenceLogprobs, TeacherLogprobs
from oppo.hf.train.packing import MicroBatch, micro_batches, pack, units
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.losses import PPOLoss, SupportIndex, token_logprobs
from oppo.models import Sampling, Scorer
from oppo.placement import Thread
from oppo.returns import TopLogprobs
from oppo.stages import GAE
from oppo.stages.batch import ScoredRollout
from oppo.testing import respond_serially, score_serially
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.serve.test_whole import causal as only_whole
from tests.hf.stories import Story, allowed, full_logprobs, prompts, serving, told
from tests.responses import responses, stream

torch.set_num_threads(1)

STOP = (2, 3, 4)
TRUNCATED = {
    "top_k": Sampling(max_new_tokens=24, top_k=20, stop=STOP, seed=5),
    "top_p": Sampling(max_new_tokens=24, top_p=0.9, stop=STOP, seed=5),
    "min_new_tokens": Sampling(max_new_tokens=24, min_new_tokens=6, stop=STOP, seed=5),
    "cooler": Sampling(max_new_tokens=24, temperature=0.7, top_k=20, top_p=0.9, min_new_tokens=4, stop=STOP, seed=5),
}


@pytest.fixture
def thread() -> Iterator[Thread]:
    with Thread("all", setup=lambda: torch.set_num_threads(1)) as thread:
        yield thread


@pytest.fixture(params=list(TRUNCATED.values()), ids=list(TRUNCATED))
def sampling(request: pytest.FixtureRequest) -> Sampling:
    made = request.param
    assert isinstance(made, Sampling)
    return made


def batch_of(finished: Sequence[Finish], reference: Sequence[FloatArray], *, kl: float = 0.05) -> Batch:
    rows = [
        ScoredRollout(event, logprobs, float(k % 3), np.zeros(len(event.response), np.float32))
        for k, (event, logprobs) in enumerate(zip(finished, reference, strict=True))
    ]
    return GAE(kl=kl).batch(rows)


async def rolled_out(model: PreTrainedModel, sampling: Sampling, thread: Thread, count: int = 6) -> list[Finish]:
    return await respond_serially(HfPolicy(model, sampling=sampling, place=thread), prompts(count))


@tiny.apart
@torch.no_grad()
def current(trainer: HfTrainer, part: MicroBatch) -> Tensor:
    outputs, _ = trainer.core.optimisation.models(part, lambda logits, at, again: {"logprobs": logits})
    logits: Tensor = outputs["logprobs"]
    return logits


@pytest.mark.parametrize("name", ["gpt2", "llama"])
async def test_before_the_first_step_the_ratio_of_every_token_is_one(
    name: str, sampling: Sampling, thread: Thread
) -> None:
    actor, critic = tiny.causal(name, seed=1), tiny.scalar(name, seed=2)
    finished = await rolled_out(actor, sampling, thread)
    batch = batch_of(finished, [event.response.logprobs for event in finished])
    assert batch.support(range(len(batch))).holds(batch.tokens).all()
    settings = TrainerSettings(epochs=1, micro_batch_tokens=100)
    trainer = HfTrainer(actor, critic, sampling=sampling, place=thread, settings=settings)
    cpu = torch.device("cpu")
    for group in micro_batches(batch, units(batch, "row"), cpu, 100):
        part = pack(batch, group, cpu)
        logits = current(trainer, part)
        ours = token_logprobs(logits, part.tokens, sampling.temperature, SupportIndex.of(part.support, cpu))
        assert ((ours - part.behaviour).exp() - 1).abs().max() <= 1e-5
        full = token_logprobs(logits, part.tokens, sampling.temperature)
        assert (full - part.behaviour).min() < -1e-3, "nothing was left out, so this shows nothing"
    metrics = (await trainer.update(batch)).metrics
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/approxkl_avg"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
async def test_of_a_reference_equal_to_the_policy_the_kl_is_zero(
    name: str, deterministic: bool, sampling: Sampling, thread: Thread
) -> None:
    finished = await rolled_out(tiny.causal(name, seed=1), sampling, thread)
    scorer = ReferenceLogprobs(tiny.causal(name, seed=1), sampling=sampling, place=thread, deterministic=deterministic)
    reference = await score_serially(scorer, finished)
    for event, logprobs in zip(finished, reference, strict=True):
        np.testing.assert_allclose(logprobs, event.response.logprobs, atol=1e-5)
    batch = batch_of(finished, reference)
    assert batch.metrics["objective/kl"] == pytest.approx(0, abs=1e-4)  # nats a response, of up to 24 tokens


@pytest.mark.parametrize("deterministic", [False, True])
async def test_reference_log_probs_are_over_the_support_however_the_tokens_come(
    deterministic: bool, sampling: Sampling, thread: Thread
) -> None:
    finished = await rolled_out(tiny.causal(seed=1), sampling, thread)
    model, dice = tiny.causal(seed=7), random.Random(3)
    scorer = ReferenceLogprobs(model, sampling=sampling, place=thread, deterministic=deterministic)
    await scorer.extend([event.response.prompt for event in finished])
    for event in finished:
        start = 0
        while start < len(event.response):
            stop = min(len(event.response), start + dice.choice([1, 2, 9]))
            await scorer.extend([event.response.chunk(start, stop)])
            start = stop
    for event, logprobs in zip(finished, await scorer.finish(finished), strict=True):
        response = event.response
        expected = full_logprobs(
            model, response.prompt, response.tokens.tolist(), response.support, sampling.temperature
        )
        np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "truncated",
    [Sampling(), Sampling(top_k=20), Sampling(min_new_tokens=6, temperature=0.7)],
    ids=["whole", "top_k", "min_new_tokens"],
)
async def test_ids_of_a_padded_table_are_never_sampled_and_no_log_prob_counts_them(
    truncated: Sampling, thread: Thread
) -> None:
    known = 70
    actor, critic = tiny.causal("llama", seed=1), tiny.scalar("llama", seed=2)
    sampling = replace(truncated, max_new_tokens=24, stop=STOP, seed=5, vocabulary=known)
    with torch.no_grad():
        actor.get_output_embeddings().weight[known:] *= 30
    reference = ReferenceLogprobs(copy.deepcopy(actor), sampling=sampling, place=thread)
    finished = await rolled_out(actor, sampling, thread)
    assert max(int(event.response.tokens.max()) for event in finished) < known
    for event, logprobs in zip(finished, await score_serially(reference, finished), strict=True):
        np.testing.assert_allclose(logprobs, event.response.logprobs, atol=1e-5)
    batch = batch_of(finished, [event.response.logprobs for event in finished])
    settings = TrainerSettings(epochs=1, micro_batch_tokens=100)
    trainer = HfTrainer(actor, critic, sampling=sampling, place=thread, settings=settings)
    metrics = (await trainer.update(batch)).metrics
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert 0 < metrics["policy/entropy_avg"] < np.log(known)


READERS: Final[Mapping[str, Callable[..., Scorer[Any]]]] = {
    "reference": ReferenceLogprobs,
    "proximal": RecomputedLogprobs,
    "teacher": partial(TeacherLogprobs, top_k=4),
    "all-ids": partial(TeacherLogprobs, top_k=tiny.VOCABULARY),
}


@pytest.mark.parametrize("made", [tiny.causal, partial(only_whole, "mamba")], ids=["streamed", "whole"])
@pytest.mark.parametrize("kind", READERS)
async def test_ids_that_the_policy_lacks_make_no_difference_to_what_a_model_says(
    kind: str, made: Callable[[], PreTrainedModel], thread: Thread
) -> None:
    model, texts = made(), responses()
    sampling = Sampling(temperature=0.7, vocabulary=tiny.VOCABULARY)
    plain, wide = [
        await stream(READERS[kind](each, sampling=sampling, place=thread), texts, seed=1)
        for each in (model, tiny.apart(tiny.lengthened)(model))
    ]
    for rollout, said in plain.items():
        for one, other in zip(_arrays(said), _arrays(wide[rollout]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def _arrays(said: object) -> Sequence[np.ndarray[Any, Any]]:
    return (said.tokens, said.ids, said.top) if isinstance(said, TopLogprobs) else (np.asarray(said),)


async def test_a_support_outside_of_the_references_vocabulary_is_refused(thread: Thread) -> None:
    scorer = ReferenceLogprobs(tiny.causal(), sampling=Sampling(), place=thread)
    prompt = Prompt(0, 0, np.array([5], np.int32))
    support = Support(np.array([6, tiny.VOCABULARY], np.int32), np.array([2], np.int32))
    one = np.zeros(1, np.float32)
    chunk = Chunk(0, 0, np.array([6], np.int32), one, np.zeros(1, np.int32), support)
    await scorer.extend([prompt])
    with pytest.raises(ModelError, match=f"token ids from 6 to {tiny.VOCABULARY}"):
        await scorer.extend([chunk])


async def test_what_is_learnt_does_not_depend_on_how_a_support_is_written(thread: Thread) -> None:
    sampling = TRUNCATED["min_new_tokens"]
    finished = await rolled_out(tiny.causal(seed=1), sampling, thread)
    digests = set()
    for kept in (False, True):
        events = [Finish(e.rollout, listed(e.response) if kept else e.response, e.reason) for e in finished]
        actor, critic = tiny.causal(seed=1), tiny.scalar(seed=2)
        settings, loss = TrainerSettings(epochs=1, learning_rate=1e-3), PPOLoss(entropy_coefficient=0.1)
        trainer = HfTrainer(actor, critic, sampling=sampling, place=thread, settings=settings, loss=loss)
        before = weights_digest(actor)
        batch = batch_of(events, [event.response.logprobs - 0.1 for event in events])
        metrics = (await trainer.update(batch)).metrics
        assert weights_digest(actor) != before
        digests.add(tuple(round(metrics[name], 4) for name in ("policy/entropy_avg", "train/grad_norm", "val/ratio")))
    assert len(digests) == 1


def listed(response: Response) -> Response:
    """The same, each token's support written as the ids that were kept."""
    rows = [row.nonzero()[:, 0].int().numpy() for row in allowed(response.support, len(response), tiny.VOCABULARY)]
    counts = np.array([len(row) for row in rows], np.int32)
    support = Support(np.concatenate(rows), counts)
    return Response(response.prompt, response.tokens, response.logprobs, response.versions, response.sampled, support)


async def test_deferred_rollouts_keep_their_supports(sampling: Sampling) -> None:
    with serving(sampling=sampling) as policy:
        whole = await told(policy, prompts(6))
        cut = Story(await policy.open(prompts(6)), cut_after=2)
        await cut.step(policy, limit=3)
        cut.cut_after = 1_000_000
        await cut.step(policy, limit=3)
    assert cut.tokens() == whole.tokens()
    for ours, theirs in zip(cut.supports(), whole.supports(), strict=True):
        assert ours.counts.tolist() == theirs.counts.tolist()
        assert ours.ids.tolist() == theirs.ids.tolist()
