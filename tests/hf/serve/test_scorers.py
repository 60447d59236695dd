from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import Tensor
from transformers import PreTrainedModel

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.errors import ConfigError, ModelError, ModelRefused, ProtocolError
from oppo.events import (
    Batch,
    Chunk,
    Finish,
    FloatArray,
    IntArray,
    Prompt,
    Response,
    StepReport,
    Support,
    TokenColumns,
    ToolTokens,
)
from oppo.hf.kv.reader import WholeRows, reader_of
from oppo.hf.loading import load_process
from oppo.hf.servable import probe
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import (
    ProcessRewardModel,
    ProximalLogprobs,
    RecomputedLogprobs,
    ReferenceLogprobs,
    RewardModel,
    ScorerInput,
    ScorerWorker,
    TeacherLogprobs,
    ValueModel,
)
from oppo.hf.tokenizer import HfTokenizer
from oppo.hf.train.packing import MicroBatch, micro_batches, pack, units
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import SharedModel, weights_digest
from oppo.losses import PPOLoss, SupportIndex, token_logprobs
from oppo.models import Sampling, Scorer, Weights
from oppo.placement import Place, Thread
from oppo.placement.child import pack_with_blocks, unpack
from oppo.returns import ImportanceCorrection, TokenRewards, TopLogprobs
from oppo.stages import GAE, ScoredRollout
from oppo.testing import check_scorer, respond_serially, score_serially
from oppo.training import TrainerSettings
from oppo.vllm import VllmPolicy
from tests.hf import tiny
from tests.hf.child import ONE
from tests.hf.stories import allowed, graph_of, prompts, response_logprobs, response_values
from tests.kit.known import assert_close, known
from tests.kit.pipelines import Tap
from tests.kit.responses import EOS, PADDING, chunk, endings, responses, stream
from tests.kit.workplace import tokenizer
from tests.test_returns import EVERY
from tests.vllm.fakes import VOCABULARY, FakeAsyncLLM, engine_of, running

TEMPERATURE = 0.7


def sequence(response: Response) -> torch.Tensor:
    return torch.from_numpy(np.concatenate((response.prompt.tokens, response.tokens)).astype(np.int64))


@tiny.apart
@torch.no_grad()
def library_score(model: PreTrainedModel, response: Response) -> float:
    return float(model(sequence(response)[None]).logits[0, 0])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
async def test_streamed_log_probs_and_values_equal_one_forward_pass(
    name: str, deterministic: bool, thread: Thread
) -> None:
    causal, scalar, made = tiny.causal(name), tiny.scalar(name), responses()
    reference = ReferenceLogprobs(
        causal, sampling=Sampling(temperature=TEMPERATURE), place=thread, deterministic=deterministic
    )
    logprobs = await stream(reference, made, seed=1)
    values = await stream(ValueModel(scalar, place=thread, deterministic=deterministic), made, seed=3)
    for response in made:
        got = logprobs[response.prompt.rollout]
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.shape) == (np.float32, response.tokens.shape)
        assert_close(got, response_logprobs(causal, response, TEMPERATURE))
        assert_close(values[response.prompt.rollout], response_values(scalar, response))


@pytest.mark.parametrize("pad", [PADDING, EOS, None], ids=["padding", "eos", "none"])
@pytest.mark.parametrize("name", ["llama", "opt"])
async def test_wherever_padding_stands_the_score_is_that_of_the_librarys_own_call(
    name: str, pad: int | None, thread: Thread
) -> None:
    model = tiny.scalar(name, pad=pad)
    for made in (endings(), responses()):
        for seed, deterministic in ((3, False), (4, True)):
            values = await stream(RewardModel(model, place=thread, deterministic=deterministic), made, seed)
            for response in made:
                assert_close(values[response.prompt.rollout], library_score(model, response))


async def test_exact_results_are_equal_to_the_bit_for_any_arrival_pattern(thread: Thread) -> None:
    made = responses(4)
    scorers: list[Scorer[object]] = [
        ReferenceLogprobs(tiny.causal("qwen2"), sampling=Sampling(), place=thread, deterministic=True),
        RewardModel(tiny.scalar("gpt2"), place=thread, deterministic=True),
        ValueModel(tiny.scalar("llama"), place=thread, deterministic=True),
        ProcessRewardModel(tiny.steps(), place=thread, separators=SEPARATORS, deterministic=True),
    ]
    for scorer in scorers:
        first = await stream(scorer, made, seed=0)
        for seed in range(1, 6):
            again = await stream(scorer, made if seed % 2 else made[:2], seed)
            for rollout, value in again.items():
                one, other = (getattr(each, "rewards", each) for each in (value, first[rollout]))
                assert np.array_equal(np.asarray(one), np.asarray(other))


