"""The models of a workload: an actor that is taught to count down, a reward model and a critic with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, cast

import anyio
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from benchmarks.ladder.countdown import EOS, FILLERS, PAD, Countdown, lessons
from benchmarks.ladder.workloads import Shape
from oppo.demo.models import IGNORED, Progress, TrainingBudget, descend, rate
from oppo.evaluation import Answering, respond
from oppo.events import Prompt
from oppo.hf.devices import use_cores
from oppo.hf.serve.policy import HfPolicy
from oppo.models import Sampling
from oppo.placement import Thread

TOKENS: Final = 512
"""Tokens of an optimizer step, for every width of its rows."""
WIDTHS: Final = (16, 64, 256)
"""Widths of the rows, in turn: the next token must not depend on the position."""
RATE: Final = 6e-3
SHARPER: Final = 3.0
"""Factor of the taught actor's final norm: likely tokens become almost certain."""
AS_ANNOUNCED: Final = 0.99
"""Least fraction of responses of the announced length."""


def config_of(shape: Shape, vocabulary: int, positions: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def scalar_model(shape: Shape, vocabulary: int, positions: int) -> PreTrainedModel:
    """Return a sequence-classification model with one label and random weights from torch's global generator."""
    config = config_of(shape, vocabulary, positions)
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


def taught(language: Countdown, shape: Shape, *, steps: int, positions: int, progress: Progress) -> PreTrainedModel:
    """Return an actor that counts down; its initial weights are drawn from torch's global generator.

    Every block begins as the identity, so training begins with which token follows which, and that suffices. The cost
    of a forward pass does not depend on the weights.
    """
    model = LlamaForCausalLM(config_of(shape, language.vocabulary, positions))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    rng = np.random.default_rng(torch.initial_seed() % 2**32)
    budget = TrainingBudget(steps=steps, rows=0, learning_rate=RATE)
    model.train()
    for step in range(steps):
        width = min(WIDTHS[step % len(WIDTHS)], positions)
        tokens, labels = _packed(language, TOKENS // width, width, rng)
        descended = descend(optimizer, model, [partial(_loss, model, tokens, labels)], rate(step, budget))
        progress(f"teaching the actor to count down, loss {descended:.4f}", (step + 1) / steps)
    model.train(mode=False)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(SHARPER)
    return model


def _loss(model: PreTrainedModel, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", model(input_ids=tokens, labels=labels, use_cache=False).loss)


def _packed(language: Countdown, rows: int, width: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, int64 [rows, width]: lessons end to end, without loss on prompts."""
    stream: list[int] = []
    for lesson in lessons(language, width, rng):
        stream += lesson
        if len(stream) >= rows * width:
            break
    tokens = torch.tensor(stream[: rows * width]).view(rows, width)
    after_filler = torch.nn.functional.pad((tokens < 2 + FILLERS) & (tokens != EOS), (1, 0))[:, :-1]
    after_end = torch.nn.functional.pad(tokens == EOS, (1, 0))[:, :-1]
    unlearned = (tokens >= 2) & (tokens < 2 + FILLERS) | after_filler | after_end
    return tokens, tokens.masked_fill(unlearned, IGNORED)


def lengths_written(actor: PreTrainedModel, prompts: Sequence[Prompt], *, cap: int, seed: int) -> list[int]:
    """Return the lengths of the actor's responses to ``prompts``, sampled at temperature 1 and cut off at ``cap``."""
    sampling = Sampling(max_new_tokens=cap, stop=(EOS,), seed=seed)

    with Thread("teacher", setup=lambda: use_cores(1)) as thread:
        policy = HfPolicy(actor, sampling=sampling, thread=thread)
        finished = anyio.run(respond, policy, prompts, Answering(batch=len(prompts)))
    return [len(event.response) for event in finished]
