"""The measured steps in a run directory: the input of a calibration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from oppo.admission import Observation
from oppo.errors import ConfigError, DataError, one_line
from oppo.report.records import JOURNAL, METRICS, WORK, Record, Work, ended, observations, read
from oppo.simulate.calibrate import MeasuredStep
from oppo.simulate.lengths import Observed

NEEDED = ("timing_s/update", "timing_s/publish", "trained")
"""Metrics without which a step cannot be calibrated on."""

TRACKS: Final[Mapping[str, str]] = MappingProxyType(
    {"reference": "ref_logp", "reward model": "reward", "reward": "reward", "critic": "value"}
)
"""The stage of each scorer by the track of its model."""

NOTHING: Final = [0, 0.0]
"""No call, and no second."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The records of a run directory.

    Attributes:
        steps: measured, in order.
        prompt: mean tokens of a prompt.
        lengths: of the responses, those of a group together.
        cap: the longest response.
    """

    steps: Sequence[MeasuredStep]
    prompt: float
    lengths: Observed
    cap: int

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        """Return the records of a finished run.

        Raises:
            ConfigError: the directory holds no run, or one that has not finished.
            DataError: its records lack what a calibration needs, or hold something else.
        """
        if not (directory / METRICS).is_file():
            raise ConfigError(f"there is no run in {directory}: expected the file {directory / METRICS}")
        if ended(directory) is None:
            raise ConfigError(
                f"the run in {directory} has not finished, and a simulation is calibrated on a finished one: go on "
                f"with `oppo resume {directory}`"
            )
        try:
            return cls._of(directory)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"the records in {directory} cannot be used: {one_line(error)}") from error

    @classmethod
    def _of(cls, directory: Path) -> RunRecord:
        seen = observations(directory / JOURNAL)
        metrics = {cast("int", each["step"]): cast("Mapping[str, Any]", each) for each in read(directory / METRICS)}
        if any(each.get("selection/rounds", 1) != 1 for each in metrics.values()):
            raise ConfigError(f"the run in {directory} replaces rejected groups, which a simulation does not know yet")
        work = {cast("int", each["step"]): cast("Any", each.get("models", {})) for each in read(directory / WORK)}
        steps = [
            measured_step(seen[step], each, work.get(step, {}))
            for step, each in sorted(metrics.items())
            if step in seen and all(each.get(name) is not None for name in NEEDED)
        ]
        journal = list(read(directory / JOURNAL))
        prompts = [cast("int", each["prompt_tokens"]) for each in journal if each.get("event") == "admitted"]
        groups = lengths_of(journal)
        if not (steps and prompts and groups):
            raise DataError(f"{directory / JOURNAL} says nothing of the run's steps or rollouts: it was made elsewhere")
        longest = max(max(group) for group in groups)
        return cls(steps, sum(prompts) / len(prompts), Observed(groups), longest)


def measured_step(seen: Observation, metrics: Mapping[str, Any], work: Work) -> MeasuredStep:
    """Return what was measured of a step: its observation, and its lines of ``metrics.jsonl`` and ``work.jsonl``."""
    models = {stage: work[track] for track, stage in TRACKS.items() if track in work}
    return MeasuredStep(
        seen,
        trained=int(metrics["trained"]),
        tokens=int(metrics.get("response_length/tokens") or 0),
        update=float(metrics["timing_s/update"]),
        publish=float(metrics["timing_s/publish"]),
        reading={stage: labels.get("extend", NOTHING)[1] for stage, labels in models.items()},
        answering={stage: labels.get("finish", NOTHING)[1] for stage, labels in models.items()},
    )


def lengths_of(journal: Iterable[Record]) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of the finished responses in a journal, in tokens, by group; of whole groups only."""
    group_of: dict[object, object] = {}
    finished: dict[object, list[int]] = {}
    for each in journal:
        if each.get("event") == "admitted":
            group_of[each["rollout"]] = each["group"]
        elif each.get("event") == "finished":
            group = group_of.get(each["rollout"], each["rollout"])
            finished.setdefault(group, []).append(max(1, cast("int", each["tokens"])))
    size = max(map(len, finished.values()), default=0)
    return tuple(tuple(group) for group in finished.values() if len(group) == size)
