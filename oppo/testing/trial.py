"""Trials of a policy: its rollouts are decoded and read, and everything that comes is checked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import anyio
import numpy as np

from oppo.errors import ProtocolError, as_itself
from oppo.events import Prompt, Response
from oppo.models import Decode, Piece, Policy
from oppo.stages.contract import require_piece

T = TypeVar("T")
Make: TypeAlias = Callable[[], Awaitable[T]]
"""Returns a fresh model, equal to the one before."""


def require(holds: bool, sentence: str) -> None:
    """Raise a :class:`ProtocolError` with ``sentence`` unless ``holds``."""
    if not holds:
        raise ProtocolError(sentence)


@dataclass
class Transcript:
    """The pieces read of one rollout."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def tokens(self) -> list[tuple[int, bool]]:
        """All tokens, in order, and whether each was given."""
        return [(int(token), piece.given) for piece in self.pieces for token in piece.tokens]

    @property
    def ended(self) -> bool:
        """Whether the response has."""
        return self.state not in {"live", "cut"}

    @property
    def state(self) -> str:
        """The state of the last piece."""
        return self.pieces[-1].state if self.pieces else "live"

    def first_half(self, prompt: Prompt) -> Response:
        """Return the response to ``prompt`` as it was after half of the pieces."""
        half, start = Response.empty(prompt), 0
        for piece in self.pieces[: len(self.pieces) // 2]:
            half = half.then(piece.event(prompt.rollout, start))
            start += len(piece.tokens)
        return half


@dataclass
class Trial:
    """One policy and its decodes.

    Attributes:
        transcripts: what was read of each.
        reported: the rollouts that were reported to the cut.
        cut_at: the number of these at which it answers true.
        turns: whether a response may end after its last token.
    """

    policy: Policy
    prompts: Sequence[Prompt]
    decodes: Sequence[Decode]
    transcripts: list[Transcript] = field(default_factory=list)
    reported: list[int] = field(default_factory=list)
    cut_at: int = 1_000_000
    has_cut: bool = False
    turns: bool = False

    def __post_init__(self) -> None:
        self.transcripts = [Transcript() for _ in self.prompts]

    @property
    def live(self) -> list[int]:
        """The indexes of those that have not ended."""
        return [k for k, transcript in enumerate(self.transcripts) if not transcript.ended]

    @property
    def tokens(self) -> list[list[tuple[int, bool]]]:
        """The tokens of each so far."""
        return [transcript.tokens for transcript in self.transcripts]

    def cut(self, finished: Sequence[int]) -> bool:
        """Note rollouts that have ended; return whether decoding is to stop."""
        require(not self.has_cut, f"cut() was called with {finished} after it had answered true")
        require(len(finished) > 0, "cut() was called though nothing had finished")
        again = set(finished) & set(self.reported)
        require(not again, f"rollouts {sorted(again)} were reported to cut() twice")
        self.reported.extend(finished)
        self.has_cut = len(self.reported) >= self.cut_at
        return self.has_cut

    async def decode(self, limit: int, *, cancel_first: bool = False) -> None:
        """Decode one step and read all of it, ``limit`` tokens at a time."""
        self.has_cut = False
        live = self.live
        decoding = self.policy.decoding([self.decodes[k] for k in live], self.cut)
        with as_itself():
            async with decoding, anyio.create_task_group() as readers:
                for k in live:
                    readers.start_soon(self.read, k, limit, cancel_first)

    async def read(self, k: int, limit: int, cancel_first: bool = False) -> None:
        """Read one rollout, ``limit`` tokens at a time, until it ends or is parked."""
        if cancel_first:
            with anyio.move_on_after(0):
                self.transcripts[k].pieces.append(await self.decodes[k].read(limit))
            if self.transcripts[k].ended:
                return
        rollout = self.prompts[k].rollout
        while True:
            piece = await self.decodes[k].read(limit)
            check_piece(rollout, piece, limit, self.policy, self.transcripts[k].pieces, turns=self.turns)
            self.transcripts[k].pieces.append(piece)
            if piece.state in {"eos", "stop", "length"}:
                require(
                    rollout in self.reported, f"rollout {rollout}: its last piece was readable before cut() was called"
                )
            if piece.state != "live":
                return


def check_piece(
    rollout: int, piece: Piece, limit: int, policy: Policy, earlier: Sequence[Piece], *, turns: bool = False
) -> None:
    """Raise :class:`ProtocolError` unless a piece can be the next of its rollout."""
    sampled = [before.versions[-1] for before in earlier if len(before.versions) and not before.given]
    require_piece(piece, policy, rollout, limit, int(sampled[-1]) if sampled else 0, turns=turns)
    n = len(piece.tokens)
    for before in () if turns else earlier[-1:]:  # a piece ends with its turn
        have, whole = len(before.tokens), before.state != "live" or before.given is not piece.given
        require(whole or have == limit, f"rollout {rollout}: a live piece holds {have} of {limit} tokens")
    if not piece.given:
        require(bool(np.all(piece.logprobs <= 0)), f"rollout {rollout}: a log-prob is above 0")
        require(
            piece.support.describes(n) and bool(piece.support.holds(piece.tokens).all()),
            f"rollout {rollout}: a token of a piece is outside of its own support",
        )
