"""One PPO run with nothing overlapped: generate, score, estimate, train, one after another.

This is the whole algorithm in plain lines, with the models that the streamed graph uses but no graph and no channel.
It is also the oracle: in deterministic mode the graph reproduces its tokens, scores, advantages and weights bit for
bit.

    python examples/00_serial_ppo.py

runs three steps on models made on the spot.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import anyio
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from oppo.events import Batch, Finish, FinishReason, Prompt, Response
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ReferenceLogprobs, RewardModel, ValueModel
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.returns import gae, kl_estimate, shaped_rewards, whiten
from oppo.training import TrainerSettings

KL, GAMMA, LAM = 0.05, 1.0, 0.95


async def generate(policy: HfPolicy, prompts: Sequence[Prompt]) -> list[Finish]:
    """Decode every prompt to its end, then return the finished rollouts."""
    finished = []
    decodes = await policy.open(prompts)
    async with policy.decoding(decodes, lambda _ended: False):
        for prompt, decode in zip(prompts, decodes, strict=True):
            chunk = await decode.read(sys.maxsize)
            response = Response.empty(prompt).then(chunk)
            finished.append(Finish(prompt.rollout, response, cast("FinishReason", chunk.state)))
    for decode in decodes:
        await decode.aclose()
    return finished


async def score(scorer: ReferenceLogprobs | RewardModel | ValueModel, finished: Sequence[Finish]) -> Sequence[object]:
    """Read every rollout from its beginning and return what the scorer says of each."""
    await scorer.extend([event.response.prompt for event in finished])
    await scorer.extend([event.response.chunk() for event in finished])
    return await scorer.finish(finished)


def advantages(
    finished: Sequence[Finish], reference: Sequence[object], scores: Sequence[object], values: Sequence[object]
) -> Batch:
    """Penalise the KL to the reference, estimate advantages (Schulman et al. 2016) and whiten them over the batch."""
    responses = tuple(event.response for event in finished)
    offsets = np.concatenate(([0], np.cumsum([len(response) for response in responses]))).astype(np.int64)
    logprobs = np.concatenate([response.logprobs for response in responses])
    flat_reference = np.concatenate([cast("np.ndarray", row) for row in reference])
    flat_values = np.concatenate([cast("np.ndarray", row)[:-1] for row in values])  # the last is of the state after
    kl = kl_estimate(logprobs, flat_reference, "k1")
    rows = [slice(a, b) for a, b in pairwise(offsets)]
    rewards = [shaped_rewards(cast("float", s), kl[row], KL) for s, row in zip(scores, rows, strict=True)]
    estimates = [gae(r, flat_values[row], GAMMA, LAM) for r, row in zip(rewards, rows, strict=True)]
    sampled = np.ones(len(logprobs), np.bool_)
    return Batch(
        responses=responses,
        reasons=tuple(event.reason for event in finished),
        scores=np.array(scores, np.float32),
        offsets=offsets,
        tokens=np.concatenate([response.tokens for response in responses]),
        versions=np.concatenate([response.versions for response in responses]),
        sampled=sampled,
        logprobs=logprobs,
        proximal=logprobs,
        reference=flat_reference,
        values=flat_values,
        rewards=np.concatenate(rewards),
        advantages=whiten(np.concatenate([advantage for advantage, _ in estimates]), sampled),
        returns=np.concatenate([total for _, total in estimates]),
    )


async def serial_ppo(
    models: dict[str, PreTrainedModel],
    prompts: Sequence[Prompt],
    batch: int,
    sampling: Sampling,
    settings: TrainerSettings,
) -> list[Batch]:
    """Train ``models["actor"]`` and ``models["critic"]`` in place; return what each step trained on."""
    with Thread("serial") as thread:
        policy = HfPolicy(models["actor"], sampling=sampling, place=thread, deterministic=True)
        reference = ReferenceLogprobs(models["reference"], sampling=sampling, place=thread, deterministic=True)
        reward = RewardModel(models["reward"], place=thread, deterministic=True)
        critic = ValueModel(models["critic"], place=thread, deterministic=True)
        trainer = HfTrainer(models["actor"], models["critic"], sampling=sampling, place=thread, settings=settings)
        batches = []
        for start in range(0, len(prompts), batch):
            finished = await generate(policy, prompts[start : start + batch])
            said = [await score(scorer, finished) for scorer in (reference, reward, critic)]
            batches.append(advantages(finished, *said))
            await trainer.update(batches[-1])
            await trainer.sync_weights(policy, critic)
        return batches


def tiny_models(seed: int = 0) -> dict[str, PreTrainedModel]:
    """Return an actor, its frozen reference, a critic and a reward model with random weights."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    config.num_labels = 1
    torch.manual_seed(seed)
    models = {"actor": LlamaForCausalLM(config), "reference": LlamaForCausalLM(config)}
    models["reference"].load_state_dict(models["actor"].state_dict())
    return models | {name: LlamaForSequenceClassification(config) for name in ("critic", "reward")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    models = tiny_models()
    prompts = [Prompt(n, n, np.arange(3 + n, 8 + n, dtype=np.int32), group=n) for n in range(12)]
    sampling = Sampling(max_new_tokens=24, stop=tuple(range(1, 17)), seed=1)
    batches = anyio.run(serial_ppo, models, prompts, 4, sampling, TrainerSettings(learning_rate=1e-3, epochs=2))
    for step, trained in enumerate(batches):
        print(f"step {step}: {len(trained.tokens)} tokens, mean score {trained.scores.mean():+.3f}")
    print("actor", weights_digest(models["actor"])[:16])
