"""What the policies of every backend share: a decode's unread tokens, and the check of what is opened."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import numpy as np

from oppo.errors import ModelError, ProtocolError
from oppo.events import Prompt, Response
from oppo.models import Piece, PieceState
from oppo.support import Support


class BufferedDecode:
    """One rollout of a policy; it buffers the rollout's tokens until they are read.

    It lives on the event loop. Its reader uses :meth:`read`; the policy, which a backend derives from it, the rest.

    Args:
        prompt: of the rollout.
        taken: length in tokens of the response so far, which is not read again.

    Attributes:
        enough: length of the response, in tokens, at which the waiting reader continues; may be read in any thread.
        given_up: its reader has closed it.
    """

    def __init__(self, prompt: Prompt, taken: int) -> None:
        self.prompt = prompt
        self.enough = 0
        self.given_up = False
        self._taken = taken
        self._unread: list[tuple[int, float, int, Support]] = []
        self._state: PieceState = "cut"
        self._failure: Exception | None = None
        self._readiness: anyio.Event | None = None

    @property
    def live(self) -> bool:
        """Whether it is being decoded."""
        return self._state == "live"

    @property
    def ended(self) -> bool:
        """Whether the response is complete."""
        return self._state not in ("live", "cut")

    @property
    def usable(self) -> bool:
        """Whether it may be decoded: it was not given up, and has not failed."""
        return not self.given_up and self._failure is None

    @property
    def received(self) -> int:
        """Length in tokens of the response as far as it has arrived here, read or not."""
        return self._taken + len(self._unread)

    async def read(self, limit: int) -> Piece:
        """Return the next ``limit`` tokens, or fewer at the end of the response or at the cut.

        Outside of ``decoding`` it does not wait. Cancel-safe: a cancelled read has taken nothing.

        Raises:
            ProtocolError: another read is waiting, the rollout was given up, or its last piece has been read.
            ValueError: ``limit`` is less than 1.
            Exception: whatever ended decoding.
        """
        if limit < 1:
            raise ValueError(f"a read takes at least 1 token, not {limit}")
        await anyio.lowlevel.checkpoint()
        if self._readiness is not None:
            raise ProtocolError(f"two reads of rollout {self.prompt.rollout} at once: it has one reader")
        self.enough = self._taken + limit
        self.before_wait()
        while not self._readable():
            self._readiness = anyio.Event()
            try:
                await self._readiness.wait()
            finally:
                self._readiness = None
        return self._take(limit)

    def before_wait(self) -> None:
        """Called before a read looks at what has arrived."""

    def begin(self) -> None:
        """Become live."""
        self._state = "live"

    def put(self, token: int, logprob: float, version: int, support: Support, state: PieceState) -> None:
        """Append a token to those that can be read."""
        self._unread.append((token, logprob, version, support))
        self._state = state
        if self._readable():
            self.wake()

    def park(self, failure: Exception | None) -> None:
        """Stop being live: parked without a ``failure``, failed for good with one."""
        if self.live:
            self._state, self._failure = "cut", failure
            self.wake()

    def wake(self) -> None:
        """Wake the reader."""
        if self._readiness is not None:
            self._readiness.set()

    def _readable(self) -> bool:
        return not self.live or self.given_up or self.received >= self.enough

    def _take(self, limit: int) -> Piece:
        rollout = self.prompt.rollout
        if self.given_up:
            raise ProtocolError(f"rollout {rollout} was given up, so it cannot be read")
        if not self._unread and self._failure is not None:
            raise self._failure
        if not self._unread and self.ended:
            raise ProtocolError(f"the last piece of rollout {rollout} has been read; expected no further read")
        taken, self._unread = self._unread[:limit], self._unread[limit:]
        self._taken += len(taken)
        tokens, logprobs, versions, supports = zip(*taken, strict=True) if taken else ((), (), (), ())
        continues = bool(self._unread) or self._failure is not None
        return Piece(
            np.array(tokens, np.int32),
            np.array(logprobs, np.float32),
            np.array(versions, np.int32),
            "live" if continues else self._state,
            Support.concatenate((support, 1) for support in supports),
        )


def response_to(rollout: Prompt | Response, model: str, *, vocabulary: int, longest: int) -> Response:
    """Return the response so far of what a policy opens.

    Args:
        model: its name, for errors.
        vocabulary: upper bound of token ids.
        longest: the longest sequence that the model reads, in tokens.

    Raises:
        ModelError: the prompt is empty, leaves no room for a response, or holds an id outside of the vocabulary.
    """
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
