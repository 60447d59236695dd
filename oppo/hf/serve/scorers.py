"""The three scorers of PPO on transformers: reference log-probs, the reward model's scalar, the critic's values.

Each reads rollouts while they grow, in a place that several may share. Its worker (:mod:`oppo.hf.serve.scorer_workers`)
computes there: token ids go in, floats come out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

import anyio.to_thread

from oppo.errors import ModelLost
from oppo.events import Chunk, Finish, FloatArray, Given, Prompt
from oppo.hf.recipe import Loadable, ModelRecipe, worker_of
from oppo.hf.serve.scorer_input import ReplayJournal, ScorerInput
from oppo.hf.serve.scorer_workers import ReferenceWorker, RewardWorker, ScorerWorker, ValueWorker
from oppo.hf.weights import SentWeights, addresses, copies, share_storage
from oppo.models import Sampling, Weights
from oppo.placement import Hosting, Recipe
from oppo.placement.recipe import kind_of
from oppo.scheduling import IN_ORDER, Priority, TimeSlice

T = TypeVar("T")


class StreamedScorer(Generic[T]):
    """A scorer that reads rollouts as they grow, in the place of its worker.

    Args:
        worker: reads them; by its recipe (:func:`oppo.hf.recipe.worker_of`), its model is loaded where it lives.
        place: where the worker lives from now on.
        supports: whether the worker needs the supports of tokens.
    """

    def __init__(
        self, worker: ScorerWorker[T] | Recipe[ScorerWorker[T]], place: Hosting, *, supports: bool = False
    ) -> None:
        self._kind = kind_of(worker)
        self._worker = place.host(worker, journal=ReplayJournal(ScorerWorker.extend))
        self._supports = supports
        self._version = 0

    @property
    def version(self) -> int:
        """Version of the weights in use; 0 for a frozen model."""
        return self._version

    @property
    def time_slice(self) -> TimeSlice:
        """How long a preemptible call should last, as its place has it."""
        return self._worker.time_slice

    async def _follow(self, weights: Mapping[str, object], version: int) -> None:
        """Compute with these weights, which have this version, from the next call on."""

        def served() -> None:
            self._version = version

        await self._worker.load(self._kind.load, SentWeights(weights), served)

    async def extend(self, events: Sequence[Prompt | Chunk | Given], *, priority: Priority = IN_ORDER) -> None:
        """Read more of some rollouts."""
        inputs = ScorerInput(events, supports=self._supports)
        await self._worker.at(priority).call("extend", ScorerWorker.extend, inputs)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[T]:
        """Return each rollout's result, and forget it."""
        lengths = {event.rollout: len(event.response) for event in finished}
        return await self._worker.at(priority).call("finish", ScorerWorker[T].finish, lengths)

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        """Drop sessions; unknown rollouts are ignored."""
        with suppress(ModelLost):  # sessions are lost with the place they were in
            await self._worker.at(priority).call("forget", ScorerWorker.forget, list(rollouts))


class ReferenceLogprobs(StreamedScorer[FloatArray]):
    """Scores each response token with its log-prob under a frozen causal LM: float32 [n], natural logarithm.

    It computes them as the trainer does, by :func:`oppo.losses.token_logprobs`: of logits z, the log-prob of token t is
    (z / temperature)[t] - logsumexp(z / temperature), in float32; a temperature of 0 counts as 1. Where the policy's
    sampling left ids out, the logsumexp is over the others, so that the KL is between distributions over one support.
    ``Given`` tokens get a log-prob too. Between chunks it keeps one row of logits for each open rollout.

    Args:
        model: a causal LM that shares the policy's tokenizer; or its recipe, for a place on another machine.
        sampling: the policy's; only the temperature and the ids that may be drawn count.
        thread: where the model lives: any place.
        exact: the bits of results do not depend on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model cannot be served row by row.
    """

    def __init__(self, model: Loadable, *, sampling: Sampling, thread: Hosting, exact: bool = False) -> None:
        super().__init__(worker_of(ReferenceWorker, model, exact, sampling), thread, supports=True)


class RewardModel(StreamedScorer[float]):
    """Scores each rollout with one number: a sequence-classification model's, at the end of prompt + response.

    The number is what transformers' own call on this one sequence returns. In particular it is taken at the last token
    *that is not padding*: where the padding token is also the end-of-text token, at the token before it.

    Args:
        model: ``AutoModelForSequenceClassification`` with ``num_labels == 1``; or its recipe, see
            :class:`~oppo.hf.recipe.ModelRecipe`.
        thread: where the model lives: any place.
        exact: the bits of results do not depend on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model has several labels, no ``score`` layer, or cannot be served row by row.
    """

    def __init__(self, model: Loadable, *, thread: Hosting, exact: bool = False) -> None:
        super().__init__(worker_of(RewardWorker, model, exact), thread)


class ValueModel(StreamedScorer[FloatArray]):
    """Scores each response token with the critic's value of the state before it, and the state after: float32 [n + 1].

    The critic is a sequence-classification model with one label; the value of the state before response token ``i``
    is its ``score`` layer on the hidden state at position ``len(prompt) - 1 + i``, and the last one is that of the
    state after the response.

    It follows the trainer. After :meth:`load`, sessions opened under an older version are stale: the caller forgets and
    replays them.

    Args:
        model: ``AutoModelForSequenceClassification`` with ``num_labels == 1``; or its recipe, see
            :class:`~oppo.hf.recipe.ModelRecipe`.
        thread: where the model lives: any place.
        exact: the bits of results do not depend on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model has several labels, no ``score`` layer, or cannot be served row by row.
    """

    def __init__(self, model: Loadable, *, thread: Hosting, exact: bool = False) -> None:
        super().__init__(worker_of(ValueWorker, model, exact), thread)
        self._model = model

    def serves(self, weights: Weights) -> bool:
        """Return whether it scores with the very tensors of ``weights``."""
        return not isinstance(self._model, ModelRecipe) and share_storage(self._model, weights.critic)

    def tensors(self) -> frozenset[int]:
        """Return the addresses of the tensors that new weights change: a trunk that the policy has too, for example."""
        return frozenset() if isinstance(self._model, ModelRecipe) else addresses(self._model)

    async def copied(self, weights: Weights) -> Weights:
        """Return the critic's part of ``weights`` in memory of its own."""
        return Weights(weights.version, critic=await anyio.to_thread.run_sync(copies, weights.critic))

    async def load(self, weights: Weights) -> None:
        """Serve ``weights.critic`` from the next call on; tensors that are the model's own are not copied.

        No tensor crosses to another process of this machine: this one writes the memory that both share, while no other
        call is made there. To another machine they are sent.

        Raises:
            ModelError: a name is missing or unknown, or a shape differs; the old weights are then still served.
        """
        await self._follow(weights.critic, weights.version)
