from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oppo.errors import ModelError, ModelRefused, ProtocolError
from oppo.events import Finish, FloatArray, Prompt, Response
from oppo.hf.introspection import backbone, score_head
from oppo.hf.serve.scorers import ReferenceLogprobs, RewardModel, ValueModel
from oppo.models import Sampling, Scorer, Weights
from oppo.placement import Thread
from oppo.testing.conformance import check_scorer
from tests.hf import tiny
from tests.responses import EOS, PADDING, chunk, endings, responses, stream

torch.set_num_threads(1)

TEMPERATURE = 0.7


@pytest.fixture
def thread() -> Iterator[Thread]:
    with Thread("scorers", setup=lambda: torch.set_num_threads(1)) as thread:
        yield thread


def sequence(response: Response) -> torch.Tensor:
    return torch.from_numpy(np.concatenate((response.prompt.tokens, response.tokens)).astype(np.int64))


@tiny.apart
@torch.no_grad()
def expected_logprobs(model: PreTrainedModel, response: Response) -> FloatArray:
    tokens, prompt = sequence(response), len(response.prompt.tokens)
    logits = model(tokens[None]).logits[0, prompt - 1 : -1].float() / TEMPERATURE
    result: FloatArray = logits.log_softmax(-1).gather(1, tokens[prompt:, None])[:, 0].numpy()
    return result


@tiny.apart
@torch.no_grad()
def expected_values(model: PreTrainedModel, response: Response) -> FloatArray:
    hidden = backbone(model)(sequence(response)[None]).last_hidden_state
    values: FloatArray = score_head(model)(hidden)[0, len(response.prompt.tokens) - 1 :, 0].float().numpy()
    return values


@tiny.apart
@torch.no_grad()
def library_score(model: PreTrainedModel, response: Response) -> float:
    return float(model(sequence(response)[None]).logits[0, 0])


def assert_close(got: object, want: object) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", [*tiny.PLAIN, *tiny.WINDOWED])
async def test_streamed_reference_logprobs_equal_one_forward_pass(
    name: str, deterministic: bool, thread: Thread
) -> None:
    model = tiny.causal(name)
    scorer = ReferenceLogprobs(
        model, sampling=Sampling(temperature=TEMPERATURE), place=thread, deterministic=deterministic
    )
    made = responses()
    values = await stream(scorer, made, seed=1)
    for response in made:
        got = values[response.prompt.rollout]
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.shape) == (np.float32, response.tokens.shape)
        assert_close(got, expected_logprobs(model, response))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", [*tiny.PLAIN, *tiny.WINDOWED])
async def test_a_streamed_score_equals_the_librarys_own_call(name: str, deterministic: bool, thread: Thread) -> None:
    model = tiny.scalar(name)
    made = responses()
    values = await stream(RewardModel(model, place=thread, deterministic=deterministic), made, seed=2)
    for response in made:
        assert_close(values[response.prompt.rollout], library_score(model, response))


@pytest.mark.parametrize("pad", [PADDING, EOS, None], ids=["padding", "eos", "none"])
@pytest.mark.parametrize("name", tiny.CONFIGS)
async def test_wherever_padding_stands_the_score_is_that_of_the_librarys_own_call(
    name: str, pad: int | None, thread: Thread
) -> None:
    model = tiny.scalar(name, pad=pad)
    made = endings()
    for seed, deterministic in ((3, False), (4, True)):
        values = await stream(RewardModel(model, place=thread, deterministic=deterministic), made, seed)
        for response in made:
            assert_close(values[response.prompt.rollout], library_score(model, response))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "opt"])
@pytest.mark.parametrize("pad", [PADDING, EOS], ids=["padding", "eos"])
@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_streamed_score_is_that_of_the_librarys_batch_padded_on_either_side(
    name: str, pad: int, side: str, thread: Thread
) -> None:
    model = tiny.scalar(name, pad=pad)
    made = responses()
    longest = max(len(sequence(response)) for response in made)
    ids = torch.full((len(made), longest), pad)
    mask = torch.zeros_like(ids)
    for row, response in enumerate(made):
        tokens = sequence(response)
        at = slice(longest - len(tokens), None) if side == "left" else slice(len(tokens))
        ids[row, at], mask[row, at] = tokens, 1
    values = await stream(RewardModel(model, place=thread), made, seed=5)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = tiny.apart(model)(ids, attention_mask=mask, position_ids=positions).logits[:, 0].detach()
    assert_close([values[response.prompt.rollout] for response in made], padded)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", tiny.PLAIN)
async def test_streamed_values_equal_the_score_head_on_one_forward_pass(
    name: str, deterministic: bool, thread: Thread
) -> None:
    model = tiny.scalar(name)
    made = responses()
    values = await stream(ValueModel(model, place=thread, deterministic=deterministic), made, seed=3)
    for response in made:
        assert_close(values[response.prompt.rollout], expected_values(model, response))


async def test_exact_results_are_equal_to_the_bit_for_any_arrival_pattern(thread: Thread) -> None:
    made = responses(4)
    scorers: list[Scorer[object]] = [
        ReferenceLogprobs(tiny.causal("qwen2"), sampling=Sampling(), place=thread, deterministic=True),
        RewardModel(tiny.scalar("gpt2"), place=thread, deterministic=True),
        ValueModel(tiny.scalar("llama"), place=thread, deterministic=True),
    ]
    for scorer in scorers:
        first = await stream(scorer, made, seed=0)
        for seed in range(1, 8):
            again = await stream(scorer, made if seed % 2 else made[:2], seed)
            for rollout, value in again.items():
                assert np.array_equal(np.asarray(value), np.asarray(first[rollout]))


