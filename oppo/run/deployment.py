"""Where each model of a run works: its engine, device, type and memory, resolved once, and the places made for it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from oppo.config.scorers import ModelRewardSection, OnVllm, RewardSection, VllmRewardSection
from oppo.config.sections import ModelsSection
from oppo.config.settings import Settings
from oppo.errors import ConfigError
from oppo.hf.devices import (
    SCORED,
    DeviceLayout,
    Devices,
    DeviceThread,
    RemotePlaces,
    acting_share,
    available_cores,
    require_sharable_memory,
    use_cores,
)
from oppo.hf.lora import Quantization
from oppo.hf.memory import Load
from oppo.log import logger
from oppo.placement import Place, Process
from oppo.simulate.profile import Hardware
from oppo.training import TrainerSettings
from oppo.vllm.arguments import workers_of


@dataclass(frozen=True, slots=True)
class Role:
    name: str  # policy, reference, critic or proximal; of several teachers or rewards teacher.NAME
    key: str  # the setting that names its source, or that has its engine, for errors
    source: str  # its directory or hub name
    device: torch.device  # on which it is served
    on: OnVllm | None = None  # of its engine, where vLLM serves it to score
    apart: bool = False  # loaded where it is served: in a process with its own memory, or on another machine
    remote: bool = False  # served on another machine
    quantization: Quantization = "none"  # of its base

    @property
    def model(self) -> str:
        return self.name.partition(".")[0]

    @property
    def engine_key(self) -> str:
        return self.key if self.model == "reward" else f"scorers.{self.name}"


@dataclass(frozen=True, slots=True)
class Deployment:
    settings: Settings  # of the run, as its file has them
    models: ModelsSection  # with the type of the weights and the sync of adapters chosen
    trainer: TrainerSettings  # with the tokens of a micro-batch chosen, once memory is counted
    devices: Devices
    roles: Mapping[str, Role]  # the models of the run, by name
    assumed: Hardware | None = None  # the hardware it is planned for; None: this machine
    share: float | None = None  # of each of its GPUs that the policy's engine takes; None: as that chooses

    @classmethod
    def of(cls, settings: Settings, assumed: Hardware | None = None) -> Self:
        devices = Devices.found(
            {**settings.devices, "actor": (settings.actor_device,)},
            settings.placement.key_of,
            deterministic=settings.run.deterministic,
            remote=settings.remote,
            scorers=settings.run.scorers,
            replicas=settings.placement.policy_replicas,
            gpus=None if assumed is None else assumed.gpus,
        )
        models = _with_types(settings.models, devices, assumed)
        return cls(settings, models, settings.trainer, devices, _roles(settings, models, devices), assumed)

    def spanning(self, steps: int) -> Self:
        settings = self.settings.spanning(steps)
        return replace(self, settings=settings, trainer=settings.trainer)

    def load(self, prompt: int) -> Load:
        step, response = self.settings.step, self.settings.sampling.max_new_tokens
        # a stage has one step at a time, however many are alive: a model holds the rollouts of one, and the deferred
        rollouts = (step.batch + step.most_overcommit) * self.settings.algorithm.responses
        chunk = step.chunk if isinstance(step.chunk, int) else response
        return Load(rollouts, prompt, response, chunk, one_by_one=bool(self.settings.agents.program))

    @property
    def gpus(self) -> int | None:
        return None if self.assumed is None else self.assumed.gpus

    @property
    def has_engine(self) -> bool:
        return self.models.engine != "transformers"

    @property
    def cores(self) -> int:
        return self.settings.run.cores or available_cores()

    def roles_of(self, model: str) -> list[Role]:
        return [role for role in self.roles.values() if role.model == model and role.on is None]

    def on_vllm(self, *models: str) -> list[tuple[Role, OnVllm]]:
        return [(role, role.on) for role in self.roles.values() if role.model in models and role.on is not None]

    @property
    def scored(self) -> list[str]:
        return [model for model in SCORED if model == "reward" or self.roles_of(model)]

    @property
    def reference_is_apart(self) -> bool:
        return self.devices.reference != self.devices.actor or "reference" in self.devices.apart

    @property
    def teacher_shares(self) -> bool:
        """Whether the policy is its own teacher with weights that are in memory without it."""
        devices, models = self.devices, self.models
        if "teacher" in devices.apart or not self.settings.teacher.own:
            return False
        if self.settings.teacher.weights == "frozen" and not models.adapts:
            same = bool(self.roles_of("reference")) and models.reference == models.policy
            return same and devices.reference == devices.teacher and "reference" not in devices.apart
        return self.settings.teacher.weights != "average" and devices.teacher == devices.actor

    @property
    def trains_elsewhere(self) -> bool:
        return "trainer" in self.devices.remote

    @property
    def engine_workers(self) -> int:
        return workers_of(self.settings.vllm) if self.has_engine else 1

    def policy_name(self, number: int) -> str:
        return "policy" if self.devices.replicas == 1 else f"policy {number}"


def named_reward(reward: RewardSection) -> str:
    return "reward" if reward.name is None else f"reward.{reward.name}"


def _roles(settings: Settings, models: ModelsSection, devices: Devices) -> Mapping[str, Role]:
    kinds = ModelRewardSection | VllmRewardSection
    rewards = {key: reward for key, reward in settings.reward_tables.items() if isinstance(reward, kinds)}
    sources = {"policy": ("models.policy", models.policy)}
    if settings.has_reference:
        sources["reference"] = "models.reference", models.reference
    sources |= {named_reward(reward): (key, reward.source) for key, reward in rewards.items()}
    if settings.algorithm.has_critic:
        sources["critic"] = "models.critic", models.critic
    key = "teacher.weights" if settings.teacher.own else ""
    sources |= {name: (key or f"models.{name}", path) for name, path in settings.teachers.items()}
    if settings.algorithm.corrects:
        sources["proximal"] = "models.policy", models.policy
    engines: dict[str, OnVllm] = {
        named_reward(each): each for each in rewards.values() if isinstance(each, VllmRewardSection)
    }
    engines |= settings.on_vllm
    on_base = {"policy", *(["reference"] if models.is_reference_on_base else [])}
    on_base |= {"teacher"} if settings.teacher.weights == "frozen" else set()

    def role(name: str, key: str, source: str) -> Role:
        model = name.partition(".")[0]
        return Role(
            name,
            key,
            source,
            device=getattr(devices, model),
            on=engines.get(name),
            apart=model in devices.apart,
            remote=model in devices.remote,
            quantization=models.quantization if name in on_base else "none",
        )

    return {name: role(name, key, source) for name, (key, source) in sources.items()}


def _with_types(models: ModelsSection, devices: Devices, assumed: Hardware | None) -> ModelsSection:
    if models.dtype == "by-device":
        half = devices.actor.type == "cuda" and (
            assumed is not None or torch.cuda.is_bf16_supported(including_emulation=False)
        )
        models = replace(models, dtype="bfloat16" if half else "float32")
    if models.lora_sync == "auto":
        alone = models.dtype in {"bfloat16", "float16"} and not models.unfit_alone
        models = replace(models, lora_sync="adapter" if alone else "merged")
    return models


def places_of(deployment: Deployment) -> DeviceLayout:
    devices, run, cores = deployment.devices, deployment.settings.run, deployment.cores
    if cores > (available := available_cores()):
        logger.warning(
            f"run.cores = {cores} is more than the {available} that this process may use: threads will wait for each "
            "other"
        )
    if "critic" in devices.apart - devices.remote and deployment.settings.algorithm.has_critic:
        if deployment.models.shared_trunk:
            raise ConfigError(
                "models.shared_trunk = true makes the critic a head on the policy's trunk, whose memory on a GPU no "
                "other process shares, and run.scorers = 'process': expected run.scorers = 'thread' or 'auto'"
            )
        require_sharable_memory("the process of the critic", "set run.scorers = 'thread'")
    if devices.replicas > 1 and "policy" not in devices.remote:
        share = acting_share(cores)
        if devices.weights.type == devices.policy.type == "cuda":
            require_sharable_memory("a replica of the policy", "leave placement.policy_replicas out")
        if devices.policy.type == "cpu" and devices.replicas > share:
            logger.warning(
                f"placement.policy_replicas = {devices.replicas} share {share} core(s), half of run.cores: they will "
                "wait for each other"
            )
    with ExitStack() as stack:
        remote = _remote_places(deployment)
        stack.callback(remote.close)
        layout = DeviceLayout.of(
            cores,
            devices,
            run.scorers,
            scored=_scored_here(deployment),
            policy=run.policy,
            trainer=run.trainer,
            restarts=run.scorer_restarts,
            remote=remote,
        )
        setup = partial(use_cores, acting_share(cores))
        players = {
            f"role {role!r}": DeviceThread(f"role {role!r}", devices.actor, setup=setup)
            for role in deployment.settings.agents.frozen
        }
        stack.pop_all()
    return replace(layout, scoring={**layout.scoring, **players})


def _scored_here(deployment: Deployment) -> list[str]:
    functions = len(deployment.roles_of("reward")) < len(deployment.settings.rewards)
    here = [model for model in deployment.scored if model not in deployment.devices.remote]
    return [*here, "reward"] if functions and "reward" not in here else here


def _remote_places(deployment: Deployment) -> RemotePlaces:
    settings, devices, chosen = deployment.settings, deployment.devices, deployment.settings.placement
    starting = (lambda number: Process(f"policy {number}")) if settings.starts_servers else None
    if not devices.remote:
        return RemotePlaces(starting)
    from oppo.placement.ray import Cluster, RayPlace, RayRanks, Room  # noqa: PLC0415 - Ray is an extra

    setup = partial(use_cores, chosen.actor_cpus)

    def room(kind: str, workers: int = 1) -> Room:
        return Room(cpus=chosen.actor_cpus, gpus=float(workers * (kind == "cuda")))

    with ExitStack() as stack:
        logger.info(f"connecting to the Ray cluster at {chosen.cluster}")
        cluster = stack.enter_context(Cluster(chosen.cluster))
        training: Place | None = None
        if "trainer" in devices.remote:
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

        def acting(number: int) -> Place:
            name = deployment.policy_name(number)
            logger.info(f"starting the actor of the {name} in the cluster")
            takes = room(devices.policy.type, deployment.engine_workers)
            return RayPlace(name, cluster, room=takes, setup=setup, restarts=0)

        actors: dict[str, Place] = {}
        for model, device in devices.scoring(sorted(devices.remote - {"trainer", "policy"})).items():
            logger.info(f"starting the actor of the {model} in the cluster")
            actors[model] = RayPlace(
                model, cluster, room=room(device.type), setup=setup, restarts=settings.run.scorer_restarts
            )
            stack.callback(actors[model].close)
        return RemotePlaces(acting if "policy" in devices.remote else starting, actors, training, stack.pop_all().close)
