"""The protocol of an algorithm for ``oppo train``, and the models it receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from oppo.admission import Admission
from oppo.chunking import ChunkSize
from oppo.events import Drop, FloatArray, StepReport
from oppo.graph import Graph
from oppo.models import Policy, Scorer, Trainer

if TYPE_CHECKING:
    from oppo.losses import Loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roles:
    """The models of a run and the schedule of its steps, from which an algorithm makes a graph.

    Attributes:
        policy: the actor that decodes.
        reference: log-probs of the frozen reference model, float32 [n] for a response of n tokens.
        reward: the score of a finished response, or a ``Drop``.
        critic: values, float32 [n]; ``None`` without a critic.
        proximal: log-probs under the weights that are about to be updated, float32 [n]; ``None`` without corrections.
        trainer: trains the actor and the critic.
        admission: batch size, overcommit and the cut.
        chunks: tokens per chunk.
    """

    policy: Policy
    reference: Scorer[FloatArray]
    reward: Scorer[float | Drop]
    critic: Scorer[FloatArray] | None
    proximal: Scorer[FloatArray] | None
    trainer: Trainer
    admission: Admission
    chunks: ChunkSize


class Algorithm(Protocol):
    """The settings of an algorithm, a frozen dataclass, and what they define."""

    has_critic: ClassVar[bool]
    """Whether a critic is trained too and estimates values."""

    @property
    def responses(self) -> int:
        """Responses to each prompt; several are compared with one another."""

    @property
    def corrects(self) -> bool:
        """Whether stale tokens are corrected for, which needs log-probs under the proximal policy."""

    def graph(self, roles: Roles) -> Graph[StepReport]:
        """Return the graph of a step."""

    def loss(self) -> Loss:
        """Return the trainer's loss; this loads torch."""