async def test_a_response_without_tokens_has_a_score_and_the_value_of_its_only_state(thread: Thread) -> None:
    response = Response.empty(Prompt(0, 0, np.array([5, 6, 7], np.int32)))
    finish = [Finish(0, response, "stop")]
    value, reward = ValueModel(tiny.scalar(), place=thread), RewardModel(tiny.scalar(), place=thread)
    await value.extend([response.prompt])
    await reward.extend([response.prompt])
    assert_close(await value.finish(finish), [expected_values(tiny.scalar(), response)])
    assert_close(await reward.finish(finish), [library_score(tiny.scalar(), response)])


async def test_a_long_chunk_is_read_in_several_passes(thread: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.hf.kv.prefill.TOKENS_PER_PASS", 40)
    model = tiny.causal("llama")
    scorer = ReferenceLogprobs(model, sampling=Sampling(temperature=TEMPERATURE), place=thread)
    made = responses()
    for response in made:
        await scorer.extend([response.prompt, chunk(response.prompt.rollout, 0, response.tokens)])
    values = await scorer.finish([Finish(response.prompt.rollout, response, "eos") for response in made])
    for response, got in zip(made, values, strict=True):
        assert_close(got, expected_logprobs(model, response))


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


async def test_new_weights_are_used_from_the_next_call_on(thread: Thread) -> None:
    scorer, other = ValueModel(tiny.scalar(seed=0), place=thread), tiny.scalar(seed=1)
    await scorer.load(Weights(3, critic=other.state_dict()))
    assert scorer.version == 3
    made = responses(2)
    values = await stream(scorer, made, seed=0)
    for response in made:
        assert_close(values[response.prompt.rollout], expected_values(other, response))


async def test_shared_weights_are_followed_without_a_copy(thread: Thread) -> None:
    model = tiny.scalar()
    scorer = ValueModel(model, place=thread)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    versions = [parameter._version for parameter in model.parameters()]
    await scorer.load(Weights(1, critic=model.state_dict()))
    assert versions == [parameter._version for parameter in model.parameters()]
    assert scorer.version == 1


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


async def test_a_gap_names_the_rollout_and_both_positions(thread: Thread) -> None:
    scorer = ReferenceLogprobs(tiny.causal(), sampling=Sampling(), place=thread)
    tokens = np.array([5, 6], np.int32)
    await scorer.extend([Prompt(7, 7, tokens)])
    with pytest.raises(ProtocolError, match=r"rollout 7: .* expected tokens from 0 .* Chunk starts at 2"):
        await scorer.extend([chunk(7, 2, tokens)])


async def test_events_out_of_place_are_errors(thread: Thread) -> None:
    scorer = RewardModel(tiny.scalar(), place=thread)
    tokens = np.array([5, 6], np.int32)
    response = Response.empty(Prompt(1, 1, tokens)).then(chunk(1, 0, tokens))
    with pytest.raises(ProtocolError, match=r"rollout 1 is unknown"):
        await scorer.extend([chunk(1, 0, tokens)])
    await scorer.extend([response.prompt])
    with pytest.raises(ProtocolError, match="a second time"):
        await scorer.extend([response.prompt])
    with pytest.raises(ProtocolError, match=r"finished with 4 tokens.* was given 2"):
        await scorer.finish([Finish(1, response, "eos")])
    await scorer.forget([1, 99])
    with pytest.raises(ProtocolError, match="unknown"):
        await scorer.finish([Finish(1, response, "eos")])


async def test_a_sequence_too_long_or_of_another_vocabulary_is_named(thread: Thread) -> None:
    scorer = RewardModel(tiny.scalar("gpt2"), place=thread)
    with pytest.raises(ModelError, match=r"rollout 4 has 600 tokens.* GPT2ForSequenceClassification .* 512"):
        await scorer.extend([Prompt(4, 4, np.full(600, 5, np.int32))])
    with pytest.raises(ModelError, match=r"rollout 5 has token ids from 5 to 96.* 96"):
        await scorer.extend([Prompt(5, 5, np.array([5, 96], np.int32))])


async def test_dropout_of_a_model_in_training_mode_is_off(thread: Thread) -> None:
    model = tiny.scalar("gpt2")
    assert model.training
    RewardModel(model, place=thread)
    assert not any(module.training for module in model.modules())


async def test_gradients_stay_possible_for_a_critic_that_is_trained_too(thread: Thread) -> None:
    model = tiny.scalar()
    await stream(ValueModel(model, place=thread), responses(2), seed=0)
    tiny.apart(model)(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_with_several_labels_or_no_score_layer_is_refused(thread: Thread) -> None:
    with pytest.raises(ModelRefused, match=r"2 numbers.*num_labels=1"):
        RewardModel(tiny.scalar(labels=2), place=thread)
    model = tiny.causal()
    model.config.num_labels = 1
    with pytest.raises(ModelRefused, match="no score layer"):
        ValueModel(model, place=thread)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_every_scorer_keeps_the_contract(thread: Thread, deterministic: bool) -> None:
    finished = [Finish(response.prompt.rollout, response, "eos") for response in responses(3, seed=4)]

    async def reference() -> ReferenceLogprobs:
        return ReferenceLogprobs(tiny.causal(), sampling=Sampling(), place=thread, deterministic=deterministic)

    async def reward() -> RewardModel:
        return RewardModel(tiny.scalar(), place=thread, deterministic=deterministic)

    async def critic() -> ValueModel:
        return ValueModel(tiny.scalar(), place=thread, deterministic=deterministic)

    def close(a: FloatArray, b: FloatArray) -> bool:
        return np.allclose(a, b, rtol=1e-5, atol=1e-5)

    await check_scorer(reference, finished, close)
    await check_scorer(critic, finished, close)
    await check_scorer(reward, finished, lambda a, b: abs(a - b) <= 1e-5 * (1 + abs(b)))
