"""Faults of the engine's own contracts: invalid answers, lost sessions, weights synced half-way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from oppo.errors import ModelError
from oppo.models import Piece, Trained
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

    ``count``: one item too few. ``nan``: no numbers (of a piece: its log-probs). ``shape``: per-token values for one
    token too few; a scalar as an array; of a piece, one log-prob too few. ``none``: ``None`` for each rollout.
    ``empty``: a piece or an answer without tokens. ``version``: weights that do not exist yet; of ``load`` and
    ``update``: the version does not move. ``order``: a piece ends with older weights than it began with. ``token``: an
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
        elif isinstance(answer, Piece):
            return self._piece(answer)
        elif self.what == "count":
            return answer[:-1]
        elif call.method in {"finish", "call"}:
            return [self._value(value) for value in cast("Sequence[object]", answer)]
        return answer

    def _piece(self, piece: Piece) -> Piece:
        if self.what == "empty":
            none = np.zeros(0, np.int32)
            return Piece(none, none.astype(np.float32), none, "live")
        old = piece.versions[:1] - np.int32(FAR)
        spoilt: dict[str, Callable[[], Piece]] = {
            "nan": lambda: replace(piece, logprobs=np.full_like(piece.logprobs, np.nan)),
            "shape": lambda: replace(piece, logprobs=piece.logprobs[:-1]),
            "version": lambda: replace(piece, versions=piece.versions + np.int32(FAR)),
            "order": lambda: replace(piece, versions=np.append(piece.versions[:-1], old)),
            "token": lambda: replace(piece, tokens=-1 - piece.tokens),
        }
        return spoilt[self.what]() if len(piece.tokens) else piece

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
