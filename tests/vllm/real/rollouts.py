"""Rollouts of a policy on real engines and servers, beside what transformers computes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import anyio
import anyio.to_thread
import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from oppo.events import Chunk, FloatArray, Prompt, Response
from oppo.hf.lora import adapter_matrices, add_lora
from oppo.models import Decode, Weights
from oppo.vllm import VllmPolicy
from tests.kit.responses import read_chunk
from tests.vllm.real.conftest import VOCABULARY, tiny_actor

TOLERANCE = 1e-4


def some(count: int, length: int = 7) -> list[Prompt]:
    random = np.random.default_rng(0)
    return [Prompt(n, n, random.integers(4, VOCABULARY, length, dtype=np.int32)) for n in range(count)]


async def read(decode: Decode, pieces: list[Chunk], limit: int = 8) -> None:
    while True:
        pieces.append(await read_chunk(decode, limit))
        if pieces[-1].state != "live":
            return


async def whole(policy: VllmPolicy, prompts: Sequence[Prompt | Response]) -> list[list[Chunk]]:
    """Return the pieces of each rollout, decoded to their ends."""
    decodes = await policy.open(prompts)
    pieces: list[list[Chunk]] = [[] for _ in decodes]
    async with policy.decoding(decodes, lambda ended: False), anyio.create_task_group() as readers:
        for decode, into in zip(decodes, pieces, strict=True):
            readers.start_soon(read, decode, into)
    return pieces


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that the engine brings about."""
    while not condition():  # noqa: ASYNC110 - nothing announces it
        await anyio.sleep(0.001)


def tokens_of(pieces: Sequence[Chunk]) -> list[int]:
    return [int(token) for piece in pieces for token in piece.tokens]


def logprobs_of(pieces: Sequence[Chunk]) -> list[float]:
    return [float(each) for piece in pieces for each in piece.logprobs]


async def logprobs(
    models: Sequence[PreTrainedModel], prompt: Prompt, pieces: Sequence[Chunk], *, kept: bool = False
) -> FloatArray:
    """Return the log-prob of each token under the weights that made it, float32 [n].

    Args:
        models: by version.
        kept: keys and values of tokens stay those of the weights that read them; otherwise the weights that make a
            token have read all before it.
    """
    tokens = np.concatenate([piece.tokens for piece in pieces])
    versions = np.concatenate([piece.versions for piece in pieces])
    borders = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(tokens)]
    sequence = torch.tensor([[*prompt.tokens.tolist(), *tokens.tolist()]])

    @torch.no_grad()
    def forward() -> FloatArray:
        found, cache, before = np.zeros(len(tokens), np.float32), DynamicCache(), len(prompt.tokens)
        for start, end in pairwise(borders):
            read = before + start - 1 if kept and start else 0
            model = models[int(versions[start])]
            logits = model(
                sequence[:, read : before + end - 1],
                past_key_values=cache if kept else None,
                position_ids=torch.arange(read, before + end - 1)[None],
                use_cache=kept,
            ).logits[0, start - end :]
            found[start:end] = logits.float().log_softmax(-1)[range(end - start), tokens[start:end].tolist()]
        return found

    return await anyio.to_thread.run_sync(forward)


async def respond(policy: VllmPolicy, prompt: Prompt, *, load: Weights | None = None) -> list[Chunk]:
    """Return the pieces of a rollout; ``load``: weights that arrive while it is decoded."""
    pieces: list[Chunk] = []
    (decode,) = await policy.open([prompt])
    async with policy.decoding([decode], lambda ended: False):
        while not pieces or pieces[-1].state == "live":
            pieces.append(await read_chunk(decode, 20))
            if load is not None:
                await policy.load(load)
                load = None
    return pieces


async def assert_of(
    models: Sequence[PreTrainedModel],
    prompts: Sequence[Prompt],
    pieces: Sequence[Sequence[Chunk]],
    *,
    kept: bool = False,
    tolerance: float = TOLERANCE,
) -> None:
    """Check that the tokens of rollouts have the log-probs of the models, by version, that they name."""
    for prompt, each in zip(prompts, pieces, strict=True):
        wanted = await logprobs(models, prompt, each, kept=kept)
        np.testing.assert_allclose(logprobs_of(each), wanted, rtol=0, atol=tolerance)


async def deferred_across_syncs(policy: VllmPolicy, *, kept: bool = False, tolerance: float = TOLERANCE) -> None:
    """Decode three rollouts over three steps, each with other weights."""
    prompts, models = some(3), [tiny_actor(seed) for seed in range(4)]
    await policy.load(Weights(0, models[0].state_dict()))
    decodes = await policy.open(prompts)
    pieces: list[list[Chunk]] = [[] for _ in decodes]
    for version in range(3):
        live = [decode for decode in decodes if not decode.ended]
        async with policy.decoding(live, lambda ended: True), anyio.create_task_group() as readers:
            for decode in live:
                readers.start_soon(read, decode, pieces[decode.prompt.rollout])
        await policy.load(Weights(version + 1, models[version + 1].state_dict()))
    assert [len(tokens_of(each)) for each in pieces] == [8, 308, 608]
    assert set(np.concatenate([piece.versions for piece in pieces[2]]).tolist()) == {0, 1, 2}
    await assert_of(models, prompts, pieces, kept=kept, tolerance=tolerance)


def limit_of_deferred(prompt: Prompt) -> int:
    return 8 + 300 * prompt.rollout


def adapted(version: int) -> PreTrainedModel:
    """Return the actor with an adapter that changes much of what it says, another in each version."""
    model = tiny_actor()
    add_lora(model, 4, 8, seed=version)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1, generator=generator)
    return model


def weights(version: int) -> Weights:
    model = adapted(version)
    return Weights(version, model.state_dict(), adapters=partial(adapter_matrices, model))


async def adapters_arrive_alone(policy: VllmPolicy, *, kept: bool = False) -> None:
    """Sync two adapters, the second while a response is decoded."""
    await policy.load(weights(1))
    (prompt,) = some(1)
    pieces = await respond(policy, prompt, load=weights(2))
    assert {int(version) for piece in pieces for version in piece.versions} == {1, 2}
    await assert_of([adapted(version) for version in range(3)], [prompt], [pieces], kept=kept)
    whole = sum(each.nbytes for each in tiny_actor().state_dict().values())
    assert policy.sync_metrics["sync/bytes"] < 0.2 * whole
    assert policy.sync_metrics["sync/rounding_loss"] == 0.0
