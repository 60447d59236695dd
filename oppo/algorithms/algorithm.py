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

    The fields are the arguments of :func:`oppo.ppo`. ``critic`` is ``None`` for an algorithm without one, ``proximal``
    for one that corrects nothing, and ``reference`` for one that refers to none, unless settings name a model for it,
    to measure the KL. ``max_new_tokens`` is the cap of a response.
    """

    policy: Policy
    reference: Scorer[FloatArray] | None
    reward: Scorer[float | Drop]
    critic: Scorer[FloatArray] | None
    proximal: Scorer[FloatArray] | None
    trainer: Trainer
    admission: Admission
    chunks: ChunkSize
    max_new_tokens: int


class Algorithm(Protocol):
    """The settings of an algorithm, a frozen dataclass, and what they define."""

    has_critic: ClassVar[bool]
    """Whether a critic is trained too and estimates values."""

    @property
    def responses(self) -> int:
        """Responses to each prompt; several are compared with one another."""

    @property
    def refers(self) -> bool:
        """Whether log-probs of a reference are needed, for a KL penalty or by the loss; otherwise none is loaded."""

    @property
    def corrects(self) -> bool:
        """Whether stale tokens are corrected for, which needs log-probs under the proximal policy."""

    def graph(self, roles: Roles) -> Graph[StepReport]:
        """Return the graph of a step."""

    def loss(self) -> Loss:
        """Return the trainer's loss; this loads torch."""
