"""Faults of the engine's own contracts: invalid answers, lost sessions, weights synced half-way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from oppo.errors import ModelError
from oppo.events import Chunk
from oppo.models import Trained
from oppo.testing.faulty import Call, FaultKind, Method
from oppo.turns import Answer
from oppo.weight_sync import name_of

Spoilt: TypeAlias = Literal["nan", "count", "shape", "none", "empty", "version", "order", "token", "stranger"]

# How the answer of each method can be wrong; the other methods return nothing
SPOILT: Mapping[Method, tuple[Spoilt, ...]] = {
    "open": ("count",),
    "read": ("nan", "shape", "empty", "version", "order", "token"),
    "load": ("version",),
    "finish": ("nan", "count", "shape", "none"),
    "update": ("version", "stranger"),
    "commit": ("version", "stranger"),
    "call": ("nan", "count", "none"),
    "answer": ("empty", "token"),
}

FAR = 1_000  # versions by which a spoilt piece is ahead of the current weights, or behind them


@dataclass(frozen=True, slots=True)
class Garbage(FaultKind):
    """The call does its work and returns an invalid answer.

    ``count``: one item too few. ``nan``: no numbers (of a chunk: its log-probs). ``shape``: per-token values for one
    token too few; a scalar as an array; of a chunk, one log-prob too few. ``none``: ``None`` for each rollout.
    ``empty``: a chunk or an answer without tokens. ``version``: weights that do not exist yet; of ``load`` and
    ``update``: the version does not move. ``order``: a chunk ends with older weights than it began with. ``token``: an
    id below 0. ``stranger``: of an update, a rollout that is not in the batch.
    """

    what: Spoilt

    def fits(self, method: Method) -> bool:
        return self.what in SPOILT.get(method, ())

    def after(self, call: Call, answer: Any) -> Any:
        if self.what == "version" and call.method != "read":
            call.model.behind += 1
        elif isinstance(answer, Trained):
            return replace(answer, nonfinite=(*answer.nonfinite, -1))
        elif isinstance(answer, Answer):
            return replace(answer, tokens=answer.tokens[:0] if self.what == "empty" else -1 - answer.tokens)
        elif isinstance(answer, Chunk):
            return self._chunk(answer)
        elif self.what == "count":
            return answer[:-1]
        elif call.method in {"finish", "call"}:
            return [self._value(value) for value in cast("Sequence[object]", answer)]
        return answer

    def _chunk(self, chunk: Chunk) -> Chunk:
        if self.what == "empty":
            return replace(chunk.part(0, 0), state="live")
        old = chunk.versions[:1] - np.int32(FAR)
        spoilt: dict[str, Callable[[], Chunk]] = {
            "nan": lambda: replace(chunk, logprobs=np.full_like(chunk.logprobs, np.nan)),
            "shape": lambda: replace(chunk, logprobs=chunk.logprobs[:-1]),
            "version": lambda: replace(chunk, versions=chunk.versions + np.int32(FAR)),
            "order": lambda: replace(chunk, versions=np.append(chunk.versions[:-1], old)),
            "token": lambda: replace(chunk, tokens=-1 - chunk.tokens),
        }
        return spoilt[self.what]() if len(chunk.tokens) else chunk

    def _value(self, value: object) -> object:
        if self.what == "none":
            return None
        if self.what == "nan":
            return np.full_like(value, np.nan) if isinstance(value, np.ndarray) else float("nan")
        return value[:-1] if isinstance(value, np.ndarray) else np.array([value])


@dataclass(frozen=True, slots=True)
class LoseSessions(FaultKind):
    """The model loses all its sessions before the call: a policy those of the decoding, a fake scorer all."""

    def fits(self, method: Method) -> bool:
        return method in {"decoding", "extend", "finish"}

    async def before(self, call: Call) -> tuple[Any, ...]:
        if call.method == "decoding":
            for decode in call.arguments[0]:
                await decode.aclose()
        else:
            sessions = call.model.inner.sessions
            sessions.forget(list(sessions))
        return call.arguments


@dataclass(frozen=True, slots=True)
class HalfSynced(FaultKind):
    """The first half of the synced models (rounded down) gets the weights; if not ``silent``, the call then raises."""

    silent: bool = False

    def fits(self, method: Method) -> bool:
        return method == "sync_weights"

    async def before(self, call: Call) -> tuple[Any, ...]:
        return call.arguments[: len(call.arguments) // 2]

    def after(self, call: Call, answer: Any) -> Any:
        if not self.silent:
            held = ", ".join(f"{name_of(one)} has version {one.version}" for one in call.arguments)
            raise ModelError(f"{call.place} fails half-way, as its script says: {held}")
        return answer
