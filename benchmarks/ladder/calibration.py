"""Chooses the depths of a workload's models so that the phases of a serial step have their stated shares on this host.

The cost of a layer relative to a decode step depends on the cores. So the workload is run serially, the depths of its
reward model and its critic are chosen from the measured costs, and it is run again, until the shares are within their
bounds. The actor, which is taught once, keeps its depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Final, get_args

from benchmarks.ladder.record import StepRecord
from benchmarks.ladder.workloads import BenchWorkload, Bound, Layout, Phase

TRIES: Final = 4
"""Serial runs, at most."""
DEEPEST: Final = 48
"""Most layers of a reward model or a critic."""
WELL_WITHIN: Final = 0.8
"""Distance of the shares from the middle of their bounds, where 1 is a bound, that ends the search."""


@dataclass(frozen=True, slots=True)
class Depths:
    """Layers of the models that are calibrated."""

    reward: int
    critic: int

    @classmethod
    def of(cls, workload: BenchWorkload) -> Depths:
        """Return the depths of a workload's models."""
        return cls(workload.models.reward.layers, workload.models.critic.layers)

    def applied(self, workload: BenchWorkload) -> BenchWorkload:
        """Return the workload with models of these depths."""
        models = workload.models
        reward, critic = replace(models.reward, layers=self.reward), replace(models.critic, layers=self.critic)
        return replace(workload, models=replace(models, reward=reward, critic=critic))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of serial steps: decoding, each scorer, the update, and the whole with the time of no phase."""

    decode: float
    reference: float
    reward: float
    critic: float
    update: float
    whole: float

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> Costs:
        """Return the costs of serial steps together."""

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
        """Return the costs at other depths: in proportion to a scorer's layers, in an update to actor's plus critic's.

        A layer of the critic counts as one of the actor's, which is as wide.
        """
        reward = self.reward * new.reward / old.reward
        critic = self.critic * new.critic / old.critic
        update = self.update * (actor_layers + new.critic) / (actor_layers + old.critic)
        change = reward - self.reward + critic - self.critic + update - self.update
        return replace(self, reward=reward, critic=critic, update=update, whole=self.whole + change)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Depths that were tried, and the measured shares."""

    depths: Depths
    shares: Mapping[Phase, float]


@dataclass(frozen=True, slots=True)
class Calibration:
    """All attempts, and the best of them."""

    attempts: Sequence[Attempt]
    chosen: Attempt

    def as_json(self) -> dict[str, object]:
        """Return the entry of a file of results."""
        return asdict(self)

    def sentence(self) -> str:
        """Return the chosen depths and their shares in words."""
        depths = self.chosen.depths
        shares = ", ".join(f"{phase} {share:.3f}" for phase, share in self.chosen.shares.items())
        return (
            f"calibrated in {len(self.attempts)} serial run(s): a reward model of {depths.reward} layers, a critic of "
            f"{depths.critic}; shares {shares}"
        )


def bounds_of(workload: BenchWorkload, layout: Layout) -> Sequence[Bound]:
    """Return the bounds of all phases, or none if a phase has none: the workload is not calibrated then."""
    bounds = [bound for bound in workload.shares if bound.layout == layout]
    return bounds if {bound.phase for bound in bounds} == set(get_args(Phase)) else ()


def distance(shares: Mapping[Phase, float], bounds: Sequence[Bound]) -> float:
    """Return the distance of the worst share from the middle of its bounds: 0 is the middle, 1 a bound.

    Example:
        >>> distance({"score": 0.3}, [Bound("split", "score", 0.2, 0.3)])
        1.0
    """
    return max(
        round(abs(2 * shares[bound.phase] - bound.low - bound.high) / (bound.high - bound.low), 9) for bound in bounds
    )


def choose(costs: Costs, depths: Depths, actor_layers: int, bounds: Sequence[Bound]) -> Depths:
    """Return the depths predicted closest to the middle of all bounds, from the costs measured at ``depths``.

    Of equal ones it returns the shallowest.
    """
    possible = (Depths(reward, critic) for reward, critic in product(range(1, DEEPEST + 1), repeat=2))
    return min(possible, key=lambda new: distance(costs.at(new, depths, actor_layers).shares(), bounds))


def calibrate(
    workload: BenchWorkload,
    bounds: Sequence[Bound],
    measure: Callable[[BenchWorkload], Costs],
    tell: Callable[[str], None],
) -> Calibration:
    """Return the attempts, up to shares well within their bounds or until no better ones are predicted.

    ``measure`` runs a workload serially; ``tell`` receives a sentence about each attempt.
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
