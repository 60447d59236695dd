"""The settings of a training run: :class:`Settings` checks the sections of :mod:`oppo.config.sections` together.

``[trainer]`` is :class:`oppo.TrainerSettings`; ``[algorithm]`` is the class that ``step.algorithm`` names
(:mod:`oppo.algorithms`); ``[admission]`` and ``[loss]`` hold the settings of your own parts (:mod:`oppo.config.own`);
``[vllm]`` holds arguments of vLLM's engine, by its own names, or the URLs of its servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, cast

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    SkipValidation,
    ValidationInfo,
    model_validator,
)

from oppo.admission import Admission
from oppo.algorithms.base import OF_THE_LOSS, Algorithm
from oppo.algorithms.ppo import PPO
from oppo.config.agents import AgentsSection
from oppo.config.own import NAMED, OWN, Kinds, checked, loss_of
from oppo.config.placement import PlacementSection
from oppo.config.rewards import (
    ENVIRONMENT,
    REWARD_KINDS,
    ModelRewardSection,
    RewardList,
    RewardSection,
    VllmRewardSection,
    file_of,
)
from oppo.config.scorers import ScorerSection, check_scorers, check_teacher
from oppo.config.sections import (
    DataSection,
    EnvironmentSection,
    EvalSection,
    ModelsSection,
    PromptSource,
    RunSection,
    SamplingSection,
    StepSection,
    named,
)
from oppo.declared import (
    MOST,
    STRICT,
    Declared,
    Resume,
    Table,
    adapter,
    changed,
    declared,
)
from oppo.errors import in_toml
from oppo.training import OF_THE_CRITIC, TrainerSettings
from oppo.user_code import is_of_a_file

if TYPE_CHECKING:
    from oppo.losses import Loss


def _algorithm(table: object, info: ValidationInfo) -> Algorithm:
    kind = None if info.context is None else info.context.algorithm
    chosen: Algorithm = PPO() if kind is None else adapter(kind).validate_python(table)
    return checked(chosen)


def _own(table: object, info: ValidationInfo) -> object:
    kinds, name = info.context or Kinds(), str(info.field_name)
    if table and name not in kinds.own:
        raise ValueError(
            f"it holds the settings of a part of your own: name that in step.{name} as file.py:name, or leave it out"
        )
    return adapter(kinds.table(name)).validate_python(table)


def _spanning(table: object, info: ValidationInfo) -> object:
    if not isinstance(table, Mapping):
        return table
    if "total_steps" in table:
        raise ValueError("total_steps is run.steps: leave it out")
    return {**table, "total_steps": info.data["run"].steps if "run" in info.data else MOST - 1}


class Settings(BaseModel):
    """All settings of a run, checked; see :func:`oppo.config.load.load`."""

    model_config = STRICT

    run: Annotated[RunSection, Table()] = RunSection()
    models: Annotated[ModelsSection, Table()]
    rewards: RewardList
    environment: Annotated[EnvironmentSection, Table()] = EnvironmentSection()
    agents: Annotated[AgentsSection, Table()] = AgentsSection()
    placement: Annotated[PlacementSection, Table()] = PlacementSection()
    data: Annotated[DataSection, Table()]
    sampling: Annotated[SamplingSection, Table()] = SamplingSection()
    step: Annotated[StepSection, Table()] = StepSection()
    algorithm: Annotated[SkipValidation[Algorithm], PlainValidator(_algorithm)] = Field({}, validate_default=True)
    admission: Annotated[SkipValidation[object], PlainValidator(_own)] = Field({}, validate_default=True)
    loss: Annotated[SkipValidation[object], PlainValidator(_own)] = Field({}, validate_default=True)
    eval: Annotated[EvalSection, Table()] = EvalSection()
    trainer: Annotated[TrainerSettings, Table(), BeforeValidator(_spanning)] = Field({}, validate_default=True)
    scorers: dict[str, Annotated[ScorerSection, Table()]] = Field({})
    vllm: dict[str, object] = Field({})
    """Arguments of vLLM's engine, by its own names, or its servers; :mod:`oppo.run.engines` checks them before anything
    is loaded."""

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        require_consistent(self)
        return self

    @classmethod
    def of(cls, document: Mapping[str, object]) -> Settings:
        kinds = Kinds.of(document)
        rewards: dict[str, object] = {"rewards": ()} if kinds.scoreless else {}
        environment = document.get("environment")
        if not rewards and isinstance(environment, Mapping) and environment.get("factory"):
            rewards = {"rewards": [{"source": ENVIRONMENT}]}
        return cls.model_validate({**rewards, **document}, context=kinds)

    @property
    def kinds(self) -> Kinds:
        return Kinds.of({"step": {name: getattr(self.step, name) for name in NAMED}})

    def own_admission(self) -> Admission | None:
        """Return a new admission of one's own; ``None`` where ``step.admission`` names one of ours."""
        return cast("Admission | None", self.kinds.make("admission", self.admission, self.step))

    def trained_loss(self) -> Loss:
        return cast("Loss | None", self.kinds.make("loss", self.loss, self.step)) or loss_of(self.algorithm)

    @property
    def shares_weights(self) -> bool:
        """Whether the weights that are trained are those that are served."""
        shares = self.models.share_weights
        alone = not self.step.lookahead and not self.step.stream_updates and self.trains_where_it_serves
        return alone if shares is None else shares

    @property
    def devices(self) -> Mapping[str, tuple[str, ...]]:
        """The devices by model: ``policy``, ``trainer``, ``reference``, ``reward``, ``critic``, ``teacher``.

        A missing teacher counts as on the CPU, so that no other device is looked for.
        """
        found = self.placement.names(self.models.device)
        return found if self.models.teacher else {**found, "teacher": ("cpu",)}

    @property
    def actor_device(self) -> str:
        """The device on which transformers loads the policy here: where it decodes, or else where it is trained.

        Ranks on GPUs have the whole weights on the CPU only. What reads the policy again is then beside the reference.
        """
        devices = self.devices
        if self.serves_here:
            return devices["policy"][0]
        ranks = devices["trainer"]
        by_ranks = len(ranks) > 1 and ranks[0] != "cpu" and "reference" not in self.remote
        return devices["reference"][0] if by_ranks else ranks[0]

    @property
    def serves_here(self) -> bool:
        """Whether transformers decodes with weights that lie in this process."""
        apart = "policy" in self.remote or self.placement.policy_replicas > 1
        return self.models.engine == "transformers" and not apart

    @property
    def trains_where_it_serves(self) -> bool:
        """Whether updates are made on the device of the policy and the critic that transformers serves here, if any.

        Ranks are processes, which share no memory of GPUs.
        """
        devices, models = self.devices, {"critic"} if self.algorithm.has_critic else set()
        if self.serves_here:
            models.add("policy")
        ranks = devices["trainer"]
        if len(ranks) > 1 and ranks[0] != "cpu":
            return False
        served = {device for model in models - self.remote for device in devices[model]}
        return not served or served == set(ranks)

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference: one that is named, or the policy as it began, if the algorithm refers to it."""
        return bool(self.models.reference) or self.algorithm.refers

    @property
    def reward_tables(self) -> Mapping[str, RewardSection]:
        """The rewards by their place in the file: ``rewards.0``, ``rewards.1``, ..."""
        return {f"rewards.{number}": reward for number, reward in enumerate(self.rewards)}

    @property
    def reward_models(self) -> Sequence[str]:
        kinds = ModelRewardSection | VllmRewardSection
        return [each.source for each in self.rewards if isinstance(each, kinds)]

    @property
    def reward_engines(self) -> Mapping[str, VllmRewardSection]:
        """The rewards whose models are served by engines that this run starts, by their place in the file."""
        found = {key: each for key, each in self.reward_tables.items() if isinstance(each, VllmRewardSection)}
        return {key: each for key, each in found.items() if not each.url}

    @property
    def on_vllm(self) -> Mapping[str, ScorerSection]:
        """The reference and the teachers that vLLM serves, by their names."""
        return {name: each for name, each in self.scorers.items() if each.engine == "vllm"}

    @property
    def can_be_remote(self) -> frozenset[str]:
        """The models of this run that can be actors of a cluster."""
        models = self.models
        can = {
            "policy": not self.on_server and not models.shared_trunk and self.run.policy == "thread",
            "reference": self.has_reference and "reference" not in self.on_vllm,
            "reward": any(isinstance(each, ModelRewardSection) for each in self.rewards) and not self.reward_engines,
            "critic": self.algorithm.has_critic and not models.shared_trunk,
            "teacher": bool(models.teachers) and not self.on_vllm.keys() & models.teachers.keys(),
            "trainer": len(self.devices["trainer"]) > 1,
        }
        return frozenset(name for name, possible in can.items() if possible)

    @property
    def remote(self) -> frozenset[str]:
        """The models that are actors of a cluster; of the ``trainer``, every rank but the first."""
        if not self.placement.cluster:
            return frozenset()
        return frozenset(self.placement.remote) or self.can_be_remote - {"policy"}

    @property
    def on_server(self) -> bool:
        """Whether a vLLM server decodes, which others start and end."""
        return "urls" in self.vllm

    @property
    def starts_servers(self) -> bool:
        """Whether vLLM servers decode that the run starts: the replicas of a pool, or one in a cluster."""
        apart = self.placement.policy_replicas > 1 or "policy" in self.remote
        return self.models.engine == "vllm" and apart and not self.on_server

    @property
    def run_directory(self) -> Path:
        """The folder that the run writes."""
        return Path(self.run.directory) / self.run.name

    @property
    def files(self) -> dict[str, Path]:
        """The files and directories that the run reads besides its models, each under the setting that names it."""
        rewards = {f"{key}.source": reward.source for key, reward in self.reward_tables.items()}
        steps = {f"step.{name}": getattr(self.step, name) for name in NAMED}
        code = {**rewards, **steps}
        found = {name: file for name, spec in code.items() if (file := file_of(spec)) is not None}
        prompts = {**named("data.prompts", self.data.prompts), **named("eval.prompts", self.eval.prompts)}
        return (
            {name: each.file for name, each in prompts.items() if each.file is not None}
            | {f"agents.program of {name}": file for name, each in prompts.items() if (file := file_of(each.taskset))}
            | found
            | self.environment.files
            | self.agents.files
            | self.data.files
        )

    def tables(self) -> dict[str, dict[str, object]]:
        """Return every setting as in a file, by section and key; ``None`` for an absent key.

        The sections of the rewards are ``rewards.0``, ``rewards.1``, ...
        """
        found = {
            name: {key: _spelt(getattr(getattr(self, name), key)) for key in keys}
            for name, keys in keys_of(type(self.algorithm), self.kinds).items()
        }
        found |= {key: {**asdict(reward)} for key, reward in self.reward_tables.items()}
        found |= {"scorers": {name: asdict(each) for name, each in self.scorers.items()}} if self.scorers else {}
        return {**found, "vllm": dict(self.vllm)} if self.vllm else found

    def spanning(self, steps: int) -> Settings:
        """Return these settings with a learning-rate schedule that spans ``steps``, as many as the prompts last for."""
        return self.model_copy(update={"trainer": replace(self.trainer, total_steps=steps)})

    def changed(self, changes: Mapping[str, Mapping[str, object] | Sequence[object]]) -> Settings:
        """Return these settings with ``changes``, by section and key; the list of rewards is a whole one."""
        document = self.document()
        for name, keys in changes.items():
            document[name] = {**document.get(name, {}), **keys} if isinstance(keys, Mapping) else keys
        return Settings.of(document)

    def document(self) -> dict[str, Any]:
        """Return the resolved file, parsed: resolving it in any folder gives these settings again."""
        found: dict[str, Any] = {
            name: {key: value for key, value in keys.items() if value is not None}
            for name, keys in self.tables().items()
        }
        rewards = [found.pop(key) for key in self.reward_tables]
        return {**found, "rewards": rewards}

    def toml(self) -> str:
        """Return the resolved file: loading it from any folder gives these settings again."""
        return tomli_w.dumps(self.document())


def _spelt(value: object) -> object:
    if isinstance(value, tuple) and any(isinstance(each, PromptSource) for each in value):
        return [each.table() for each in cast("tuple[PromptSource, ...]", value)]
    return value


def keys_of(algorithm: type[Algorithm], kinds: Kinds | None = None) -> dict[str, dict[str, Declared]]:
    """Return the declaration of every key for an algorithm, and for parts of one's own, by section and key."""
    named = kinds or Kinds()
    tables: dict[str, Any] = {name: each.annotation for name, each in Settings.model_fields.items()}
    tables |= {"algorithm": algorithm, **{name: named.table(name) for name in OWN if name in named.own}}
    return {
        name: {key: each for key, each in declared(kind).items() if key != "total_steps"}
        for name, kind in tables.items()
        if isinstance(kind, type) and is_dataclass(kind)
    }


