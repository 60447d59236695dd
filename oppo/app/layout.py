"""From settings to the devices of a run's models, and to the places where they work: here, or in a Ray cluster."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from oppo.config.sections import FunctionRewardSection
from oppo.config.settings import Settings
from oppo.hf.devices import SCORED, DeviceLayout, Devices, Elsewhere, available_cores, use_cores
from oppo.hf.memory import Hardware
from oppo.log import logger
from oppo.placement import Place


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


def layout_of(settings: Settings, devices: Devices) -> DeviceLayout:
    """Return the places of a run.

    Raises:
        ConfigError: a process is chosen for models on a GPU, whose memory is not shared; or the cluster that the
            settings name cannot be used.
        ModelError: the cluster has no room for the trainer's ranks.
    """
    run, available = settings.run, available_cores()
    if (cores := run.cores or available) > available:
        logger.warning(
            f"run.cores = {cores} is more than the {available} that this process may use: threads will wait for each "
            "other"
        )
    with ExitStack() as stack:
        elsewhere = _elsewhere(settings, devices)
        stack.callback(elsewhere.close)
        layout = DeviceLayout.of(
            cores,
            devices,
            run.scorers,
            scored=_scored_here(settings),
            policy=run.policy,
            trainer=run.trainer,
            restarts=run.scorer_restarts,
            elsewhere=elsewhere,
        )
        stack.pop_all()
    return layout


def _scored_here(settings: Settings) -> list[str]:
    functions = any(isinstance(each, FunctionRewardSection) for each in settings.rewards)
    here = [model for model in scored(settings) if model not in settings.elsewhere]
    return [*here, "reward"] if functions and "reward" not in here else here


def _elsewhere(settings: Settings, devices: Devices) -> Elsewhere:
    """Return the places of the models that are elsewhere; the cluster is left when they are closed.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
        ModelError: it has no room for the trainer's ranks.
    """
    chosen = settings.placement
    if not settings.elsewhere:
        return Elsewhere()
    from oppo.placement.ray import Cluster, RayPlace, RayRanks, Room  # noqa: PLC0415 - Ray is an extra

    setup = partial(use_cores, chosen.actor_cpus)

    def room(kind: str) -> Room:
        return Room(cpus=chosen.actor_cpus, gpus=float(kind == "cuda"))

    with ExitStack() as stack:
        logger.info(f"connecting to the Ray cluster at {chosen.cluster}")
        cluster = stack.enter_context(Cluster(chosen.cluster))
        training: Place | None = None
        if "trainer" in settings.elsewhere:
            count = len(devices.trainer)
            logger.info(f"starting {count} training ranks, {count - 1} of them in the cluster")
            training = RayRanks(
                "trainer",
                cluster,
                count,
                room=room(devices.trainer[-1].type),
                spread=chosen.spread,
                setup=setup,
            )
            stack.callback(training.close)
        actors: dict[str, Place] = {}
        for model, device in devices.scoring(sorted(settings.elsewhere - {"trainer"})).items():
            logger.info(f"starting the actor of the {model} in the cluster")
            actors[model] = RayPlace(
                model,
                cluster,
                room=room(device.type),
                setup=setup,
                restarts=0 if model == "policy" else settings.run.scorer_restarts,
            )
            stack.callback(actors[model].close)
        return Elsewhere(actors.pop("policy", None), actors, training, stack.pop_all().close)
