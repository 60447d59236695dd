"""A process reward model on transformers: a reward at the end of each step of a response, read as it grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ConfigError
from oppo.hf.introspection import backbone, token_head
from oppo.hf.kv.incremental import Incremental
from oppo.hf.kv.incremental_prefill import ReadState, TokenSpan
from oppo.hf.recipe import Loadable, worker_of
from oppo.hf.serve.scorer_workers import ScorerWorker
from oppo.hf.serve.scorers import StreamedScorer
from oppo.hf.shared_memory import SharedModel
from oppo.placement import Hosting
from oppo.returns import TokenRewards


class ProcessRewardWorker(ScorerWorker[TokenRewards]):
    """The rewards of a response's steps; see :class:`ProcessRewardModel`."""

    def __init__(self, model: PreTrainedModel, exact: bool, separators: Sequence[int], label: int, baseline: float):
        labels = int(model.config.num_labels or 0)
        if not -labels <= label < labels:
            raise ConfigError(f"{type(model).__name__} has {labels} labels, and none with the index {label}")
        self._separators = tuple(separators)
        self._label = label
        self._baseline = baseline
        head = token_head(model)
        super().__init__(model, Incremental(backbone(model), head=head), exact=exact)
        self._ids = torch.tensor(self._separators, dtype=torch.int64, device=model.device)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        arguments = (SharedModel(self._model), self._exact, self._separators, self._label, self._baseline)
        return type(self), arguments

    @torch.inference_mode()
    def _keep(self, span: TokenSpan, outputs: Tensor) -> None:
        if span.in_prompt:
            return
        own = slice(max(span.state.prompt - span.start, 0), None)
        tokens, logits = span.tokens[own], outputs[own].float()
        rewards = logits[:, 0] if logits.shape[-1] == 1 else logits.softmax(-1)[:, self._label]
        rewards = rewards - self._baseline
        span.state.kept.append(rewards.where(torch.isin(tokens, self._ids), 0))
        span.state.tail = rewards[-1:]

    def _result(self, state: ReadState) -> TokenRewards:
        if state.tail is None:
            return TokenRewards(np.zeros(0, np.float32))
        return TokenRewards(torch.cat((*state.kept[:-1], state.kept[-1][:-1], state.tail)).cpu().numpy())


class ProcessRewardModel(StreamedScorer[TokenRewards]):
    """Scores each step of a response: a reward at each token that ends a step, and at the last token.

    The reward is the probability of one label of a token-classification model at that token, as in "Let's Verify Step
    by Step" (Lightman et al. 2023, arXiv 2305.20050); of a model with one label it is the logit. All other tokens have
    reward 0. The score of a response is the sum of its rewards, so a response of more steps has a higher one, unless
    ``baseline`` is what a step is worth on average.

    Args:
        model: ``AutoModelForTokenClassification`` of a decoder, which shares the policy's tokenizer; or its recipe.
        thread: where the model lives: any place.
        separators: ids of the tokens that end a step (:meth:`oppo.hf.tokenizer.HfTokenizer.ending_with`).
        label: the label whose probability counts, by its index; the last one by default.
        baseline: subtracted from each reward of a step.
        exact: the bits of results do not depend on arrival patterns and other rollouts; slower.

    Raises:
        ConfigError: there is no such label.
        ModelRefused: the model has no linear head, or cannot be served row by row.
    """

    def __init__(
        self,
        model: Loadable,
        *,
        thread: Hosting,
        separators: Sequence[int],
        label: int = -1,
        baseline: float = 0.0,
        exact: bool = False,
    ) -> None:
        super().__init__(worker_of(ProcessRewardWorker, model, exact, separators, label, baseline), thread)