@cache
def changeable(how: Resume) -> frozenset[str]:
    """Return the keys that may change in this way when a run is resumed; of rewards as ``rewards.N.key``."""
    kinds = [("rewards.N", declared(kind)) for kind in REWARD_KINDS.values()]
    return frozenset(
        f"{section}.{key}"
        for section, keys in [*keys_of(PPO).items(), *kinds]
        for key, each in keys.items()
        if each.resume == how
    )


def _refuse_idle(settings: Settings) -> None:
    algorithm: Any = settings.algorithm
    penalty = {"kl", "kl_estimator"} if getattr(algorithm, "kl_in", "") == "loss" else set()
    if idle := changed(algorithm, OF_THE_LOSS | penalty):
        names = ", ".join(f"algorithm.{name}" for name in idle)
        raise ValueError(
            f"step.loss = {settings.step.loss!r} is trained in place of the algorithm's loss, which alone reads "
            f"{names}: leave that out, or make it a setting of yours in [loss]"
        )


def _check_scores(settings: Settings) -> None:
    by_reward = getattr(settings.algorithm, "scale_scores", "") == "each_reward"
    if by_reward and settings.reward_models and len(settings.rewards) == 1:
        raise ValueError(
            "algorithm.scale_scores = 'each_reward' compares each of several rewards, and [[rewards]] has one, a "
            "model: give several with names, or another scale_scores"
        )
    if settings.rewards or settings.agents.program:
        return
    given = {"eval.prompts": bool(settings.eval.prompts), "run.keep_best = true": settings.run.keep_best}
    if found := [key for key, is_given in given.items() if is_given]:
        raise ValueError(
            f"{' and '.join(found)} is about scores, and there are none without [[rewards]]: give a reward, or leave "
            "that out"
        )


