"""The same run as ``00_serial_ppo.py``, streamed: a graph, chunks of 8 tokens, and two prompts more than a batch needs.

    python examples/01_streamed_ppo.py

prints who waits for whom, then each step with the rollouts that were deferred into the next one.
"""

from __future__ import annotations

import anyio
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from oppo import Overcommit, Prompt, Sampling, Thread, ppo
from oppo.admission.chunking import Fixed
from oppo.hf import HfPolicy, HfTrainer, ReferenceLogprobs, RewardModel, ValueModel
from oppo.training import TrainerSettings


async def main() -> None:
    """Train for five steps."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    config.num_labels = 1
    actor, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
    reference.load_state_dict(actor.state_dict())
    critic, reward = LlamaForSequenceClassification(config), LlamaForSequenceClassification(config)
    sampling = Sampling(max_new_tokens=64, stop=tuple(range(1, 17)), seed=1)
    settings = TrainerSettings(learning_rate=1e-3, epochs=2)
    prompts = [Prompt(n, n, np.arange(3 + n, 8 + n, dtype=np.int32)) for n in range(20)]

    with Thread("actor") as acting, Thread("scorers") as scoring, Thread("trainer") as training:
        graph = ppo(
            policy=HfPolicy(actor, sampling=sampling, place=acting),
            reference=ReferenceLogprobs(reference, sampling=sampling, place=scoring),
            reward=RewardModel(reward, place=scoring),
            critic=ValueModel(critic, place=scoring),
            trainer=HfTrainer(actor, critic, sampling=sampling, place=training, settings=settings),
            admission=Overcommit(batch=4, overcommit=2),
            chunks=Fixed(8),
        )
        print(graph.table())
        async with graph.open(prompts) as run:
            async for step in run.steps(5):
                deferred = [event.rollout for event in step.deferred]
                print(f"step {step.index}: score {step.score:+.3f}, trained {step.trained}, deferred {deferred}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    anyio.run(main)
