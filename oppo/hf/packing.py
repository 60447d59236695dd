"""From a ragged batch to padded forward passes of bounded size, and back to flat tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo.events import Batch
from oppo.losses import SupportIndex
from oppo.staleness import Correction


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some rows of a batch as one forward pass; n rows padded on the right to L tokens, T response tokens in all.

    The last token of each row is not read: nothing is predicted from it. Padding needs no mask: causal attention keeps
    it out of the sight of every token before it, and nothing is predicted from padding either.

    Attributes:
        ids, positions: int64 [n, L].
        padding: how many of the ``ids`` are padding.
        keep: int64 [K], the sequence positions from which some row predicts a response token.
        row, column: int64 [T], where in an [n, K, ...] output each response token was predicted.
        tokens: int64 [T].
        mask: bool [T], true for the tokens that are trained.
        logprobs, reference, values, advantages, returns: float32 [T], as they came with the batch.
        versions: int64 [T].
        denominator: float32 [T], the log-probs that the policy's ratio is over.
        weights: float32 [T], what each token's policy loss is multiplied with.
        support: where the ids lie from which the T tokens were drawn; ``None`` if that was the whole vocabulary.
    """

    ids: Tensor
    positions: Tensor
    padding: int
    keep: Tensor
    row: Tensor
    column: Tensor
    tokens: Tensor
    mask: Tensor
    logprobs: Tensor
    reference: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    versions: Tensor
    denominator: Tensor
    weights: Tensor
    support: SupportIndex | None


def trainable(batch: Batch) -> NDArray[np.int64]:
    """Return the rows of the batch of which at least one token was sampled: int64."""
    return np.array([r for r, tokens in enumerate(batch.rows()) if batch.sampled[tokens].any()], np.int64)


def minibatches(rows: NDArray[np.int64], count: int, key: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    """Yield one epoch of ``rows``, shuffled by ``key``, in ``count`` parts of nearly equal size; none is empty."""
    shuffled = np.random.default_rng(key).permutation(rows)
    yield from (part for part in np.array_split(shuffled, count) if len(part))


def read_lengths(batch: Batch) -> list[int]:
    """Return how many tokens of each row a forward pass reads."""
    return [len(response.prompt.tokens) + len(response) - 1 for response in batch.responses]


def pack(batch: Batch, rows: Sequence[int], device: torch.device, correction: Correction | None = None) -> MicroBatch:
    """Return the given rows of the batch as one forward pass on ``device``; plain PPO where nothing is corrected."""
    correction = correction or Correction()
    prompts = [batch.responses[r].prompt.tokens for r in rows]
    every = batch.rows()
    spans = [every[r] for r in rows]
    lengths = [span.stop - span.start for span in spans]
    read = [len(prompt) + length - 1 for prompt, length in zip(prompts, lengths, strict=True)]
    width = max(read)
    first = min(len(prompt) for prompt in prompts) - 1
    ids = np.zeros((len(rows), width), np.int64)
    for i, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
        sequence = np.concatenate((prompt, batch.tokens[span]))[:-1]
        ids[i, : len(sequence)] = sequence
    taken = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    columns = [np.arange(length) + len(prompt) - 1 - first for prompt, length in zip(prompts, lengths, strict=True)]

    behaviour, proximal, sampled = batch.logprobs[taken], batch.proximal[taken], batch.sampled[taken]

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.tensor(array, device=device)

    return MicroBatch(
        ids=tensor(ids),
        positions=torch.arange(width, device=device).expand(len(rows), width),
        padding=ids.size - sum(read),
        keep=torch.arange(first, width, device=device),
        row=tensor(np.repeat(np.arange(len(rows)), lengths)),
        column=tensor(np.concatenate(columns)),
        tokens=tensor(batch.tokens[taken].astype(np.int64)),
        mask=tensor(sampled),
        logprobs=tensor(behaviour),
        reference=tensor(batch.reference[taken]),
        values=tensor(batch.values[taken]),
        advantages=tensor(batch.advantages[taken]),
        returns=tensor(batch.returns[taken]),
        versions=tensor(batch.versions[taken].astype(np.int64)),
        denominator=tensor(correction.over(behaviour, proximal)),
        weights=tensor(correction.weights(behaviour, proximal, sampled, lengths)),
        support=SupportIndex.of(batch.support(rows), device),
    )