def _check_environment(settings: Settings) -> None:
    settings.environment.check_tools(settings.data.tools)
    held_out, rewards = settings.eval.prompts, bool(settings.rewards)
    settings.agents.check(settings.environment, settings.data, rewards=rewards, held_out=held_out)
    for key, reward in settings.reward_tables.items():
        if reward.source == ENVIRONMENT and not settings.environment.factory:
            raise ValueError(
                f"{key}.source = {ENVIRONMENT!r} is what get_reward() of an environment says, and environment.factory "
                "names none: give a class of a file, or another source"
            )


OF_THE_CRITIC_MODEL: Final = frozenset({"critic", "shared_trunk"})
"""The keys of ``[models]`` for a critic."""


def require_consistent(settings: Settings) -> None:
    """Check the settings of each section against those of the others."""
    settings.own_admission()  # which may refuse its settings
    _check_environment(settings)
    if settings.step.loss:
        _refuse_idle(settings)
    models = settings.models
    check_teacher(models.teacher, settings.placement.teacher, settings.algorithm, settings.step.algorithm)
    check_scorers(settings.scorers, models, refers=settings.has_reference)
    _check_scores(settings)
    if settings.run.deterministic:
        _require_exactness(settings)
    if settings.models.engine == "vllm":
        _require_possible_on_vllm(settings)
    elif settings.vllm:
        raise ValueError(
            f"[vllm] holds {', '.join(settings.vllm)}, which only vLLM reads, and models.engine = "
            f"{settings.models.engine!r}: set models.engine = 'vllm', or leave [vllm] out"
        )
    if settings.step.lookahead and settings.models.share_weights:
        raise ValueError(
            f"step.lookahead = {settings.step.lookahead} trains while the next step is decoded, and "
            "models.share_weights = true would change the weights meanwhile: leave share_weights out"
        )
    _require_possible_placement(settings)
    if settings.placement.policy_replicas > 1:
        _check_replicas(settings)
    if settings.placement.share == "sleep":
        _check_sleep(settings)
    if settings.step.weight_sync == "in-flight":
        _require_possible_in_flight(settings)
    if settings.step.stream_updates:
        _require_a_sum(settings)
    if not settings.models.lora_rank and (given := changed(settings.models, {"lora_experts", "lora"})):
        raise ValueError(
            f"models.{' and models.'.join(given)} would be of new adapters, and models.lora_rank = 0 adds none: give a "
            "rank, or leave that out"
        )
    if settings.trainer.router_replay and settings.algorithm.corrects:
        raise ValueError(
            "trainer.router_replay = true trains with the experts that were chosen while decoding, and the correction "
            "for stale tokens in [algorithm] recomputes log-probs with experts chosen anew, so their ratio would be "
            "that of two models: leave one of the two out"
        )
    apart = settings.run.trainer == "process" or len(settings.devices["trainer"]) > 1
    if apart and is_of_a_file(kind := type(settings.trained_loss())):
        key = "run.trainer = 'process'" if settings.run.trainer == "process" else "placement.trainer, with ranks,"
        raise ValueError(
            f"{key} takes the loss to another process, which cannot import {kind.__name__} from a "
            "file: leave that out, or keep the class in an installed package"
        )
    if not settings.eval.prompts:
        _require_no_evaluation(settings)
    if not settings.algorithm.has_critic:
        _require_no_critic(settings)
    units, unit = _units(settings)
    if units % settings.trainer.minibatches:
        raise ValueError(
            f"trainer.minibatches = {settings.trainer.minibatches} does not divide the {units} {unit} of step.batch = "
            f"{settings.step.batch}: optimizer steps would be of several sizes; expected a divisor"
        )
    if getattr(settings.algorithm, "selects", False) and settings.step.admission == "tail-batched":
        raise ValueError(
            "step.admission = 'tail-batched' begins late responses anew in a later step, and "
            "algorithm.dynamic_sampling = true needs whole groups in this one: choose another admission, or set "
            "dynamic_sampling = false"
        )
    if settings.algorithm.responses > 1 and settings.sampling.temperature == 0:
        raise ValueError(
            f"step.algorithm = {settings.step.algorithm!r} compares the responses to a prompt with one another, and "
            "sampling.temperature = 0 makes them all the same: give one above 0"
        )


