"""A rollout in flight, and its snapshot as plain values: with it a checkpoint loses no token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oppo.errors import ProtocolError, noted
from oppo.events import Chunk, Drop, Finish, FinishReason, Given, Prompt, Response, Support
from oppo.models import Decode


@dataclass(slots=True, eq=False)
class InFlightRollout:
    """One rollout in flight: its decode and the pieces read from it. Between steps no task owns it.

    Attributes:
        announced: whether its prompt has been sent to the scorers.
        length: tokens so far.
        tool_tokens: how many of them an environment gave.
        reason: why the response ended; ``None`` while it is unfinished.
        dropped: why the rollout is not trained; empty if it is.
        ended: loop time at which its last piece was read, in seconds; NaN while it is unfinished.
    """

    prompt: Prompt
    decode: Decode
    announced: bool = False
    pieces: list[Chunk | Given] = field(default_factory=list)
    length: int = 0
    reason: FinishReason | None = None
    dropped: str = ""
    ended: float = math.nan
    tool_tokens: int = 0

    @property
    def sampled(self) -> int:
        """The tokens that the policy sampled."""
        return self.length - self.tool_tokens

    @property
    def newest_version(self) -> int:
        """Version of the weights that made its last sampled token; 0 without one."""
        return next((int(each.versions[-1]) for each in reversed(self.pieces) if isinstance(each, Chunk)), 0)

    def response(self) -> Response:
        """Return the pieces so far as one response."""
        return Response.of(self.prompt, self.pieces)

    def ending(self) -> Finish | Drop:
        """Return the event that ends a complete rollout.

        Raises:
            ProtocolError: it is being read.
        """
        number = self.prompt.rollout
        if self.reason is None:
            raise ProtocolError(f"rollout {number} has a place in the batch but is still being read")
        return Drop(number, self.dropped) if self.dropped else Finish(number, self.response(), self.reason)

    async def aclose(self) -> None:
        """Give up its decode; an error names the rollout."""
        with noted(f"while giving up rollout {self.prompt.rollout}"):
            await self.decode.aclose()


@dataclass(frozen=True, slots=True, eq=False)
class RolloutSnapshot:
    """A rollout between two steps.

    Attributes:
        response: everything generated so far.
        reason: why the response ended; ``None`` while it is unfinished.
        dropped: why the rollout is not trained; empty if it is.
    """

    response: Response
    reason: FinishReason | None
    dropped: str = ""

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values and arrays."""
        prompt, response = self.response.prompt, self.response
        return {
            "rollout": prompt.rollout,
            "admission": prompt.admission,
            "sample": prompt.sample,
            "group": prompt.group,
            "prompt": prompt.tokens,
            "columns": dict(prompt.columns),
            "tokens": response.tokens,
            "logprobs": response.logprobs,
            "versions": response.versions,
            "sampled": response.sampled,
            "support": response.support.ids,
            "support_counts": response.support.counts,
            "reason": self.reason,
            "dropped": self.dropped,
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RolloutSnapshot:
        """Return the snapshot of which :meth:`state_dict` returned ``state``."""
        prompt = Prompt(
            rollout=state["rollout"],
            admission=state["admission"],
            tokens=state["prompt"],
            sample=state["sample"],
            group=state["group"],
            columns=state["columns"],
        )
        support = Support(state["support"], state["support_counts"])
        response = Response(prompt, state["tokens"], state["logprobs"], state["versions"], state["sampled"], support)
        return cls(response, state["reason"], state.get("dropped", ""))
