"""The policy on the real engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from oppo.events import Chunk, Prompt, Support
from oppo.models import Sampling, Weights
from oppo.testing import check_policy
from oppo.vllm import VllmDecode, VllmEngine, VllmPolicy
from oppo.vllm.async_llm import Collected
from oppo.vllm.engine import NewTokens, Request
from oppo.vllm.sync import FILES, WeightFiles, fingerprints, untied
from tests.kit.dialogues import ANSWER, dialogue, turns_answered
from tests.vllm import scenario
from tests.vllm.real.conftest import VOCABULARY, tiny_actor
from tests.vllm.real.rollouts import (
    TOLERANCE,
    assert_of,
    deferred_across_syncs,
    limit_of_deferred,
    logprobs_of,
    read,
    some,
    tokens_of,
    until,
    whole,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


SAMPLING = Sampling(max_new_tokens=48, stop=(2, 3), seed=11)


def has_written(decode: VllmDecode, tokens: int) -> bool:
    return decode.row.written >= tokens


async def expected(model: LlamaForCausalLM, prompt: Prompt, tokens: Sequence[int], sampling: Sampling) -> torch.Tensor:
    """Return the model's log-probs over the whole vocabulary at each response token, float32 [n, V]."""

    @torch.no_grad()
    def forward() -> torch.Tensor:
        sequence = [*prompt.tokens.tolist(), *tokens]
        logits = model(torch.tensor([sequence])).logits[0, len(prompt.tokens) - 1 : -1].float()
        logprobs: torch.Tensor = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
        return logprobs

    return await anyio.to_thread.run_sync(forward)


async def test_it_does_what_the_fake_does(engine: VllmEngine) -> None:
    files, sent = WeightFiles(), tiny_actor().state_dict()
    path = str(files.write(sent, "one") / FILES[False])
    await scenario.generating(engine, {"path": path, "prints": fingerprints(untied(sent))})


async def test_it_keeps_the_contract_of_a_policy(engine: VllmEngine) -> None:
    sampling = Sampling(max_new_tokens=400, seed=11, stop=tuple(range(2, 8)))

    async def make() -> VllmPolicy:
        return VllmPolicy(engine, sampling=sampling, limit=lambda prompt: 6 + 120 * prompt.rollout)

    await check_policy(make, some(4))


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLING,
        replace(SAMPLING, temperature=0.6),
        replace(SAMPLING, temperature=0.0),
        replace(SAMPLING, stop=tuple(range(2, 200)), min_new_tokens=6),
    ],
    ids=["plain", "cold", "greedy", "least length"],
)
async def test_log_probs_are_those_of_the_distribution_that_tokens_were_sampled_from(
    engine: VllmEngine, sampling: Sampling
) -> None:
    model, prompts = tiny_actor(), some(6)
    policy = VllmPolicy(engine, sampling=sampling)
    await policy.load(Weights(0, model.state_dict()))
    for prompt, pieces in zip(prompts, await whole(policy, prompts), strict=True):
        tokens = tokens_of(pieces)
        logprobs = await expected(model, prompt, tokens, sampling)
        for position in range(min(sampling.min_new_tokens, len(tokens))):
            logprobs[position, list(sampling.stop)] = -torch.inf
        logprobs = logprobs.log_softmax(-1)
        ours = logprobs[range(len(tokens)), tokens]
        assert np.allclose(logprobs_of(pieces), ours, atol=TOLERANCE)
        assert len(tokens) >= sampling.min_new_tokens
        if sampling.temperature == 0:
            assert tokens == logprobs.argmax(-1).tolist()
        state = pieces[-1].state
        assert state == ("eos" if tokens[-1] == 2 else "stop" if tokens[-1] in sampling.stop else "length")


