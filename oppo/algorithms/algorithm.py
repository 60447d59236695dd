"""What ``oppo train`` asks of an algorithm, and what it gives one."""

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
    """The models of a run and the schedule of its steps, of which an algorithm makes a graph.

    Attributes:
        policy: the actor that decodes.
        reference: log-probs of the frozen reference model, float32 [n] for a response of n tokens.
        reward: the score of a finished response, or a ``Drop`` where there is none.
        critic: values, float32 [n]; ``None`` where the algorithm has no critic.
        proximal: log-probs under the weights that are about to be updated, float32 [n]; ``None`` where the algorithm
            corrects nothing.
        trainer: trains the actor, and the critic.
        admission: batch size, overcommit and the cut.
        chunks: how many tokens travel at once.
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
    """The settings of an algorithm, a frozen dataclass, and what follows from them."""

    has_critic: ClassVar[bool]
    """Whether values are estimated, by a model that is trained too."""

    @property
    def responses(self) -> int:
        """Responses to each prompt; where there are several, they are compared with one another."""

    @property
    def corrects(self) -> bool:
        """Whether stale tokens are corrected for, so that log-probs under the proximal policy are needed."""

    def graph(self, roles: Roles) -> Graph[StepReport]:
        """Return the graph of a step."""

    def loss(self) -> Loss:
        """Return what the trainer minimises; this loads torch."""
