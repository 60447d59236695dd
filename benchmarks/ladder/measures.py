"""From the records of steps to figures: pure arithmetic without a clock.

A *round* is a few steps of every contestant, one after the other. Two contestants are compared round by round, since a
disturbance of the machine meets both. Figures of one contestant cover all of its rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

import numpy as np

from benchmarks.ladder.record import StepRecord
from benchmarks.ladder.workloads import BenchWorkload, Layout
from oppo.admission import Bottleneck, together

Rounds: TypeAlias = Sequence[Sequence[StepRecord]]
"""The steps of one contestant, round by round."""

AS_ANNOUNCED: Final = 0.98
"""Least fraction of responses of the announced length: with fewer the contestants do different work."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the least and the greatest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value.

        Example:
            >>> Spread.of([3.0, 1.0, 2.0])
            Spread(median=2.0, low=1.0, high=3.0)
        """
        sample = sorted(values)
        return cls(float(np.median(sample)), sample[0], sample[-1])


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """The cost of decoding alone: ``seconds = per_step * steps + per_token * tokens``.

    A decode step makes one token for each live row, so the second term is the cost of the rows.
    """

    per_step: float
    per_token: float

    def seconds(self, step: StepRecord) -> float:
        """Return the predicted seconds of the decoding in ``step``."""
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
    """The baseline of the figures.

    Attributes:
        score: scoring seconds of the serial mode over the same rounds; ``None`` if it did not run.
        cost: of decoding alone, fitted to the modes that hold scoring back.
    """

    score: float | None
    cost: DecodeCost | None


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one contestant.

    Attributes:
        seconds_per_step: of every counted step.
        hidden_fraction: ``1 - exposed / serial``: the seconds of scoring beside no decoding or training, over the
            scoring seconds of the serial mode in the same rounds. It can be 1 without a gain, when decoding slows down
            by as much; hence the next figure.
        decode_slowdown: decoding seconds over those of as many decode steps and tokens without scoring beside them
            (:class:`DecodeCost`); 1 is no slower. A rough extrapolation for modes that carry rollouts over, which have
            two or three times the live rows, and longer ones.
        busy: by model, the fraction of all time in which it worked.
        shares: by phase, the fraction of all time in which it was busy; phases overlap, so the sum may exceed 1.
        live_rows_per_decode_step: mean; ``None`` if the engine does not count its decode steps.
        cap_hit_rate: fraction of the trained responses that were cut off.
        deferrals: mean and most responses carried from a step into the next.
        verdict: the bottleneck of the steps, and the speedup that any schedule could reach; ``None`` for a peer.
    """

    seconds_per_step: tuple[float, ...]
    tokens_per_second: float
    samples_per_second: float
    hidden_fraction: float | None
    decode_slowdown: float | None
    busy: Mapping[str, float]
    shares: Mapping[str, float]
    live_rows_per_decode_step: float | None
    cap_hit_rate: float
    deferrals: Mapping[str, float]
    peak_rss_mb: float
    as_announced: float
    verdict: Bottleneck | None

    @classmethod
    def of(cls, rounds: Rounds, baseline: Baseline, peak_rss_mb: float) -> Figures:
        """Return the figures of a contestant's rounds."""
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
            hidden_fraction=1 - exposed / baseline.score if inside and baseline.score else None,
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
        return asdict(self) | {"verdict": None if self.verdict is None else self.verdict.as_json()}


def speedup(mode: Rounds, other: Rounds) -> Spread:
    """Return the speed of ``mode`` over that of ``other``, by pairs of rounds; above 1 is faster.

    Speeds are trained tokens a second, so that a mode which carries stragglers from round to round gets no credit for
    the short responses it trains first.
    """
    return Spread.of(per_token(theirs) / per_token(ours) for ours, theirs in zip(mode, other, strict=True))


def per_token(steps: Sequence[StepRecord]) -> float:
    """Return the seconds per trained token over some steps."""
    return math.fsum(step.seconds for step in steps) / sum(step.tokens for step in steps)


def faults(workload: BenchWorkload, layout: Layout, figures: Mapping[str, Figures], capped: float) -> list[str]:
    """Return the reasons why a run is INVALID, a sentence each; none: it is valid.

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
