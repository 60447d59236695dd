"""The three scorers of PPO on transformers: reference log-probs, the reward model's scalar, the critic's values.

Each reads rollouts while they grow, in the place it is given, which several may share. What a scorer does there is in
its worker (:mod:`oppo.hf.serve.scorer_workers`); token ids go in, floats come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from transformers import PreTrainedModel

from oppo.errors import ModelLost
from oppo.events import Chunk, Finish, FloatArray, Given, Prompt
from oppo.hf.serve.scorer_input import ReplayJournal, ScorerInput
from oppo.hf.serve.scorer_workers import ReferenceWorker, RewardWorker, ScorerWorker, ValueWorker
from oppo.models import Sampling, Weights
from oppo.placement import Hosting
from oppo.scheduling import IN_ORDER, Priority, TimeSlice

C = TypeVar("C", bound=ScorerWorker)


class Streamed(Generic[C]):
    """What every scorer here does: it reads rollouts as they grow, where its worker lives.

    Args:
        worker: does the work.
        place: where it lives from now on.
        supports: whether it needs the supports of tokens.
    """

    def __init__(self, worker: C, place: Hosting, *, supports: bool = False) -> None:
        self._worker = place.host(worker, journal=ReplayJournal(ScorerWorker.extend, supports=supports))
        self._supports = supports

    @property
    def version(self) -> int:
        """0: a frozen model."""
        return 0

    @property
    def time_slice(self) -> TimeSlice:
        """How long a call should last that nobody waits for: as long as its place says."""
        return self._worker.time_slice

    async def extend(self, events: Sequence[Prompt | Chunk | Given], *, priority: Priority = IN_ORDER) -> None:
        """Read more of some rollouts."""
        await self._worker.at(priority).call(
            "extend", ScorerWorker.extend, ScorerInput(events, supports=self._supports)
        )

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        """Drop sessions; unknown rollouts are fine."""
        with suppress(ModelLost):  # sessions are lost with the place they were in
            await self._worker.at(priority).call("forget", ScorerWorker.forget, list(rollouts))


class ReferenceLogprobs(Streamed[ReferenceWorker]):
    """Scores each response token with its log-prob under a frozen causal LM: float32 [n], natural logarithm.

    Computed as the trainer does, by :func:`oppo.losses.token_logprobs`: of logits z, the log-prob of token t is
    (z / temperature)[t] - logsumexp(z / temperature), in float32; a temperature of 0 counts as 1. Where the policy's
    sampling left ids out, the logsumexp is over the others: the KL then is between two distributions over one support.
    ``Given`` tokens get one too. Between chunks one row of logits is kept for each open rollout.

    Args:
        model: a causal LM; the policy's tokenizer.
        sampling: its temperature is the policy's.
        thread: where the model lives: any place.
        exact: the results do not depend, to the bit, on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model cannot be served row by row.
    """

    def __init__(self, model: PreTrainedModel, *, sampling: Sampling, thread: Hosting, exact: bool = False) -> None:
        super().__init__(ReferenceWorker(model, exact, sampling.temperature), thread, supports=True)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[FloatArray]:
        """Return the log-probs of each response, and forget it."""
        return await self._worker.at(priority).call("finish", ReferenceWorker.finish, _lengths(finished))


class RewardModel(Streamed[RewardWorker]):
    """Scores each rollout with one number: a sequence-classification model's, at the end of prompt + response.

    The number is that of the library's own call on this one sequence. In particular the library looks at the last
    token *that is not padding*: where the padding token is also the end-of-text token, the one before it.

    Args:
        model: ``AutoModelForSequenceClassification`` with ``num_labels == 1``.
        thread: where the model lives: any place.
        exact: the results do not depend, to the bit, on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model has several labels, no ``score`` layer, or cannot be served row by row.
    """

    def __init__(self, model: PreTrainedModel, *, thread: Hosting, exact: bool = False) -> None:
        super().__init__(RewardWorker(model, exact), thread)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[float]:
        """Return each rollout's score, and forget it."""
        return await self._worker.at(priority).call("finish", RewardWorker.finish, _lengths(finished))


class ValueModel(Streamed[ValueWorker]):
    """Scores each response token with the critic's value of the state before it: float32 [n].

    The critic is a sequence-classification model with one label; the value of the state before response token ``i``
    is its ``score`` layer on the hidden state at position ``len(prompt) - 1 + i``.

    It follows the trainer: sessions opened under an older version are stale after :meth:`load`; whoever streams into
    this scorer forgets and replays them.

    Args:
        model: ``AutoModelForSequenceClassification`` with ``num_labels == 1``.
        thread: where the model lives: any place.
        exact: the results do not depend, to the bit, on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model has several labels, no ``score`` layer, or cannot be served row by row.
    """

    def __init__(self, model: PreTrainedModel, *, thread: Hosting, exact: bool = False) -> None:
        super().__init__(ValueWorker(model, exact), thread)
        self._version = 0

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    async def load(self, weights: Weights) -> None:
        """Serve ``weights.critic`` from the next call on; shared memory is not copied.

        Tensors cross to no other process: this one sees the memory from which the model is served there, so what is
        the trainer's own model costs nothing, and anything else is copied into it, in the scorer's turn.

        Raises:
            ModelError: a name is missing or unknown, or a shape differs; the old weights are then still served.
        """
        await self._worker.call_local("load", self._load, weights)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[FloatArray]:
        """Return the values along each response, and forget it."""
        return await self._worker.at(priority).call("finish", ValueWorker.finish, _lengths(finished))

    def _load(self, worker: ValueWorker, weights: Weights) -> None:
        worker.load(weights.critic)
        self._version = weights.version


def _lengths(finished: Sequence[Finish]) -> dict[int, int]:
    """Return, by rollout, how many tokens the response has."""
    return {finish.rollout: len(finish.response) for finish in finished}
