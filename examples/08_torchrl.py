"""PPO of another library, overlapped: the update is torchrl's, its loss and its advantages, and stays as it is.

``PPO.update`` is how torchrl is used: tensordicts in, ``ClipPPOLoss`` out, an optimizer. ``serial`` calls it after
generating and scoring; ``overlapped`` gives it to ``oppo.wrap``, which streams responses to the reward model and the
critic while they are written, and carries the slow ones into the next batch.

    pip install torchrl
    python examples/08_torchrl.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import anyio
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.utils.rnn import pad_sequence
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.functional import generalized_advantage_estimate
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from oppo import Batch, Finish, Overcommit, Prompt, Response, Sampling, Scorer, StepReport, Thread, Weights, wrap
from oppo.admission.chunking import Fixed
from oppo.hf import HfPolicy, RewardModel, ValueModel

T = TypeVar("T")

PROMPT = 5
SAMPLING = Sampling(max_new_tokens=48, stop=tuple(range(1, 9)), seed=1)


class Models(NamedTuple):
    """What is trained, and what scores."""

    actor: LlamaForCausalLM
    critic: LlamaForSequenceClassification
    reward_model: LlamaForSequenceClassification


class Logits(nn.Module):
    """The logits of each response token."""

    def __init__(self, actor: LlamaForCausalLM) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, ids: Tensor) -> Tensor:
        """Return them for right-padded rows, float32 [B, T, V]."""
        logits: Tensor = self.actor(ids).logits[:, PROMPT - 1 : -1]
        return logits


class Values(nn.Module):
    """The value of the state before each response token."""

    def __init__(self, critic: LlamaForSequenceClassification) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, ids: Tensor) -> Tensor:
        """Return them for right-padded rows, float32 [B, T, 1]."""
        values: Tensor = self.critic.score(self.critic.model(ids).last_hidden_state)[:, PROMPT - 1 : -1]
        return values


class PPO:
    """torchrl's PPO on whole responses: somebody's own learner."""

    def __init__(self, actor: LlamaForCausalLM, critic: LlamaForSequenceClassification) -> None:
        said = TensorDictModule(Logits(actor), in_keys=["ids"], out_keys=["logits"])
        drawn = ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
        )
        value = TensorDictModule(Values(critic), in_keys=["ids"], out_keys=["state_value"])
        self.loss = ClipPPOLoss(
            ProbabilisticTensorDictSequential(said, drawn), value, entropy_coeff=0.0, reduction="none", functional=False
        )
        self.optimizer = torch.optim.AdamW([*actor.parameters(), *critic.parameters()], lr=1e-3)

    def update(
        self, ids: Sequence[Tensor], logprobs: Sequence[Tensor], values: Sequence[Tensor], scores: Tensor
    ) -> dict[str, float]:
        """Make two optimizer steps on a batch; prompts have one length, and responses are padded here."""
        lengths = torch.tensor([len(each) for each in logprobs])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        last = torch.arange(mask.shape[1]) == lengths[:, None] - 1
        old = pad_sequence(list(values), batch_first=True)
        rewards, done = (last * scores[:, None])[..., None], last[..., None]
        following = torch.cat([old[:, 1:], old.new_zeros(len(old), 1)], 1)
        advantages, targets = generalized_advantage_estimate(
            1.0, 0.95, old[..., None], following[..., None], rewards, done
        )
        whitened = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-8)
        padded = pad_sequence(list(ids), batch_first=True)
        batch = TensorDict(
            {
                "ids": padded,
                "action": padded[:, PROMPT:],
                "action_log_prob": pad_sequence(list(logprobs), batch_first=True),
                "advantage": whitened,
                "value_target": targets,
                "state_value": old[..., None],
            },
            batch_size=[len(padded)],
        )
        for _ in range(2):
            found = self.loss(batch)
            policy, value = found["loss_objective"][mask].mean(), found["loss_critic"][mask].mean()
            self.optimizer.zero_grad()
            (policy + value).backward()
            self.optimizer.step()
        return {"loss/policy_avg": policy.item(), "loss/value_avg": value.item()}


def tensors(responses: Sequence[Response]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the token ids of prompt and response, and the log-probs of the response."""
    ids = [torch.from_numpy(np.concatenate([each.prompt.tokens, each.tokens])).long() for each in responses]
    return ids, [torch.from_numpy(each.logprobs) for each in responses]


