"""From settings to the devices of a run's models, and to the places where they work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from oppo.app.actors import places_elsewhere
from oppo.config.settings import Settings
from oppo.hf.devices import SCORED, DeviceLayout, Devices, available_cores
from oppo.hf.memory import Hardware


def devices_of(settings: Settings, assumed: Hardware | None = None) -> Devices:
    """Return the device of each model, on this machine or on one that is assumed.

    Raises:
        ConfigError: there is no such device.
    """
    return Devices.found(
        {**settings.devices, "actor": (settings.actor_device,)},
        settings.placement.key_of,
        exact=settings.run.exact,
        elsewhere=settings.elsewhere,
        gpus=None if assumed is None else assumed.gpus,
    )


def scored(settings: Settings) -> list[str]:
    """Return the models of a run that score."""
    exist = {
        "reference": settings.has_reference,
        "reward": True,
        "critic": settings.algorithm.has_critic,
        "proximal": settings.algorithm.corrects,
    }
    return [model for model in SCORED if exist[model]]


def layout_of(settings: Settings, devices: Devices, tell: Callable[[str], None]) -> DeviceLayout:
    """Return the places of a run; ``tell`` receives a sentence about each process that is started.

    Raises:
        ConfigError: a process is chosen for models on a GPU, whose memory is not shared; or the cluster that the
            settings name cannot be used.
        ModelError: the cluster has no room for the trainer's ranks.
    """
    run, available = settings.run, available_cores()
    if (cores := run.cores or available) > available:
        tell(
            f"run.cores = {cores} is more than the {available} that this process may use: threads will wait for each "
            "other"
        )
    with ExitStack() as stack:
        elsewhere = places_elsewhere(settings, devices, tell)
        stack.callback(elsewhere.close)
        layout = DeviceLayout.of(
            cores,
            devices,
            run.scorers,
            tell,
            scored=_scored_here(settings),
            policy=run.policy,
            trainer=run.trainer,
            restarts=run.scorer_restarts,
            elsewhere=elsewhere,
        )
        stack.pop_all()
    return layout


def _scored_here(settings: Settings) -> list[str]:
    functions = any(part.is_function for part in settings.models.rewards.values())
    here = [model for model in scored(settings) if model not in settings.elsewhere]
    return [*here, "reward"] if functions and "reward" not in here else here