def _units(settings: Settings) -> tuple[int, str]:
    batch, responses = settings.step.batch, settings.algorithm.responses
    if responses > 1 and settings.trainer.minibatches > 1 and settings.trained_loss().unit == "group":
        return batch // responses, "groups"
    return batch, "responses"


def _require_a_sum(settings: Settings) -> None:
    algorithm, trainer = settings.algorithm, settings.trainer
    scale = getattr(algorithm, "scale_scores", "")
    faults = {
        "run.deterministic = true, and parts come in an order that depends on timing": settings.run.deterministic,
        "models.share_weights = true, and gradients are computed while responses are decoded": (
            settings.models.share_weights is True
        ),
        f"trainer.epochs = {trainer.epochs}": trainer.epochs > 1,
        f"trainer.minibatches = {trainer.minibatches}": trainer.minibatches > 1,
        f"step.algorithm = {settings.step.algorithm!r}, whose advantages are not those of a group alone": (
            algorithm.has_critic or algorithm.responses < 2
        ),
        f"trainer.router_aux_loss = {trainer.router_aux_loss}": bool(trainer.router_aux_loss),
        f"algorithm.scale_scores = {scale!r}": scale in {"batch", "each_reward"},
        "algorithm.score_norm = true": getattr(algorithm, "score_norm", False),
        "algorithm.kl_target": getattr(algorithm, "kl_target", None) is not None,
        "algorithm.dynamic_sampling = true": getattr(algorithm, "selects", False),
    }
    found = [words for words, is_so in faults.items() if is_so]
    loss = settings.trained_loss()
    if not found and getattr(loss, "divisor", None) is None:
        found = [f"a loss, {type(loss).__name__}, that divides by sizes of several kinds"]
    if found:
        raise ValueError(
            f"step.stream_updates = true trains a group before the batch is complete, which does not go with "
            f"{'; '.join(found)}: change that, or leave stream_updates out"
        )


