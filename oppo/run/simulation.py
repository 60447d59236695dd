"""``oppo simulate``: a run that was measured, or a profile of hardware, models and lengths in a TOML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from oppo.admission import Admission
from oppo.config.load import Faults, load_settings, overridden, parsed, resolve
from oppo.config.sections import StepSection
from oppo.declared import Table, changed, declared
from oppo.errors import ConfigError
from oppo.log import routed
from oppo.run.graph import admission_of
from oppo.simulate.calibrate import LAYOUTS, MeasuredStep, RunRecord, calibrated
from oppo.simulate.profile import Profile, System, Workload
from oppo.simulate.schedule import Schedule, ladder
from oppo.simulate.study import Study, study

AS_IT_RAN: Final = "as it ran"  # the schedule of the run that a simulation is calibrated on
CLOSE: Final = 0.10
"""The relative error of the simulated seconds of the run's own schedule up to which a calibration describes it."""

Layout = Literal["shared", "split"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """A system, what it trains, and the schedules to compare."""

    system: System
    workload: Workload
    schedules: Mapping[str, Schedule]
    baseline: str
    measured: float | None = None  # median seconds for each trained token of the baseline, where it has run
    refused: Mapping[str, str] = field(default_factory=dict)  # why a schedule does not go with the settings, by name
    about: str = ""  # the devices and the engine, where they are not those of the run

    def run(self, *, steps: int | None = None, seeds: int | None = None, precise: bool = False) -> Study:
        found = study(
            self.system,
            self.workload,
            self.schedules,
            baseline=self.baseline,
            steps=steps,
            seeds=seeds,
            precise=precise,
        )
        return replace(found, refused=self.refused, about=self.about)

    def verdict(self, found: Study) -> str:
        if self.measured is None:
            return ""
        own = found.standings[self.baseline]
        simulated = sum(outcome.per_token for outcome in own.outcomes) / len(own.outcomes)
        seconds = self.measured * own.seconds / simulated
        off = simulated / self.measured - 1
        said = f"as it ran, a step of as many tokens took {seconds:.3g} s; simulated it takes {off:+.0%}"
        if abs(off) <= CLOSE:
            return said
        return f"{said}: the calibration does not describe this run, so the figures below are not to be trusted"


def of_profile(path: Path, overrides: Sequence[str] = ()) -> Simulation:
    profile = load_profile(path, overrides)
    given, batch = profile.schedule, profile.workload.batch
    if given.overcommit > batch and changed(given, {"overcommit"}):
        raise ConfigError(f"schedule.overcommit: expected at most workload.batch = {batch}, got {given.overcommit}")
    schedules = ladder(
        batch,
        overcommit=min(given.overcommit, batch),
        chunk=given.chunk,
        max_deferrals=given.max_deferrals,
        staleness_price=given.staleness_price,
        kv_on_sync=given.kv_on_sync,
    )
    return Simulation(profile.system(), profile.work(), schedules, "serial", about=profile.about)


def of_run(directory: Path, layout: Layout = "shared") -> Simulation:
    record = RunRecord.read(directory)
    settings = load_settings(directory / "config.toml")
    if settings.environment.answering or settings.agents.program:
        raise ConfigError(
            f"the run in {directory} has an environment, whose answers a simulation does not know yet: give a run "
            "without environment.source and agents.program, or a profile"
        )
    step = settings.step
    if step.stream_updates:
        raise ConfigError(
            f"the run in {directory} trains groups while others are written, which a simulation does not know yet: "
            "give a run with step.stream_updates = false"
        )
    system = calibrated(
        record.steps,
        prompt=record.prompt,
        contention=LAYOUTS[layout],
        recomputes=step.kv_on_sync == "recompute",
    )
    workload = Workload(
        batch=step.batch,
        samples=settings.algorithm.responses,
        prompt=round(record.prompt),
        lengths=record.lengths,
        cap=min(settings.sampling.max_new_tokens, record.cap),
    )
    document = settings.document()
    own = own_schedule(settings.step, record.cap, directory / "config.toml")
    rungs = ladder(
        step.batch,
        overcommit=step.overcommit or max(1, step.batch // 14),
        chunk=own.chunk or 32,
        max_deferrals=step.max_deferrals,
        staleness_price=step.staleness_price,
        kv_on_sync=step.kv_on_sync,
    )
    return Simulation(
        system,
        workload,
        {AS_IT_RAN: own, **rungs},
        AS_IT_RAN,
        _measured(record.steps),
        {name: why for name, schedule in rungs.items() if (why := refusal(document, schedule))},
    )


def refusal(document: Mapping[str, Any], schedule: Schedule) -> str:
    if not schedule.step:
        return "no settings of oppo train give it"
    try:
        resolve({**document, "step": {**document["step"], **schedule.step}}, Path())
    except ConfigError as error:
        return " ".join(str(error).split())
    return ""


def _admission(config: Path) -> Admission:
    with routed():  # the simulating process has logged the warnings about the file
        settings = load_settings(config)
    return settings.own_admission() or admission_of(settings.step)


def own_schedule(step: StepSection, cap: int, config: Path) -> Schedule:
    # of a tuned chunk size, the middle one of its candidates
    chunk = step.chunk if isinstance(step.chunk, int) else None if step.chunk == "whole" else max(1, cap // 8)
    deferred = "" if step.admission != "overcommit" else f", {step.overcommit or 0} deferred"
    ahead = f", lookahead {step.lookahead}" if step.lookahead else ""
    in_flight = bool(step.lookahead) and step.weight_sync == "in-flight"
    return Schedule(
        name=AS_IT_RAN,
        about=f"{step.admission}{deferred}, chunk {step.chunk}{ahead}{', in flight' if in_flight else ''}",
        admission=partial(_admission, config),
        chunk=chunk,
        lookahead=step.lookahead,
        in_flight=in_flight,
    )


def _measured(steps: Sequence[MeasuredStep]) -> float | None:
    warm = [step.seen.seconds / step.tokens for step in steps[len(steps) // 4 :] if step.tokens]
    return median(warm) if warm else None


def profile_sections() -> dict[str, type]:
    hints = get_type_hints(Profile)  # of a section its class, or a dict of tables
    return {each.name: (get_args(hints[each.name]) or [hints[each.name]])[-1] for each in fields(Profile)}


PROFILE: Final[TypeAdapter[Profile]] = TypeAdapter(Annotated[Profile, Table()])


def load_profile(path: Path, overrides: Sequence[str] = ()) -> Profile:
    return profile_of(overridden(parsed(path), overrides), path.absolute().parent)


def profile_of(document: Mapping[str, object], folder: Path) -> Profile:
    lengths = document.get("lengths")
    if isinstance(lengths, Mapping) and isinstance(file := lengths.get("file"), str) and file:
        document = {**document, "lengths": {**lengths, "file": str(folder / file)}}
    try:
        profile = PROFILE.validate_python(document)
    except ValidationError as error:
        keys = {name: declared(kind) for name, kind in profile_sections().items()}
        raise ConfigError(Faults(keys, list(keys), named=("gpus", "sizes")).describe(error)) from error
    profile.system()
    return profile