async def serial(models: Models, steps: int) -> None:
    """Train with one thing after the other."""
    ppo = PPO(models.actor, models.critic)
    with Thread("models", setup=one_core) as thread:
        policy = HfPolicy(models.actor, sampling=SAMPLING, place=thread, deterministic=True)
        reward = RewardModel(models.reward_model, place=thread, deterministic=True)
        critic = ValueModel(models.critic, place=thread, deterministic=True)
        for step in range(steps):
            finished = await generate(policy, prompts(8)[8 * step : 8 * step + 8])
            scores = torch.tensor(await read(reward, finished))
            values = [torch.from_numpy(each)[:-1] for each in await read(critic, finished)]  # but of the state after
            ids, logprobs = tensors([event.response for event in finished])
            await thread.call("train", ppo.update, ids, logprobs, values, scores)
            weights = Weights(step + 1, models.actor.state_dict(), models.critic.state_dict())
            await policy.load(weights)
            await critic.load(weights)


async def overlapped(models: Models, steps: int, overcommit: int = 0) -> list[StepReport]:
    """Train with the same update, streamed; carry up to ``overcommit`` responses over."""
    ppo = PPO(models.actor, models.critic)
    with Thread("decode", setup=one_core) as decoding, Thread("score", setup=one_core) as scoring:
        policy = HfPolicy(models.actor, sampling=SAMPLING, place=decoding, deterministic=True)
        reward = RewardModel(models.reward_model, place=scoring, deterministic=True)
        critic = ValueModel(models.critic, place=scoring, deterministic=True)

        def step(batch: Batch) -> dict[str, float]:
            assert batch.values is not None
            values = torch.from_numpy(batch.values).split([len(each) for each in batch.responses])
            return ppo.update(*tensors(batch.responses), values, torch.from_numpy(batch.scores))

        graph = wrap(
            step, models.actor, policy=policy, reward=reward, critic=critic, critic_module=models.critic,
            admission=Overcommit(batch=8, overcommit=overcommit), chunks=Fixed(8), place=decoding,
        )  # fmt: skip
        async with graph.open(prompts(steps)) as run:
            return [report async for report in run.steps(steps)]


async def generate(policy: HfPolicy, asked: Sequence[Prompt]) -> list[Finish]:
    """Return the responses when all of them have ended."""
    decodes = await policy.open(asked)
    async with policy.decoding(decodes, lambda _ended: False):
        chunks = [await decode.read(sys.maxsize) for decode in decodes]
    made = [Response.empty(prompt).then(chunk) for prompt, chunk in zip(asked, chunks, strict=True)]
    return [Finish(response.prompt.rollout, response, "stop") for response in made]


async def read(scorer: Scorer[T], finished: Sequence[Finish]) -> Sequence[T]:
    """Return what a scorer says of whole responses."""
    await scorer.extend([event.response.prompt for event in finished])
    await scorer.extend([event.response.chunk() for event in finished])
    return await scorer.finish(finished)


def one_core() -> None:
    """Compute with one thread."""
    torch.set_num_threads(1)


def prompts(steps: int) -> list[Prompt]:
    """Return more prompts than a run of ``steps`` needs."""
    return [Prompt(n, n, np.arange(20 + n % 50, 20 + n % 50 + PROMPT, dtype=np.int32)) for n in range(8 * steps + 8)]


def tiny_models() -> Models:
    """Return an actor, a critic and a reward model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    config.num_labels = 1
    return Models(
        LlamaForCausalLM(config), LlamaForSequenceClassification(config), LlamaForSequenceClassification(config)
    )


async def main() -> None:
    """Train four steps both ways, then with responses deferred."""
    one, other = tiny_models(), tiny_models()
    await serial(one, steps=4)
    await overlapped(other, steps=4)
    same = all(
        torch.equal(a, b)
        for mine, theirs in ((one.actor, other.actor), (one.critic, other.critic))
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True)
    )
    print(f"nothing deferred: the weights are {'identical' if same else 'not identical'}")
    for report in await overlapped(tiny_models(), steps=4, overcommit=4):
        print(f"step {report.index}: score {report.score:+.3f}, deferred {[each.rollout for each in report.deferred]}")


if __name__ == "__main__":
    one_core()
    anyio.run(main)
