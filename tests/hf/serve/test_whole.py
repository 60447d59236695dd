"""Models that cannot continue a sequence: they score whole responses, exactly, beside a policy on another engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from transformers import PreTrainedModel

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.errors import ModelError, ModelRefused
from oppo.events import Batch, Chunk, Finish, FloatArray, Prompt, Response, StepReport, ToolTokens
from oppo.hf.kv.reader import WholeRows, reader_of
from oppo.hf.servable import probe
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import (
    ProximalLogprobs,
    RecomputedLogprobs,
    ReferenceLogprobs,
    RewardModel,
    ScorerWorker,
    ValueModel,
)
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import SharedModel, weights_digest
from oppo.losses import PPOLoss
from oppo.models import Sampling, Weights
from oppo.placement import Thread
from oppo.placement.child import pack_with_blocks, unpack
from oppo.returns import ImportanceCorrection
from oppo.stages import GAE
from oppo.stages.batch import ScoredRollout
from oppo.testing import respond_serially
from oppo.testing.conformance import check_scorer
from oppo.training import TrainerSettings
from oppo.vllm import VllmPolicy
from tests.hf import tiny
from tests.hf.child import ONE
from tests.hf.stories import graph_of, prompts, response_logprobs, response_values
from tests.kit.known import assert_close, known
from tests.kit.pipelines import Tap
from tests.kit.responses import responses, stream
from tests.test_returns import EVERY
from tests.vllm.fakes import VOCABULARY, FakeAsyncLLM, engine_of, running

SAMPLING = Sampling(max_new_tokens=30, temperature=0.7, stop=(2, 3))


@tiny.apart
def causal(name: str, *, vocabulary: int = tiny.VOCABULARY) -> PreTrainedModel:
    config = tiny.ONLY_WHOLE[name]()
    config.vocab_size = vocabulary
    model = tiny.of(config)
    assert probe(model) == "whole"
    return model


@tiny.apart
def scalar(name: str, *, vocabulary: int = tiny.VOCABULARY, seed: int = 2) -> PreTrainedModel:
    config = tiny.ONLY_WHOLE[name]()
    config.vocab_size, config.num_labels = vocabulary, 1
    model = tiny.scalar_of(config, seed=seed)
    assert probe(model) == "whole"
    return model


@pytest.mark.parametrize("name", tiny.ONLY_WHOLE)
async def test_whole_responses_are_scored_as_one_forward_pass_would(name: str, thread: Thread) -> None:
    model, made = causal(name), responses()
    scorer = ReferenceLogprobs(model, sampling=SAMPLING, place=thread)
    found = await stream(scorer, made, seed=1)
    for response in made:
        assert_close(found[response.prompt.rollout], response_logprobs(model, response, SAMPLING.temperature))
    with pytest.raises(ModelRefused, match=r"not decode here: vLLM .*models\.engine = 'vllm'"):
        HfPolicy(model, sampling=SAMPLING, place=thread)


async def test_whole_readers_keep_to_the_contract_of_scorers_and_to_the_bits_of_a_rollout(thread: Thread) -> None:
    model, made = causal("jamba"), responses()

    async def reference() -> ReferenceLogprobs:
        return ReferenceLogprobs(model, sampling=SAMPLING, place=thread, deterministic=True)

    await check_scorer(reference, [Finish(each.prompt.rollout, each, "eos") for each in made], np.array_equal)


def test_a_whole_reader_in_another_process_knows_that_it_is_one() -> None:
    crossed = cast("SharedModel[PreTrainedModel]", unpack(pack_with_blocks(SharedModel(causal("mamba")))))
    assert isinstance(reader_of(crossed.load()), WholeRows)


@pytest.mark.parametrize(("actor", "others"), [("jamba", "minimax"), ("rwkv", "bloom")])
async def test_a_ppo_step_beside_vllm_with_models_that_read_whole_responses(actor: str, others: str) -> None:
    """All of them but the engine's copy of the policy: what they score is what one forward pass of each says."""
    trained = causal(actor, vocabulary=VOCABULARY)
    reward, critic = (scalar(others, vocabulary=VOCABULARY, seed=seed) for seed in (2, 3))
    reference, before, old = copy.deepcopy(trained), copy.deepcopy(critic), weights_digest(trained)
    llm = FakeAsyncLLM(seconds=0.0)
    asked = [Prompt(n, n, np.arange(10 + n, 12 + 9 * n, dtype=np.int32)) for n in range(1, 6)]
    tap = Tap()
    with Thread("score", setup=ONE) as scoring, Thread("train", setup=ONE) as training:
        policy = VllmPolicy(engine_of(llm), sampling=SAMPLING)
        graph = ppo(
            policy=policy,
            reference=ReferenceLogprobs(reference, sampling=SAMPLING, place=scoring),
            reward=RewardModel(reward, place=scoring),
            critic=ValueModel(critic, place=scoring),
            proximal=RecomputedLogprobs(trained, sampling=SAMPLING, place=scoring),
            trainer=HfTrainer(
                trained,
                critic,
                sampling=SAMPLING,
                place=training,
                loss=PPOLoss(correction=ImportanceCorrection(ratio_base="proximal")),
                settings=TrainerSettings(learning_rate=1e-3, epochs=1, minibatches=1, micro_batch_tokens=200),
            ),
            admission=Overcommit(batch=4, overcommit=1),
            chunks=Fixed(7),
        )
        async with running(llm), graph.open(asked, observers=[tap]) as run:
            [report] = [report async for report in run.steps(1)]
    [batch] = [item for _, _, item in tap.items if isinstance(item, Batch)]
    for response, row, score in zip(batch.responses, batch.rows(), batch.scores, strict=True):
        for column in (batch.reference, batch.proximal):
            assert_close(known(column)[row], response_logprobs(reference, response, SAMPLING.temperature))
        assert_close(known(batch.values)[row], response_values(before, response)[:-1])
        assert_close(score, response_values(reward, response)[-1])
    assert len(batch) == 4
    assert report.metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert weights_digest(trained) != old
    assert all(parameter.isfinite().all() for parameter in trained.parameters())
    assert policy.version == 1


