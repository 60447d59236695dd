"""The policy where its model lives: the rows that are open between decode calls, and the weights in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from transformers import PreTrainedModel

from oppo.hf.recipe import Loadable, ModelRecipe
from oppo.hf.serve.decoder import Decoder, DecodeRow, Deliver
from oppo.hf.serve.decoder import Signals
from oppo.hf.weights import adopt
from oppo.models import Cut, Weights
from oppo.placement import Recipe

DecoderOver: TypeAlias = Callable[[PreTrainedModel], Decoder]
"""Returns a decoder over a model."""


class PolicyCore:
    """Synchronous; :class:`oppo.hf.serve.policy.HfPolicy` is its handle on the event loop.

    Pickled, it crosses to another process as a core without rows, over the same weights and the same counters.

    Args:
        decoder: decodes the rows.
        recompute: whether parked rows read their tokens again after weights were loaded.
    """

    def __init__(self, decoder: Decoder, recompute: bool) -> None:
        self.counters = decoder.counters
        self._decoder = decoder
        self._recompute = recompute
        self._loads = self.counters.loads
        self._rows: dict[int, DecodeRow] = {}

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return PolicyCore, (self._decoder, self._recompute)

    def run(
        self,
        new: Sequence[DecodeRow],
        given: Mapping[int, Sequence[int]],
        cut: Cut,
        signals: Signals,
        deliver: Deliver,
    ) -> None:
        """Decode rows until each has ended, ``cut`` returns true or ``signals`` stop the loop; the rest is parked.

        Args:
            new: rows that are unknown here so far.
            given: by the keys of the rows to decode, which the signals number in this order: the tokens that a row
                reads before it goes on after a turn; none for a row that simply goes on.
            cut: called with the rollouts that ended in one decode step.
            signals: looked at between two decode steps.
            deliver: called with each decode step, after ``cut``.

        Raises:
            ModelError: logits were not finite; the rows are then forgotten, as after any other error.
        """
        self.refresh()
        self._rows.update({row.key: row for row in new})
        rows = [self._rows.pop(key) for key in given]
        for row in rows:
            row.proceed(given[row.key])
        self._decoder.run(rows, cut, signals, deliver)
        self._rows.update({row.key: row for row in rows if row.reason is None or row.waits})

    def forget(self, keys: Iterable[int]) -> None:
        """Drop rows and free their memory; unknown keys are ignored."""
        keys = list(keys)
        for key in keys:
            self._rows.pop(key, None)
        self._decoder.reader.forget(keys)

    def load(self, weights: Weights) -> None:
        """Serve ``weights.actor`` from now on, here and in every core over the same memory.

        Raises:
            ModelError: a tensor is missing, unknown or of another shape; the old weights are still served.
        """
        if weights.actor:
            adopt(self._decoder.model, weights.actor)
        self.counters.version = weights.version
        self.counters.loads += 1

    def refresh(self) -> None:
        """Free the keys and values of replaced weights, if they are to be recomputed."""
        if self._recompute and self._loads != self.counters.loads:
            self._decoder.reader.clear()
        self._loads = self.counters.loads

    def memory(self) -> tuple[int, int]:
        """Return the bytes allocated for keys and values, and the bytes that the tokens read so far need."""
        return self._decoder.reader.memory()


def core_over(model: Loadable, decoder: DecoderOver, *, recompute: bool) -> PolicyCore | Recipe[PolicyCore]:
    """Return the core of a policy over ``model``; its recipe, if that is what the model is given by.

    Args:
        decoder: can be pickled, if the model is given by its recipe.
        recompute: see :class:`PolicyCore`.
    """
    if isinstance(model, ModelRecipe):
        return Recipe(PolicyCore, _loaded, (model, decoder, recompute))
    return PolicyCore(decoder(model), recompute)


def _loaded(recipe: ModelRecipe, decoder: DecoderOver, recompute: bool) -> PolicyCore:
    return PolicyCore(decoder(recipe.load()), recompute)
