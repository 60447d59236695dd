"""A loop that exists already, and the same loop overlapped: its training step stays as it is.

``serial`` is how many write it: generate, score, train. ``overlapped`` adds a dozen lines and changes none: responses
are scored while they are written, and the slow ones are deferred into the next batch.

    python examples/06_existing_loop.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import anyio
import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from oppo import Batch, Finish, Overcommit, Prompt, Response, Sampling, StepReport, Thread, Weights, wrap
from oppo.admission.chunking import Fixed
from oppo.hf import HfPolicy, RewardModel

SAMPLING = Sampling(max_new_tokens=48, stop=tuple(range(1, 9)), seed=1)


class Learner:
    """REINFORCE with the mean score as the baseline: somebody's own training step."""

    def __init__(self, actor: LlamaForCausalLM) -> None:
        self.actor = actor
        self.optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)

    def train_step(self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Tensor) -> dict[str, float]:
        """Make one optimizer step."""
        self.optimizer.zero_grad()
        total = 0.0
        for query, response, advantage in zip(queries, responses, scores - scores.mean(), strict=True):
            logits = self.actor(torch.cat([query, response])[None]).logits[0, len(query) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(-1, response[:, None])
            loss = -advantage * chosen.sum() / len(queries)
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return {"loss/policy_avg": total}


async def generate(policy: HfPolicy, prompts: Sequence[Prompt]) -> list[Finish]:
    """Return the responses when all of them have ended."""
    decodes = await policy.open(prompts)
    async with policy.decoding(decodes, lambda _ended: False):
        chunks = [await decode.read(sys.maxsize) for decode in decodes]
    made = [Response.empty(prompt).then(chunk) for prompt, chunk in zip(prompts, chunks, strict=True)]
    return [Finish(response.prompt.rollout, response, "stop") for response in made]


async def score(reward: RewardModel, finished: Sequence[Finish]) -> Tensor:
    """Return the scores of whole responses."""
    await reward.extend([event.response.prompt for event in finished])
    await reward.extend([event.response.chunk() for event in finished])
    return torch.tensor(await reward.finish(finished))


def tokens_of(responses: Sequence[Response]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tokens of prompts and responses."""
    queries = [torch.from_numpy(each.prompt.tokens).long() for each in responses]
    return queries, [torch.from_numpy(each.tokens).long() for each in responses]


async def serial(actor: LlamaForCausalLM, reward_model: LlamaForSequenceClassification, steps: int) -> None:
    """Train with one thing after the other."""
    learner = Learner(actor)
    with Thread("models", setup=one_core) as thread:
        policy = HfPolicy(actor, sampling=SAMPLING, place=thread, deterministic=True)
        reward = RewardModel(reward_model, place=thread, deterministic=True)
        for step in range(steps):
            finished = await generate(policy, prompts(8)[8 * step : 8 * step + 8])
            scores = await score(reward, finished)
            queries, responses = tokens_of([event.response for event in finished])
            await thread.call("train", learner.train_step, queries, responses, scores)
            await policy.load(Weights(step + 1, actor.state_dict()))


async def overlapped(
    actor: LlamaForCausalLM, reward_model: LlamaForSequenceClassification, steps: int, overcommit: int = 0
) -> list[StepReport]:
    """Train with the same models and the same training step, streamed; carry up to ``overcommit`` responses over."""
    learner = Learner(actor)
    with Thread("decode", setup=one_core) as decoding, Thread("score", setup=one_core) as scoring:
        policy = HfPolicy(actor, sampling=SAMPLING, place=decoding, deterministic=True)
        reward = RewardModel(reward_model, place=scoring, deterministic=True)

        def step(batch: Batch) -> dict[str, float]:
            return learner.train_step(*tokens_of(batch.responses), torch.from_numpy(batch.scores))

        admission = Overcommit(batch=8, overcommit=overcommit)
        graph = wrap(step, actor, policy=policy, reward=reward, admission=admission, chunks=Fixed(8), place=decoding)
        async with graph.open(prompts(steps)) as run:
            return [report async for report in run.steps(steps)]


def one_core() -> None:
    """Compute with one thread."""
    torch.set_num_threads(1)


def prompts(steps: int) -> list[Prompt]:
    """Return more prompts than a run of ``steps`` needs."""
    return [Prompt(n, n, np.arange(20 + n % 50, 25 + n % 50, dtype=np.int32)) for n in range(8 * steps + 8)]


def tiny_models() -> tuple[LlamaForCausalLM, LlamaForSequenceClassification]:
    """Return an actor and a reward model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    config.num_labels = 1
    return LlamaForCausalLM(config), LlamaForSequenceClassification(config)


async def main() -> None:
    """Train four steps both ways, then with responses deferred."""
    one, other = tiny_models(), tiny_models()
    await serial(*one, steps=4)
    await overlapped(*other, steps=4)
    same = all(torch.equal(a, b) for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True))
    print(f"nothing deferred: the weights are {'identical' if same else 'not identical'}")
    for report in await overlapped(*tiny_models(), steps=4, overcommit=4):
        print(f"step {report.index}: score {report.score:+.3f}, deferred {[each.rollout for each in report.deferred]}")


if __name__ == "__main__":
    one_core()
    anyio.run(main)