TRUNCATING = Sampling(max_new_tokens=24, temperature=0.8, top_k=30, stop=(2, 3, 4), seed=5)


def aged(event: Finish, versions: Sequence[int]) -> Finish:
    """The same, its tokens made by these versions in turns of four."""
    response = event.response
    made = np.repeat(np.array(versions, np.int32), 4)
    made = np.concatenate((made, np.full(len(response), versions[-1], np.int32)))[: len(response)]
    return replace(event, response=replace(response, versions=made))


async def rolled_out(thread: Thread, *, seed: int = 1) -> list[Finish]:
    policy = HfPolicy(tiny.causal(seed=seed), sampling=TRUNCATING, place=thread)
    return [event for event in await respond_serially(policy, prompts(8)) if len(event.response) > 4]


async def at_version(scorer: ProximalLogprobs, version: int) -> ProximalLogprobs:
    await scorer.load(Weights(version))
    return scorer


def expected(event: Finish, seed: int) -> FloatArray:
    return response_logprobs(tiny.causal(seed=seed), event.response, TRUNCATING.temperature)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_stale_tokens_are_computed_again_and_current_ones_keep_what_was_recorded(
    deterministic: bool, thread: Thread
) -> None:
    finished = [aged(event, (0, 2)) for event in await rolled_out(thread)]
    scorer = await at_version(
        ProximalLogprobs(tiny.causal(seed=7), sampling=TRUNCATING, place=thread, deterministic=deterministic), 2
    )
    for event, logprobs in zip(finished, await scorer.finish(finished), strict=True):
        assert logprobs.dtype == np.float32
        assert_array_equal(logprobs[4:], event.response.logprobs[4:])
        assert_close(logprobs[:4], expected(event, 7)[:4])
        assert np.abs(logprobs[:4] - event.response.logprobs[:4]).max() > 1e-3, "other weights, other log-probs"


