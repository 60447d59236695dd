"""The rollout buffer between an engine and the readers of its rollouts.

::

    engine  -> put(token, ...)          -> RolloutBuffer -> read(limit) -> Chunk        a reader of the rollout
    engine  -> DecodeSteps.push(step)   -> put            from the thread or the process in which the model decodes
    engine  <- answer                   <- proceed(given) <- turn()                     a conversation

An engine samples tokens. Before it pushes the last token of a response, it calls the cut with that response, so the cut
counts it before a reader can. The engine's own state of a rollout is the buffer's ``row``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar, cast

import anyio
import anyio.lowlevel
import numpy as np

from oppo.errors import ModelError, ProtocolError, leaves
from oppo.events import (
    NO_COLUMNS,
    Chunk,
    ChunkState,
    FinishReason,
    FloatArray,
    IntArray,
    Prompt,
    Response,
    TokenColumns,
    ToolTokens,
)
from oppo.limits import UNLIMITED, TurnLimit
from oppo.models import Decode
from oppo.turns import turn_so_far

R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """The tokens of one decode step, one for each of n live rows, in admission order; no reason: it stays live."""

    keys: tuple[int, ...]
    tokens: IntArray
    logprobs: FloatArray
    version: int
    reasons: tuple[FinishReason | None, ...]
    extra: TokenColumns = NO_COLUMNS


class DecodeEngine(Protocol[R]):
    """The engine that decodes a rollout, as its buffer calls it, on the event loop."""

    def collect(self) -> None:
        """Put the tokens that have arrived, of any rollout; called before a reader waits."""

    def note_answer(self, rollout: RolloutBuffer[R]) -> None:
        """Let a rollout go on after its turn with ``pop_answer()``, or end if it is ``ending``."""

    async def discard(self, rollout: RolloutBuffer[R]) -> None:
        """Free the memory of a rollout that its reader has closed."""


SampledToken: TypeAlias = tuple[int, float, int, TokenColumns]
"""A token, its log-prob, the version that made it and its further columns."""


class RolloutBuffer(Generic[R]):
    """One rollout of a policy, as :class:`oppo.turns.TurnDecode`; it buffers the rollout's tokens until they are read.

    It lives on the event loop. Its reader uses :meth:`read` and :meth:`aclose`, a conversation :meth:`turn`,
    :meth:`proceed` and :meth:`finish`; the engine the rest.
    """

    def __init__(
        self,
        engine: DecodeEngine[R],
        key: int,
        row: R,
        response: Response,
        limit: int,
        *,
        turns: bool = False,
        ended: FinishReason | None = None,
    ) -> None:
        self.engine = engine
        self.key = key  # by which the engine names the rollout
        self.row = row  # the engine's state of the rollout
        self.prompt = response.prompt
        self.limit = limit  # length in tokens at which the response ends
        self.turns = turns  # whether a token that would end the response ends a turn
        self.enough = 0  # length of the response at which the waiting reader continues; read in any thread
        # Whether decoding has been cut, though the last tokens may be on their way; set in any thread. An answer then
        # waits for the next decoding, whichever of the two comes first.
        self.cutting = False
        self.closed = False
        self._taken = len(response)
        self._unread: list[SampledToken] = []
        self._tool: list[range] = []  # positions in the response of the unread tool tokens
        self._version = int(response.versions[-1]) if len(response) else 0
        self._end_read = False
        self._state: ChunkState = "cut"
        self._failure: Exception | None = None
        self._readiness: asyncio.Future[None] | None = None
        self._answer: list[int] = []
        self._turn = turn_so_far(response) if turns else []
        self.bounds: tuple[TurnLimit, int] = UNLIMITED, 0
        self._unanswered = ended  # why a turn has ended with the response so far
        self._final: FinishReason | None = None
        self._turned: anyio.Event | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.prompt.admission, self.prompt.stream

    @property
    def live(self) -> bool:
        return self._state == "live"

    @property
    def ended(self) -> bool:
        return self._state not in ("live", "cut")

    @property
    def deferred(self) -> bool:
        return self._state == "cut"

    def usable_by(self, engine: object) -> bool:
        return self.engine is engine and not self.closed and self._failure is None

    @property
    def received(self) -> int:
        # In tokens, read or not.
        return self._taken + len(self._unread)

    @property
    def unanswered(self) -> bool:
        return self._unanswered is not None and self._final is None

    @property
    def ending(self) -> bool:
        return self._final is not None and not self.ended

    async def turn(self) -> IntArray | None:
        await anyio.lowlevel.checkpoint()
        while self.live and not self.closed and not self.unanswered:
            self._turned = anyio.Event()
            await self._turned.wait()
        return np.array(self._turn, np.int32) if self.live and self.unanswered else None

    def bound(self, limit: TurnLimit, start: int) -> None:
        self.bounds = limit, start
        if self._unanswered is None and self._turn and limit.reached(self._turn, self.received - start):
            self._unanswered = "stop"

    def proceed(self, given: IntArray) -> bool:
        self._require_turn(len(given))
        if not self.live or self.cutting:
            return False
        if self.received + len(given) >= self.limit:
            self._final = "length"
        else:
            self._tool.append(range(self.received, self.received + len(given)))
            self._turn, self._unanswered, self._answer = [], None, given.tolist()
            for token in self._answer:
                self._unread.append((token, 0.0, self._version, NO_COLUMNS))
            self._wake_if_readable()
        self.engine.note_answer(self)
        return True

    def finish(self) -> bool:
        self._require_turn(1)
        if not self.live or self.cutting:
            return False
        self._final = self._unanswered
        self.engine.note_answer(self)
        return True

    def _require_turn(self, given: int) -> None:
        if not self.unanswered or not given:
            what = "a turn that has ended" if given else "at least one token"
            raise ProtocolError(f"rollout {self.prompt.rollout}: expected {what} to go on after")

    def pop_answer(self) -> list[int]:
        answer, self._answer = self._answer, []
        return answer

    def end(self) -> None:
        if self._final is not None:
            self._state = self._final
            self.wake()

    async def read(self, limit: int) -> Chunk | ToolTokens:
        if limit < 1:
            raise ValueError(f"a read takes at least 1 token, not {limit}")
        await anyio.lowlevel.checkpoint()
        if self._readiness is not None:
            raise ProtocolError(f"two reads of rollout {self.prompt.rollout} at once: it has one reader")
        self.enough = self._taken + limit
        self.engine.collect()
        while not self._readable():
            self._readiness = asyncio.get_running_loop().create_future()  # an event is four objects more
            try:
                await self._readiness
            finally:
                self._readiness = None
        return self._take(limit)

    async def aclose(self) -> None:
        # A live row's memory is freed at the next decode step.
        if not self.closed:
            self.closed = True
            self.wake()
            await self.engine.discard(self)

    def begin(self) -> None:
        self._state, self.cutting = "live", False

    def put(self, sampled: SampledToken, state: ChunkState) -> None:
        self._unread.append(sampled)
        self._version = sampled[2]
        if self.turns:
            self._turn.append(sampled[0])
        if self.turns and state in {"eos", "stop"}:
            self._unanswered = state
            self._wake_turn()
        else:
            self._state = state
        self._wake_if_readable()

    def _wake_if_readable(self) -> None:
        if self._readable():
            self.wake()

    def defer(self, failure: Exception | None) -> None:
        """Stop being live: deferred without a ``failure``, failed for good with one."""
        if self.live:
            self._state, self._failure = "cut", failure
            self.wake()

    def wake(self) -> None:
        if self._readiness is not None and not self._readiness.done():
            self._readiness.set_result(None)
        self._wake_turn()

    def _wake_turn(self) -> None:
        if self._turned is not None:
            self._turned.set()

    def _readable(self) -> bool:
        if not self.live or self.closed or self.received >= self.enough:
            return True
        return bool(self._unread) and (self.unanswered or bool(self._tool))

    def _take(self, limit: int) -> Chunk | ToolTokens:
        rollout = self.prompt.rollout
        if self.closed:
            raise ProtocolError(f"rollout {rollout} was closed, so it cannot be read")
        if not self._unread and self._failure is not None:
            raise self._failure
        if self._end_read:
            raise ProtocolError(f"the last chunk of rollout {rollout} has been read; expected no further read")
        start, n, given = self._taken, min(limit, len(self._unread)), False
        if self._tool:
            given = start in self._tool[0]
            n = min(n, (self._tool[0].stop if given else self._tool[0].start) - start)
            if given:
                rest = range(start + n, self._tool[0].stop)
                self._tool[0:1] = [rest] if rest else []
        self._taken += n
        read, self._unread = self._unread[:n], self._unread[n:]
        continues = bool(self._unread) or self._failure is not None
        self._end_read = self.ended and not continues
        state: ChunkState = "live" if continues else self._state
        tokens = np.array([token for token, _, _, _ in read], np.int32)
        if given:
            return ToolTokens(rollout, start, tokens, state)
        logprobs = np.array([logprob for _, logprob, _, _ in read], np.float32)
        versions = np.array([version for _, _, version, _ in read], np.int32)
        extra = TokenColumns.concatenate((columns, 1) for _, _, _, columns in read)
        return Chunk(rollout, start, tokens, logprobs, versions, extra, state)


class DecodeSteps(Generic[R]):
    """Carries decode steps to the rollouts that are decoded, from another thread.

    It wakes the event loop only when a reader has enough tokens or a response ends, not at every decode step. A reader
    first sets ``enough``, then calls :meth:`hand_out`, then waits: earlier tokens are handed out then, and later ones
    are compared with ``enough``.
    """

    def __init__(self, rollouts: Iterable[RolloutBuffer[R]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._rollouts = {rollout.key: rollout for rollout in rollouts}
        self._lengths = {key: rollout.received for key, rollout in self._rollouts.items()}
        self._steps: deque[DecodeStep] = deque()

    def push(self, step: DecodeStep) -> None:
        # In the model's thread, or in the thread that waits for the model's process.
        self._steps.append(step)
        for key in step.keys:
            self._lengths[key] += 1
        if any(step.reasons) or any(self._lengths[key] >= self._rollouts[key].enough for key in step.keys):
            self._loop.call_soon_threadsafe(self.hand_out)

    def hand_out(self) -> None:
        # On the event loop.
        while self._steps:
            step = self._steps.popleft()
            n = len(step.keys)
            columns = step.tokens.tolist(), step.logprobs.tolist(), [step.version] * n, step.extra.split(n)
            sampled = zip(*columns, strict=True)
            for key, token, reason in zip(step.keys, sampled, step.reasons, strict=True):
                self._rollouts[key].put(token, reason or "live")


def unfinished(decodes: Sequence[Decode], engine: DecodeEngine[R]) -> list[RolloutBuffer[R]]:
    for decode in decodes:
        if not isinstance(decode, RolloutBuffer) or not decode.usable_by(engine):
            raise ProtocolError(
                f"expected open decodes of this policy, not {decode!r}: it is foreign, closed or failed"
            )
    return [rollout for rollout in cast("Sequence[RolloutBuffer[R]]", decodes) if not rollout.ended]


def raise_first(errors: Sequence[Exception]) -> None:
    # Readers raise the very same error.
    if not errors:
        return
    first, *others = errors
    for other in (leaf for error in others for leaf in leaves(error)):
        if other is not first:
            first.add_note(f"and then {type(other).__name__}: {other}")
    raise first


def response_to(rollout: Prompt | Response, model: str, *, vocabulary: int, longest: int) -> Response:
    response = rollout if isinstance(rollout, Response) else Response.empty(rollout)
    prompt = response.prompt
    length = len(prompt.tokens)
    if not length:
        raise ModelError(f"the prompt of rollout {prompt.rollout} is empty; expected at least one token")
    if length >= longest:
        raise ModelError(
            f"the prompt of rollout {prompt.rollout} has {length} tokens, but {model} reads "
            f"at most {longest}, response included: shorten or filter the prompts"
        )
    low, high = int(prompt.tokens.min()), int(prompt.tokens.max())
    if low < 0 or high >= vocabulary:
        raise ModelError(
            f"the prompt of rollout {prompt.rollout} holds token id {low if low < 0 else high}, but the vocabulary "
            f"of {model} is 0 .. {vocabulary - 1}: is it of another tokenizer?"
        )
    return response