def _require_exactness(settings: Settings) -> None:
    models = settings.models
    if models.engine == "vllm":
        raise ValueError(
            "run.deterministic makes every bit independent of timing, and vLLM chooses its batches by time: leave it "
            "out, or set models.engine = 'transformers'"
        )
    rewards = [key for key, each in settings.reward_tables.items() if isinstance(each, VllmRewardSection)]
    if on_vllm := [*rewards, *(f"scorers.{name}" for name in settings.on_vllm)]:
        raise ValueError(
            f"run.deterministic makes every bit independent of timing, and {on_vllm[0]}.engine = 'vllm' has vLLM "
            "choose its batches by time: leave one of the two out"
        )
    if settings.step.admission == "adaptive":
        raise ValueError(
            "run.deterministic makes every bit independent of timing, and step.admission = 'adaptive' decides by time: "
            "choose another admission"
        )
    if settings.step.admission == "continuous":
        raise ValueError(
            "run.deterministic makes every bit independent of timing, and with step.admission = 'continuous' rollouts "
            "join others when a place is free: choose another admission"
        )
    if settings.step.weight_sync == "in-flight":
        raise ValueError(
            "run.deterministic makes every bit independent of timing, and step.weight_sync = 'in-flight' syncs "
            "weights when they are ready: leave one of the two out"
        )
    if models.dtype not in {"float32", "by-device"}:
        raise ValueError(f"run.deterministic needs models.dtype = 'float32', got {models.dtype!r}")
    for model, devices in settings.devices.items():
        for device in devices:
            if device.startswith("cuda"):
                key = settings.placement.key_of(model)
                raise ValueError(f"run.deterministic needs {key} = 'cpu' (or 'auto'), got {device!r}")


