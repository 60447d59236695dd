"""The record of one step of a contestant, sent as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from oppo.admission.protocol import Json
from oppo.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one contestant; a peer cannot measure the optional fields.

    Attributes:
        seconds: wall time of the whole step.
        tokens: response tokens trained.
        samples: responses trained.
        capped: of them, those cut off at the cap.
        as_announced: fraction of them with the announced length.
        deferred: responses carried into the next step.
        decode, score, update: busy seconds of each phase.
        exposed: seconds of scoring beside no decoding or training.
        busy: busy seconds of each model.
        decode_steps: of the actor; 0 if its engine does not count them.
        decoded: tokens it made, those of unfinished responses included.
        bottleneck: the step's metrics of its bottleneck.
        publish: seconds of publishing the weights.
        observed: the controllers' observation of it, as JSON.
        work: by model and label, the number of calls and their seconds.
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
    publish: float = 0.0
    observed: Mapping[str, Json] = field(default_factory=dict)
    work: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Return the input of :meth:`of`."""
        return asdict(self)

    def for_simulation(self) -> dict[str, object]:
        """Return what a simulation is calibrated on and compared with."""
        names = ("seconds", "tokens", "samples", "update", "publish", "observed", "work")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, answer: object) -> StepRecord:
        """Return the record in a contestant's answer, whose other keys are left out.

        Raises:
            ProtocolError: the answer is no record.
        """
        names = {each.name for each in fields(cls)}
        if not isinstance(answer, Mapping) or not {"seconds", "tokens", "samples"} <= answer.keys():
            raise ProtocolError(f"expected a step with seconds, tokens and samples, got {answer!r}")
        record = cls(**{name: value for name, value in answer.items() if name in names})
        if not (record.seconds > 0 and record.tokens > 0 and record.samples > 0):
            raise ProtocolError(f"expected a step that took time and trained something, got {answer!r}")
        return record