@pytest.mark.parametrize("top_p", [1.0, 0.7])
async def test_the_support_of_top_k_is_that_of_the_model(engine: VllmEngine, top_p: float) -> None:
    sampling = replace(SAMPLING, top_k=30, top_p=top_p, temperature=0.8)
    model, prompts = tiny_actor(), some(4)
    policy = VllmPolicy(engine, sampling=sampling)
    assert policy.capabilities.supports
    sizes = set[int]()
    for prompt, pieces in zip(prompts, await whole(policy, prompts), strict=True):
        tokens = tokens_of(pieces)
        top = (await expected(model, prompt, tokens, sampling)).topk(30)
        mass = top.values.softmax(-1).cumsum(-1)
        counts = np.concatenate([piece.extra[Support].counts for piece in pieces])
        ids = np.split(np.concatenate([piece.extra[Support].ids for piece in pieces]), counts.cumsum()[:-1])
        for at, token in enumerate(tokens):
            kept = 30 if top_p == 1 else int((mass[at] < top_p).sum()) + 1
            normalised = top.values[at, :kept].log_softmax(-1)
            assert set(ids[at].tolist()) == set(top.indices[at, :kept].tolist())
            ours = float(normalised[top.indices[at, :kept] == token])
            assert logprobs_of(pieces)[at] == pytest.approx(ours, abs=TOLERANCE)
            sizes.add(kept)
    assert sizes == {30} if top_p == 1 else len(sizes) > 3


async def test_tokens_follow_from_the_seed_and_the_rollout(engine: VllmEngine) -> None:
    prompts = some(5)
    one = await whole(VllmPolicy(engine, sampling=SAMPLING), prompts)
    other = await whole(VllmPolicy(engine, sampling=SAMPLING), prompts[::-1])
    assert [tokens_of(pieces) for pieces in one] == [tokens_of(pieces) for pieces in other[::-1]]
    seeded = await whole(VllmPolicy(engine, sampling=replace(SAMPLING, seed=12)), prompts)
    assert [tokens_of(pieces) for pieces in one] != [tokens_of(pieces) for pieces in seeded]
    sample = await whole(VllmPolicy(engine, sampling=SAMPLING), [replace(prompts[0], sample=1)])
    assert tokens_of(sample[0]) != tokens_of(one[0])


async def test_rollouts_that_are_preempted_go_on_with_their_noise(engine: VllmEngine) -> None:
    """Recomputing the KV cache after a sync of the same weights preempts every request and changes no token."""
    model, prompts = tiny_actor(), some(4)
    sampling = Sampling(max_new_tokens=600, seed=3)
    undisturbed = await whole(VllmPolicy(engine, sampling=sampling), prompts)
    policy = VllmPolicy(engine, sampling=sampling, kv_on_sync="recompute")
    decodes = await policy.open(prompts)
    pieces: list[list[Chunk]] = [[] for _ in decodes]
    async with policy.decoding(decodes, lambda ended: False), anyio.create_task_group() as readers:
        for decode, into in zip(decodes, pieces, strict=True):
            readers.start_soon(read, decode, into)
        await until(lambda: min(decode.row.written for decode in decodes) >= 20)
        await policy.load(Weights(1, model.state_dict()))
    versions = np.concatenate([piece.versions for piece in pieces[0]])
    assert set(versions.tolist()) == {0, 1}
    assert [tokens_of(each) for each in pieces] == [tokens_of(each) for each in undisturbed]


@pytest.mark.parametrize("kv_on_sync", ["keep", "recompute"])
async def test_syncing_while_it_decodes_counts_every_token_to_the_weights_that_made_it(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, kv_on_sync: Literal["keep", "recompute"]
) -> None:
    """The engine names the same versions, and the log-probs are those of their weights.

    With ``keep`` these read the keys and values that the weights before have left.
    """
    models, named = [tiny_actor(seed) for seed in range(11)], spans_named(monkeypatch)
    policy = VllmPolicy(engine, sampling=Sampling(max_new_tokens=900, seed=4), kv_on_sync=kv_on_sync)
    await policy.load(Weights(0, models[0].state_dict()))
    prompts = some(14)
    decodes = await policy.open(prompts)
    pieces: list[list[Chunk]] = [[] for _ in decodes]
    async with policy.decoding(decodes, lambda ended: False), anyio.create_task_group() as readers:
        for decode, into in zip(decodes, pieces, strict=True):
            readers.start_soon(read, decode, into)
        for version, model in enumerate(models[1:], 1):
            await until(partial(has_written, decodes[0], 80 * version))
            await policy.load(Weights(version, model.state_dict()))
    versions = [np.concatenate([piece.versions for piece in each]) for each in pieces]
    assert sum(map(len, versions)) == 14 * 900 >= 10_000
    assert set(np.concatenate(versions).tolist()) == set(range(11))
    for prompt, made in zip(prompts, versions, strict=True):
        assert (np.diff(made) >= 0).all()
        assert len(set(made.tolist())) > 3, "three syncs within one response"
        ends = [*(start for _, start in named[prompt.rollout][1:]), 900]
        spans = [(label, end - start) for (label, start), end in zip(named[prompt.rollout], ends, strict=True)]
        assert [policy.number_of(label) for label, count in spans for _ in range(count)] == made.tolist()
    await assert_of(models, prompts, pieces, kept=kv_on_sync == "keep")