def _require_possible_placement(settings: Settings) -> None:
    models, devices = settings.models, settings.devices
    if models.share_weights and not settings.trains_where_it_serves:
        raise ValueError(
            f"models.share_weights = true trains the weights that are served, and placement.trainer = "
            f"{list(devices['trainer'])} is not where they are served: leave one of the two out"
        )
    if impossible := settings.remote - settings.can_be_remote:
        _refuse_remote(settings, min(impossible))
    for model in sorted(settings.remote):
        there = devices[model][1:] if model == "trainer" else devices[model]
        if numbered := [device for device in there if ":" in device]:
            raise ValueError(
                f"{settings.placement.key_of(model)} names {numbered[0]!r}, and an actor has the GPU that Ray gives "
                "it: expected 'cuda' or 'cpu'"
            )
    if models.shared_trunk and devices["critic"][0] != settings.actor_device:
        raise ValueError(
            f"models.shared_trunk = true makes the critic a head on the policy's trunk, which is on "
            f"{settings.actor_device!r}, and {settings.placement.key_of('critic')} = {devices['critic'][0]!r}: set "
            f"placement.critic = {settings.actor_device!r}"
        )
    ranks = devices["trainer"]
    if len({device.partition(":")[0] for device in ranks}) > 1:
        raise ValueError(
            f"placement.trainer = {list(ranks)} has devices of several kinds, and ranks exchange tensors of one: name "
            "GPUs only, or 'cpu' only"
        )
    if ranks[0] != "cpu" and len(set(ranks)) < len(ranks) and "trainer" not in settings.remote:
        raise ValueError(
            f"placement.trainer = {list(ranks)} names a device twice: expected one of its own for each rank, or a "
            "cluster for all ranks but the first (--ray, placement.cluster)"
        )
    if settings.placement.cluster and not settings.remote:
        raise ValueError(
            "placement.cluster is given, and no model of this run would be in it: the rewards are functions, there is "
            "no reference, critic or second rank; name the policy in placement.remote, or leave the cluster out"
        )
    if len(ranks) > 1 and settings.run.trainer == "process":
        raise ValueError(
            f"run.trainer = 'process' is one process, and placement.trainer has {len(ranks)} ranks, each a process: "
            "leave run.trainer out"
        )
    if not settings.algorithm.has_critic and settings.placement.critic:
        raise ValueError(
            f"step.algorithm = {settings.step.algorithm!r} has no critic and cannot use placement.critic = "
            f"{settings.placement.critic!r}: leave that out"
        )


def _check_replicas(settings: Settings) -> None:
    given = f"placement.policy_replicas = {settings.placement.policy_replicas}"
    if settings.on_server:
        raise ValueError(f"{given} starts engines, and vllm.urls names servers, one engine each: leave it out")
    faults = {
        "run.deterministic = true, and bits depend on the rollouts of an engine": settings.run.deterministic,
        "run.policy = 'process', which replicas are by themselves": settings.run.policy == "process",
        "models.shared_trunk = true, which makes the critic a head on weights of this process": (
            settings.models.shared_trunk
        ),
    }
    if found := [words for words, is_so in faults.items() if is_so]:
        raise ValueError(f"{given} does not go with {'; '.join(found)}: change that, or leave it out")


