"""The workers of the three scorers, where their models live: synchronous; events in, one result per rollout out.

A worker can live in another process (:class:`oppo.placement.Process`). Pickled, it crosses without its open sessions,
over the same weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.events import FloatArray
from oppo.hf.introspection import backbone, score_head, vocabulary
from oppo.hf.kv.incremental import Incremental
from oppo.hf.kv.incremental_prefill import IncrementalPrefill, ReadState, TokenSpan
from oppo.hf.serve.scorer_input import ScorerInput
from oppo.hf.shared_memory import SharedModel
from oppo.hf.weights import adopt
from oppo.losses import SupportIndex, token_logprobs
from oppo.models import Sampling

T = TypeVar("T")


class ScorerWorker(ABC, Generic[T]):
    """Reads rollouts as they grow, and keeps of each span what the scorer's result needs.

    Args:
        model: whose weights are loaded.
        incremental: reads with it, or with its backbone and score layer.
        exact: read each rollout alone, on the grid.
        needs_logits: see :class:`~oppo.hf.kv.incremental_prefill.IncrementalPrefill`.
    """

    def __init__(
        self, model: PreTrainedModel, incremental: Incremental, *, exact: bool, needs_logits: bool = False
    ) -> None:
        self._model = model
        self._exact = exact
        self._reader = IncrementalPrefill(
            incremental,
            name=type(model).__name__,
            vocabulary=vocabulary(model),
            keep=self._keep,
            exact=exact,
            needs_logits=needs_logits,
        )

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (SharedModel(self._model), self._exact)

    def extend(self, inputs: ScorerInput) -> None:
        """Read more of some rollouts."""
        self._reader.extend(inputs.events)

    def finish(self, lengths: Mapping[int, int]) -> list[T]:
        """Return each rollout's result, and forget it; ``lengths`` are the tokens of the responses, by rollout."""
        return [self._result(state) for state in self._reader.finish(lengths)]

    def forget(self, rollouts: Iterable[int]) -> None:
        """Drop sessions; unknown rollouts are ignored."""
        self._reader.forget(rollouts)

    def memory(self) -> tuple[int, int]:
        """Return the bytes allocated for keys and values, and the bytes that the tokens read so far need."""
        return self._reader.memory()

    def load(self, weights: Mapping[str, object]) -> None:
        """Compute with ``weights`` from now on, here and in every worker over the same memory."""
        adopt(self._model, weights)

    @abstractmethod
    def _keep(self, span: TokenSpan, outputs: Tensor) -> None:
        """Keep in the rollout's state what the result needs of ``outputs`` [k, D] at the span's last k positions."""

    @abstractmethod
    def _result(self, state: ReadState) -> T:
        """Return the result of a rollout that has been read."""


class ReferenceWorker(ScorerWorker[FloatArray]):
    """Log-probs of a response under a causal LM, float32 [n]; see :class:`oppo.hf.serve.scorers.ReferenceLogprobs`."""

    def __init__(self, model: PreTrainedModel, exact: bool, sampling: Sampling) -> None:
        self._sampling = sampling
        super().__init__(model, Incremental(model), exact=exact, needs_logits=True)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (SharedModel(self._model), self._exact, self._sampling)

    def load(self, weights: Mapping[str, object]) -> None:
        """Compute with ``weights`` from now on; without any, go on with those there are."""
        if weights:
            super().load(weights)

    def _result(self, state: ReadState) -> FloatArray:
        return _joined(state)

    @torch.inference_mode()
    def _keep(self, span: TokenSpan, outputs: Tensor) -> None:
        session, first = span.state, max(span.state.prompt, span.start)
        if not span.in_prompt:
            # The logits at a position predict the next token: those for a span's first token precede the span.
            before = outputs[:-1] if session.tail is None else torch.cat((session.tail, outputs[:-1]))
            skipped = first - span.start
            targets = span.tokens[skipped:]
            support = SupportIndex.of(span.support.slice(skipped, len(span.tokens)), outputs.device)
            before = before[len(before) - len(targets) :, self._sampling.drawn]
            session.kept.append(token_logprobs(before, targets, self._sampling.temperature, support))
        session.tail = outputs[-1:].clone()  # a view would keep the whole chunk's logits alive


class RewardWorker(ScorerWorker[float]):
    """The score of a rollout; see :class:`oppo.hf.serve.scorers.RewardModel`."""

    def __init__(self, model: PreTrainedModel, exact: bool) -> None:
        self._padding = model.config.get_text_config().pad_token_id
        super().__init__(model, score_reader(model), exact=exact)

    def _result(self, state: ReadState) -> float:
        return float(state.kept[0])

    def _keep(self, span: TokenSpan, outputs: Tensor) -> None:
        if self._padding is None:
            span.state.kept = [outputs[-1]]
            return
        real = (span.tokens != self._padding).nonzero()
        if len(real):
            span.state.kept = [outputs[int(real[-1])]]
        elif span.start == 0:
            span.state.kept = [outputs[0]]  # the library's choice when there is nothing but padding


class ValueWorker(ScorerWorker[FloatArray]):
    """Values of the states around the tokens, float32 [n + 1]; see :class:`oppo.hf.serve.scorers.ValueModel`."""

    def __init__(self, model: PreTrainedModel, exact: bool) -> None:
        super().__init__(model, score_reader(model), exact=exact)

    def _result(self, state: ReadState) -> FloatArray:
        return _joined(state)

    @torch.inference_mode()
    def _keep(self, span: TokenSpan, outputs: Tensor) -> None:
        skipped = max(span.state.prompt - 1 - span.start, 0)
        span.state.kept.append(outputs[skipped:, 0].float())


def score_reader(model: PreTrainedModel) -> Incremental:
    """Return a reader that applies a sequence-classification model's score layer at every position."""
    head = score_head(model)
    model.train(mode=False)
    return Incremental(backbone(model), head=head)


def _joined(state: ReadState) -> FloatArray:
    if not state.kept:
        return np.zeros(0, np.float32)
    joined: FloatArray = torch.cat(state.kept).cpu().numpy()
    return joined
