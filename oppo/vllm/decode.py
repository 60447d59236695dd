"""One rollout of the policy on vLLM: what the engine makes of its request, until it may be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oppo.decodes import BufferedDecode
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
        self._versions: list[int] = []
        self._last: list[tuple[int, float, Support]] = []
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

    def take(self, output: Output, version: int) -> None:
        """Take what is new of the request; of a response that ends, all of it is withheld until :meth:`release`.

        It may come late, when the rollout is parked already.

        Raises:
            ModelError: a log-prob is not finite, or the engine ended the request for a reason of its own.
            ProtocolError: the engine says that other weights made a token.
        """
        (completion,) = output.outputs
        fresh = drawn(completion, self.sampling, self.written)
        for count, (token, _, _) in enumerate(fresh, 1):
            self._tokens.append(token)
            self._versions.append(version)
            self._reason = self._stopping.reason(self._tokens, self.limit)
            if self.finished:
                fresh = fresh[:count]
                break
        turn = self._reason if self.turns and self._reason != "length" else None
        if completion.finish_reason is not None:
            self._require_versions(completion)
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
        for at, (token, logprob, support) in enumerate(fresh, 1):
            self.put(token, logprob, version, support, turn if turn and at == len(fresh) else going)

    def release(self) -> None:
        """Let the reader have the end of the response."""
        if self.ending:
            self.end()
            return
        if self._reason is None:
            raise ProtocolError(f"rollout {self.prompt.rollout} has not ended")
        last, self._last = self._last, []
        for token, logprob, support in last[:-1]:
            self.put(token, logprob, self._versions[-1], support, "live")
        token, logprob, support = last[-1]
        self.put(token, logprob, self._versions[-1], support, self._reason)

    def submitted(self, request: str, collector: Collector) -> None:
        """Take what the engine makes for a new request from now on."""
        self.request, self.collector, self._versions = request, collector, []

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

    def _require_versions(self, completion: object) -> None:
        """Compare the versions with those that the engine names, where it names any."""
        spans = getattr(completion, "weight_versions", None)
        for span in spans or ():
            ours = set(self._versions[span.start : span.end])
            if ours - {self._policy.number_of(span.version)}:
                raise ProtocolError(
                    f"vLLM says that weights {span.version} made tokens {span.start} .. {span.end} of rollout "
                    f"{self.prompt.rollout}, which are counted as those of versions {sorted(ours)}"
                )