def _check_sleep(settings: Settings) -> None:
    step, engine = settings.step, settings.models.engine
    faults = {
        f"models.engine = {engine!r}, which cannot sleep: only 'vllm' can": engine != "vllm",
        "vllm.urls, since others start and end servers": settings.on_server,
        "placement.policy_replicas or placement.remote, since servers decode then": settings.starts_servers,
        f"step.lookahead = {step.lookahead}, which decodes while the policy is trained": step.lookahead > 0,
        "step.stream_updates = true, which decodes while the policy is trained": step.stream_updates,
        "step.kv_on_sync = 'keep', since an engine that sleeps has no KV cache": step.kv_on_sync == "keep",
    }
    if found := [words for words, is_so in faults.items() if is_so]:
        raise ValueError(
            "placement.share = 'sleep' lets the engine sleep while the policy is trained, which does not go with "
            f"{'; '.join(found)}: change that, or leave share out"
        )


def _refuse_remote(settings: Settings, model: str) -> NoReturn:
    why = {
        "policy": _why_the_policy_is_here(settings),
        "reference": "scorers.reference.engine = 'vllm' serves it"
        if "reference" in settings.on_vllm
        else f"step.algorithm = {settings.step.algorithm!r} refers to none, and models.reference names none",
        "reward": f"{next(iter(settings.reward_engines))}.engine = 'vllm' starts an engine on this machine"
        if settings.reward_engines
        else "[[rewards]] names no model that transformers serves",
        "critic": "models.shared_trunk = true makes it a head on the policy's trunk"
        if settings.models.shared_trunk
        else f"step.algorithm = {settings.step.algorithm!r} has none",
        "teacher": "vLLM serves one ([scorers])"
        if settings.on_vllm.keys() & settings.models.teachers.keys()
        else "models.teacher names none",
        "trainer": "its first rank is here, and placement.trainer names no other",
    }
    raise ValueError(f"placement.remote has {model!r}, and {why[model]}: leave it out")


def _why_the_policy_is_here(settings: Settings) -> str:
    if settings.on_server:
        return "vllm.urls names the servers of it, which others start"
    if settings.models.shared_trunk:
        return "models.shared_trunk = true makes the critic a head on its trunk"
    return f"run.policy = {settings.run.policy!r} serves it on this machine"


def _require_possible_in_flight(settings: Settings) -> None:
    if not settings.step.lookahead:
        raise ValueError(
            "step.weight_sync = 'in-flight' syncs weights while the next step is decoded, and with step.lookahead "
            "= 0 nothing is decoded then: set step.lookahead to 1 or more, or leave weight_sync out"
        )
    if settings.models.shared_trunk:
        raise ValueError(
            "step.weight_sync = 'in-flight' changes the policy while the critic reads, and models.shared_trunk = true "
            "makes them one model: leave one of the two out"
        )


def _require_possible_on_vllm(settings: Settings) -> None:
    if settings.run.policy == "process":
        raise ValueError(
            "run.policy = 'process' places an actor of transformers, and vLLM has processes of its own: leave it out, "
            "or set models.engine = 'transformers'"
        )
    if settings.sampling.top_p < 1 and not settings.sampling.top_k:
        raise ValueError(
            f"sampling.top_p = {settings.sampling.top_p} draws from the most likely tokens, and vLLM does not say "
            "which those were, though log-probs are among them: bound them by sampling.top_k too, or set "
            "models.engine = 'transformers'"
        )


def _require_no_evaluation(settings: Settings) -> None:
    if given := changed(settings.eval, declared(EvalSection).keys() - {"prompts", "seed"}):
        raise ValueError(
            f"[eval] has {', '.join(given)}, and nothing is evaluated without held-out prompts: give eval.prompts, or "
            "leave that out"
        )


def _require_no_critic(settings: Settings) -> None:
    given = {f"models.{key}": value for key, value in changed(settings.models, OF_THE_CRITIC_MODEL).items()}
    given |= {f"trainer.{key}": value for key, value in changed(settings.trainer, OF_THE_CRITIC).items()}
    if given:
        raise ValueError(
            f"step.algorithm = {settings.step.algorithm!r} has no critic and cannot use "
            f"{', '.join(f'{name} = {in_toml(value)}' for name, value in given.items())}: leave that out"
        )
