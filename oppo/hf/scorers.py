"""The three scorers of PPO on transformers: reference log-probs, the reward model's scalar, the critic's values.

Each reads rollouts while they grow, in the thread it is given; several may share one, and then take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.events import Chunk, Finish, FloatArray, Given, Prompt
from oppo.hf.anatomy import backbone, score_head, vocabulary
from oppo.hf.incremental import Incremental
from oppo.hf.reading import Reader, Session, Stretch
from oppo.hf.weights import adopt
from oppo.losses import SupportIndex, token_logprobs
from oppo.models import Sampling, Weights
from oppo.placement import Thread


class Streamed:
    """What every scorer here does: it reads rollouts as they grow, in its model's thread."""

    def __init__(self, thread: Thread, reader: Reader) -> None:
        self._thread = thread
        self._reader = reader

    @property
    def version(self) -> int:
        """0: a frozen model."""
        return 0

    async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        """Read more of some rollouts."""
        await self._thread.call("extend", self._reader.extend, events)

    async def forget(self, rollouts: Sequence[int]) -> None:
        """Drop sessions; unknown rollouts are fine."""
        await self._thread.call("forget", self._reader.forget, rollouts)


class ReferenceLogprobs(Streamed):
    """Scores each response token with its log-prob under a frozen causal LM: float32 [n], natural logarithm.

    Computed as the trainer does, by :func:`oppo.losses.token_logprobs`: of logits z, the log-prob of token t is
    (z / temperature)[t] - logsumexp(z / temperature), in float32; a temperature of 0 counts as 1. Where the policy's
    sampling left ids out, the logsumexp is over the others: the KL then is between two distributions over one support.
    ``Given`` tokens get one too. Between chunks one row of logits is kept for each open rollout.

    Args:
        model: a causal LM; the policy's tokenizer.
        sampling: its temperature is the policy's.
        thread: where the model lives.
        exact: the results do not depend, to the bit, on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model cannot be served row by row.
    """

    def __init__(self, model: PreTrainedModel, *, sampling: Sampling, thread: Thread, exact: bool = False) -> None:
        self._temperature = sampling.temperature
        super().__init__(thread, _reader(model, Incremental(model), self._keep, exact=exact, wide=True))

    async def finish(self, finished: Sequence[Finish]) -> Sequence[FloatArray]:
        """Return the log-probs of each response, and forget it."""
        return await self._thread.call("finish", self._finish, finished)

    @torch.inference_mode()
    def _keep(self, stretch: Stretch, logits: Tensor) -> None:
        session, first = stretch.session, max(stretch.session.prompt, stretch.start)
        if not stretch.in_prompt:
            # The logits at a position are those of the next token: the first of a stretch was predicted before it.
            before = logits[:-1] if session.tail is None else torch.cat((session.tail, logits[:-1]))
            skipped = first - stretch.start
            targets = stretch.tokens[skipped:]
            support = SupportIndex.of(stretch.support.slice(skipped, len(stretch.tokens)), logits.device)
            before = before[len(before) - len(targets) :]
            session.kept.append(token_logprobs(before, targets, self._temperature, support))
        session.tail = logits[-1:].clone()  # a view would keep the whole chunk's logits alive

    def _finish(self, finished: Sequence[Finish]) -> Sequence[FloatArray]:
        return [_floats(session) for session in self._reader.finish(finished)]


class RewardModel(Streamed):
    """Scores each rollout with one number: a sequence-classification model's, at the end of prompt + response.

    The number is that of the library's own call on this one sequence. In particular the library looks at the last
    token *that is not padding*: where the padding token is also the end-of-text token, the one before it.

    Args:
        model: ``AutoModelForSequenceClassification`` with ``num_labels == 1``.
        thread: where the model lives.
        exact: the results do not depend, to the bit, on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model has several labels, no ``score`` layer, or cannot be served row by row.
    """

    def __init__(self, model: PreTrainedModel, *, thread: Thread, exact: bool = False) -> None:
        super().__init__(thread, _reader(model, _scalar(model), self._keep, exact=exact))
        self._padding = model.config.get_text_config().pad_token_id

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        """Return each rollout's score, and forget it."""
        return await self._thread.call("finish", self._finish, finished)

    def _keep(self, stretch: Stretch, scores: Tensor) -> None:
        if self._padding is None:
            stretch.session.kept = [scores[-1]]
            return
        real = (stretch.tokens != self._padding).nonzero()
        if len(real):
            stretch.session.kept = [scores[int(real[-1])]]
        elif stretch.start == 0:
            stretch.session.kept = [scores[0]]  # the library's choice when there is nothing but padding

    def _finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        return [float(session.kept[0]) for session in self._reader.finish(finished)]


class ValueModel(Streamed):
    """Scores each response token with the critic's value of the state before it: float32 [n].

    The critic is a sequence-classification model with one label; the value of the state before response token ``i``
    is its ``score`` layer on the hidden state at position ``len(prompt) - 1 + i``.

    It follows the trainer: sessions opened under an older version are stale after :meth:`load`; whoever streams into
    this scorer forgets and replays them.

    Args:
        model: ``AutoModelForSequenceClassification`` with ``num_labels == 1``.
        thread: where the model lives.
        exact: the results do not depend, to the bit, on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model has several labels, no ``score`` layer, or cannot be served row by row.
    """

    def __init__(self, model: PreTrainedModel, *, thread: Thread, exact: bool = False) -> None:
        super().__init__(thread, _reader(model, _scalar(model), self._keep, exact=exact))
        self._model = model
        self._version = 0

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    async def load(self, weights: Weights) -> None:
        """Serve ``weights.critic`` from the next call on; shared memory is not copied.

        Raises:
            ModelError: a name is missing or unknown, or a shape differs; the old weights are then still served.
        """
        await self._thread.call("load", self._load, weights)

    async def finish(self, finished: Sequence[Finish]) -> Sequence[FloatArray]:
        """Return the values along each response, and forget it."""
        return await self._thread.call("finish", self._finish, finished)

    def _load(self, weights: Weights) -> None:
        adopt(self._model, weights.critic)
        self._version = weights.version

    @torch.inference_mode()
    def _keep(self, stretch: Stretch, values: Tensor) -> None:
        skipped = max(stretch.session.prompt - 1 - stretch.start, 0)
        stretch.session.kept.append(values[skipped:, 0].float())

    def _finish(self, finished: Sequence[Finish]) -> Sequence[FloatArray]:
        # The last value is that of the state after the last token.
        return [_floats(session)[:-1] for session in self._reader.finish(finished)]


def _scalar(model: PreTrainedModel) -> Incremental:
    """Return a reader of a sequence-classification model's backbone that puts its score layer on every position."""
    head = score_head(model)
    model.train(mode=False)
    return Incremental(backbone(model), head=head)


def _reader(
    model: PreTrainedModel,
    incremental: Incremental,
    keep: Callable[[Stretch, Tensor], None],
    *,
    exact: bool,
    wide: bool = False,
) -> Reader:
    return Reader(
        incremental,
        name=type(model).__name__,
        vocabulary=vocabulary(model),
        device=model.device,
        keep=keep,
        exact=exact,
        wide=wide,
    )


def _floats(session: Session) -> FloatArray:
    """Return what was kept as one float32 array."""
    if not session.kept:
        return np.zeros(0, np.float32)
    joined: FloatArray = torch.cat(session.kept).cpu().numpy()
    return joined
