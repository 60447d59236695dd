"""Going on with a run from its directory: which settings it has, which may change, and where it stands."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from oppo.app.checkpoint import Checkpoint, Checkpoints
from oppo.app.config import load
from oppo.app.settings import Settings
from oppo.errors import CheckpointError, ConfigError
from oppo.report.lock import Lock
from oppo.report.occupancy import METRICS, ended
from oppo.report.records import read

CHECKPOINTS = "checkpoints"
"""Where a run directory holds its checkpoints."""

MAY_CHANGE = frozenset(
    {
        "run.steps",
        "run.panel",
        "run.logged_samples",
        "run.trace",
        "run.watchdog_seconds",
        "run.call_timeout",
        "run.scorer_restarts",
        "run.trainer",
        "run.max_empty",
        "run.max_nonfinite",
        "run.checkpoint_every",
        "run.keep_last",
        "run.keep_best",
        "models.reward_process",
        "models.share_weights",
    }
)
"""Settings that may be others when a run goes on: none of them changes what a step does.

``run.steps`` may change where the learning rate does not depend on it, that is, under a constant schedule.
"""

ROUNDING = frozenset(
    {"run.cores", "run.policy", "run.scorers", "trainer.micro_batch_tokens", "trainer.gradient_checkpointing"}
)
"""Settings that say how a step is computed: they may change too, but for exact runs, whose bits depend on them."""


def settings_of(directory: Path, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings of the run in ``directory``, with ``section.key=value`` overrides.

    Raises:
        ConfigError: there is no run, or an override changes what may not change.
    """
    file = directory / "config.toml"
    if not file.is_file():
        raise ConfigError(f"there is no run to resume in {directory}: expected the file {file}")
    settings = load(file, overrides)
    require_same(fingerprints(load(file)), settings)
    if settings.run_directory.resolve() != directory.resolve():
        raise ConfigError(
            f"{file} is of the run in {settings.run_directory}: a run is resumed where it was, so move it back there"
        )
    return settings


def require_same(before: Mapping[str, str], settings: Settings, *, of: str = "") -> None:
    """Check that a run goes on with the settings that it had, but for those that may change.

    Args:
        before: what :func:`fingerprints` returned then; settings that were not there then are not compared.
        settings: of now.
        of: what was written with the former, where that is not the file of the run.

    Raises:
        ConfigError: it does not.
    """
    now = fingerprints(settings)
    changed = {key for key, value in before.items() if now.get(key, value) != value}
    exact, schedule = settings.run.exact, settings.trainer.schedule
    where = f", and {of} was written with other values than config.toml has" if of else ""
    if refused := sorted(changed - MAY_CHANGE - ROUNDING):
        raise ConfigError(
            f"{', '.join(refused)} cannot change when a run is resumed{where}: put it back as it was, or start a new "
            f"run; what may change is {', '.join(sorted(MAY_CHANGE if exact else MAY_CHANGE | ROUNDING))}"
        )
    if exact and (refused := sorted(changed & ROUNDING)):
        raise ConfigError(
            f"{', '.join(refused)} cannot change when a run is resumed that is exact{where}: sums would be rounded in "
            "another order, and every bit is to be that of an uninterrupted run; start a new run for that"
        )
    if "run.steps" in changed and not schedule.startswith("constant"):
        raise ConfigError(
            f"run.steps cannot change{where}: the {schedule} schedule of the learning rate is laid out over the steps "
            "of the run"
        )


def locked(settings: Settings) -> Lock:
    """Return the lock of the run directory: what it holds does not change any more but by who has the lock.

    Raises:
        ConfigError: another run has it, or the directory cannot be written.
    """
    try:
        return Lock(settings.run_directory)
    except OSError as error:
        raise ConfigError(
            f"the run directory {settings.run_directory} cannot be written: {error.strerror or error}"
        ) from error


def newest(settings: Settings, checkpoints: Checkpoints) -> Checkpoint | None:
    """Return where the run goes on; ``None``: at its beginning, for it was killed before its first checkpoint.

    Raises:
        CheckpointError: no checkpoint is whole, or the run has come to its end and is to make no further steps. One
            that was ended after its last step, before what it learned was saved, has not come to its end.
    """
    found = checkpoints.newest()
    if found is None and not checkpoints.begun and is_young(settings):
        return None
    if found is None:
        raise CheckpointError(f"no checkpoint in {settings.run_directory / CHECKPOINTS} can be used: {_why(settings)}")
    made = ended(settings.run_directory)
    if made is not None and settings.run.steps <= made:
        raise CheckpointError(
            f"the run has made all of its {made} steps: raise run.steps (--set run.steps=...) to go on"
        )
    return found


def _why(settings: Settings) -> str:
    if not settings.run.checkpoint_every:
        return "a run is resumed from one, and writes them if run.checkpoint_every is set"
    return (
        f"a run is resumed from one, and those that this run wrote, after every {settings.run.checkpoint_every} steps, "
        "are damaged or gone; start a new run"
    )


def is_young(settings: Settings) -> bool:
    """Return whether a run has made so few steps that it may be without a checkpoint although it writes them."""
    over = sum(1 for _ in read(settings.run_directory / METRICS))
    return 0 < settings.run.checkpoint_every >= over


def fingerprints(settings: Settings) -> dict[str, str]:
    """Return a digest of every setting, under ``section.key``: a value may hold a secret, in a URL for example."""
    return {
        f"{section}.{key}": hashlib.sha256(repr(value).encode()).hexdigest()[:16]
        for section, values in settings.tables().items()
        for key, value in values.items()
    }
