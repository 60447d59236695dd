"""A model that reads whole texts, many side by side: a classifier, or an encoder whose states are pooled."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf.introspection import longest
from oppo.hf.kv.incremental_prefill import TOKENS_PER_PASS
from oppo.hf.kv.length_bucketing import cheapest_groups, overhead_on
from oppo.hf.shared_memory import SharedModel
from oppo.hf.tokenizer import HfTokenizer

Pooling: TypeAlias = Literal["cls", "last", "max", "mean"]
"""Which of the last hidden states stand for a text: the first, the last, their largest components, their mean."""

TOLERANCE: Final = 1e-3
"""Largest difference, relative to the largest output, that padding may make before texts are read one by one."""

FAILURES: Final = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of a model that cannot read its input."""

Features: TypeAlias = Mapping[str, Sequence[int]]
"""A tokenizer's output for one text: the model's inputs by name, one number for each token."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """A model with its tokenizer.

    Attributes:
        tokenizer: splits the texts.
        limit: tokens that the model reads at most.
        pooling: of the last hidden states; ``None``: the outputs are the logits of a classifier.
        beside: whether texts are read side by side, padded; otherwise one by one.
    """

    model: PreTrainedModel
    tokenizer: HfTokenizer
    limit: int
    pooling: Pooling | None
    beside: bool = True

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (SharedModel(self.model), self.tokenizer, self.limit, self.pooling, self.beside)

    def outputs(self, texts: Sequence[Features], *, alone: bool = False) -> Tensor:
        """Return the logits or the pooled states of each text: float32 [n, D], on the CPU.

        Texts of similar length are read together, in the passes that cost least.

        Args:
            texts: at least one.
            alone: read each by itself: its bits then do not depend on the others.
        """
        lengths = [len(text["input_ids"]) for text in texts]
        groups = [[at] for at in range(len(texts))]
        if self.beside and not alone:
            overhead = overhead_on(self.model.device)
            groups = cheapest_groups(lengths, range(len(texts)), overhead=overhead, budget=TOKENS_PER_PASS)
        found: dict[int, Tensor] = {}
        for group in groups:
            found.update(zip(group, self._pass([texts[at] for at in group]), strict=True))
        return torch.stack([found[at] for at in range(len(texts))])

    @torch.inference_mode()
    def _pass(self, texts: Sequence[Features]) -> Tensor:
        device = self.model.device
        taken = inspect.signature(self.model.forward).parameters
        tokenizer = self.tokenizer.inner
        padding = {"input_ids": tokenizer.pad_token_id or 0, "token_type_ids": tokenizer.pad_token_type_id}
        inputs = {
            name: pad_sequence(
                [torch.tensor(text[name]) for text in texts], batch_first=True, padding_value=padding.get(name, 0)
            ).to(device)
            for name in texts[0]
            if name in taken
        }
        output = self.model(**inputs)
        if self.pooling is None:
            logits: Tensor = output.logits
            return logits.float().cpu()
        lengths = torch.tensor([len(text["input_ids"]) for text in texts], device=device)
        return pooled(output.last_hidden_state.float(), lengths, self.pooling).cpu()


def pooled(states: Tensor, lengths: Tensor, pooling: Pooling) -> Tensor:
    """Return one vector [n, D] for each row of hidden states [n, T, D], of which the first ``lengths`` are tokens."""
    rows = torch.arange(len(states), device=states.device)
    real = (torch.arange(states.shape[1], device=states.device) < lengths[:, None])[:, :, None]
    match pooling:
        case "cls":
            return states[:, 0]
        case "last":
            return states[rows, lengths - 1]
        case "max":
            return states.masked_fill(~real, -torch.inf).amax(1)
        case "mean":
            return (states * real).sum(1) / lengths[:, None]


def reach(model: PreTrainedModel, tokenizer: HfTokenizer) -> int:
    """Return how many tokens a text may have: of the tokenizer's limit and the model's positions the smaller."""
    tables = [
        module
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    # A table with a row for padding, as RoBERTa's, begins to count behind that.
    rows = [table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1) for table in tables]
    return min([longest(model), int(tokenizer.inner.model_max_length), *rows])


def reads_beside(encoder: Encoder) -> bool:
    """Return whether a text has the same outputs, up to rounding, when longer ones are read beside it.

    Raises:
        ModelRefused: the model reads no text at all.
    """
    ids = [number for number in range(len(encoder.tokenizer.inner)) if number != encoder.tokenizer.inner.pad_token_id]
    end = encoder.model.config.eos_token_id
    texts = []
    for length in (3, 5, 9):
        tokens = [ids[at * 7 % len(ids)] for at in range(length)]
        tokens += [end] if end in ids else []  # some pool the state there
        texts.append({"input_ids": tokens, "attention_mask": [1] * len(tokens)})
    try:
        alone = encoder.outputs(texts, alone=True)
    except FAILURES as error:
        raise ModelRefused(f"{type(encoder.model).__name__} failed when it was given a text: {error!r}") from error
    if encoder.tokenizer.inner.pad_token_id is None:
        return False
    try:
        beside = encoder.outputs(texts)
    except FAILURES:  # a model that takes no padding says so in its own way
        return False
    return bool((beside - alone).abs().max() <= TOLERANCE * alone.abs().max())