async def test_a_response_without_tokens_has_a_score_and_the_value_of_its_only_state(thread: Thread) -> None:
    response = Response.empty(Prompt(0, 0, np.array([5, 6, 7], np.int32)))
    finish = [Finish(0, response, "stop")]
    value, reward = ValueModel(tiny.scalar(), place=thread), RewardModel(tiny.scalar(), place=thread)
    steps = ProcessRewardModel(tiny.steps(), place=thread, separators=SEPARATORS)
    for scorer in (value, reward, steps):
        await scorer.extend([response.prompt])
    assert_close(await value.finish(finish), [response_values(tiny.scalar(), response)])
    assert_close(await reward.finish(finish), [library_score(tiny.scalar(), response)])
    (score,) = await steps.finish(finish)
    assert (float(score), len(score.rewards)) == (0.0, 0)


async def test_a_long_chunk_is_read_in_several_passes(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.hf.kv.prefill.TOKENS_PER_PASS", 40)
    model = tiny.causal("llama")
    scorer = ReferenceLogprobs(model, sampling=Sampling(temperature=TEMPERATURE), place=thread)
    made = responses()
    for response in made:
        await scorer.extend([response.prompt, chunk(response.prompt.rollout, 0, response.tokens)])
    values = await scorer.finish([Finish(response.prompt.rollout, response, "eos") for response in made])
    for response, got in zip(made, values, strict=True):
        assert_close(got, response_logprobs(model, response, TEMPERATURE))


async def test_responses_of_very_different_length_are_read_with_little_padding(thread: Thread) -> None:
    model, read = tiny.causal("llama"), list[int]()
    scorer = ReferenceLogprobs(model, sampling=Sampling(temperature=TEMPERATURE), place=thread)
    lengths = [4] * 12 + [20] * 6 + [60] * 3 + [300]
    tokens = [np.full(length, 5, np.int32) for length in lengths]
    await scorer.extend([Prompt(n, n, np.array([5, 6], np.int32)) for n in range(len(lengths))])
    model.model.register_forward_pre_hook(lambda *given: read.append(given[2]["input_ids"].numel()), with_kwargs=True)
    await scorer.extend([chunk(n, 0, each) for n, each in enumerate(tokens)])
    assert sum(lengths) <= sum(read) < 1.5 * sum(lengths)


async def test_no_logits_are_computed_that_say_nothing_of_a_response(thread: Thread) -> None:
    model, made = tiny.causal("llama"), list[int]()
    model.lm_head.register_forward_pre_hook(lambda _, given: made.append(given[0].shape[1]))
    scorer = ReferenceLogprobs(model, sampling=Sampling(temperature=TEMPERATURE), place=thread)
    await scorer.extend([Prompt(0, 0, np.full(3, 5, np.int32))])
    prompt = np.full(30, 5, np.int32)
    made.clear()
    await scorer.extend([Prompt(1, 1, prompt), chunk(1, 0, prompt[:6]), Prompt(2, 2, prompt)])
    assert made == [6], "those at the position before each token of the response"


async def test_weights_that_do_not_fit_leave_the_old_ones(thread: Thread) -> None:
    model = tiny.scalar()
    scorer = ValueModel(model, place=thread)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights: dict[str, object] = {name: tensor + 1 for name, tensor in before.items()}
    with pytest.raises(ModelError, match=r"score\.weight"):
        await scorer.load(Weights(1, critic={name: value for name, value in weights.items() if "score" not in name}))
    with pytest.raises(ModelError, match="shape"):
        await scorer.load(Weights(1, critic={**weights, "score.weight": torch.zeros(2, 2)}))
    assert scorer.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


async def test_events_out_of_place_and_tokens_that_cannot_be_read_are_errors_that_name_the_rollout(
    thread: Thread,
) -> None:
    scorer = RewardModel(tiny.scalar("gpt2"), place=thread)
    tokens = np.array([5, 6], np.int32)
    response = Response.empty(Prompt(1, 1, tokens)).then(chunk(1, 0, tokens))
    with pytest.raises(ProtocolError, match=r"rollout 1 is unknown"):
        await scorer.extend([chunk(1, 0, tokens)])
    await scorer.extend([response.prompt])
    with pytest.raises(ProtocolError, match=r"rollout 1: .* expected tokens from 0 .* Chunk starts at 2"):
        await scorer.extend([chunk(1, 2, tokens)])
    with pytest.raises(ProtocolError, match="a second time"):
        await scorer.extend([response.prompt])
    with pytest.raises(ProtocolError, match=r"finished with 4 tokens.* was given 2"):
        await scorer.finish([Finish(1, response, "eos")])
    await scorer.forget([1, 99])
    with pytest.raises(ProtocolError, match="unknown"):
        await scorer.finish([Finish(1, response, "eos")])
    with pytest.raises(ModelError, match=r"rollout 4 has 600 tokens.* GPT2ForSequenceClassification .* 512"):
        await scorer.extend([Prompt(4, 4, np.full(600, 5, np.int32))])
    with pytest.raises(ModelError, match=r"rollout 5 has token ids from 5 to 96.* 96"):
        await scorer.extend([Prompt(5, 5, np.array([5, 96], np.int32))])


async def test_dropout_is_off_and_gradients_stay_possible_for_a_critic_that_is_trained_too(thread: Thread) -> None:
    model = tiny.scalar("gpt2")
    assert model.training
    await stream(ValueModel(model, place=thread), responses(2), seed=0)
    assert not any(module.training for module in model.modules())
    tiny.apart(model)(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_with_several_labels_or_no_score_layer_is_refused(thread: Thread) -> None:
    with pytest.raises(ModelRefused, match=r"2 numbers.*num_labels=1"):
        RewardModel(tiny.scalar(labels=2), place=thread)
    model = tiny.causal()
    model.config.num_labels = 1
    with pytest.raises(ModelRefused, match="no score layer"):
        ValueModel(model, place=thread)


@pytest.mark.parametrize(("at", "deterministic"), [("thread", False), ("thread", True), ("process", False)])
async def test_every_scorer_keeps_the_contract(at: str, deterministic: bool, request: pytest.FixtureRequest) -> None:
    place: Place = request.getfixturevalue(at)
    finished = [Finish(response.prompt.rollout, response, "eos") for response in responses(3, seed=4)]

    async def reference() -> ReferenceLogprobs:
        return ReferenceLogprobs(tiny.causal(), sampling=Sampling(), place=place, deterministic=deterministic)

    async def reward() -> RewardModel:
        return RewardModel(tiny.scalar(), place=place, deterministic=deterministic)

    async def critic() -> ValueModel:
        return ValueModel(tiny.scalar(), place=place, deterministic=deterministic)

    async def steps() -> ProcessRewardModel:
        return ProcessRewardModel(tiny.steps(), place=place, separators=SEPARATORS, deterministic=deterministic)

    def close(a: FloatArray, b: FloatArray) -> bool:
        return np.allclose(a, b, rtol=1e-5, atol=1e-5)

    await check_scorer(reference, finished, close)
    await check_scorer(critic, finished, close)
    await check_scorer(reward, finished, lambda a, b: abs(a - b) <= 1e-5 * (1 + abs(b)))
    await check_scorer(steps, finished, lambda a, b: close(a.rewards, b.rewards))


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def chunk_of(rollout: int, start: int, *tokens: int, ids: tuple[int, ...] = (), counts: tuple[int, ...] = ()) -> Chunk:
    n = len(tokens)
    support = Support(ints(*ids), ints(*counts))
    return Chunk(rollout, start, ints(*tokens), np.full(n, -1, np.float32), np.ones(n, np.int32), TokenColumns(support))


def read(scorer_input: object) -> list[tuple[object, ...]]:
    assert isinstance(scorer_input, ScorerInput)
    heads = [(type(event).__name__, event.rollout, event.tokens.tolist()) for event in scorer_input.events]
    starts = [() if isinstance(event, Prompt) else (event.start,) for event in scorer_input.events]
    supports = [
        (event.extra[Support].ids.tolist(), event.extra[Support].counts.tolist())
        if isinstance(event, Chunk) and not event.extra[Support].empty
        else ()
        for event in scorer_input.events
    ]
    return [head + start + support for head, start, support in zip(heads, starts, supports, strict=True)]


def inputs() -> ScorerInput:
    return ScorerInput(
        [
            Prompt(7, 7, ints(1, 2), columns={"judge": lambda: None}),
            chunk_of(3, 5, 9, 8, 7, ids=(9, 1, 4, 5), counts=(2, 0, -2)),
            ToolTokens(4, 0, ints()),
            chunk_of(6, 0, 3),
            ToolTokens(5, 2, ints(6)),
            chunk_of(8, 1, 5, 6, ids=(5, 6), counts=(1, 1)),
        ],
        extra=(Support,),
    )


def test_a_scorers_input_crosses_as_its_token_ids_and_their_supports() -> None:
    crossed = pickle.loads(pickle.dumps(inputs()))
    assert read(crossed) == read(inputs())
    assert all(event.tokens.dtype == np.int32 for event in crossed.events)
    assert crossed.events[0].columns == {}
    assert read(pickle.loads(pickle.dumps(ScorerInput([])))) == []
    bare = pickle.loads(pickle.dumps(ScorerInput(inputs().events)))
    assert all(event.extra[Support].empty for event in bare.events if isinstance(event, Chunk)), (
        "unless the scorer needs them"
    )
    assert [event.tokens.tolist() for event in bare.events] == [event.tokens.tolist() for event in inputs().events]
    long = ScorerInput([chunk_of(rollout, 0, *range(32)) for rollout in range(32)], extra=(Support,))
    assert len(pickle.dumps(long, 5)) < 1.5 * 4 * 32 * 32


SEPARATORS = tuple(range(10, 30))


@tiny.apart
@torch.no_grad()
def expected(model: PreTrainedModel, response: Response, label: int = -1) -> FloatArray:
    tokens = np.concatenate((response.prompt.tokens, response.tokens)).astype(np.int64)
    logits = model.eval()(torch.from_numpy(tokens)[None]).logits[0, len(response.prompt.tokens) :]
    rewards = logits[:, 0] if logits.shape[-1] == 1 else logits.softmax(-1)[:, label]
    ends = np.isin(response.tokens, SEPARATORS)
    ends[-1:] = True
    result: FloatArray = np.where(ends, rewards.numpy(), 0).astype(np.float32)
    return result


def rewards_of(values: dict[int, object], made: Sequence[Response]) -> list[FloatArray]:
    scores = [values[response.prompt.rollout] for response in made]
    assert all(isinstance(score, TokenRewards) for score in scores)
    return [score.rewards for score in scores if isinstance(score, TokenRewards)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding"])
async def test_streamed_rewards_are_those_of_the_librarys_own_call(
    name: str, labels: int, deterministic: bool, thread: Thread
) -> None:
    model, made = tiny.steps(name, labels=labels), responses()
    scorer = ProcessRewardModel(model, place=thread, separators=SEPARATORS, deterministic=deterministic)
    for response, rewards in zip(made, rewards_of(await stream(scorer, made, seed=2), made), strict=True):
        np.testing.assert_allclose(rewards, expected(model, response), rtol=1e-5, atol=1e-5)
        assert np.count_nonzero(rewards) > 1 or len(response) < 8


async def test_another_label_and_a_baseline_may_be_chosen_and_a_response_may_have_no_step(thread: Thread) -> None:
    model, made = tiny.steps(labels=3), responses(3)
    scorer = ProcessRewardModel(model, place=thread, separators=SEPARATORS, label=0, baseline=0.5)
    for response, rewards in zip(made, rewards_of(await stream(scorer, made, seed=0), made), strict=True):
        want = expected(model, response, 0)
        np.testing.assert_allclose(rewards, np.where(want > 0, want - 0.5, 0), rtol=1e-5, atol=1e-5)
    alone = ProcessRewardModel(model, place=thread, separators=())
    for rewards in rewards_of(await stream(alone, made, seed=0), made):
        assert np.flatnonzero(rewards).tolist() == [len(rewards) - 1]
    with pytest.raises(ConfigError, match="3 labels, and none with the index 3"):
        ProcessRewardModel(model, place=thread, separators=(), label=3)


async def test_the_advantage_of_a_token_counts_the_steps_from_it_on(thread: Thread) -> None:
    tokens = np.array([5, 12, 6, 13, 7], np.int32)
    prompt = Prompt(0, 0, np.array([5], np.int32))
    response = Response.empty(prompt).then(chunk(0, 0, tokens))
    scorer = ProcessRewardModel(tiny.steps(), place=thread, separators=SEPARATORS)
    await scorer.extend([prompt, response.chunk()])
    (score,) = await scorer.finish([Finish(0, response, "eos")])
    batch = GAE(kl=0.0, whiten_advantages=False).batch([ScoredRollout(Finish(0, response, "eos"), None, score)])
    a, b, c = score.rewards[[1, 3, 4]].tolist()
    np.testing.assert_allclose(known(batch.advantages), [a + b + c, a + b + c, b + c, b + c, c], rtol=1e-6)


def test_it_is_loaded_with_its_head_and_nothing_else(tmp_path: Path) -> None:
    tiny.steps(seed=3).save_pretrained(tmp_path / "steps")
    loaded = load_process(tmp_path / "steps")
    assert type(loaded).__name__ == "LlamaForTokenClassification"
    assert not loaded.training
    tiny.causal().save_pretrained(tmp_path / "causal")
    with pytest.raises(
        ConfigError, match=r"has no score.* expected a token classification model; a reward from an untr"
    ):
        load_process(tmp_path / "causal")


def test_tokens_are_found_by_the_text_that_they_end_with() -> None:
    text = HfTokenizer(tokenizer())
    assert text.ending_with(["w5", "7"]) == (5, 7, 17, 27, 37, 47, 57, 67, 77, 87)
    with pytest.raises(ConfigError, match="no token of the policy's tokenizer ends with any of"):
        text.ending_with(["\n"])


STOP = (2, 3, 4)
TRUNCATED = {
    "top_k": Sampling(max_new_tokens=24, top_k=20, stop=STOP, seed=5),
    "top_p": Sampling(max_new_tokens=24, top_p=0.9, stop=STOP, seed=5),
    "min_new_tokens": Sampling(max_new_tokens=24, min_new_tokens=6, stop=STOP, seed=5),
    "cooler": Sampling(max_new_tokens=24, temperature=0.7, top_k=20, top_p=0.9, min_new_tokens=4, stop=STOP, seed=5),
}


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
    assert batch.column(Support, range(len(batch))).holds(batch.tokens).all()
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
        assert_close(logprobs, response_logprobs(model, event.response, sampling.temperature))


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


READERS: Final[Mapping[str, Callable[..., Scorer[Any]]]] = {
    "reference": ReferenceLogprobs,
    "proximal": RecomputedLogprobs,
    "teacher": partial(TeacherLogprobs, top_k=4),
    "all-ids": partial(TeacherLogprobs, top_k=tiny.VOCABULARY),
}


@pytest.mark.parametrize("made", [tiny.causal, partial(causal, "mamba")], ids=["streamed", "whole"])
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
    chunk = Chunk(0, 0, np.array([6], np.int32), one, np.zeros(1, np.int32), TokenColumns(support))
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
    rows = [
        row.nonzero()[:, 0].int().numpy() for row in allowed(response.extra[Support], len(response), tiny.VOCABULARY)
    ]
    counts = np.array([len(row) for row in rows], np.int32)
    support = Support(np.concatenate(rows), counts)
    return Response(
        response.prompt, response.tokens, response.logprobs, response.versions, response.sampled, TokenColumns(support)
    )


SAMPLING = Sampling(max_new_tokens=30, temperature=0.7, stop=(2, 3))


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


async def stopping(thread: Thread, *, seed: int = 1) -> list[Finish]:
    policy = HfPolicy(tiny.causal(seed=seed), sampling=TRUNCATING, place=thread)
    return [event for event in await respond_serially(policy, prompts(8)) if len(event.response) > 4]


async def at_version(scorer: ProximalLogprobs, version: int) -> ProximalLogprobs:
    await scorer.load(Weights(version))
    return scorer


def expected_again(event: Finish, seed: int) -> FloatArray:
    return response_logprobs(tiny.causal(seed=seed), event.response, TRUNCATING.temperature)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_stale_tokens_are_computed_again_and_current_ones_keep_what_was_recorded(
    deterministic: bool, thread: Thread
) -> None:
    finished = [aged(event, (0, 2)) for event in await stopping(thread)]
    scorer = await at_version(
        ProximalLogprobs(tiny.causal(seed=7), sampling=TRUNCATING, place=thread, deterministic=deterministic), 2
    )
    for event, logprobs in zip(finished, await scorer.finish(finished), strict=True):
        assert logprobs.dtype == np.float32
        assert_array_equal(logprobs[4:], event.response.logprobs[4:])
        assert_close(logprobs[:4], expected_again(event, 7)[:4])
        assert np.abs(logprobs[:4] - event.response.logprobs[:4]).max() > 1e-3, "other weights, other log-probs"


async def test_of_the_same_weights_what_is_computed_again_agrees_with_what_was_recorded(thread: Thread) -> None:
    finished = await stopping(thread)
    scorer = await at_version(ProximalLogprobs(tiny.causal(seed=1), sampling=TRUNCATING, place=thread), 1)
    for event, logprobs in zip(finished, await scorer.finish(finished), strict=True):
        assert_close(logprobs, event.response.logprobs)


async def test_where_nothing_is_stale_the_model_is_not_called(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = [aged(event, (3,)) for event in await stopping(thread)]
    scorer = await at_version(ProximalLogprobs(tiny.causal(), sampling=TRUNCATING, place=thread), 3)
    monkeypatch.delattr(ScorerWorker, "extend")
    for event in finished:
        await scorer.extend([event.response.prompt])
        await scorer.extend([event.response.chunk()])
    for event, logprobs in zip(finished, await scorer.finish(finished), strict=True):
        assert logprobs is event.response.logprobs


async def test_where_the_kv_cache_is_kept_everything_after_a_stale_token_is_stale(thread: Thread) -> None:
    finished = [aged(event, (0, 2)) for event in await stopping(thread)]
    mixed = ProximalLogprobs(tiny.causal(seed=7), sampling=TRUNCATING, place=thread, kv_on_sync="keep")
    for event, logprobs in zip(finished, await (await at_version(mixed, 2)).finish(finished), strict=True):
        assert_close(logprobs, expected_again(event, 7))


async def test_given_tokens_are_read_and_keep_a_log_prob_of_zero(thread: Thread) -> None:
    event = max(await stopping(thread), key=lambda event: len(event.response))
    whole = event.response
    answer = ToolTokens(event.rollout, 2, np.array([9, 11], np.int32))
    tail = whole.chunk(2)
    shifted = Chunk(event.rollout, 4, tail.tokens, tail.logprobs, tail.versions, tail.extra)
    response = Response.empty(whole.prompt).then(whole.chunk(0, 2)).then(answer).then(shifted)
    scorer = await at_version(ProximalLogprobs(tiny.causal(seed=7), sampling=TRUNCATING, place=thread), 1)
    (logprobs,) = await scorer.finish([Finish(event.rollout, response, "eos")])
    everything = expected_again(Finish(event.rollout, response, "eos"), 7)
    assert_close(logprobs, np.where(response.sampled, everything, 0))


async def test_a_failure_leaves_no_session_behind(thread: Thread) -> None:
    (event, *_) = await stopping(thread)
    foreign = event.response.tokens.copy()
    foreign[0] = tiny.VOCABULARY
    broken = Finish(event.rollout, replace(event.response, tokens=foreign), "eos")
    scorer = await at_version(ProximalLogprobs(tiny.causal(seed=7), sampling=TRUNCATING, place=thread), 1)
    with pytest.raises(ModelError, match="vocabulary"):
        await scorer.finish([broken])
    (logprobs,) = await scorer.finish([event])
    assert_close(logprobs, expected_again(event, 7))


async def test_what_another_engine_sampled_is_computed_again_also_if_it_is_current(thread: Thread) -> None:
    finished = await stopping(thread)
    scorer = RecomputedLogprobs(tiny.causal(seed=1), sampling=TRUNCATING, place=thread)
    await scorer.load(Weights(3, actor=tiny.causal(seed=7).state_dict()))
    for first, rest in ((0, 2), (2, 5), (5, None)):
        if not first:
            await scorer.extend([event.response.prompt for event in finished])
        await scorer.extend([event.response.chunk(first, rest) for event in finished if len(event.response) > first])
    for event, logprobs in zip(finished, await scorer.finish(finished), strict=True):
        assert_close(logprobs, expected_again(event, 7))
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
    finished = [aged(event, (0,)) for event in await stopping(thread, seed=9)]
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
