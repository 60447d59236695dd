"""The run of ``03_grpo.py`` with vLLM as the engine: the policy is another one, and the rest of the program the same.

    python examples/04_vllm.py

vLLM serves a copy of the weights in processes of its own, and receives those of each update. It computes log-probs with
other kernels than the trainer, so ``proximal`` computes them again, and importance weights correct for the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oppo import FunctionReward, Overcommit, Prompt, Sampling, StepReport, Thread, TrainerSettings, grpo
from oppo.errors import ConfigError
from oppo.hf import HfTrainer, RecomputedLogprobs, ReferenceLogprobs
from oppo.losses import ClippedLoss
from oppo.returns import ImportanceCorrection
from oppo.vllm import VllmEngine, VllmPolicy

SAMPLES = 8


def even(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return the share of even numbers in each completion."""
    del prompts
    return [float(np.mean([int(token) % 2 == 0 for token in text.split()])) for text in completions]


def words(tokens: Sequence[int]) -> str:
    """Return token ids as text, in the place of a tokenizer."""
    return " ".join(map(str, tokens))


def model() -> LlamaForCausalLM:
    """Return the actor; vLLM's kernels on a CPU need heads of 32 dimensions or more."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=128,
        )
    )


async def train(engine: VllmEngine, steps: int = 12) -> list[StepReport]:
    """Train for some steps on an engine that serves :func:`model`, and return what each of them did."""
    actor, reference = model(), model()
    sampling = Sampling(max_new_tokens=16, stop=(1, 2), seed=1)
    settings = TrainerSettings(learning_rate=2e-2, epochs=2)
    loss = ClippedLoss(kl=0.01, kl_estimator="k3", correction=ImportanceCorrection(weight="truncated"))
    prompts = [Prompt(n, n, np.arange(3 + n % 50, 8 + n % 50, dtype=np.int32)) for n in range(200)]

    with Thread("reference") as scoring, Thread("trainer") as training:
        graph = grpo(
            policy=VllmPolicy(engine, sampling=sampling),
            reward=FunctionReward(even, words),
            reference=ReferenceLogprobs(reference, sampling=sampling, place=scoring),
            trainer=HfTrainer(actor, sampling=sampling, place=training, settings=settings, loss=loss),
            proximal=RecomputedLogprobs(actor, sampling=sampling, place=scoring),
            admission=Overcommit(batch=4, overcommit=1),
            samples=SAMPLES,
        )
        async with graph.open(prompts) as run:
            return [step async for step in run.steps(steps)]


def main() -> None:
    """Print the score of each step, which groups were deferred, and how far vLLM's log-probs are from the trainer's."""
    with TemporaryDirectory() as folder:
        model().save_pretrained(folder)
        with VllmEngine.start(Path(folder)) as engine:
            steps = anyio.run(train, engine)
    for step in steps:
        late = sorted({event.rollout // SAMPLES for event in step.deferred})
        off = step.metrics["mismatch/kl_current"]
        print(f"step {step.index}: score {step.score:.3f}, deferred {late}, {step.seconds:.2f} s, mismatch {off:.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main()
    except ConfigError as error:
        raise SystemExit(str(error)) from None
