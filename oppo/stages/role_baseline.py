"""Advantages over a running mean of the returns in a role, without a group or a critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oppo.declared import Fraction, validated
from oppo.errors import ConfigError
from oppo.events import Batch, Drop, FloatArray
from oppo.stages.advantage import AdaptiveObjective, GroupRelative


@dataclass(eq=False)
@validated(ConfigError)
class RoleBaseline(GroupRelative):
    """Compares each return with the running mean of its role, in place of the others of its group.

    ``A = R - b``, then ``b = decay b + (1 - decay) R``, from 0 on, with a ``b`` for each role, in the order of
    rollouts, whenever they ended (role-conditioned advantage estimation: Liu et al. 2025, arXiv 2506.24119). A response
    alone in its group is trained too, and ``advantage`` has no effect.

    Attributes:
        decay: of the mean, in [0, 1].
        baselines: the mean of each role so far, without a role ``""``; a checkpoint holds them.
    """

    decay: Fraction = field(default=0.95, kw_only=True)
    baselines: dict[str, float] = field(default_factory=dict, init=False)

    def unfit(self, batch: Batch) -> Sequence[Drop]:
        return AdaptiveObjective.unfit(self, batch)

    def estimated(self, batch: Batch) -> Batch:
        found = super().estimated(batch)
        means = {f"objective/baseline/{role}": mean for role, mean in sorted(self.baselines.items()) if role}
        return replace(found, metrics={**found.metrics, **means})

    def _relative(
        self, batch: Batch, earned: Mapping[int, FloatArray], groups: Sequence[NDArray[np.int64]]
    ) -> Mapping[int, FloatArray]:
        del groups
        relative, prompts = dict[int, FloatArray](), [response.prompt for response in batch.responses]
        for row in sorted(earned, key=lambda row: prompts[row].first):
            role, total = prompts[row].role, float(earned[row].sum(dtype=np.float64))
            baseline = self.baselines.get(role, 0.0)
            relative[row] = np.full(len(earned[row]), total - baseline, np.float32)
            self.baselines[role] = self.decay * baseline + (1.0 - self.decay) * total
        return relative

    def state_dict(self) -> Mapping[str, Any]:
        return {**super().state_dict(), "baselines": dict(self.baselines)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.baselines = dict(state["baselines"])
