"""GroupRelative: groups of scored rollouts in, one training batch out; nobody estimates values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat, get_args

import numpy as np
from numpy.typing import NDArray

from oppo.errors import ConfigError
from oppo.estimators import GroupAdvantage, KLEstimator, group_advantages
from oppo.events import Batch, Defer, Drop, FloatArray, RolloutEvent, Scored
from oppo.graph import Receiver, Sender
from oppo.shaping import ScoreShaping
from oppo.stages.gather import ScoredRollouts
from oppo.stages.objective import KLControl, Objective, controlled, restored, state_of
from oppo.stages.rows import Row, unestimated

ALONE = "left alone in its group"
"""Why a response is dropped whose siblings all were: it has nothing to be compared with."""


@dataclass(eq=False)
class GroupRelative:
    """Joins what the scorers said of each finished rollout and compares the responses to each prompt with one another.

    A response is worth its shaped score less ``kl`` times its KL to the reference; its advantage, that of each of its
    sampled tokens, follows from what the others of its group are worth. Values and returns are 0. Where somebody
    dropped a response, or said something of it that is not finite, those that are left of its group are compared; one
    that is left alone is dropped too.

    Log-probs of a reference, and those under the weights that are about to be updated, which corrections for stale
    tokens need, are inputs by name: ``reference=`` and ``proximal=``.

    Attributes:
        advantage: ``leave_one_out`` (RLOO), ``standardised`` (GRPO) or ``centred`` (Dr. GRPO); see
            :func:`oppo.estimators.group_advantages`.
        kl: coefficient of the KL penalty in what a response is worth, as in RLOO: a number, or a controller that adapts
            it to a target. GRPO has its KL in the loss instead, ``ClippedLoss.kl``: what is standardised is of the
            same size at any coefficient, and all of it where scores tie. Both need a reference.
        kl_estimator: ``k1``, ``k2`` or ``k3`` (Schulman, "Approximating KL divergence", 2020).
        shaping: what is made of the scores first; replaced by its successor after each batch.

    Raises:
        ConfigError: there is no such estimator, ``kl`` is no coefficient, or would be standardised.
        ValueError: the coefficient of the KL penalty is negative or not finite.
    """

    advantage: GroupAdvantage = "standardised"
    kl: SupportsFloat | KLControl = 0.0
    kl_estimator: KLEstimator = "k1"
    shaping: ScoreShaping = field(default_factory=ScoreShaping)
    _control: KLControl = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.advantage not in get_args(GroupAdvantage):
            raise ConfigError(f"advantage must be one of {', '.join(get_args(GroupAdvantage))}, not {self.advantage!r}")
        self._control = controlled(self.kl, self.kl_estimator)
        if self.advantage == "standardised" and self.refers:
            raise ConfigError(
                f"advantage = 'standardised' cannot have a KL in the reward, got kl = {self.kl}: where the scores of a "
                "group tie, what is standardised is the KL alone, of full size at any coefficient; put it into the "
                'loss, with algorithm.kl_in="loss" or ClippedLoss(kl=..., kl_estimator="k3"), or choose \'centred\' or '
                "'leave_one_out'"
            )

    @property
    def refers(self) -> bool:
        """Whether a reference is needed."""
        return self._control.coefficient > 0

    def state_dict(self) -> Mapping[str, Any]:
        """Return what was learned of KL and scores so far."""
        return state_of(self._control, self.shaping)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what another estimator had learned."""
        self._control, self.shaping = restored(state, self._control, self.shaping)

    async def run(
        self,
        rollout: Receiver[RolloutEvent],
        score: Receiver[Scored[float] | Drop],
        /,
        *,
        out: Sender[Batch],
        reference: Receiver[Scored[FloatArray] | Drop] | None = None,
        proximal: Receiver[Scored[FloatArray] | Drop] | None = None,
    ) -> None:
        """Send the step's batch as soon as every finished rollout is scored; nothing when there was no rollout.

        Raises:
            ConfigError: a KL penalty has no reference.
        """
        if self.refers and reference is None:
            raise ConfigError(
                f"a KL penalty, kl = {self._control.coefficient}, is one to a reference: connect reference=stream, or "
                "leave kl at 0"
            )
        gathered = await ScoredRollouts.of(rollout, score, reference=reference, proximal=proximal)
        if gathered:
            await out.send(self.batch(*gathered.in_order()))

    def batch(self, rows: Sequence[Row], dropped: Sequence[Drop] = (), deferred: Sequence[Defer] = ()) -> Batch:
        """Return the training batch of these rows, in the order given, and let the KL controller learn from it."""
        size = Counter(row.finish.response.prompt.group for row in rows)
        alone = [row for row in rows if size[row.finish.response.prompt.group] == 1]
        compared = [row for row in rows if row not in alone]
        dropped = [*dropped, *(Drop(row.finish.rollout, ALONE) for row in alone)]
        batch = unestimated(compared, sorted(dropped, key=lambda drop: drop.rollout), deferred)
        self.shaping = self.shaping.after(batch.scores)
        objective = Objective.of(batch, self.shaping, self._control, self.kl_estimator)
        self._control = objective.after(self._control, batch)
        rewards = objective.rewards(batch)
        worth = np.array([rewards[row].sum(dtype=np.float64) for row in batch.rows()], np.float32)
        groups = _groups(batch)
        relative = np.zeros(len(batch), np.float32)
        for members in groups:
            relative[members] = group_advantages(worth[members], self.advantage)
        advantages = np.where(batch.sampled, np.repeat(relative, np.diff(batch.offsets)), np.float32(0))
        spread = _spread([objective.shaped[members] for members in groups])
        metrics = {**objective.metrics(batch), **spread}
        return replace(batch, rewards=rewards, advantages=advantages, metrics=metrics)


def _groups(batch: Batch) -> Sequence[NDArray[np.intp]]:
    """Return the rows of each group."""
    of = np.array([response.prompt.group for response in batch.responses], np.int64)
    return [np.flatnonzero(of == group) for group in np.unique(of)]


def _spread(groups: Sequence[FloatArray]) -> Mapping[str, float]:
    """Return how different the scores of a group are: their deviation, and in how many groups they teach nothing."""
    if not groups:
        return {}
    deviations = [float(scores.std(ddof=1, dtype=np.float64)) for scores in groups]
    return {
        "objective/group_std": float(np.mean(deviations)),
        "objective/frac_zero_std": float(np.mean([not deviation for deviation in deviations])),
    }
