"""Resuming a run from its directory: its settings, which of them may change, and its newest checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from oppo.app.checkpoint import Checkpoint, Checkpoints
from oppo.app.provenance import Provenance, fingerprint, fingerprints, require_continued
from oppo.config.load import load
from oppo.config.sections import EvalSection, PlacementSection
from oppo.config.settings import Settings
from oppo.declared import declared
from oppo.errors import CheckpointError, ConfigError, RunComplete
from oppo.report.records import METRICS, Lock, ended, read

CHECKPOINTS = "checkpoints"
"""The checkpoints in a run directory."""

MAY_CHANGE = frozenset(
    {
        "run.steps",
        "run.panel",
        "run.logged_samples",
        "run.track",
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
        "environment.concurrency",
        "environment.process",
        "environment.timeout",
        "models.share_weights",
        "placement.spread",
        "rewards.N.concurrency",
        "rewards.N.process",
        "rewards.N.timeout",
        *(f"eval.{key}" for key in declared(EvalSection)),
    }
)
"""Settings that may change when a run is resumed: none of them changes what a step computes.

``run.steps`` may change under a constant schedule of the learning rate, which does not depend on it.
"""

DRAINING = frozenset({"run.checkpoint_every"})
"""Those that may not change with ``step.lookahead``: they decide after which steps none is in flight."""

ROUNDING = frozenset(
    {
        "run.cores",
        "run.policy",
        "run.scorers",
        "models.device",
        "trainer.micro_batch_tokens",
        "trainer.gradient_checkpointing",
        *(f"placement.{key}" for key in declared(PlacementSection) if key != "spread"),
    }
)
"""Settings that decide how sums are rounded: they may change too, except in exact runs.

Of ``placement.cluster`` that is whether there is one, and not its address.
"""

CLUSTER = "placement.cluster"

ENGINE_ARGUMENTS = "vllm."
"""Before the arguments of vLLM's engine: they may change, as another machine may need others."""


def settings_of(directory: Path, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings of the run in ``directory``, with ``section.key=value`` overrides.

    Raises:
        ConfigError: ``directory`` holds no run, or an override changes a setting that may not change.
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
    """Check that a resumed run has the settings it began with, except for those that may change.

    Args:
        before: the former :func:`fingerprints`; settings that they lack are not compared.
        of: what recorded ``before``, unless the run's ``config.toml`` did.

    Raises:
        ConfigError: a setting has changed that may not.
    """
    now = fingerprints(settings)
    changed = {
        key for key, value in before.items() if now.get(key, value) != value and not key.startswith(ENGINE_ARGUMENTS)
    }
    exact, schedule = settings.run.exact, settings.trainer.schedule
    free = MAY_CHANGE - DRAINING if settings.step.lookahead else MAY_CHANGE
    where = f", and {of} was written with other values than config.toml has" if of else ""
    if refused := sorted(key for key in changed if of_rewards(key) not in free | ROUNDING):
        raise ConfigError(
            f"{', '.join(refused)} cannot change when a run is resumed{where}: put it back as it was, or start a new "
            f"run; what may change is {', '.join(sorted(free if exact else free | ROUNDING))}"
            + ", and what [vllm] holds"
            * (settings.models.engine == "vllm")
        )
    if fingerprint("") not in (before.get(CLUSTER), now[CLUSTER]):
        changed -= {CLUSTER}
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


def of_rewards(key: str) -> str:
    """Return the setting of a reward without its number.

    Example:
        >>> of_rewards("rewards.0.timeout"), of_rewards("run.steps")
        ('rewards.N.timeout', 'run.steps')
    """
    return re.sub(r"^rewards\.\d+\.", "rewards.N.", key)


def require_same_run(
    checkpoint: Checkpoint,
    settings: Settings,
    now: Provenance,
    *,
    accept_changed_code: bool,
) -> None:
    """Check that a run goes on with the settings and the files that it had at a checkpoint.

    Raises:
        ConfigError: a setting has changed that may not.
        DataError: a file has changed.
        CheckpointError: the checkpoint does not say what its run was made of.
    """
    before = Provenance.restored(checkpoint.state(), settings)
    require_same(before.settings, settings, of="its checkpoint")
    require_continued(before, now, settings, accept_changed_code=accept_changed_code)


def locked(settings: Settings) -> Lock:
    """Return the lock of the run directory, which other processes no longer change.

    Raises:
        ConfigError: another run holds the lock, or the directory cannot be written.
    """
    try:
        return Lock(settings.run_directory)
    except OSError as error:
        raise ConfigError(
            f"the run directory {settings.run_directory} cannot be written: {error.strerror or error}"
        ) from error


def newest(settings: Settings, checkpoints: Checkpoints) -> Checkpoint | None:
    """Return the checkpoint to resume from; ``None``: the run was killed before its first and begins anew.

    Raises:
        CheckpointError: no checkpoint is whole.
        RunComplete: ``run.steps`` asks for no further steps. A run that was ended after its last step, before its
            models were saved, is not complete.
    """
    found = checkpoints.newest()
    if found is None:
        if not checkpoints.begun and is_young(settings):
            return None
        advice = "a run is resumed from one, and writes them if run.checkpoint_every is set"
        if every := settings.run.checkpoint_every:
            advice = (
                f"a run is resumed from one, and those that this run wrote, after every {every} steps, are damaged or "
                "gone; start a new run"
            )
        raise CheckpointError(f"no checkpoint in {settings.run_directory / CHECKPOINTS} can be used: {advice}")
    made = ended(settings.run_directory)
    if made is not None and settings.run.steps <= made:
        raise RunComplete(f"the run has made all of its {made} steps: raise run.steps (--set run.steps=...) to go on")
    return found


def is_young(settings: Settings) -> bool:
    """Return whether a run that writes checkpoints has made too few steps for its first."""
    made = sum(1 for _ in read(settings.run_directory / METRICS))
    return 0 < settings.run.checkpoint_every >= made
