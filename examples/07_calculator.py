"""A tool, offline: a policy learns to call a calculator, with GRPO, in seconds.

    python examples/07_calculator.py

A prompt is a sum of two digits. A response that writes ``=`` has called the calculator, whose answer it then reads; one
that writes ``.`` ends. The reward is 1 for a response with the right result. The model begins at random and never
learns to add: what it learns is to ask.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oppo import FunctionReward, Overcommit, Prompt, Sampling, StepReport, Thread, TrainerSettings, grpo
from oppo.environments import FunctionEnvironment, TextTurn
from oppo.hf import HfPolicy, HfTrainer
from oppo.losses import ClippedLoss

CHARACTERS = "_.=+0123456789abcdefghijklmnopqr"
END, CALL = CHARACTERS.index("."), CHARACTERS.index("=")


def encode(text: str) -> list[int]:
    """Return a token id for each character, in the place of a tokenizer."""
    return [CHARACTERS.index(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    """Return the characters of token ids."""
    return "".join(CHARACTERS[token] for token in tokens)


def result(prompt: str) -> str:
    """Return the result of a sum, in two digits."""
    return f"{sum(int(digit) for digit in prompt.split('+')):02}"


async def calculator(turn: TextTurn) -> str | None:
    """Answer the first call, and end the response with whatever else ends a turn."""
    return result(str(turn.prompt)) if turn.text.endswith("=") and turn.number == 0 else None


def right(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return 1 for each completion with the right result in it."""
    return [float(result(prompt) in completion) for prompt, completion in zip(prompts, completions, strict=True)]


async def train(steps: int = 12) -> list[StepReport]:
    """Train for some steps, and return what each of them did."""
    torch.manual_seed(0)
    actor = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(CHARACTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
    )
    sampling = Sampling(max_new_tokens=16, stop=(END, CALL), seed=1)
    sums = [f"{n % 10}+{n // 10 % 10}" for n in range(400)]
    prompts = [Prompt(n, n, np.array(encode(text), np.int32)) for n, text in enumerate(sums)]

    with Thread("actor") as acting, Thread("trainer") as training:
        graph = grpo(
            policy=HfPolicy(actor, sampling=sampling, place=acting),
            reward=FunctionReward(right, decode),
            trainer=HfTrainer(
                actor,
                sampling=sampling,
                place=training,
                settings=TrainerSettings(learning_rate=2e-2, epochs=2),
                loss=ClippedLoss(),
            ),
            admission=Overcommit(batch=8, overcommit=2),
            samples=4,
            environment=FunctionEnvironment(calculator, decode, encode, timeout=5),
        )
        async with graph.open(prompts) as run:
            return [step async for step in run.steps(steps)]


async def main() -> None:
    """Print the share of right responses in each step."""
    for step in await train():
        print(f"step {step.index}: right {step.score:.2f}, {step.seconds:.2f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    anyio.run(main)
