"""What the three scorers are where their models live: synchronous, fed with events, asked for values at the end.

A worker can live in another process (:class:`oppo.placement.Process`): there it is made anew, over the same weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

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


class ScorerWorker(ABC):
    """Reads rollouts as they grow and keeps what the scorer needs of each span.

    Args:
        model: computes.
        incremental: the part of it that reads.
        exact: each rollout alone, on the grid.
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
        """Cross to another process as what it is made of; open sessions stay behind."""
        return type(self), (SharedModel(self._model), self._exact)

    def extend(self, feed: ScorerInput) -> None:
        """Read more of some rollouts."""
        self._reader.extend(feed.events)

    def forget(self, rollouts: Iterable[int]) -> None:
        """Drop sessions; unknown rollouts are fine."""
        self._reader.forget(rollouts)

    def load(self, weights: Mapping[str, object]) -> None:
        """Compute with ``weights`` from now on, and so does every worker over the same memory."""
        adopt(self._model, weights)

    @abstractmethod
    def _keep(self, span: TokenSpan, outputs: Tensor) -> None:
        """Note in the session of ``span`` what is needed of ``outputs`` [k, D] at its last k positions."""


class ReferenceWorker(ScorerWorker):
    """Log-probs of each response under a causal LM; see :class:`oppo.hf.serve.scorers.ReferenceLogprobs`."""

    def __init__(self, model: PreTrainedModel, exact: bool, temperature: float) -> None:
        self._temperature = temperature
        super().__init__(model, Incremental(model), exact=exact, needs_logits=True)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """Cross to another process as what it is made of; open sessions stay behind."""
        return type(self), (SharedModel(self._model), self._exact, self._temperature)

    def finish(self, lengths: Mapping[int, int]) -> list[FloatArray]:
        """Return float32 [n] for each rollout, of as many response tokens as ``lengths`` says, and forget it."""
        return [_floats(session) for session in self._reader.finish(lengths)]

    @torch.inference_mode()
    def _keep(self, span: TokenSpan, outputs: Tensor) -> None:
        session, first = span.state, max(span.state.prompt, span.start)
        if not span.in_prompt:
            # The logits at a position are those of the next token: the first of a span was predicted before it.
            before = outputs[:-1] if session.tail is None else torch.cat((session.tail, outputs[:-1]))
            skipped = first - span.start
            targets = span.tokens[skipped:]
            support = SupportIndex.of(span.support.slice(skipped, len(span.tokens)), outputs.device)
            before = before[len(before) - len(targets) :]
            session.kept.append(token_logprobs(before, targets, self._temperature, support))
        session.tail = outputs[-1:].clone()  # a view would keep the whole chunk's logits alive


class RewardWorker(ScorerWorker):
    """One number for each rollout; see :class:`oppo.hf.serve.scorers.RewardModel`."""

    def __init__(self, model: PreTrainedModel, exact: bool) -> None:
        self._padding = model.config.get_text_config().pad_token_id
        super().__init__(model, _scalar(model), exact=exact)

    def finish(self, lengths: Mapping[int, int]) -> list[float]:
        """Return the score of each rollout, of as many response tokens as ``lengths`` says, and forget it."""
        return [float(session.kept[0]) for session in self._reader.finish(lengths)]

    def _keep(self, span: TokenSpan, outputs: Tensor) -> None:
        if self._padding is None:
            span.state.kept = [outputs[-1]]
            return
        real = (span.tokens != self._padding).nonzero()
        if len(real):
            span.state.kept = [outputs[int(real[-1])]]
        elif span.start == 0:
            span.state.kept = [outputs[0]]  # the library's choice when there is nothing but padding


class ValueWorker(ScorerWorker):
    """A value of the state before each token; see :class:`oppo.hf.serve.scorers.ValueModel`."""

    def __init__(self, model: PreTrainedModel, exact: bool) -> None:
        super().__init__(model, _scalar(model), exact=exact)

    def finish(self, lengths: Mapping[int, int]) -> list[FloatArray]:
        """Return float32 [n] for each rollout, of as many response tokens as ``lengths`` says, and forget it."""
        # The last value is that of the state after the last token.
        return [_floats(session)[:-1] for session in self._reader.finish(lengths)]

    @torch.inference_mode()
    def _keep(self, span: TokenSpan, outputs: Tensor) -> None:
        skipped = max(span.state.prompt - 1 - span.start, 0)
        span.state.kept.append(outputs[skipped:, 0].float())


def _scalar(model: PreTrainedModel) -> Incremental:
    """Return a reader of a sequence-classification model's backbone that puts its score layer on every position."""
    head = score_head(model)
    model.train(mode=False)
    return Incremental(backbone(model), head=head)


def _floats(session: ReadState) -> FloatArray:
    """Return what was kept as one float32 array."""
    if not session.kept:
        return np.zeros(0, np.float32)
    joined: FloatArray = torch.cat(session.kept).cpu().numpy()
    return joined