async def test_of_the_same_weights_what_is_computed_again_agrees_with_what_was_recorded(thread: Thread) -> None:
    finished = await rolled_out(thread)
    scorer = await at_version(ProximalLogprobs(tiny.causal(seed=1), sampling=TRUNCATING, place=thread), 1)
    for event, logprobs in zip(finished, await scorer.finish(finished), strict=True):
        assert_close(logprobs, event.response.logprobs)


async def test_where_nothing_is_stale_the_model_is_not_called(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = [aged(event, (3,)) for event in await rolled_out(thread)]
    scorer = await at_version(ProximalLogprobs(tiny.causal(), sampling=TRUNCATING, place=thread), 3)
    monkeypatch.delattr(ScorerWorker, "extend")
    for event in finished:
        await scorer.extend([event.response.prompt])
        await scorer.extend([event.response.chunk()])
    for event, logprobs in zip(finished, await scorer.finish(finished), strict=True):
        assert logprobs is event.response.logprobs


async def test_where_the_kv_cache_is_kept_everything_after_a_stale_token_is_stale(thread: Thread) -> None:
    finished = [aged(event, (0, 2)) for event in await rolled_out(thread)]
    mixed = ProximalLogprobs(tiny.causal(seed=7), sampling=TRUNCATING, place=thread, kv_on_sync="keep")
    for event, logprobs in zip(finished, await (await at_version(mixed, 2)).finish(finished), strict=True):
        assert_close(logprobs, expected(event, 7))


async def test_given_tokens_are_read_and_keep_a_log_prob_of_zero(thread: Thread) -> None:
    event = max(await rolled_out(thread), key=lambda event: len(event.response))
    whole = event.response
    answer = ToolTokens(event.rollout, 2, np.array([9, 11], np.int32))
    tail = whole.chunk(2)
    shifted = Chunk(event.rollout, 4, tail.tokens, tail.logprobs, tail.versions, tail.extra)
    response = Response.empty(whole.prompt).then(whole.chunk(0, 2)).then(answer).then(shifted)
    scorer = await at_version(ProximalLogprobs(tiny.causal(seed=7), sampling=TRUNCATING, place=thread), 1)
    (logprobs,) = await scorer.finish([Finish(event.rollout, response, "eos")])
    everything = expected(Finish(event.rollout, response, "eos"), 7)
    assert_close(logprobs, np.where(response.sampled, everything, 0))


async def test_a_failure_leaves_no_session_behind(thread: Thread) -> None:
    (event, *_) = await rolled_out(thread)
    foreign = event.response.tokens.copy()
    foreign[0] = tiny.VOCABULARY
    broken = Finish(event.rollout, replace(event.response, tokens=foreign), "eos")
    scorer = await at_version(ProximalLogprobs(tiny.causal(seed=7), sampling=TRUNCATING, place=thread), 1)
    with pytest.raises(ModelError, match="vocabulary"):
        await scorer.finish([broken])
    (logprobs,) = await scorer.finish([event])
    assert_close(logprobs, expected(event, 7))


async def test_what_another_engine_sampled_is_computed_again_also_if_it_is_current(thread: Thread) -> None:
    finished = await rolled_out(thread)
    scorer = RecomputedLogprobs(tiny.causal(seed=1), sampling=TRUNCATING, place=thread)
    await scorer.load(Weights(3, actor=tiny.causal(seed=7).state_dict()))
    for first, rest in ((0, 2), (2, 5), (5, None)):
        if not first:
            await scorer.extend([event.response.prompt for event in finished])
        await scorer.extend([event.response.chunk(first, rest) for event in finished if len(event.response) > first])
    for event, logprobs in zip(finished, await scorer.finish(finished), strict=True):
        assert_close(logprobs, expected(event, 7))
    assert scorer.version == 3
    await scorer.load(Weights(4))
    assert scorer.version == 4, "an actor that is not trained yet has a version too"


@dataclass
class Ran:
    digest: str
    batches: list[Batch]
    reports: list[StepReport]


async def ran(correction: ImportanceCorrection | None, *, extra: int, steps: int = 3) -> Ran:
    """A streamed run; ``None``: through the graph of four inputs, as it is where nothing is corrected."""
    actor, critic, tap = tiny.causal(seed=1), tiny.scalar(seed=2), Tap()
    settings, loss = (
        TrainerSettings(learning_rate=2e-3, epochs=2),
        PPOLoss(correction=correction or ImportanceCorrection()),
    )
    with Thread("decode", setup=ONE) as decoding, Thread("score", setup=ONE) as scoring:
        graph = graph_of(
            actor,
            critic,
            trainer=HfTrainer(actor, critic, sampling=TRUNCATING, place=decoding, settings=settings, loss=loss),
            acting=decoding,
            scoring=scoring,
            sampling=TRUNCATING,
            extra=extra,
            chunk=7,
            reference=tiny.causal(seed=3),
            reward=tiny.scalar(seed=4),
            proximal=correction is not None,
        )
        async with graph.open(prompts(40), observers=[tap]) as run:
            reports = [report async for report in run.steps(steps)]
    batches = [item for _, _, item in tap.items if isinstance(item, Batch)]
    return Ran(weights_digest(actor) + weights_digest(critic), batches, reports)


async def test_where_nothing_is_deferred_every_choice_makes_the_same_update_bit_for_bit() -> None:
    plain = await ran(None, extra=0, steps=1)
    for correction in EVERY:
        assert (await ran(correction, extra=0, steps=1)).digest == plain.digest, correction
    for report in plain.reports:
        assert report.metrics["staleness/share_0"] == 1
        assert report.metrics["mismatch/kl"] == report.metrics["mismatch/masked"] == 0
        assert report.metrics["mismatch/ess"] == pytest.approx(1, abs=1e-6)
        assert "policy/clipfrac_staleness_1" not in report.metrics


async def test_the_trainers_mismatch_is_that_of_the_batch() -> None:
    run = await ran(ImportanceCorrection(ratio_base="proximal"), extra=3)
    for batch, report in zip(run.batches, run.reports, strict=True):
        log = (known(batch.proximal) - batch.logprobs).astype(np.float64)[batch.sampled]
        stale = batch.versions[batch.sampled] < report.index
        ratio = np.exp(log)
        assert report.metrics["mismatch/ess"] == pytest.approx(
            ratio.sum() ** 2 / (len(log) * (ratio**2).sum()), rel=1e-5
        )
        if stale.any():
            divergence = (np.expm1(log) - log)[stale].mean()
            assert report.metrics["mismatch/kl"] == pytest.approx(divergence, rel=1e-3, abs=1e-8)
        assert_array_equal(known(batch.proximal)[batch.sampled][~stale], batch.logprobs[batch.sampled][~stale])


async def test_ratios_over_the_proximal_policy_begin_at_one_for_stale_tokens_too(thread: Thread) -> None:
    finished = [aged(event, (0,)) for event in await rolled_out(thread, seed=9)]
    actor, critic = tiny.causal(seed=1), tiny.scalar(seed=2)
    scorer = await at_version(ProximalLogprobs(actor, sampling=TRUNCATING, place=thread), 1)
    proximal = await scorer.finish(finished)
    rows = [
        ScoredRollout(event, event.response.logprobs, 0.0, np.zeros(len(event.response), np.float32), again)
        for event, again in zip(finished, proximal, strict=True)
    ]
    loss = PPOLoss(correction=ImportanceCorrection(ratio_base="proximal"))
    trainer = HfTrainer(actor, critic, sampling=TRUNCATING, place=thread, settings=TrainerSettings(epochs=1), loss=loss)
    metrics = (await trainer.update(GAE().batch(rows))).metrics
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/clipfrac_avg"] == 0
