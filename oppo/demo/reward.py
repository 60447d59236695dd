"""The demo's reward model: the policy's backbone with a scalar head, trained on noisy preference pairs.

Its scores are centred and scaled afterwards, to mean 0 and standard deviation 1 over the base policy's responses: so a
KL coefficient keeps its meaning.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Final, cast

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from oppo.demo.language import held_out_prompts, training_prompts
from oppo.demo.preference import Preferences, Review, sample_preferences
from oppo.demo.pretrain import Progress, TrainingBudget, descend, rate

PARTS: Final = 2
"""Micro-batches of a step, one for each core."""
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
    budget: TrainingBudget,
    *,
    seed: int,
    progress: Progress,
) -> LlamaForSequenceClassification:
    r"""Return a reward model trained on ``budget.rows`` prompts a step, with the preferences among four texts each.

    The loss is that of Bradley and Terry (1952), :math:`-\log \sigma(r_\text{better} - r_\text{worse})`.
    """
    model = scalar_model(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    rng = random.Random(f"reward {seed}")  # noqa: S311 - a corpus, not a secret
    smooth = 0.0
    model.train()
    for step in range(budget.steps):
        batch = sample_preferences(training_prompts(budget.rows, rng.getrandbits(32)), rng)
        losses = [partial(_loss, model, tokenizer, batch[k::PARTS]) for k in range(PARTS)]
        loss = descend(optimizer, model, losses, rate(step, budget))
        smooth = loss if step == 0 else 0.9 * smooth + 0.1 * loss
        progress(f"teaching the reward model what readers prefer, loss {smooth:.2f}", (step + 1) / budget.steps)
    model.eval()
    return model


@torch.no_grad()
def pair_accuracy(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, *, count: int, seed: int
) -> float:
    """Return the fraction of ``count`` noisy pairs, for held-out prompts, that the model orders as labelled."""
    rng = random.Random(f"accuracy {seed}")  # noqa: S311 - a corpus, not a secret
    pairs = sample_preferences(held_out_prompts(count, seed), rng, texts=2)
    margins = [_margins(model, tokenizer, pairs[first : first + 64]) for first in range(0, count, 64)]
    return float((torch.cat(margins) > 0).sum()) / count


@torch.no_grad()
def score(
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    texts: Sequence[Review],
) -> list[float]:
    """Return the model's score of each text as a response to its prompt."""
    last = _last_states(model, tokenizer, prompts, texts)
    return cast("list[float]", model.score(last).squeeze(1).tolist())


@torch.no_grad()
def normalise(
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    texts: Sequence[Review],
) -> None:
    r"""Change the head so that these texts have scores of mean 0 and standard deviation 1.

    The head has no bias to shift. With the last hidden states :math:`H` of the texts, the ridge regression
    :math:`v = (H^T H + \lambda I)^{-1} H^T 1` has :math:`H v \approx 1`, so adding a multiple of :math:`v` to the
    head's weights adds a constant to every score.

    Raises:
        ValueError: all texts have the same score.
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
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, batch: Sequence[Preferences]
) -> torch.Tensor:
    """Return one micro-batch's term in the mean loss over all pairs."""
    return -functional.logsigmoid(_margins(model, tokenizer, batch)).mean() / PARTS


def _margins(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, batch: Sequence[Preferences]
) -> torch.Tensor:
    """Return float32 [pairs]: the score of each pair's better text minus that of the worse."""
    prompts = [each.ask.text for each in batch for _ in each.texts]
    texts = [text for each in batch for text in each.texts]
    scores = model.score(_last_states(model, tokenizer, prompts, texts)).squeeze(1)  # [texts]
    starts = accumulate((len(each.texts) for each in batch), initial=0)
    pairs = [
        (start + better, start + worse)
        for start, each in zip(starts, batch, strict=False)
        for better, worse in each.pairs
    ]
    where = torch.tensor(pairs)  # [pairs, 2]
    return cast("torch.Tensor", scores[where[:, 0]] - scores[where[:, 1]])


def _last_states(
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    texts: Sequence[Review],
) -> torch.Tensor:
    """Return float32 [texts, hidden]: the hidden state of each text's last token.

    Texts are packed into rows as long as the longest; each has its own positions, so none attends to another.
    """
    prompt_ids, text_ids = tokenizer(list(prompts))["input_ids"], tokenizer([text.words for text in texts])["input_ids"]
    sequences = [
        prompt + response + [tokenizer.eos_token_id] * text.ended
        for prompt, response, text in zip(prompt_ids, text_ids, texts, strict=True)
    ]
    width = max(map(len, sequences))
    rows: list[list[int]] = [[]]
    positions: list[list[int]] = [[]]
    lasts: list[tuple[int, int]] = []
    for sequence in sequences:
        if len(rows[-1]) + len(sequence) > width:
            rows.append([])
            positions.append([])
        rows[-1] += sequence
        positions[-1] += range(len(sequence))
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
