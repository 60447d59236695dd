"""``python -m benchmarks.lora_sync MODEL``: how far vLLM in bfloat16 is from the trainer, by how it gets the adapters.

An adapter of rank 16 on a bfloat16 base learns random sequences for some steps. vLLM then decodes with it, once alone
and once merged, and the trainer computes the log-probs of the same tokens. The KL is ``mismatch/kl_current``: of the
engine's distribution to the trainer's, by k3, in nats a token; ``none`` is the base without an adapter on both sides.
Prints the table and writes no file.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from oppo.events import Chunk, Prompt
from oppo.hf.lora import adapter_matrices, add_lora, merged
from oppo.models import Sampling, Weights
from oppo.vllm import VllmEngine, VllmPolicy

PROMPTS, LENGTH, RANK = 16, 128, 16
LEARNED = ((10, 3e-6), (100, 1e-4))  # steps of AdamW, and their learning rate


def learned(base: PreTrainedModel, steps: int, rate: float) -> PreTrainedModel:
    """Return a copy of the base with an adapter that has learned, beside a base in float32: that is faster on a CPU."""
    model, found = copy.deepcopy(base).float(), copy.deepcopy(base)
    for each in (model, found):
        add_lora(each, RANK, 2 * RANK)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, model.config.vocab_size, (8, 64), generator=generator)
    for _ in range(steps):
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for to, of in zip(found.parameters(), model.parameters(), strict=True):
            if to.requires_grad:
                to.copy_(of)
    return found


async def decoded(policy: VllmPolicy, prompts: list[Prompt]) -> list[list[Chunk]]:
    decodes, pieces = await policy.open(prompts), list[list[Chunk]]()
    async with policy.decoding(decodes, lambda ended: False):
        for decode in decodes:
            read = [await decode.read(LENGTH)]
            while read[-1].state == "live":
                read.append(await decode.read(LENGTH))
            pieces.append([chunk for chunk in read if isinstance(chunk, Chunk)])
    return pieces


@torch.no_grad()
def kl(model: PreTrainedModel, prompts: list[Prompt], pieces: list[list[Chunk]]) -> tuple[float, float]:
    """Return the mean of k3 over all tokens, and its standard error."""
    terms = []
    for prompt, read in zip(prompts, pieces, strict=True):
        tokens = np.concatenate([piece.tokens for piece in read])
        sequence = torch.tensor([[*prompt.tokens.tolist(), *tokens.tolist()]])
        logits = model(sequence).logits[0, len(prompt.tokens) - 1 : -1].float().log_softmax(-1)
        ours = logits[range(len(tokens)), tokens.tolist()].double()
        ratio = ours - torch.from_numpy(np.concatenate([piece.logprobs for piece in read])).double()
        terms.append(ratio.expm1() - ratio)
    every = torch.cat(terms)
    return float(every.mean()), float(every.std() / len(every) ** 0.5)


async def compare(engine: VllmEngine, way: str, models: dict[str, PreTrainedModel]) -> None:
    """Print a line for each adapter."""
    policy = VllmPolicy(engine, sampling=Sampling(max_new_tokens=LENGTH, seed=1))
    generator = np.random.default_rng(0)
    prompts = [Prompt(n, n, generator.integers(3, policy.vocabulary, 8).astype(np.int32)) for n in range(PROMPTS)]
    for version, (name, model) in enumerate(models.items(), 1):
        has = name != "none"
        if not has and engine.adapts:
            continue
        merge = partial(merged, model, torch.float32) if has else None
        adapters = partial(adapter_matrices, model) if has else None
        await policy.load(Weights(version, model.state_dict(), merge=merge, adapters=adapters))
        mean, error = kl(model, prompts, await decoded(policy, prompts))
        lost = policy.sync_metrics.get("sync/rounding_loss", 0.0) if has else 0.0
        print(f"| {way} | {name} | {mean:.2e} ± {error:.0e} | {lost:.2%} | {policy.sync_metrics['sync/bytes']:,.0f} |")


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    models = {"none": base}
    for steps, rate in LEARNED:
        models[f"{steps} steps at {rate:g}"] = learned(base, steps, rate)
    print("| sync | adapter | KL, nats a token | rounding loss | bytes |\n|---|---|---|---|---|")
    for way, arguments, rank in (
        ("merged, float32", {"dtype": "float32"}, 0),
        ("merged", {"dtype": "bfloat16"}, 0),
        ("adapter", {"dtype": "bfloat16"}, RANK),
    ):
        with VllmEngine.start(directory, arguments={"max_num_seqs": PROMPTS, **arguments}, adapters=rank) as engine:
            anyio.run(compare, engine, way, models)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
