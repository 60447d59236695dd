"""What a policy is where its model lives: rows under their keys, and the decode loop that makes their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from oppo.hf.serve.decoding import Decoder, DecodeRow, Deliver
from oppo.hf.serve.signals import Counters, Signals
from oppo.hf.serve.stopping import Detokenize
from oppo.hf.shared_memory import SharedModel
from oppo.hf.weights import adopt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oppo.models import Cut, Sampling, Weights


class PolicyCore:
    """Synchronous, and at home in any place; :class:`oppo.hf.serve.policy.HfPolicy` is its handle on the event loop.

    In another process it is made anew, over the same weights and the same counters.

    Args:
        model: a causal LM; put into evaluation mode for good.
        sampling: how tokens are drawn.
        exact: see :class:`~oppo.hf.serve.decoding.Decoder`, as for ``prefill_tokens`` and ``decode``.
        recompute: whether rows that go on with other weights read their tokens again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sampling: Sampling,
        exact: bool,
        prefill_tokens: int,
        recompute: bool,
        decode: Detokenize | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.counters = counters or Counters()
        self._model = model
        self._recompute = recompute
        self._decoder = Decoder(
            model,
            sampling=sampling,
            exact=exact,
            prefill_tokens=prefill_tokens,
            decode=decode,
            counters=self.counters,
        )
        self._anew = partial(
            PolicyCore,
            sampling=sampling,
            exact=exact,
            prefill_tokens=prefill_tokens,
            recompute=recompute,
            decode=decode if sampling.stop_strings else None,
            counters=self.counters,
        )
        self._loads = self.counters.loads
        self._rows: dict[int, DecodeRow] = {}

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """Cross to another process as what it is made of; rows stay behind."""
        return self._anew, (SharedModel(self._model),)

    def run(self, new: Sequence[DecodeRow], keys: Sequence[int], cut: Cut, signals: Signals, deliver: Deliver) -> None:
        """Decode rows until each has ended, ``cut`` answers true or ``signals`` say stop; the others stay parked.

        Args:
            new: rows that are not known yet.
            keys: which rows are decoded; the signals number them in this order.
            cut: told the rollouts that ended in one decode step.
            signals: looked at between two decode steps.
            deliver: given each decode step, after ``cut`` was told.

        Raises:
            ModelError: logits were not finite; the rows are forgotten then, as for any other error.
        """
        self.refresh()
        self._rows.update({row.key: row for row in new})
        rows = [self._rows.pop(key) for key in keys]
        self._decoder.run(rows, cut, signals, deliver)
        self._rows.update({row.key: row for row in rows if row.reason is None})

    def forget(self, keys: Iterable[int]) -> None:
        """Drop rows and free their memory; unknown ones are fine."""
        keys = list(keys)
        for key in keys:
            self._rows.pop(key, None)
        self._decoder.forget(keys)

    def load(self, weights: Weights) -> None:
        """Serve ``weights.actor`` from now on, and so does every worker over the same memory.

        Raises:
            ModelError: a tensor is missing, unknown or of another shape; the old weights are still served.
        """
        if weights.actor:
            adopt(self._model, weights.actor)
        self.counters.version = weights.version
        self.counters.loads += 1

    def refresh(self) -> None:
        """Free the keys and values of weights that are served no more, where they are to be computed again."""
        if self._recompute and self._loads != self.counters.loads:
            self._decoder.expire()
        self._loads = self.counters.loads

    def memory(self) -> tuple[int, int]:
        """Return the bytes allocated for keys and values, and the bytes that the tokens read so far need."""
        return self._decoder.reader.memory()
