"""Costs of a step's work, in seconds: decode steps, reading, updates; and which of it shares a device.

Costs are linear in what there is to do, as a roofline or a fit gives them::

    decode step of one replica   max(floor, step + row * rows + context * tokens in the rows' context)
    end of a rollout             ending
    reading start .. stop        token * (stop - start) + pair * (stop^2 - start^2) / 2
    update                       fixed + the same over whole rows, prompts included
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from oppo.declared import require_declared
from oppo.testing.device import Interference, time_shared

ScorerName: TypeAlias = Literal["reward", "reference", "critic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The costs of forward passes, or of forward and backward passes, in seconds.

    Attributes:
        token: for each token.
        pair: for each pair of a token and one before it: attention.
    """

    token: float = 0.0
    pair: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        """Return the costs of both models' passes."""
        return Passes(token=self.token + other.token, pair=self.pair + other.pair)

    def reading(self, start: float, stop: float) -> float:
        """Return the seconds for positions ``start .. stop`` of a row."""
        return (self.token + self.pair * (start + stop) / 2) * (stop - start)

    def whole(self, rows: NDArray[np.float64], *, padded: bool = False) -> float:
        """Return the seconds for whole rows, of which ``rows`` has the tokens, padded to the longest or not."""
        if padded:
            rows = np.full_like(rows, rows.max(initial=0))
        return float((self.token * rows + self.pair * rows**2 / 2).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The costs of decode steps, in seconds.

    Attributes:
        floor: of any decode step.
        step: for itself, as for reading the weights.
        row: for each live row.
        context: for each token in the context of the live rows, prompts included.
        ending: for each rollout that ends: what is left of its rows is put together anew.
        prefill: of reading a rollout's context before it is decoded; decode steps wait meanwhile.
        recomputes: whether that is read again with new weights.
        replicas: copies of the actor, each with rows and decode steps of its own.
        static: a row that has ended keeps its place until the cut, padded to the longest; in the serial schedule only.
        device: of all replicas.
    """

    floor: float = 0.0
    step: float = 0.0
    row: float = 0.0
    context: float = 0.0
    ending: float = 0.0
    prefill: Passes = Passes()
    recomputes: bool = True
    replicas: int = 1
    static: bool = False
    device: str = "actor"

    def __post_init__(self) -> None:
        require_declared(self)

    def seconds(self, rows: float, context: float) -> float:
        """Return the seconds of a decode step of one replica."""
        return max(self.floor, self.step + self.row * rows + self.context * context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The costs of a scorer, in seconds.

    Attributes:
        passes: of what it reads.
        call: of each call that reads.
        answer: of each rollout that it answers for.
        streams: whether it reads along while responses are written; otherwise it reads them whole, after the cut.
        padded: whether rows that it reads whole are padded to the longest of the step.
        device: that it works on.
        place: scorers of a place take turns.
    """

    passes: Passes = Passes()
    call: float = 0.0
    answer: float = 0.0
    streams: bool = True
    padded: bool = False
    device: str = "scorers"
    place: str = "scorers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    """The costs of an update, in seconds.

    Attributes:
        passes: of all epochs, actor and critic.
        fixed: of each update: the optimizer, the data.
        padded: whether rows are padded to the longest of the batch.
        publish: from the update to the new weights in the actor.
        device: that it works on.
    """

    passes: Passes = Passes()
    fixed: float = 0.0
    padded: bool = False
    publish: float = 0.0
    device: str = "actor"

    def seconds(self, rows: NDArray[np.float64]) -> float:
        """Return the seconds of an update on whole rows, of which ``rows`` has the tokens, prompts included."""
        return self.fixed + self.passes.whole(rows, padded=self.padded)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The models of a step and where they work.

    Attributes:
        readers: the scorers; without a ``reward`` it is a rule that costs nothing.
        interference: of kinds of work on one device: ``decode``, ``score`` and ``train``.
        cache: bytes of keys and values for a token of the actor; 0: unknown.
    """

    decoder: Decoder
    readers: Mapping[ScorerName, Reader] = field(default_factory=dict)
    updater: Updater = Updater()
    interference: Interference = time_shared
    cache: float = 0.0


DrawLengths: TypeAlias = Callable[[int, int, int], NDArray[np.int64]]
"""``f(units, samples, seed)``: the lengths of the responses to ``units`` prompts, int64 [units, samples], in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Size of a batch and lengths of its prompts and responses.

    Attributes:
        batch: units in a batch: rollouts, or groups of ``samples`` rollouts.
        lengths: of the responses.
        cap: the longest response, in tokens.
        prompt: tokens of a prompt.
        samples: rollouts for each prompt.
    """

    batch: int
    lengths: DrawLengths
    cap: int
    prompt: int
    samples: int = 1

    def __post_init__(self) -> None:
        require_declared(self)
