"""What the policy makes, against plain full forwards, and what it refuses."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

import anyio
import numpy as np
import pytest
import torch
from torch import Tensor

from oppo.errors import ModelError, ModelLost, ProtocolError
from oppo.events import Prompt
from oppo.hf.serve.policy import HfPolicy
from oppo.models import Sampling, Weights
from oppo.testing.conformance import check_policy
from tests.hf import tiny
from tests.hf.stories import SAMPLING, Serving, Story, assert_close, full_logprobs, prompts, reference, serving, told

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mistral"])
@pytest.mark.parametrize(
    "sampling", [SAMPLING, Sampling(max_new_tokens=30, temperature=0.8, top_k=20, top_p=0.9, stop=(2, 3))]
)
async def test_sampled_tokens_are_those_of_full_forwards_with_the_same_noise(name: str, sampling: Sampling) -> None:
    model = tiny.causal(name)
    asked = prompts(5)
    with serving(model, sampling=sampling) as policy:
        story = await told(policy, asked)
    for prompt, tokens, logprobs in zip(asked, story.tokens(), story.logprobs(), strict=True):
        expected, expected_logprobs = reference(model, prompt, sampling)
        assert tokens == expected
        assert_close(logprobs, expected_logprobs)


async def test_greedy_tokens_are_those_of_generate() -> None:
    model = tiny.causal()
    asked = prompts(6)
    with serving(model, sampling=Sampling(max_new_tokens=25, temperature=0, stop=(2,))) as policy:
        story = await told(policy, asked)
    for prompt, tokens in zip(asked, story.tokens(), strict=True):
        ids = torch.tensor(prompt.tokens[None], dtype=torch.int64)
        generate = tiny.apart(cast("Callable[..., Tensor]", model.generate))
        out = generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=25, eos_token_id=2, pad_token_id=0
        )
        assert tokens == out[0, ids.shape[1] :].tolist()


async def test_log_probs_agree_with_one_full_forward(serving: Serving) -> None:
    model = tiny.causal("qwen2")
    asked = prompts(6)
    with serving(model) as policy:
        story = await told(policy, asked)
    for prompt, tokens, logprobs in zip(asked, story.tokens(), story.logprobs(), strict=True):
        assert_close(logprobs, full_logprobs(model, prompt, tokens))


@pytest.mark.parametrize("deterministic", [False, True])
async def test_the_policy_keeps_the_contract_of_its_seam(deterministic: bool, serving: Serving) -> None:
    with ExitStack() as stack:

        async def make() -> HfPolicy:
            return stack.enter_context(serving(deterministic=deterministic))

        await check_policy(make, prompts(6))


async def test_fifty_rollouts_of_all_lengths_end_with_a_reason_and_free_their_memory(serving: Serving) -> None:
    asked = prompts(50, longest=100)
    with serving() as policy:
        story = await told(policy, asked, limit=5)
        assert (await policy.memory())[1] == 0
        assert policy.counters.tokens == sum(map(len, story.tokens()))
        assert policy.counters.prefilled == sum(len(prompt.tokens) for prompt in asked)
        assert policy.counters.decode_steps == max(map(len, story.tokens()))
    for tokens, state in zip(story.tokens(), story.states(), strict=True):
        assert state == ("eos" if tokens[-1] == 2 else "stop" if tokens[-1] in SAMPLING.stop else "length")
        assert not set(tokens[:-1]) & set(SAMPLING.stop)
        assert state != "length" or len(tokens) == SAMPLING.max_new_tokens
    assert {"eos", "stop", "length"} == set(story.states())
    assert [sorted(step) for step in story.told] == story.told
    lengths = dict(zip(range(50), map(len, story.tokens()), strict=True))
    assert [rollout for step in story.told for rollout in step] == sorted(lengths, key=lambda r: (lengths[r], r))


async def test_tokens_do_not_depend_on_the_neighbours(serving: Serving) -> None:
    asked = prompts(6)
    with serving() as policy:
        together = (await told(policy, asked)).tokens()
        backwards = (await told(policy, asked[::-1])).tokens()
        alone = [(await told(policy, [prompt])).tokens()[0] for prompt in asked]
    assert together == backwards[::-1] == alone


async def test_exact_first_log_probs_do_not_depend_on_the_neighbours_to_the_last_bit() -> None:
    asked = prompts(8, longest=90)
    with serving(sampling=Sampling(max_new_tokens=1), deterministic=True) as policy:
        together = (await told(policy, asked)).logprobs()
        alone = [(await told(policy, [prompt])).logprobs()[0] for prompt in asked]
    assert together == alone


@pytest.mark.parametrize("keep", [False, True])
async def test_a_deferred_rollout_goes_on_with_the_weights_that_were_synced(keep: bool, serving: Serving) -> None:
    other, asked = tiny.causal(seed=1), prompts(8)
    with serving(tiny.causal(seed=0), keep=keep) as policy:
        story = Story(await policy.open(asked), cut_after=2)
        await story.step(policy)
        before = [len(tokens) for tokens in story.tokens()]
        await policy.load(Weights(1, actor=other.state_dict()))
        assert policy.version == 1
        assert ((await policy.memory())[1] > 0) == keep
        story.cut_after = 1_000_000
        await story.step(policy)
    resumed = [k for k, versions in enumerate(story.versions()) if 1 in versions]
    assert len(resumed) >= 3
    for k in resumed:
        tokens, versions = story.tokens()[k], story.versions()[k]
        assert versions == [0] * before[k] + [1] * (len(tokens) - before[k])
        if not keep:
            assert_close(story.logprobs()[k][before[k] :], full_logprobs(other, asked[k], tokens)[before[k] :])


async def test_the_model_that_was_given_has_the_weights_that_were_synced(serving: Serving) -> None:
    model, other = tiny.causal(seed=0), tiny.causal(seed=1)
    with serving(model) as policy:
        await policy.load(Weights(1, actor=other.state_dict()))
    assert set(other.state_dict()) == set(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


async def test_rollouts_join_while_others_are_decoded(serving: Serving) -> None:
    model, asked = tiny.causal(), prompts(7)
    with serving(model) as policy:
        story = Story(await policy.open(asked))
        async with policy.decoding(story.decodes[:2], story.cut) as decoding, anyio.create_task_group() as readers:
            for k in range(2):
                readers.start_soon(story.read, k, 3)
            for k in range(2, 7):
                await decoding.add([story.decodes[k]])
                readers.start_soon(story.read, k, 3)
            with pytest.raises(ProtocolError, match=r"rollouts \[6\] are being decoded, so they cannot join"):
                await decoding.add(story.decodes[6:])
        assert (await policy.memory())[1] == 0
    for prompt, tokens in zip(asked, story.tokens(), strict=True):
        assert tokens == reference(model, prompt, SAMPLING)[0]


async def test_rollouts_may_join_when_all_others_have_ended(serving: Serving) -> None:
    model, asked = tiny.causal(), prompts(3)
    with serving(model) as policy:
        story = Story(await policy.open(asked))
        async with policy.decoding([], story.cut) as decoding:
            for k in range(3):
                await decoding.add([story.decodes[k]])
                await story.read(k, 100)
    assert story.told == [[prompt.rollout] for prompt in asked]
    for prompt, tokens in zip(asked, story.tokens(), strict=True):
        assert tokens == reference(model, prompt, SAMPLING)[0]


async def test_weights_that_do_not_fit_change_nothing(serving: Serving) -> None:
    model = tiny.causal()
    untouched = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrong: dict[str, object] = dict(tiny.causal(seed=1).state_dict())
    del wrong["model.layers.1.mlp.up_proj.weight"]
    with serving(model) as policy:
        with pytest.raises(ModelError, match=r"missing.*up_proj"):
            await policy.load(Weights(1, actor=wrong))
        assert policy.version == 0
    assert all(torch.equal(untouched[name], tensor) for name, tensor in model.state_dict().items())


async def test_logits_that_are_not_finite_are_an_error_that_names_the_rollouts(serving: Serving) -> None:
    model = tiny.causal()
    with torch.no_grad():
        next(model.get_input_embeddings().parameters())[90] = torch.nan
    asked = [Prompt(0, 0, np.array([7], np.int32)), Prompt(1, 1, np.array([90], np.int32))]
    with serving(model) as policy:
        decodes = await policy.open(asked)
        with pytest.raises(ModelError, match=r"not finite for rollouts \[1\]"):
            async with policy.decoding(decodes, lambda _: False):
                await decodes[1].read(1)


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ([], "is empty"),
        ([7] * tiny.LONGEST, f"has {tiny.LONGEST} tokens.*at most {tiny.LONGEST}"),
        ([7, tiny.VOCABULARY], f"token id {tiny.VOCABULARY}"),
        ([-1, 7], "token id -1"),
    ],
)
async def test_a_prompt_that_cannot_be_read_is_refused_by_name(tokens: list[int], complaint: str) -> None:
    with serving() as policy, pytest.raises(ModelError, match=f"rollout 3.*{complaint}"):
        await policy.open([Prompt(3, 3, np.array(tokens, np.int32))])


async def test_a_response_ends_where_the_model_ends() -> None:
    room = 9
    prompt = Prompt(0, 0, np.full(tiny.LONGEST - room, 7, np.int32))
    with serving(tiny.causal("gpt2"), sampling=Sampling(max_new_tokens=100)) as policy:
        story = await told(policy, [prompt, *prompts(2, first=1)])
    assert len(story.tokens()[0]) == room
    assert story.states() == ["length"] * 3


async def test_a_closed_thread_is_a_lost_model() -> None:
    with serving() as policy:
        decodes = await policy.open(prompts(2))
    with pytest.raises(ModelLost):
        async with policy.decoding(decodes, lambda _: False):
            await decodes[0].read(1)
    await decodes[1].aclose()
