"""The schedules that a simulation compares. Each is an argument of one graph: a further one is a further row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from oppo.admission import Admission, Continuous, Overcommit, Synchronous, TailAdaptive
from oppo.chunking import ChunkSize, Fixed, WholeRollout
from oppo.declared import require_declared

MakeAdmission = Callable[[], Admission]
MakeChunks = Callable[[], ChunkSize]

FORESEEN: Final = 64
"""The largest ``max_deferrals`` that the adaptive schedule reckons with; nothing is deferred so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How the steps of a run overlap.

    Attributes:
        name: of a line in a report.
        about: it in words.
        admission: makes a new policy of admission.
        chunk: tokens that travel at once; ``None``: whole responses.
        held: scoring waits until decoding has ended.
        lookahead: number of steps that begin before the current one has ended.
        in_flight: the actor gets new weights between two decode steps, instead of at the cut.
    """

    name: str
    about: str
    admission: MakeAdmission
    chunk: int | None = None
    held: bool = False
    lookahead: int = 0
    in_flight: bool = False

    def __post_init__(self) -> None:
        require_declared(self)

    def chunks(self, grain: int = 1) -> ChunkSize:
        """Return the chunk size where one token stands for ``grain``."""
        return WholeRollout() if self.chunk is None else Fixed(max(1, self.chunk // grain))


def ladder(batch: int, *, extra: int, chunk: int, max_deferrals: int = 2, price: float = 1.0) -> Mapping[str, Schedule]:
    """Return the schedules by name, each with one overlap more than one before it.

    Args:
        batch: units in a batch.
        extra: Delta of the schedules with a fixed one.
        chunk: tokens that travel at once.
        max_deferrals: of what is carried.
        price: of lag, to the adaptive schedules.
    """
    waiting = partial(Synchronous, batch)
    carrying = partial(Overcommit, batch, extra, max_deferrals)
    foreseen = min(max_deferrals, FORESEEN)
    adaptive = partial(TailAdaptive, batch, price=price, max_deferrals=foreseen)
    live = max(1, batch // 2)
    carried = f"{extra} stragglers carried into the next step"
    schedules = (
        Schedule(name="serial", about="decode, then score, then train", admission=waiting, held=True),
        Schedule(name="rollout", about="each response is scored when it ends", admission=waiting),
        Schedule(name="chunk", about="responses are scored while they are written", admission=waiting, chunk=chunk),
        Schedule(name="fixed", about=f"chunk, {carried}", admission=carrying, chunk=chunk),
        Schedule(name="adaptive", about="chunk, as many carried as pay", admission=adaptive, chunk=chunk),
        Schedule(
            name="lookahead 1", about="chunk, decodes during training", admission=waiting, chunk=chunk, lookahead=1
        ),
        Schedule(name="lookahead 1, fixed", about=f"both, {carried}", admission=carrying, chunk=chunk, lookahead=1),
        Schedule(
            name="lookahead 2, fixed", about="the same, two steps ahead", admission=carrying, chunk=chunk, lookahead=2
        ),
        Schedule(
            name="in flight",
            about="the same, weights adopted while tokens are written",
            admission=carrying,
            chunk=chunk,
            lookahead=2,
            in_flight=True,
        ),
        Schedule(
            name="continuous",
            about=f"the same, {live} decoded at a time: each that ends is replaced at once",
            admission=partial(Continuous, batch, live, max_deferrals),
            chunk=chunk,
            lookahead=2,
            in_flight=True,
        ),
    )
    return {schedule.name: schedule for schedule in schedules}
