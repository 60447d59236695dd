"""The number of tokens in a chunk, which is a unit of transport: the cut does not wait for its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Protocol, cast

from annotated_types import Gt, Le

from oppo.admission.protocol import Json, Observation
from oppo.declared import PositiveCount, validated

FIRST_PROBE = 2
"""Steps before the first probe: the first steps of a run are slow, whatever the chunk size."""


class ChunkSize(Protocol):
    """Decides the size of the chunks; pure and synchronous."""

    def size(self) -> int:
        """Return the tokens in a chunk, at least 1; called at the start of a step."""

    def observe(self, seen: Observation) -> None:
        """Learn from a completed step; by default nothing."""
        del seen


@dataclass(frozen=True, slots=True)
@validated()
class Fixed(ChunkSize):
    """Chunks of ``tokens`` tokens."""

    tokens: PositiveCount = 32

    def size(self) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class WholeRollout(ChunkSize):
    """One chunk for each response: scoring begins when the response is complete, as without overlap."""

    def size(self) -> int:
        return sys.maxsize


@dataclass
@validated()
class Tuned(ChunkSize):
    """Probes candidate sizes periodically and keeps the fastest until the next probe (OPPO, arXiv 2509.25762).

    In every probe each candidate gets ``trials`` steps, interleaved with the others' steps. The criterion is seconds
    per generated token over all of a candidate's steps, since the seconds of a step follow the lengths of its
    responses. With lookahead these are observed some steps later, and a probe is decided when all of them are.
    Candidates are fractions of the length cap, as the cost of a chunk depends on its share of a response.
    They differ where scoring is slow or each chunk is expensive; with a cheap reward model they hardly do.

    Attributes:
        cap: the longest response, in tokens.
        parts: the candidates, as fractions of the cap; the middle one is used until the first probe.
        every: steps from the beginning of one probe to the next.
        trials: steps for each candidate in a probe.

    Raises:
        ValueError: there is no candidate, a part lies outside of 0 .. 1, or a probe does not fit into ``every``.

    Example:
        >>> Tuned(cap=2048).candidates
        (128, 256, 512)
    """

    cap: PositiveCount
    parts: tuple[Annotated[float, Gt(0), Le(1)], ...] = (1 / 16, 1 / 8, 1 / 4)
    every: int = 50
    trials: PositiveCount = 3
    _size: int = field(init=False, repr=False)
    _step: int = field(default=-FIRST_PROBE, init=False, repr=False)
    _seconds: dict[int, float] = field(default_factory=dict, init=False, repr=False)
    _tokens: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts must be some numbers above 0 and up to 1, not ()")
        if self.every < self.trials * len(self.candidates):
            raise ValueError(
                f"a probe takes {self.trials} steps for each of {len(self.candidates)} candidates, so every must be at "
                f"least {self.trials * len(self.candidates)}, not {self.every}"
            )
        self._size = self.candidates[len(self.candidates) // 2]

    @property
    def candidates(self) -> tuple[int, ...]:
        return tuple(sorted({max(1, round(part * self.cap)) for part in self.parts}))

    def size(self) -> int:
        """Return the candidate at trial during a probe, else the fastest of the last probe."""
        return self._size if self._trial is None else self.candidates[self._trial % len(self.candidates)]

    def observe(self, seen: Observation) -> None:
        if not seen.tokens:
            return
        asked = self._step - seen.lookahead
        at = asked % self.every
        if asked >= 0 and at < self._trials:
            size = seen.chunk or self.size()
            self._seconds[size] = self._seconds.get(size, 0.0) + seen.seconds
            self._tokens[size] = self._tokens.get(size, 0) + seen.tokens
        self._step += 1
        if at + 1 == self._trials and self._tokens:
            self._size = min(self._tokens, key=lambda size: self._seconds[size] / self._tokens[size])
            self._seconds, self._tokens = {}, {}

    def metrics(self) -> Mapping[str, float]:
        return {"overlap/chunk": float(self.size())}

    def state_dict(self) -> dict[str, Json]:
        seconds: dict[str, Json] = {str(size): value for size, value in self._seconds.items()}
        tokens: dict[str, Json] = {str(size): value for size, value in self._tokens.items()}
        return {"size": self._size, "step": self._step, "seconds": seconds, "tokens": tokens}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        self._size, self._step = cast("int", state["size"]), cast("int", state["step"])
        self._seconds = {int(size): value for size, value in cast("dict[str, float]", state["seconds"]).items()}
        self._tokens = {int(size): value for size, value in cast("dict[str, int]", state["tokens"]).items()}

    @property
    def _trial(self) -> int | None:
        at = self._step % self.every
        return at if self._step >= 0 and at < self._trials else None

    @property
    def _trials(self) -> int:
        return self.trials * len(self.candidates)
