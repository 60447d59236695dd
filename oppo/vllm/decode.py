"""One rollout of the policy on vLLM: what the engine makes of its request, until it may be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from oppo.rollout_buffer import BufferedDecode
from oppo.errors import ProtocolError
from oppo.events import FinishReason, IntArray, Response
from oppo.models import PieceState, Sampling
from oppo.stopping import StopCriteria
from oppo.support import Support
from oppo.vllm.requests import drawn
from oppo.vllm.surface import Collector, Output

if TYPE_CHECKING:
    from oppo.vllm.policy import VllmPolicy


class VllmDecode(BufferedDecode):
    """One rollout of a :class:`VllmPolicy`.

    Attributes:
        sampling: how its tokens are drawn.
        request: id of its request in the engine; empty when there is none.
        collector: receives the engine's outputs for the request.
        error: what the engine made of it that cannot be used, which ends its decoding.
    """

    def __init__(
        self,
        policy: VllmPolicy,
        response: Response,
        limit: int,
        sampling: Sampling,
        stopping: StopCriteria,
        *,
        turns: bool = False,
        ended: FinishReason | None = None,
    ) -> None:
        super().__init__(response, limit, turns=turns, ended=ended)
        self.sampling = sampling
        self.request = ""
        self.collector: Collector | None = None
        self.error: Exception | None = None
        self._policy = policy
        self._stopping = stopping
        self._tokens = response.tokens.tolist()
        self._made = 0  # tokens of the request
        self._last: list[tuple[int, float, int, Support]] = []
        self._reason: FinishReason | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of admission order: admission number and sample."""
        return self.prompt.admission, self.prompt.sample

    @property
    def sequence(self) -> list[int]:
        """Prompt and response so far."""
        return [*self.prompt.tokens.tolist(), *self._tokens]

    @property
    def written(self) -> int:
        """Length of the response in tokens, those included that may not be read yet."""
        return len(self._tokens)

    @property
    def finished(self) -> bool:
        """Whether the response has ended, whether that may be known or not."""
        return self._reason is not None or self.ending or self.ended

    @property
    def idle(self) -> bool:
        """Whether the engine has nothing to do for it: it has ended, or waits for an answer."""
        return self.finished or self.unanswered

    @property
    def withheld(self) -> bool:
        """Whether the response has ended, and its end has not been reported."""
        return self.finished and not self.ended

    def take(self, output: Output, version_at: Callable[[int], int]) -> None:
        """Take what is new of the request; of a response that ends, all of it is withheld until :meth:`release`.

        It may come late, when the rollout is parked already.

        Args:
            output: of the request.
            version_at: returns the version of the weights that made a token, by its index in the request.

        Raises:
            ModelError: a log-prob is not finite.
            ProtocolError: the engine ended the request for a reason of its own.
        """
        (completion,) = output.outputs
        fresh = []
        for token, logprob, support in drawn(completion, self.sampling, self.written):
            fresh.append((token, logprob, version_at(self._made), support))
            self._tokens.append(token)
            self._made += 1
            self._reason = self._stopping.reason(self._tokens, self.limit)
            if self.finished:
                break
        turn = self._reason if self.turns and self._reason != "length" else None
        if completion.finish_reason is not None:
            if not self.finished:
                raise ProtocolError(
                    f"vLLM ended rollout {self.prompt.rollout} with reason {completion.finish_reason!r} after "
                    f"{self.written} of {self.limit} tokens, and none of them ends a response"
                )
            self._policy.forget(self)
        if turn is not None:
            self._reason = None
        elif self.finished:
            self._last = fresh
            return
        going: PieceState = "live" if self.live else "cut"
        for at, (token, logprob, version, support) in enumerate(fresh, 1):
            self.put(token, logprob, version, support, turn if turn and at == len(fresh) else going)

    def release(self) -> None:
        """Let the reader have the end of the response."""
        if self.ending:
            self.end()
            return
        if self._reason is None:
            raise ProtocolError(f"rollout {self.prompt.rollout} has not ended")
        last, self._last = self._last, []
        for at, (token, logprob, version, support) in enumerate(last, 1):
            self.put(token, logprob, version, support, self._reason if at == len(last) else "live")

    def submitted(self, request: str, collector: Collector) -> None:
        """Take what the engine makes for a new request from now on."""
        self.request, self.collector, self._made = request, collector, 0

    def answered(self, given: IntArray) -> None:
        """Append an answer to the response, and have a new request made for what follows it."""
        self.collector = None  # what the engine made after a turn is not of the response
        if not self.ending:
            self._tokens += given.tolist()
        self._policy.note_answer(self)

    async def aclose(self) -> None:
        """Give up the rollout and free its memory; idempotent."""
        if self.given_up:
            return
        self.given_up = True
        self.wake()
        self._policy.notice()
        await self._policy.abort([self])

    def usable_by(self, policy: VllmPolicy) -> bool:
        """Return whether ``policy`` may decode it."""
        return self._policy is policy and self.usable
