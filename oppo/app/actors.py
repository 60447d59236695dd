"""The places of a run in actors of a Ray cluster, as ``[placement]`` names them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from oppo.config.settings import Settings
from oppo.hf.devices import Devices, Elsewhere, use_cores
from oppo.placement import Place


def places_elsewhere(settings: Settings, devices: Devices, tell: Callable[[str], None]) -> Elsewhere:
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
        tell(f"connecting to the Ray cluster at {chosen.cluster}")
        cluster = stack.enter_context(Cluster(chosen.cluster))
        training: Place | None = None
        if "trainer" in settings.elsewhere:
            count = len(devices.trainer)
            tell(f"starting {count} training ranks, {count - 1} of them in the cluster")
            training = RayRanks(
                "trainer",
                cluster,
                count,
                room=room(devices.trainer[-1].type),
                spread=chosen.spread,
                setup=setup,
                tell=tell,
            )
            stack.callback(training.close)
        actors: dict[str, Place] = {}
        for model, device in devices.scoring(sorted(settings.elsewhere - {"trainer"})).items():
            tell(f"starting the actor of the {model} in the cluster")
            actors[model] = RayPlace(
                model,
                cluster,
                room=room(device.type),
                setup=setup,
                restarts=0 if model == "policy" else settings.run.scorer_restarts,
                tell=tell,
            )
            stack.callback(actors[model].close)
        return Elsewhere(actors.pop("policy", None), actors, training, stack.pop_all().close)
