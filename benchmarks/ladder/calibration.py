"""The depths of a workload's models on the host at hand, chosen so that a serial step has the shares it is to have.

What a layer costs beside a decode step depends on the cores. So the workload is run serially, the depths of its reward
model and its critic are chosen from what was measured, and it is run again, until the shares are within their bounds.
The actor stays as it is: it decodes as long as it decodes, and is taught once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Final, get_args

from benchmarks.ladder.record import StepRecord
from benchmarks.ladder.workloads import Bound, Layout, Phase, Workload

TRIES: Final = 4
"""Serial runs, at most."""
DEEPEST: Final = 48
"""Layers that a reward model or a critic may be given."""
WELL_WITHIN: Final = 0.8
"""Shares this close to the middle of their bounds, where 1 is at a bound, are not tried to be bettered."""


@dataclass(frozen=True, slots=True)
class Depths:
    """Layers of the models that are calibrated."""

    reward: int
    critic: int

    @classmethod
    def of(cls, workload: Workload) -> Depths:
        """Return those of a workload."""
        return cls(workload.models.reward.layers, workload.models.critic.layers)

    def applied(self, workload: Workload) -> Workload:
        """Return the workload with models of these depths."""
        models = workload.models
        reward, critic = replace(models.reward, layers=self.reward), replace(models.critic, layers=self.critic)
        return replace(workload, models=replace(models, reward=reward, critic=critic))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of serial steps: by model what scored, the phases, and all of them with whatever was no phase."""

    decode: float
    reference: float
    reward: float
    critic: float
    update: float
    whole: float

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> Costs:
        """Return what serial steps cost together."""

        def busy(model: str) -> float:
            return math.fsum(step.busy.get(model, 0.0) for step in steps)

        return cls(
            decode=math.fsum(step.decode for step in steps),
            reference=busy("reference"),
            reward=busy("reward"),
            critic=busy("critic"),
            update=math.fsum(step.update for step in steps),
            whole=math.fsum(step.seconds for step in steps),
        )

    def shares(self) -> dict[Phase, float]:
        """Return the phases' shares of the whole."""
        score = self.reference + self.reward + self.critic
        return {"decode": self.decode / self.whole, "score": score / self.whole, "update": self.update / self.whole}

    def at(self, new: Depths, old: Depths, actor_layers: int) -> Costs:
        """Return the costs with models of other depths: scoring costs its layers, an update also those of the actor.

        A layer of the critic counts as one of the actor's, which is as wide.
        """
        reward = self.reward * new.reward / old.reward
        critic = self.critic * new.critic / old.critic
        update = self.update * (actor_layers + new.critic) / (actor_layers + old.critic)
        more = reward - self.reward + critic - self.critic + update - self.update
        return replace(self, reward=reward, critic=critic, update=update, whole=self.whole + more)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Depths that were tried, and the shares that they came to."""

    depths: Depths
    shares: Mapping[Phase, float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was tried, and the best of it."""

    attempts: Sequence[Attempt]
    chosen: Attempt

    def as_json(self) -> dict[str, object]:
        """Return everything, as a file of results holds it."""
        return asdict(self)

    def sentence(self) -> str:
        """Return what was chosen and reached."""
        depths = self.chosen.depths
        shares = ", ".join(f"{phase} {share:.3f}" for phase, share in self.chosen.shares.items())
        return (
            f"calibrated in {len(self.attempts)} serial run(s): a reward model of {depths.reward} layers, a critic of "
            f"{depths.critic}; shares {shares}"
        )


def bounds_of(workload: Workload, layout: Layout) -> Sequence[Bound]:
    """Return the bounds that a workload is calibrated to: those of all phases, or none where some have none."""
    bounds = [bound for bound in workload.shares if bound.layout == layout]
    return bounds if {bound.phase for bound in bounds} == set(get_args(Phase)) else ()


def distance(shares: Mapping[Phase, float], bounds: Sequence[Bound]) -> float:
    """Return how far the worst share is from the middle of its bounds: 0 is the middle, 1 a bound.

    Example:
        >>> distance({"score": 0.3}, [Bound("split", "score", 0.2, 0.3)])
        1.0
    """
    return max(
        round(abs(2 * shares[bound.phase] - bound.low - bound.high) / (bound.high - bound.low), 9) for bound in bounds
    )


def choose(costs: Costs, depths: Depths, actor_layers: int, bounds: Sequence[Bound]) -> Depths:
    """Return the depths that are to come closest to the middle of all bounds; of equal ones the shallowest.

    Args:
        costs: as they were measured.
        depths: at which.
        actor_layers: of the actor, which stays.
        bounds: of the shares.
    """
    possible = (Depths(reward, critic) for reward, critic in product(range(1, DEEPEST + 1), repeat=2))
    return min(possible, key=lambda new: distance(costs.at(new, depths, actor_layers).shares(), bounds))


def calibrate(
    workload: Workload, bounds: Sequence[Bound], measure: Callable[[Workload], Costs], tell: Callable[[str], None]
) -> Calibration:
    """Return what was tried, until shares were well within their bounds or nothing better was expected.

    Args:
        workload: where to begin.
        bounds: of the shares, at least one.
        measure: runs a workload serially.
        tell: told, in a sentence, what each attempt came to.
    """
    attempts: list[Attempt] = []
    depths = Depths.of(workload)
    for _ in range(TRIES):
        costs = measure(depths.applied(workload))
        attempts.append(Attempt(depths, costs.shares()))
        tell(Calibration(attempts, attempts[-1]).sentence())
        if distance(attempts[-1].shares, bounds) <= WELL_WITHIN:
            break
        depths = choose(costs, depths, workload.models.actor.layers, bounds)
        if depths in [attempt.depths for attempt in attempts]:
            break
    return Calibration(attempts, min(attempts, key=lambda attempt: distance(attempt.shares, bounds)))
