"""Rollouts in flight as plain values: what a checkpoint keeps of them, so that a resumed run loses no token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oppo.events import FinishReason, Prompt, Response
from oppo.support import Support


@dataclass(frozen=True, slots=True, eq=False)
class RolloutSnapshot:
    """A rollout between two steps.

    Attributes:
        response: everything generated so far.
        reason: why the response ended; ``None`` while it has not.
    """

    response: Response
    reason: FinishReason | None

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
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RolloutSnapshot:
        """Return the rollout that :meth:`state_dict` described."""
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
        return cls(response, state["reason"])
