"""Teach a model of 0.2 million parameters the form of a task's answers, and some of the answers themselves.

::

    pip install 'oppo[reasoning-gym]'
    python -m examples.reasoning_gym.make_model     # writes examples/reasoning_gym/model/

The tokenizer is a byte-level BPE trained on the questions, with every digit a token. Supervised training stops early: a
model that knows all the answers has nothing to learn from a reward, and one that knows none is never rewarded.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oppo.errors import OppoError
from oppo.rewards.tasks import task_rows

TASK = "chain_sum"
CONFIG = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
"""Of the task, as in ``config.toml``."""

ROWS = 4000
SEED = 1
"""Of the questions that are taught; those of the reinforcement learning have another."""

PADDING, END = "<pad>", "<end>"
IGNORED = -100
"""The label of a token without loss, by the convention of torch and transformers."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return ``output``, ``steps``, ``rows`` and ``seed``."""
    parser = argparse.ArgumentParser(description="Make the model that examples/reasoning_gym/config.toml trains.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=400, help="of supervised training (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="questions a step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on ``texts``; it never merges digits."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PADDING, END],
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PADDING, eos_token=END)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama with weights drawn from torch's global generator."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def teach(model: LlamaForCausalLM, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], steps: int) -> float:
    """Train on questions with their answers; return the last loss, in nats per token of an answer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    loss = 0.0
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        tokens, labels = next(batches)
        output = model(input_ids=tokens, attention_mask=(tokens != 0).long(), labels=labels)
        optimizer.zero_grad()
        cast("torch.Tensor", output.loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = cast("torch.Tensor", output.loss).item()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {steps}, loss {loss:.2f}", flush=True)
    model.eval()
    return loss


def batches_of(
    examples: Sequence[tuple[list[int], list[int]]], rows: int, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels, int64 [rows, longest], padded on the right; the loss covers the answers."""
    while True:
        chosen = rng.sample(examples, rows)
        width = max(len(question) + len(answer) for question, answer in chosen)
        tokens, labels = torch.zeros(rows, width, dtype=torch.long), torch.full((rows, width), IGNORED)
        for row, (question, answer) in enumerate(chosen):
            start, end = len(question), len(question) + len(answer)
            tokens[row, :end] = torch.tensor(question + answer)
            labels[row, start:end] = torch.tensor(answer)
        yield tokens, labels


def main(arguments: Sequence[str] | None = None) -> int:
    """Make and save the model; return 0, or 2 after printing what was wrong."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    if options.output.exists():
        print(f"make_model: {options.output} exists already: remove it, or choose another --output", file=sys.stderr)
        return 2
    try:
        rows = task_rows(TASK, size=ROWS, seed=SEED, **CONFIG)
    except OppoError as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    questions, answers = [str(row["prompt"]) for row in rows], [str(row["answer"]) for row in rows]
    tokenizer = make_tokenizer([*questions, *answers])
    end = [int(tokenizer.eos_token_id)]
    examples = [(tokenizer.encode(q), tokenizer.encode(a) + end) for q, a in zip(questions, answers, strict=True)]
    model = make_model(tokenizer)
    rng = random.Random(options.seed)  # noqa: S311 - the order of examples, not a secret
    teach(model, batches_of(examples, options.rows, rng), options.steps)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters, in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
