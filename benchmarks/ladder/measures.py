"""From the records of steps to figures, their validity, and the depths of models: arithmetic without a clock.

A *round* is a few steps of every contestant, one after the other. Two contestants are compared round by round, since a
disturbance of the machine meets both. Figures of one contestant cover all of its rounds.

The cost of a layer relative to a decode step depends on the cores. So a workload that states the shares of all phases
is run serially, the depths of its reward model and its critic are chosen from the measured costs, and it is run again,
until the shares are within their bounds. The actor keeps its depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Final, TypeAlias, get_args

import numpy as np

from benchmarks.harness import Machine, Spread
from benchmarks.ladder.contestant import EARLIER, StepRecord
from benchmarks.ladder.directory import Files
from benchmarks.ladder.workloads import MODES, BenchWorkload, Bound, Layout, Phase, Plan
from benchmarks.peer.service import TOLERANCE
from oppo.admission import Bottleneck, together
from oppo.errors import ProtocolError
from oppo.log import logger

Rounds: TypeAlias = Sequence[Sequence[StepRecord]]  # the steps of one contestant, round by round

# Least fraction of responses of the announced length: with fewer the contestants do different work
AS_ANNOUNCED: Final = 0.98


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """The cost of decoding alone: ``seconds = per_step * steps + per_token * tokens``.

    A decode step makes one token for each live row, so the second term is the cost of the rows.
    """

    per_step: float
    per_token: float

    def seconds(self, step: StepRecord) -> float:
        return self.per_step * step.decode_steps + self.per_token * step.decoded

    @classmethod
    def fitted(cls, alone: Sequence[StepRecord]) -> DecodeCost | None:
        """Return the cost by least squares without negative terms, scaled so that the total of ``alone`` is right.

        The scale makes it exact for modes that decode the same steps; for others (overcommitted modes have more live
        rows in fewer steps) it is a linear extrapolation. ``None`` without decoding.
        """
        done = [step for step in alone if step.decode > 0 and step.decode_steps > 0]
        if not done:
            return None
        work = np.array([(step.decode_steps, step.decoded) for step in done], np.float64)
        took = np.array([step.decode for step in done])
        fit = np.linalg.lstsq(work, took, rcond=None)[0]
        if (fit < 0).any():  # then the better single term
            alternatives = [np.array([took.sum() / work[:, 0].sum(), 0]), np.array([0, took.sum() / work[:, 1].sum()])]
            fit = min(alternatives, key=lambda each: float(((work @ each - took) ** 2).sum()))
        fit = fit * took.sum() / (work @ fit).sum()
        return cls(float(fit[0]), float(fit[1]))


@dataclass(frozen=True, slots=True)
class Baseline:
    score: float | None  # scoring seconds of the serial mode over the same rounds; `None` if it did not run
    cost: DecodeCost | None  # of decoding alone, fitted to the modes that hold scoring back


@dataclass(frozen=True, slots=True)
class Figures:
    seconds_per_step: tuple[float, ...]  # of every counted step
    tokens_per_second: float
    samples_per_second: float
    # tokens_per_step, samples_per_step: trained, means
    tokens_per_step: float
    samples_per_step: float
    # `1 - exposed / serial`: the seconds of scoring beside no decoding or training, over the scoring seconds of the
    # serial mode in the same rounds. It can be 1 without a gain, when decoding slows down by as much; hence the next
    # figure.
    hidden_fraction: float | None
    # decoding seconds over those of as many decode steps and tokens without scoring beside them (`DecodeCost`); 1 is no
    # slower. A rough extrapolation for modes that carry rollouts over, which have two or three times the live rows, and
    # longer ones.
    decode_slowdown: float | None
    busy: Mapping[str, float]  # by model, the fraction of all time in which it worked
    # by phase, the fraction of all time in which it was busy; phases overlap, so the sum may exceed 1
    shares: Mapping[str, float]
    live_rows_per_decode_step: float | None  # mean; `None` if the engine does not count its decode steps
    cap_hit_rate: float  # fraction of the trained responses that were cut off
    deferrals: Mapping[str, float]  # mean and most responses carried from a step into the next
    peak_rss_mb: float
    as_announced: float
    # the bottleneck of the steps, and the speedup that any schedule could reach; `None` for a peer
    verdict: Bottleneck | None

    @classmethod
    def of(cls, rounds: Rounds, baseline: Baseline, peak_rss_mb: float) -> Figures:
        steps = [step for each in rounds for step in each]
        took, samples = math.fsum(step.seconds for step in steps), sum(step.samples for step in steps)
        decoded, decode_steps = sum(step.decoded for step in steps), sum(step.decode_steps for step in steps)
        exposed = math.fsum(step.exposed for step in steps)
        alone = math.fsum(baseline.cost.seconds(step) for step in steps) if baseline.cost else 0.0
        decode = math.fsum(step.decode for step in steps)
        inside = decode > 0
        bottlenecks = [Bottleneck.of_metrics(step.bottleneck, step.seconds) for step in steps]
        models = {model for step in steps for model in step.busy}
        return cls(
            seconds_per_step=tuple(step.seconds for step in steps),
            tokens_per_second=sum(step.tokens for step in steps) / took,
            samples_per_second=samples / took,
            tokens_per_step=sum(step.tokens for step in steps) / len(steps),
            samples_per_step=samples / len(steps),
            hidden_fraction=1 - exposed / baseline.score if inside and models and baseline.score else None,
            decode_slowdown=decode / alone if inside and alone else None,
            busy={model: math.fsum(step.busy.get(model, 0.0) for step in steps) / took for model in sorted(models)},
            shares={
                phase: math.fsum(getattr(step, phase) for step in steps) / took
                for phase in ("decode", "score", "update")
                if inside
            },
            live_rows_per_decode_step=decoded / decode_steps if decode_steps else None,
            cap_hit_rate=sum(step.capped for step in steps) / samples,
            deferrals={
                "mean": math.fsum(step.deferred for step in steps) / len(steps),
                "most": float(max(step.deferred for step in steps)),
            },
            peak_rss_mb=peak_rss_mb,
            as_announced=math.fsum(step.as_announced * step.samples for step in steps) / samples,
            verdict=together([each for each in bottlenecks if each is not None]),
        )

    def as_json(self) -> dict[str, object]:
        """Return the entry of a file of results; the verdict in words and numbers."""
        figures, verdict = asdict(self), self.verdict
        if verdict is not None:
            figures["verdict"] = {
                "bottleneck": verdict.largest,
                "message": verdict.message,
                "limit": verdict.limit,
                "limits": dict(verdict.limits),
                "next": verdict.next_schedule,
                "shares": dict(verdict.shares),
                "capped": verdict.capped,
                "needed": verdict.needed,
            }
        return figures


def speedup(mode: Rounds, other: Rounds) -> Spread:
    """Return the speed of ``mode`` over that of ``other``, by pairs of rounds; above 1 is faster.

    Speeds are trained tokens a second, so that a mode which carries stragglers from round to round gets no credit for
    the short responses it trains first.
    """
    return Spread.of_ratios([per_token(steps) for steps in other], [per_token(steps) for steps in mode])


def ratios(counted: Mapping[str, Rounds]) -> dict[str, Spread]:
    """Return the ratios of all contestants to the serial mode, and of each mode to the one it extends and to peers."""
    return {
        f"{name}/{other}": speedup(rounds, counted[other])
        for other in counted
        for name, rounds in counted.items()
        if name != other and _compared(name, other)
    }


def _compared(name: str, other: str) -> bool:
    if EARLIER in other:
        return other.partition(EARLIER)[0] == name
    if other == "serial":
        return EARLIER not in name
    return name in MODES and (other not in MODES or other == MODES[name].over)


def require_equal_work(records: Mapping[str, Rounds]) -> None:
    """Check that all contestants have trained as many responses, and, if they defer none, as many tokens.

    Tokens may differ by :data:`~benchmarks.peer.service.TOLERANCE`. A mode that defers trains the same responses in
    other steps, and its speed is one of tokens.
    """
    done = {name: [step for steps in rounds for step in steps] for name, rounds in records.items()}
    samples = {name: sum(step.samples for step in steps) for name, steps in done.items()}
    tokens = {
        name: sum(step.tokens for step in steps)
        for name, steps in done.items()
        if not any(step.deferred for step in steps)
    }
    for what, trained, tolerance in (("responses", samples, 0.0), ("tokens", tokens, TOLERANCE)):
        if trained and max(trained.values()) - min(trained.values()) > tolerance * max(trained.values()):
            amounts = ", ".join(f"{name} {amount}" for name, amount in trained.items())
            raise ProtocolError(f"contestants do different work, so there is nothing to compare: {what} {amounts}")


def per_token(steps: Sequence[StepRecord]) -> float:
    return math.fsum(step.seconds for step in steps) / sum(step.tokens for step in steps)


def faults(workload: BenchWorkload, layout: Layout, figures: Mapping[str, Figures], capped: float) -> list[str]:
    """Return the reasons why a run is INVALID, a message each; none: it is valid.

    ``capped`` is the fraction of all prompts that announce the cap or more; a few steps see a random part of them.
    """
    found = []
    serial = figures.get("serial")
    bounds = [bound for bound in workload.shares if bound.layout == layout]
    for bound in bounds:
        if serial is None:
            found.append(f"the share of {bound.phase} is unknown, since the serial mode did not run")
        elif not bound.low <= serial.shares[bound.phase] <= bound.high:
            found.append(
                f"{bound.phase} took {serial.shares[bound.phase]:.3f} of the serial step, and the workload states "
                f"{bound.low:.2f} to {bound.high:.2f}"
            )
    low, high = workload.capped
    if not low <= capped <= high:
        found.append(f"{capped:.3f} of the prompts announce the cap, and the workload states {low} to {high}")
    for name, each in figures.items():
        if each.as_announced < AS_ANNOUNCED:
            found.append(f"{name}: only {each.as_announced:.3f} of the responses were as long as announced")
    return found


TRIES: Final = 4  # serial runs, at most
DEEPEST: Final = 48  # most layers of a reward model or a critic
# Distance of the shares from the middle of their bounds, where 1 is a bound, that ends the search
WELL_WITHIN: Final = 0.8


@dataclass(frozen=True, slots=True)
class Depths:
    reward: int
    critic: int

    @classmethod
    def of(cls, workload: BenchWorkload) -> Depths:
        return cls(workload.models.reward.layers, workload.models.critic.layers)

    def applied(self, workload: BenchWorkload) -> BenchWorkload:
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
        reference, reward, critic = (
            math.fsum(step.busy.get(model, 0.0) for step in steps) for model in ("reference", "reward", "critic")
        )
        decode, update, whole = (
            math.fsum(getattr(step, name) for step in steps) for name in ("decode", "update", "seconds")
        )
        return cls(decode, reference, reward, critic, update, whole)

    def shares(self) -> dict[Phase, float]:
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
    attempts: Sequence[Attempt]
    chosen: Attempt

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def message(self) -> str:
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
) -> Calibration:
    """Return the attempts, up to shares well within their bounds or until no better ones are predicted.

    ``measure`` runs a workload serially.
    """
    attempts: list[Attempt] = []
    depths = Depths.of(workload)
    for _ in range(TRIES):
        costs = measure(depths.applied(workload))
        attempts.append(Attempt(depths, costs.shares()))
        logger.info(f"{workload.name}, {bounds[0].layout}: {Calibration(attempts, attempts[-1]).message()}")
        if distance(attempts[-1].shares, bounds) <= WELL_WITHIN:
            break
        depths = choose(costs, depths, workload.models.actor.layers, bounds)
        if depths in [attempt.depths for attempt in attempts]:
            break
    return Calibration(attempts, min(attempts, key=lambda attempt: distance(attempt.shares, bounds)))


@dataclass(frozen=True, slots=True, eq=False)
class Ladder:
    files: Files
    layout: Layout
    plan: Plan
    machine: Machine
    threads: Mapping[str, object]  # cores and threads by contestant
    versions: Mapping[str, object]  # of Python and the libraries, by contestant
    modes: Mapping[str, Figures]
    ratios: Mapping[str, Spread]  # `a/b`: the speed of a over that of b
    faults: Sequence[str] = ()  # why the run is INVALID; none: it is valid
    remarks: Mapping[str, str] = field(default_factory=dict)  # on the settings of a contestant
    calibration: Calibration | None = None  # of the models' depths; `None`: they are those of the table
    # what a simulation is calibrated on and compared with: the counted steps of each mode, round by round
    records: Mapping[str, Rounds] = field(default_factory=dict)

    @property
    def workload(self) -> BenchWorkload:
        return self.files.workload

    @property
    def valid(self) -> bool:
        return not self.faults

    def as_json(self) -> dict[str, object]:
        facts = asdict(self.files.facts)
        return {
            "workload": self.workload.name,
            "layout": self.layout,
            "machine": asdict(self.machine),
            "threads": dict(self.threads),
            "valid": self.valid,
            "faults": list(self.faults),
            "modes": {name: figures.as_json() for name, figures in self.modes.items()},
            "ratios": {name: ratio.median for name, ratio in self.ratios.items()},
            "ratio_ranges": {name: [ratio.low, ratio.high] for name, ratio in self.ratios.items()},
            "plan": asdict(self.plan),
            "remarks": dict(self.remarks),
            "versions": dict(self.versions),
            "lengths": facts,
            "recipe": asdict(self.workload),
            "calibration": None if self.calibration is None else self.calibration.as_json(),
            "records": {
                name: [[step.for_simulation() for step in steps] for steps in rounds]
                for name, rounds in self.records.items()
            },
        }
