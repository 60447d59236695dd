"""What a contestant says of one step: one line of JSON on the way, one value here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from oppo.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one contestant; what is optional a peer cannot know of itself.

    Attributes:
        seconds: wall time of the whole step.
        tokens: response tokens trained.
        samples: responses trained.
        capped: how many of them were cut off at the cap.
        as_announced: share of them as long as announced.
        deferred: responses carried into the next step.
        decode, score, update: seconds in which something of that phase was busy.
        exposed: seconds in which something scored while nothing decoded or trained.
        busy: seconds in which each model worked.
        decode_steps: of the actor.
        decoded: tokens it made, also those of responses that are not finished.
        bottleneck: the step's verdict, as its metrics have it.
    """

    seconds: float
    tokens: int
    samples: int
    capped: int = 0
    as_announced: float = 1.0
    deferred: int = 0
    decode: float = 0.0
    score: float = 0.0
    update: float = 0.0
    exposed: float = 0.0
    busy: Mapping[str, float] = field(default_factory=dict)
    decode_steps: int = 0
    decoded: int = 0
    bottleneck: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds_per_token(self) -> float:
        """Seconds for each response token trained."""
        return self.seconds / self.tokens

    def as_json(self) -> dict[str, object]:
        """Return what :meth:`of` reads."""
        return asdict(self)

    @classmethod
    def of(cls, told: object) -> StepRecord:
        """Return the record that a contestant told; what it says beyond one is left out.

        Raises:
            ProtocolError: it is none.
        """
        names = {each.name for each in fields(cls)}
        if not isinstance(told, Mapping) or not {"seconds", "tokens", "samples"} <= told.keys():
            raise ProtocolError(f"expected a step with seconds, tokens and samples, got {told!r}")
        record = cls(**{name: value for name, value in told.items() if name in names})
        if not (record.seconds > 0 and record.tokens > 0 and record.samples > 0):
            raise ProtocolError(f"expected a step that took time and trained something, got {told!r}")
        return record
