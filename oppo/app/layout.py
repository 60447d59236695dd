"""From settings to the devices of a run's models, and to the places where they work."""

from __future__ import annotations

from collections.abc import Callable

from oppo.app.settings import Settings
from oppo.hf.cpu import available_cores
from oppo.hf.device_layout import SCORED, DeviceLayout, Devices


def devices_of(settings: Settings) -> Devices:
    """Return the device of each model.

    Raises:
        ConfigError: there is no such device.
    """
    return Devices.found(settings.devices, settings.placement.key_of, exact=settings.run.exact)


def scored(settings: Settings) -> list[str]:
    """Return the models of a run that score, which need a place."""
    exist = {
        "reference": bool(settings.models.reference),
        "reward": True,
        "critic": settings.algorithm.has_critic,
        "proximal": settings.algorithm.corrects,
    }
    return [model for model in SCORED if exist[model]]


def layout_of(settings: Settings, devices: Devices, tell: Callable[[str], None]) -> DeviceLayout:
    """Return the places of a run; ``tell`` receives a sentence about each process that is started.

    Raises:
        ConfigError: a process is chosen for models on a GPU, whose memory is not shared.
    """
    run, available = settings.run, available_cores()
    if (cores := run.cores or available) > available:
        tell(
            f"run.cores = {cores} is more than the {available} that this process may use: threads will wait for each "
            "other"
        )
    return DeviceLayout.of(
        cores,
        devices,
        run.scorers,
        tell,
        scored=scored(settings),
        policy=run.policy,
        trainer=run.trainer,
        restarts=run.scorer_restarts,
    )
