"""The schedules that a simulation compares. Each is an argument of one graph: a further one is a further row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from oppo.admission import Admission, Continuous, Overcommit, Synchronous, TailAdaptive
from oppo.admission.chunking import ChunkSize, Fixed, WholeRollout
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
        step: the keys of ``[step]`` with which ``oppo train`` runs it; empty: it has none.
    """

    name: str
    about: str
    admission: MakeAdmission
    chunk: int | None = None
    held: bool = False
    lookahead: int = 0
    in_flight: bool = False
    step: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_declared(self)

    def chunks(self, grain: int = 1) -> ChunkSize:
        """Return the chunk size where one token stands for ``grain``."""
        return WholeRollout() if self.chunk is None else Fixed(max(1, self.chunk // grain))


def ladder(
    batch: int,
    *,
    extra: int,
    chunk: int,
    max_deferrals: int = 2,
    price: float = 1.0,
    on_publish: str = "recompute",
) -> Mapping[str, Schedule]:
    """Return the schedules by name, each with one overlap more than one before it.

    Args:
        batch: units in a batch.
        extra: Delta of the schedules with a fixed one.
        chunk: tokens that travel at once.
        max_deferrals: of what is carried.
        price: of lag, to the adaptive schedules.
        on_publish: what becomes of the KV cache of carried rollouts, as of ``step.on_publish``.
    """
    foreseen = min(max_deferrals, FORESEEN)
    live = max(1, batch // 2)
    carried = f"{extra} stragglers carried into the next step"
    waiting = partial(Synchronous, batch)
    carrying = partial(Overcommit, batch, extra, max_deferrals)
    adaptive = partial(TailAdaptive, batch, price=price, max_deferrals=foreseen)
    refilling = partial(Continuous, batch, live, max_deferrals)
    keys: Mapping[MakeAdmission, Mapping[str, object]] = {
        waiting: {"admission": "overcommit", "extra": 0},
        carrying: {"admission": "overcommit", "extra": extra},
        adaptive: {"admission": "adaptive", "extra": batch // 4, "max_deferrals": foreseen, "lag_price": price},
        refilling: {"admission": "continuous", "extra": live},
    }
    serial = Schedule(name="serial", about="decode, then score, then train", admission=waiting, held=True)
    rungs: Sequence[tuple[str, str, MakeAdmission, int, bool]] = (
        ("rollout", "each response is scored when it ends", waiting, 0, False),
        ("chunk", "responses are scored while they are written", waiting, 0, False),
        ("fixed", f"chunk, {carried}", carrying, 0, False),
        ("adaptive", "chunk, as many carried as pay", adaptive, 0, False),
        ("lookahead 1", "chunk, decodes during training", waiting, 1, False),
        ("lookahead 1, fixed", f"both, {carried}", carrying, 1, False),
        ("lookahead 2, fixed", "the same, two steps ahead", carrying, 2, False),
        ("in flight", "the same, weights adopted while tokens are written", carrying, 2, True),
        ("continuous", f"the same, {live} decoded at a time: each that ends is replaced at once", refilling, 2, True),
    )
    found = {"serial": serial}
    for name, about, admission, lookahead, in_flight in rungs:
        size = None if name == "rollout" else chunk
        shared = {"batch": batch, "max_deferrals": max_deferrals, "chunk": size or "whole", "on_publish": on_publish}
        step = {**shared, "lookahead": lookahead, "publish": "in-flight" if in_flight else "cut", **keys[admission]}
        found[name] = Schedule(
            name=name,
            about=about,
            admission=admission,
            chunk=size,
            lookahead=lookahead,
            in_flight=in_flight,
            step=step,
        )
    return found
