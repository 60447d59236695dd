"""GRPO on a real, tiny model in seconds: eight responses to each prompt are compared, and there is no critic.

    python examples/03_grpo.py

The reward is a plain function, the share of even token ids in a response; a random model begins at a half. Groups are
carried from step to step as a whole, and a KL to the model as it was at the start is in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oppo import FunctionReward, Overcommit, Prompt, Sampling, StepReport, Thread, TrainerSettings, grpo
from oppo.hf import HfPolicy, HfTrainer, ReferenceLogprobs
from oppo.losses import ClippedLoss

SAMPLES = 8


def even(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return the share of even numbers in each completion."""
    del prompts
    return [float(np.mean([int(token) % 2 == 0 for token in text.split()])) for text in completions]


def words(tokens: Sequence[int]) -> str:
    """Return token ids as text, in the place of a tokenizer."""
    return " ".join(map(str, tokens))


async def train(steps: int = 12) -> list[StepReport]:
    """Train for some steps, and return what each of them did."""
    torch.manual_seed(0)
    actor = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )
    reference = LlamaForCausalLM(actor.config)
    reference.load_state_dict(actor.state_dict())
    sampling = Sampling(max_new_tokens=16, stop=(1, 2), seed=1)
    settings = TrainerSettings(learning_rate=2e-2, epochs=2)
    loss = ClippedLoss(kl=0.01, kl_estimator="k3")
    prompts = [Prompt(n, n, np.arange(3 + n % 50, 8 + n % 50, dtype=np.int32)) for n in range(200)]

    with Thread("actor") as acting, Thread("reference") as scoring, Thread("trainer") as training:
        graph = grpo(
            policy=HfPolicy(actor, sampling=sampling, place=acting),
            reward=FunctionReward(even, words),
            reference=ReferenceLogprobs(reference, sampling=sampling, place=scoring),
            trainer=HfTrainer(actor, sampling=sampling, place=training, settings=settings, loss=loss),
            admission=Overcommit(batch=4, overcommit=1),
            samples=SAMPLES,
        )
        async with graph.open(prompts) as run:
            return [step async for step in run.steps(steps)]


async def main() -> None:
    """Print the score of each step, and which groups were deferred into the next one."""
    for step in await train():
        deferred = sorted({event.rollout // SAMPLES for event in step.deferred})
        print(f"step {step.index}: score {step.score:.3f}, deferred {deferred}, {step.seconds:.2f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    anyio.run(main)
