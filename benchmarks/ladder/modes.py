"""The ladder of modes: each adds one overlap. A new controller of chunks or of admission is one more row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from benchmarks.ladder.workloads import BenchWorkload
from oppo.admission import Admission, Overcommit, Synchronous, TailAdaptive
from oppo.admission.chunking import ChunkSize, Fixed, WholeRollout


@dataclass(frozen=True, slots=True)
class Mode:
    """The schedule of a contestant; models, engine and data are the same for all.

    Attributes:
        held: scoring waits until decoding has ended.
        chunks, admission: made anew for each contestant.
        over: the mode it extends, with which it is compared besides the serial one.
        lookahead: steps that begin before the current one has ended.
    """

    name: str
    about: str
    held: bool
    chunks: Callable[[BenchWorkload], ChunkSize]
    admission: Callable[[BenchWorkload], Admission]
    over: str = "serial"
    lookahead: int = 0

    def trains_apart(self, workload: BenchWorkload) -> bool:
        """Return whether updates are made in a process, and on weights, of their own."""
        return workload.trains_apart or self.lookahead > 0


def _whole(_: BenchWorkload) -> ChunkSize:
    return WholeRollout()


def _fixed(workload: BenchWorkload) -> ChunkSize:
    return Fixed(workload.chunk)


def _synchronous(workload: BenchWorkload) -> Admission:
    return Synchronous(workload.batch)


def _overcommitted(workload: BenchWorkload) -> Admission:
    return Overcommit(batch=workload.batch, extra=workload.extra)


def _adaptive(workload: BenchWorkload) -> Admission:
    return TailAdaptive(batch=workload.batch)


SERIAL: Final = Mode("serial", "decode, then score, then train", True, _whole, _synchronous)

MODES: Final = MappingProxyType(
    {
        mode.name: mode
        for mode in (
            SERIAL,
            Mode("rollout", "each response is scored when it ends", False, _whole, _synchronous),
            Mode("chunk", "responses are scored while they are written", False, _fixed, _synchronous),
            Mode("overcommit", "serial, stragglers carried over", True, _whole, _overcommitted),
            Mode("fixed", "chunk, stragglers carried over", False, _fixed, _overcommitted, over="chunk"),
            Mode("adaptive", "chunk, as many stragglers carried over as pay", False, _fixed, _adaptive, over="chunk"),
            Mode("lookahead", "chunk, the next step decoded meanwhile", False, _fixed, _synchronous, "chunk", 1),
            Mode("lookahead+adaptive", "both of these", False, _fixed, _adaptive, "adaptive", 1),
        )
    }
)
"""By name, in the order of the ladder."""
