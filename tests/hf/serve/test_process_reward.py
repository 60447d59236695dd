"""A process reward model: a reward at the end of each step, as its own forward pass gives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oppo.errors import ConfigError, ModelRefused
from oppo.events import Finish, FloatArray, Prompt, Response
from oppo.hf.devices import use_cores
from oppo.hf.loading import load_process
from oppo.hf.serve.scorers import ProcessRewardModel
from oppo.hf.tokenizer import HfTokenizer
from oppo.placement import Place, Process, Thread
from oppo.returns import TokenRewards
from oppo.stages import GAE, ScoredRollout
from oppo.testing import check_scorer
from tests.hf import tiny
from tests.known import known
from tests.responses import chunk, responses, stream
from tests.workplace import tokenizer

SEPARATORS = tuple(range(10, 30))


@pytest.fixture
def thread() -> Iterator[Thread]:
    with Thread("scorers", setup=lambda: use_cores(1)) as thread:
        yield thread


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
@pytest.mark.parametrize("labels", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-sliding", "neox"])
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


async def test_exact_rewards_are_equal_to_the_bit_for_any_arrival_pattern_and_in_a_process(thread: Thread) -> None:
    made = responses(4)

    async def seen(place: Place, seed: int) -> list[bytes]:
        scorer = ProcessRewardModel(tiny.steps(), place=place, separators=SEPARATORS, deterministic=True)
        return [rewards.tobytes() for rewards in rewards_of(await stream(scorer, made, seed), made)]

    first = await seen(thread, 0)
    assert all([await seen(thread, seed) == first for seed in range(1, 5)])
    with Process("scorers", setup=one_core) as process:
        assert await seen(process, 9) == first


def one_core() -> None:
    use_cores(1)


async def test_it_keeps_the_contract_of_a_scorer(thread: Thread) -> None:
    async def make() -> ProcessRewardModel:
        return ProcessRewardModel(tiny.steps(), place=thread, separators=SEPARATORS)

    finished = [Finish(response.prompt.rollout, response, "eos") for response in responses(3, seed=4)]
    await check_scorer(make, finished, lambda a, b: np.allclose(a.rewards, b.rewards, rtol=1e-5, atol=1e-5))


async def test_a_response_without_tokens_has_no_rewards(thread: Thread) -> None:
    response = Response.empty(Prompt(0, 0, np.array([5, 6, 7], np.int32)))
    scorer = ProcessRewardModel(tiny.steps(), place=thread, separators=SEPARATORS)
    await scorer.extend([response.prompt])
    (score,) = await scorer.finish([Finish(0, response, "stop")])
    assert (float(score), len(score.rewards)) == (0.0, 0)


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


def test_a_bidirectional_model_is_refused_since_it_cannot_be_read_as_it_grows(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForTokenClassification

    config = BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    BertForTokenClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="cannot be served: it is not causal"):
        load_process(tmp_path)


def test_tokens_are_found_by_the_text_that_they_end_with() -> None:
    text = HfTokenizer(tokenizer())
    assert text.ending_with(["w5", "7"]) == (5, 7, 17, 27, 37, 47, 57, 67, 77, 87)
    with pytest.raises(ConfigError, match="no token of the policy's tokenizer ends with any of"):
        text.ending_with(["\n"])
