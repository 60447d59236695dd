"""Credit by turn, offline: the same environment and policy learn sooner where each turn has the reward that it earned.

    python examples/11_turns.py

The environment shows a letter, the policy writes one, and so on for eight turns. A turn that repeats the letter it was
shown has a reward of 1. By response, all turns of a response learn from the sum; by turn, each from its own reward and,
discounted, those that follow.
"""

from __future__ import annotations

import anyio
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oppo import GroupRelative, Prompt, Sampling, Synchronous, Thread, TrainerSettings, grpo
from oppo.environments import FunctionEnvironment, TextAnswer, TextTurn
from oppo.hf import HfPolicy, HfTrainer
from oppo.losses import ClippedLoss
from oppo.returns import Credit

LETTERS, TURNS, STEPS = "abcdefgh", 8, 30


def repeat(turn: TextTurn) -> TextAnswer:
    """Reward a turn, and show the next letter; after the last one there is none, which ends the response."""
    shown = str(turn.columns["letters"])
    return TextAnswer(shown[turn.number + 1 : turn.number + 2], reward=float(turn.text == shown[turn.number]))


async def train(credit: Credit, steps: int = STEPS, seed: int = 0) -> list[float]:
    """Train for some steps, and return the mean number of right turns in each."""
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    actor = LlamaForCausalLM(shape)
    sampling = Sampling(max_new_tokens=2 * TURNS, stop=tuple(range(len(LETTERS))), seed=seed)
    dice = np.random.default_rng(seed)
    rows = [dice.integers(0, len(LETTERS), TURNS) for _ in range(4 * steps)]
    prompts = [
        Prompt(n, n, row[:1].astype(np.int32), columns={"letters": "".join(LETTERS[letter] for letter in row)})
        for n, row in enumerate(rows)
    ]
    environment = FunctionEnvironment(
        repeat, lambda tokens: "".join(LETTERS[token] for token in tokens), lambda text: [*map(LETTERS.index, text)]
    )
    settings = TrainerSettings(learning_rate=5e-3, epochs=1)
    with Thread("actor") as acting, Thread("trainer") as training:
        graph = grpo(
            policy=HfPolicy(actor, sampling=sampling, place=acting),
            reward=environment.reward,
            trainer=HfTrainer(actor, sampling=sampling, place=training, settings=settings, loss=ClippedLoss()),
            admission=Synchronous(batch=4),
            samples=8,
            advantage=GroupRelative(credit=credit, gamma=1.0 if credit == "response" else 0.5),
            environment=environment,
        )
        async with graph.open(prompts) as run:
            return [step.score async for step in run.steps(steps)]


async def main() -> None:
    """Print the right turns of eight, by step, of both."""
    scores = {credit: await train(credit) for credit in ("response", "turns")}
    for step in range(0, STEPS, 5):
        means = [f"{credit} {np.mean(each[step : step + 5]):.1f}" for credit, each in scores.items()]
        print(f"step {step:2} and four more, right by", *means)


if __name__ == "__main__":
    torch.set_num_threads(1)
    anyio.run(main)
