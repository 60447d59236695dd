"""``oppo simulate``: the schedules of a run that has finished, or of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, Literal

from oppo.admission import Admission
from oppo.app.compose import admission_of
from oppo.app.profile import load_profile
from oppo.config.load import load, resolve
from oppo.config.settings import Settings
from oppo.errors import ConfigError
from oppo.simulate.calibrate import LAYOUTS, MeasuredStep, RunRecord, calibrated
from oppo.simulate.costs import System, Workload
from oppo.simulate.run import Schedule, ladder
from oppo.simulate.study import Study, study

AS_IT_RAN: Final = "as it ran"
"""The schedule of the run that a simulation is calibrated on."""

CLOSE: Final = 0.10
"""The relative error of the simulated seconds of the run's own schedule up to which a calibration describes it."""

ROLLOUTS: Final = 3072
"""In a simulated run of as many steps as are usual: more take longer, and vary hardly less."""

STEPS: Final = (12, 24)
"""The fewest and the most steps of it."""

Layout = Literal["shared", "split"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """A system, what it trains, and the schedules to compare.

    Attributes:
        baseline: name of the schedule that the others are compared with.
        measured: median seconds for each trained token of the baseline, where it has run.
        refused: why a schedule does not go with the settings of the run, by name.
    """

    system: System
    workload: Workload
    schedules: Mapping[str, Schedule]
    baseline: str
    measured: float | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def run(self, *, steps: int | None, seeds: int) -> Study:
        """Simulate every schedule; ``None``: as many steps as hold about ``ROLLOUTS``, within ``STEPS``."""
        if steps is None:
            least, most = STEPS
            steps = max(least, min(most, ROLLOUTS // (self.workload.batch * self.workload.samples)))
        found = study(
            self.system,
            self.workload,
            self.schedules,
            baseline=self.baseline,
            steps=steps,
            seeds=range(seeds),
        )
        return replace(found, refused=self.refused)

    def verdict(self, found: Study) -> str:
        """Return how well the simulation describes the run that it is calibrated on; empty where there is none."""
        if self.measured is None:
            return ""
        own = found.standings[self.baseline]
        simulated = sum(each.per_token for each in own.outcomes) / len(own.outcomes)
        seconds = self.measured * own.seconds.mean / simulated
        off = simulated / self.measured - 1
        said = f"as it ran, a step of as many tokens took {seconds:.3g} s; simulated it takes {off:+.0%}"
        said = said.replace("%", " %")
        if abs(off) <= CLOSE:
            return said
        return f"{said}: the calibration does not describe this run, so the figures below are not to be trusted"


def of_profile(path: Path, overrides: Sequence[str] = ()) -> Simulation:
    """Return the simulation of a profile.

    Raises:
        ConfigError: the profile, or the file of lengths that it names, cannot be used.
    """
    profile = load_profile(path, overrides)
    given = profile.schedule
    schedules = ladder(
        profile.workload.batch,
        extra=min(given.extra, profile.workload.batch),
        chunk=given.chunk,
        max_deferrals=given.max_deferrals,
        price=given.lag_price,
        on_publish="recompute" if given.recompute else "keep",
    )
    return Simulation(profile.system(), profile.work(), schedules, "serial")


def of_run(directory: Path, layout: Layout = "shared") -> Simulation:
    """Return the simulation of a run that has finished, calibrated on its records.

    Raises:
        ConfigError: the directory holds no run, one that has not finished, or one of a kind that is not simulated.
        DataError: its records lack what a calibration needs.
    """
    record = RunRecord.read(directory)
    settings = load(directory / "config.toml")
    if settings.environment.source:
        raise ConfigError(f"the run in {directory} has an environment, whose answers a simulation does not know yet")
    step = settings.step
    if step.stream_updates:
        raise ConfigError(
            f"the run in {directory} trains groups while others are written (step.stream_updates), which a simulation "
            "does not know yet"
        )
    system = calibrated(
        record.steps,
        prompt=record.prompt,
        contention=LAYOUTS[layout],
        recomputes=step.on_publish == "recompute",
    )
    workload = Workload(
        batch=step.batch,
        samples=settings.algorithm.responses,
        prompt=round(record.prompt),
        lengths=record.lengths,
        cap=min(settings.sampling.max_new_tokens, record.cap),
    )
    own = own_schedule(settings, record.cap, directory / "config.toml")
    rungs = ladder(
        step.batch,
        extra=step.extra or max(1, step.batch // 14),
        chunk=own.chunk or 32,
        max_deferrals=step.max_deferrals,
        price=step.lag_price,
        on_publish=step.on_publish,
    )
    return Simulation(
        system,
        workload,
        {AS_IT_RAN: own, **rungs},
        AS_IT_RAN,
        _measured(record.steps),
        {name: why for name, each in rungs.items() if (why := refusal(settings, each))},
    )


def refusal(settings: Settings, schedule: Schedule) -> str:
    """Return why a schedule does not go with the other settings of a run; empty if it does."""
    if not schedule.step:
        return "no settings of oppo train give it"
    document = settings.document()
    try:
        resolve({**document, "step": {**document["step"], **schedule.step}}, Path())
    except ConfigError as error:
        return " ".join(str(error).split())
    return ""


def _admission(config: Path) -> Admission:
    settings = load(config)
    return settings.own_admission() or admission_of(settings.step)


def own_schedule(settings: Settings, cap: int, config: Path) -> Schedule:
    """Return the schedule of a run; a chunk size that is tuned is taken as the middle one of its candidates."""
    step = settings.step
    chunk = step.chunk if isinstance(step.chunk, int) else None if step.chunk == "whole" else max(1, cap // 8)
    carried = "" if step.admission != "overcommit" else f", {step.extra or 0} carried"
    ahead = f", lookahead {step.lookahead}" if step.lookahead else ""
    in_flight = bool(step.lookahead) and step.publish == "in-flight"
    return Schedule(
        name=AS_IT_RAN,
        about=f"{step.admission}{carried}, chunk {step.chunk}{ahead}{', in flight' if in_flight else ''}",
        admission=partial(_admission, config),
        chunk=chunk,
        lookahead=step.lookahead,
        in_flight=in_flight,
    )


def _measured(steps: Sequence[MeasuredStep]) -> float | None:
    warm = [step.seen.seconds / step.tokens for step in steps[len(steps) // 4 :] if step.tokens]
    return median(warm) if warm else None