def spans_named(monkeypatch: pytest.MonkeyPatch) -> dict[int, Sequence[tuple[str, int]]]:
    """Return the versions, with their first tokens, that the engine will name when a request ends, by rollout."""
    named: dict[int, Sequence[tuple[str, int]]] = {}
    take = Request.take

    def noting(self: Request, new: NewTokens, *others: Any) -> bool:
        if new.reason is not None:
            named[self.prompt.rollout] = new.starts
        return take(self, new, *others)

    monkeypatch.setattr(Request, "take", noting)
    return named


@pytest.mark.parametrize("kv_on_sync", ["keep", "recompute"])
async def test_a_rollout_is_deferred_across_syncs(engine: VllmEngine, kv_on_sync: Literal["keep", "recompute"]) -> None:
    sampling = Sampling(max_new_tokens=700, seed=1)
    policy = VllmPolicy(engine, sampling=sampling, kv_on_sync=kv_on_sync, limit=limit_of_deferred)
    await deferred_across_syncs(policy, kept=kv_on_sync == "keep")


async def test_groups_share_the_prefix_of_their_prompt(engine: VllmEngine) -> None:
    """The samples of a prompt have the same tokens and the same salt, so whole blocks of the prompt are read once."""
    block = int(engine.config.cache_config.block_size)
    prompt = Prompt(0, 0, np.arange(4, 4 + 2 * block + 1, dtype=np.int32) % VOCABULARY)
    policy = VllmPolicy(engine, sampling=replace(SAMPLING, max_new_tokens=3))
    cached: list[int] = []
    decodes = await policy.open([replace(prompt, rollout=k, sample=k) for k in range(2)])
    new = Collected._new

    def noting(self: Collected, output: Any) -> NewTokens:
        cached.append(output.num_cached_tokens or 0)
        return new(self, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collected, "_new", noting)
        for decode in decodes:
            async with policy.decoding([decode], lambda ended: False):
                await decode.read(100)
    assert max(cached) == 2 * block


@pytest.mark.parametrize("cuts", [(), (1, 2)])
async def test_an_answer_goes_on_with_what_the_engine_has_read(engine: VllmEngine, cuts: tuple[int, ...]) -> None:
    sampling = replace(SAMPLING, max_new_tokens=200, stop=tuple(range(2, 40)))
    policy, asked, model = VllmPolicy(engine, sampling=sampling), some(4), tiny_actor()
    talk = await dialogue(policy, asked, lambda k, turn: 0.05 * (k % 2), cuts)
    assert sorted(rollout for told in talk.told for rollout in told) == [0, 1, 2, 3]
    for prompt, response in zip(asked, talk.responses(), strict=True):
        assert turns_answered(response) == 2
        assert response.tokens[~response.sampled].tolist() == [*ANSWER, *ANSWER]
        tokens = response.tokens.tolist()
        logprobs = (await expected(model, prompt, tokens, sampling)).numpy()[np.arange(len(tokens)), tokens]
        sampled = response.sampled
        np.testing.assert_allclose(response.logprobs[sampled], logprobs[sampled], atol=TOLERANCE)
