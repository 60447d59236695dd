"""``[placement]``: the device and the machine of each model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from oppo.declared import FromList, PositiveCount, setting

_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")

SCORERS: Final = ("reference", "reward", "critic", "teacher")
"""The models that score."""

Remote: TypeAlias = Literal["policy", "reference", "reward", "critic", "teacher", "trainer"]
"""A model that can be in a Ray actor of a cluster; of the trainer, every rank but the first."""


def _require_device(device: str) -> str:
    if _DEVICE.fullmatch(device) is None:
        raise ValueError(f"expected 'auto', 'cpu', 'cuda' or one of several as 'cuda:1', got {device!r}")
    return device


def _listed(devices: object) -> object:
    return [devices] if isinstance(devices, str) and devices else devices or []


DeviceName: TypeAlias = Annotated[str, AfterValidator(_require_device)]

Another: TypeAlias = Annotated[str, AfterValidator(lambda device: device and _require_device(device))]
"""A device, or nothing for that of something else."""

Several: TypeAlias = Annotated[tuple[DeviceName, ...], FromList(), BeforeValidator(_listed)]
"""A device or a list of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    """``[placement]``: the device of each model, where they are not all on ``models.device``."""

    policy: Another = setting("", "device of the policy that decodes; empty: `models.device`", resume="rounding")
    trainer: Several = setting(
        (),
        'device of the trainer; or a list of devices for as many training ranks, each a process, such as `["cuda:1", '
        '"cuda:2"]` or `["cpu", "cpu"]`; empty: `models.device`',
        resume="rounding",
    )
    scorers: Another = setting(
        "", "device of reference, reward, critic and teacher; empty: `models.device`", resume="rounding"
    )
    reference: Another = setting("", "device of the reference; empty: `placement.scorers`", resume="rounding")
    reward: Another = setting("", "device of reward models; empty: `placement.scorers`", resume="rounding")
    critic: Another = setting("", "device of the critic that is served; empty: `placement.scorers`", resume="rounding")
    teacher: Another = setting("", "device of the teacher; empty: `placement.scorers`", resume="rounding")
    shard: bool = setting(
        default=True,
        description="give each training rank a shard of weights, gradients and optimizer states (FSDP2), in place of "
        "all of them; one rank has all",
        resume="rounding",
    )
    cluster: str = setting(
        "",
        "Ray cluster for the models of `placement.remote`: `auto`, that of `RAY_ADDRESS` or of `ray start` on this "
        "machine, or the `host:port` of its head; empty: none",
        resume="rounding",
    )
    remote: Annotated[tuple[Remote, ...], FromList()] = setting(
        (),
        "with a cluster, the models that are remote, one Ray actor each; of the trainer, every rank but the first; "
        "empty: every model that can be remote, but the policy",
        resume="rounding",
    )
    actor_cpus: PositiveCount = setting(
        1,
        "with a cluster, the cores that each Ray actor reserves on its machine and computes with; rank 0 computes with "
        "as many",
        resume="rounding",
    )
    spread: bool = setting(
        default=False, description="with a cluster, put each rank of the trainer on a machine of its own", resume="free"
    )
    policy_replicas: Annotated[int, Field(ge=1, le=1024)] = setting(
        1,
        "engines that decode as one pool, which outlives the death of any: processes of this machine, each with a GPU, "
        "from that of `placement.policy` on, or its share of the cores; with the policy in `placement.remote`, Ray "
        "actors",
        resume="rounding",
    )
    share: Literal["beside", "sleep"] = setting(
        "beside",
        "how vLLM has a GPU together with the trainer: `beside`: each has its own part of the memory; `sleep`: the "
        "engine sleeps while the policy is trained, its weights in the CPU's memory and its KV cache dropped, so that "
        "the KV cache of deferred rollouts is recomputed",
        resume="rounding",
    )

    def names(self, device: str) -> Mapping[str, tuple[str, ...]]:
        scorers = self.scorers or device
        return {
            "policy": (self.policy or device,),
            "trainer": self.trainer or (device,),
            **{name: (getattr(self, name) or scorers,) for name in SCORERS},
        }

    def key_of(self, model: str) -> str:
        own = [model, "scorers"] if model in SCORERS else [model]
        return next((f"placement.{key}" for key in own if getattr(self, key)), "models.device")
