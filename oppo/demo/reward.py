"""The demo's reward model: the policy's backbone with a scalar head, trained on noisy comparisons.

Its scores are centred and scaled afterwards, so that what the base policy writes has mean 0 and standard deviation 1:
a KL coefficient then means the same whatever was compared.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, cast

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from oppo.demo.language import held_out_prompts, training_prompts
from oppo.demo.preference import Comparison, Text, compare
from oppo.demo.pretrain import Progress, Schedule, descend, rate

PARTS: Final = 2
"""Parts of equal size that a step's comparisons are cut into, so that memory holds the graph of one."""
RIDGE: Final = 0.1
"""Regularises the direction along which every final hidden state has the same component."""


def scalar_model(source: LlamaForCausalLM | LlamaForSequenceClassification) -> LlamaForSequenceClassification:
    """Return a model with a copy of the source's backbone, and one output whose weights are 0."""
    settings = {key: value for key, value in source.config.to_dict().items() if key not in {"id2label", "label2id"}}
    config = LlamaConfig(**settings)
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(source.model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    model.eval()
    return model


def train_reward(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    schedule: Schedule,
    *,
    seed: int,
    progress: Progress,
) -> LlamaForSequenceClassification:
    r"""Return a reward model that has seen ``schedule.steps`` batches of ``schedule.rows`` comparisons of four texts.

    The loss is that of Bradley and Terry (1952), :math:`-\log \sigma(r_\text{better} - r_\text{worse})`.
    """
    model = scalar_model(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    rng = random.Random(f"reward {seed}")  # noqa: S311 - a corpus, not a secret
    smooth = 0.0
    model.train()
    for step in range(schedule.steps):
        batch = compare(training_prompts(schedule.rows, rng.getrandbits(32)), rng)
        losses = (_loss(model, tokenizer, batch[k::PARTS]) for k in range(PARTS))
        loss = descend(optimizer, model, losses, rate(step, schedule))
        smooth = loss if step == 0 else 0.9 * smooth + 0.1 * loss
        progress(f"teaching the reward model what readers prefer, loss {smooth:.2f}", (step + 1) / schedule.steps)
    model.eval()
    return model


@torch.no_grad()
def pair_accuracy(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, *, count: int, seed: int
) -> float:
    """Return the share of ``count`` noisy pairs, for held-out prompts, that the model orders as they were judged."""
    rng = random.Random(f"accuracy {seed}")  # noqa: S311 - a corpus, not a secret
    pairs = compare(held_out_prompts(count, seed), rng, texts=2)
    return (
        sum(int((_margins(model, tokenizer, pairs[first : first + 64]) > 0).sum()) for first in range(0, count, 64))
        / count
    )


@torch.no_grad()
def score(
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    texts: Sequence[Text],
) -> list[float]:
    """Return the model's score of each text as a response to its prompt."""
    last = _last_states(model, tokenizer, prompts, texts)
    return cast("list[float]", model.score(last).squeeze(1).tolist())


@torch.no_grad()
def normalise(
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    texts: Sequence[Text],
) -> None:
    r"""Change the head so that these texts have scores of mean 0 and standard deviation 1.

    The head has no bias to shift. With the last hidden states :math:`H` of the texts, the ridge regression
    :math:`v = (H^T H + \lambda I)^{-1} H^T 1` has :math:`H v \approx 1`, so adding a multiple of :math:`v` to the
    head's weights adds a constant to every score.

    Raises:
        ValueError: all texts have the same score, so that there is nothing to scale.
    """
    states = _last_states(model, tokenizer, prompts, texts).double()
    weight = model.score.weight.double().squeeze(0)
    gram = states.T @ states
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    constant = torch.linalg.solve(gram + ridge, states.sum(0))
    constant /= (states @ constant).mean()
    weight = weight - (states @ weight).mean() * constant
    spread = (states @ weight).std(correction=0)
    if not spread > 0:
        raise ValueError(f"{len(texts)} texts all have the same score, so the reward model cannot be scaled")
    model.score.weight.copy_((weight / spread).unsqueeze(0))


def _loss(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, batch: Sequence[Comparison]
) -> torch.Tensor:
    """Return one part's share of the mean loss of all verdicts."""
    return -functional.logsigmoid(_margins(model, tokenizer, batch)).mean() / PARTS


def _margins(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, batch: Sequence[Comparison]
) -> torch.Tensor:
    """Return float32 [verdicts]: by how much the better text of each verdict outscores the worse."""
    prompts = [comparison.ask.text for comparison in batch for _ in comparison.texts]
    texts = [text for comparison in batch for text in comparison.texts]
    scores = model.score(_last_states(model, tokenizer, prompts, texts)).squeeze(1)  # [texts]
    starts = accumulate((len(comparison.texts) for comparison in batch), initial=0)
    verdicts = [
        (start + better, start + worse)
        for start, comparison in zip(starts, batch, strict=False)
        for better, worse in comparison.verdicts
    ]
    where = torch.tensor(verdicts)  # [verdicts, 2]
    return cast("torch.Tensor", scores[where[:, 0]] - scores[where[:, 1]])


def _last_states(
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    texts: Sequence[Text],
) -> torch.Tensor:
    """Return float32 [texts, hidden]: the hidden state of each text's last token.

    Texts are packed into rows as long as the longest; each has its own positions, so none sees another.
    """
    asked, answered = tokenizer(list(prompts))["input_ids"], tokenizer([text.words for text in texts])["input_ids"]
    wholes = [
        prompt + response + [tokenizer.eos_token_id] * text.ended
        for prompt, response, text in zip(asked, answered, texts, strict=True)
    ]
    width = max(len(whole) for whole in wholes)
    rows: list[list[int]] = [[]]
    positions: list[list[int]] = [[]]
    lasts: list[tuple[int, int]] = []
    for whole in wholes:
        if len(rows[-1]) + len(whole) > width:
            rows.append([])
            positions.append([])
        rows[-1] += whole
        positions[-1] += range(len(whole))
        lasts.append((len(rows) - 1, len(rows[-1]) - 1))
    for row, position in zip(rows, positions, strict=True):
        gap = width - len(row)
        row.extend([tokenizer.pad_token_id] * gap)
        position.extend(range(gap))
    states = model.model(
        input_ids=torch.tensor(rows), position_ids=torch.tensor(positions), use_cache=False
    ).last_hidden_state  # [rows, width, hidden]
    where = torch.tensor(lasts)  # [texts, 2]
    return cast("torch.Tensor", states[where[:, 0], where[:, 1]])
