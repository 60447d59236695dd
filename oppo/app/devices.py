"""``[placement]``: the device of each model of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator

from oppo.declared import FromList, PositiveCount, setting

_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")

SCORERS: Final = ("reference", "reward", "critic")
"""The models that score."""

Remote: TypeAlias = Literal["policy", "reference", "reward", "critic", "trainer"]
"""A model that can be in an actor of a cluster; of the trainer, every rank but the first."""


def _require_device(device: str) -> str:
    if _DEVICE.fullmatch(device) is None:
        raise ValueError(f"expected 'auto', 'cpu', 'cuda' or one of several as 'cuda:1', got {device!r}")
    return device


def _require_another(device: str) -> str:
    return device and _require_device(device)


def _listed(devices: object) -> object:
    return [devices] if isinstance(devices, str) and devices else devices or []


DeviceName: TypeAlias = Annotated[str, AfterValidator(_require_device)]

Another: TypeAlias = Annotated[str, AfterValidator(_require_another)]
"""A device, or nothing for that of something else."""

Several: TypeAlias = Annotated[tuple[DeviceName, ...], FromList(), BeforeValidator(_listed)]
"""A device or a list of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    """``[placement]``: the device of each model, where they are not all on ``models.device``."""

    policy: Another = setting("", "of the policy that decodes; `models.device` when empty")
    trainer: Several = setting(
        (),
        "where updates are made: a device, or a list of them for as many training ranks, each a process, such as "
        '`["cuda:1", "cuda:2"]` or `["cpu", "cpu"]`; `models.device` when empty',
    )
    scorers: Another = setting("", "of reference, reward and critic; `models.device` when empty")
    reference: Another = setting("", "of the reference; `placement.scorers` when empty")
    reward: Another = setting("", "of reward models; `placement.scorers` when empty")
    critic: Another = setting("", "of the critic that is served; `placement.scorers` when empty")
    shard: bool = setting(
        default=True,
        description="give each training rank a shard of weights, gradients and optimizer states (FSDP2), in place of "
        "all of them; one rank has all",
    )
    cluster: str = setting(
        "",
        "a Ray cluster whose machines take the models of `placement.remote`: `auto`, which is that of `RAY_ADDRESS` or "
        "of `ray start` on this machine, or the `host:port` of its head; none when empty",
    )
    remote: Annotated[tuple[Remote, ...], FromList()] = setting(
        (),
        "with a cluster, the models that are actors there, each of its own; of the trainer, every rank but the first; "
        "all that can be but the policy when empty",
    )
    actor_cpus: PositiveCount = setting(
        1, "with a cluster, the cores that each actor takes of its machine and computes with, as rank 0 does here"
    )
    spread: bool = setting(
        default=False, description="with a cluster, put each rank of the trainer on a machine of its own"
    )

    def names(self, device: str) -> Mapping[str, tuple[str, ...]]:
        """Return the devices by model, where ``device`` is that of models that have none of their own."""
        scorers = self.scorers or device
        return {
            "policy": (self.policy or device,),
            "trainer": self.trainer or (device,),
            **{name: (getattr(self, name) or scorers,) for name in SCORERS},
        }

    def key_of(self, model: str) -> str:
        """Return the setting that says where a model is."""
        own = [model, "scorers"] if model in SCORERS else [model]
        return next((f"placement.{key}" for key in own if getattr(self, key)), "models.device")
