"""The tables of a settings file, each checked by itself, and what follows from them together.

``[trainer]`` is :class:`oppo.TrainerSettings`; ``[algorithm]`` is the class that ``step.algorithm`` names
(:mod:`oppo.algorithms`); ``[admission]`` and ``[loss]`` hold the settings of your own parts (:mod:`oppo.config.own`);
``[vllm]`` holds arguments of vLLM's engine, by its own names, or the URLs of its servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    SkipValidation,
    ValidationInfo,
)

from oppo.admission import Admission
from oppo.algorithms.base import Algorithm
from oppo.algorithms.ppo import PPO
from oppo.config.environment import AgentsSection, EnvironmentSection
from oppo.config.own import (
    NAMED,
    OWN,
    algorithm_of,
    checked,
    extension,
    loss_of,
    made,
    table_of,
)
from oppo.config.rewards import (
    ENVIRONMENT,
    REWARD_KINDS,
    ModelRewardSection,
    RewardList,
    RewardSection,
    VllmRewardSection,
    file_of,
)
from oppo.config.scorers import ScorerSection
from oppo.config.sections import (
    DataSection,
    EvalSection,
    ModelsSection,
    PlacementSection,
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
    declared,
)
from oppo.training import TrainerSettings

if TYPE_CHECKING:
    from oppo.losses import Loss


def table_in(document: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return a table of a document that is not checked yet; an empty one if there is none."""
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


def _algorithm(table: object, info: ValidationInfo) -> Algorithm:
    kind = algorithm_of((info.context or {}).get("step", {}))
    chosen: Algorithm = PPO() if kind is None else adapter(kind).validate_python(table)
    return checked(chosen)


def _own(table: object, info: ValidationInfo) -> object:
    name = str(info.field_name)
    spec = (info.context or {}).get("step", {}).get(name)
    if table and extension(name, spec) is None:
        raise ValueError(
            f"it holds the settings of a part of your own: name that in step.{name} as file.py:name, or leave it out"
        )
    return adapter(table_of(name, spec)).validate_python(table)


def _spanning(table: object, info: ValidationInfo) -> object:
    if not isinstance(table, Mapping):
        return table
    if "total_steps" in table:
        raise ValueError("total_steps is run.steps: leave it out")
    return {**table, "total_steps": info.data["run"].steps if "run" in info.data else MOST - 1}


class Tables(BaseModel):
    """The tables of a settings file."""

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
    """Arguments of vLLM's engine, by its own names, or its servers; checked before anything is loaded."""

    @classmethod
    def of(cls, document: Mapping[str, object]) -> Self:
        step, agents, environment = (table_in(document, name) for name in ("step", "agents", "environment"))
        scoreless = bool(agents.get("program") or getattr(algorithm_of(step), "scoreless", False))
        rewards: dict[str, object] = {"rewards": ()} if scoreless else {}
        if not scoreless and environment.get("factory"):
            rewards = {"rewards": [{"source": ENVIRONMENT}]}
        return cls.model_validate({**rewards, **document}, context={"step": step, "scoreless": scoreless})

    def own_admission(self) -> Admission | None:
        return cast("Admission | None", made("admission", self.admission, self.step))

    def trained_loss(self) -> Loss:
        return cast("Loss | None", made("loss", self.loss, self.step)) or loss_of(self.algorithm)

    @property
    def shares_weights(self) -> bool:
        """Whether the weights that are trained are those that are served."""
        shares = self.models.share_weights
        alone = not self.step.lookahead and not self.step.stream_updates and self.trains_where_it_serves
        return alone if shares is None else shares

    @property
    def devices(self) -> Mapping[str, tuple[str, ...]]:
        # without a teacher no device of one is looked for
        found = self.placement.names(self.models.device)
        return found if self.models.teacher else {**found, "teacher": ("cpu",)}

    @property
    def actor_device(self) -> str:
        """The device on which transformers loads the policy here: where it decodes, or else where it is trained."""
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
        """Whether updates are made on the device of the policy and the critic that transformers serves here, if any."""
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
        return bool(self.models.reference) or self.algorithm.refers

    @property
    def reward_tables(self) -> Mapping[str, RewardSection]:
        return {f"rewards.{number}": reward for number, reward in enumerate(self.rewards)}

    @property
    def reward_models(self) -> Sequence[str]:
        kinds = ModelRewardSection | VllmRewardSection
        return [each.source for each in self.rewards if isinstance(each, kinds)]

    @property
    def reward_engines(self) -> Mapping[str, VllmRewardSection]:
        """The rewards that engines of this run serve, by their place in the file."""
        found = {key: each for key, each in self.reward_tables.items() if isinstance(each, VllmRewardSection)}
        return {key: each for key, each in found.items() if not each.url}

    @property
    def on_vllm(self) -> Mapping[str, ScorerSection]:
        """The reference and the teachers that vLLM serves."""
        return {name: each for name, each in self.scorers.items() if each.engine == "vllm"}

    @property
    def can_be_remote(self) -> frozenset[str]:
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
        """The models in actors of a cluster; of the ``trainer``, every rank but the first."""
        if not self.placement.cluster:
            return frozenset()
        return frozenset(self.placement.remote) or self.can_be_remote - {"policy"}

    @property
    def on_server(self) -> bool:
        """Whether servers decode that others start (``vllm.urls``)."""
        return "urls" in self.vllm

    @property
    def starts_servers(self) -> bool:
        """Whether vLLM servers decode that the run starts: the replicas of a pool, or one in a cluster."""
        apart = self.placement.policy_replicas > 1 or "policy" in self.remote
        return self.models.engine == "vllm" and apart and not self.on_server

    @property
    def run_directory(self) -> Path:
        return Path(self.run.directory) / self.run.name

    @property
    def files(self) -> dict[str, Path]:
        """Files and directories that the run reads besides its models, by the settings that name them."""
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

    @property
    def keys(self) -> dict[str, dict[str, Declared]]:
        return keys_of(type(self.algorithm), {name: getattr(self.step, name) for name in OWN})

    def tables(self) -> dict[str, dict[str, object]]:
        """Return all settings by section and key, ``None`` for an absent key; rewards are ``rewards.0`` and so on."""
        found = {
            name: {key: _spelt(getattr(getattr(self, name), key)) for key in keys} for name, keys in self.keys.items()
        }
        found |= {key: {**asdict(reward)} for key, reward in self.reward_tables.items()}
        found |= {"scorers": {name: asdict(each) for name, each in self.scorers.items()}} if self.scorers else {}
        return {**found, "vllm": dict(self.vllm)} if self.vllm else found

    def spanning(self, steps: int) -> Self:
        """Return these settings with a learning-rate schedule of ``steps``."""
        return self.model_copy(update={"trainer": replace(self.trainer, total_steps=steps)})

    def changed(self, changes: Mapping[str, Mapping[str, object] | Sequence[object]]) -> Self:
        """Return these settings with ``changes`` by section and key; a list of rewards replaces all of them."""
        document = self.document()
        for name, keys in changes.items():
            document[name] = {**document.get(name, {}), **keys} if isinstance(keys, Mapping) else keys
        return type(self).of(document)

    def document(self) -> dict[str, Any]:
        """Return the resolved file, parsed: resolved in any folder, it gives these settings again."""
        found: dict[str, Any] = {
            name: {key: value for key, value in keys.items() if value is not None}
            for name, keys in self.tables().items()
        }
        rewards = [found.pop(key) for key in self.reward_tables]
        return {**found, "rewards": rewards}

    def toml(self) -> str:
        return tomli_w.dumps(self.document())


def _spelt(value: object) -> object:
    if isinstance(value, tuple) and any(isinstance(each, PromptSource) for each in value):
        return [each.table() for each in cast("tuple[PromptSource, ...]", value)]
    return value


def keys_of(algorithm: type[Algorithm], step: Mapping[str, object] = {}) -> dict[str, dict[str, Declared]]:
    """Return the declarations of all keys by section, for an algorithm and the user extensions that ``step`` names."""
    tables: dict[str, Any] = {name: each.annotation for name, each in Tables.model_fields.items()}
    own = {name: table_of(name, step[name]) for name in OWN if extension(name, step.get(name)) is not None}
    return {
        name: {key: each for key, each in declared(kind).items() if key != "total_steps"}
        for name, kind in (tables | {"algorithm": algorithm} | own).items()
        if isinstance(kind, type) and is_dataclass(kind)
    }


@cache
def changeable(how: Resume) -> frozenset[str]:
    """Return the keys that may change so when a run is resumed; ``rewards.N.key`` is a key of any reward."""
    kinds = [("rewards.N", declared(kind)) for kind in REWARD_KINDS.values()]
    return frozenset(
        f"{section}.{key}"
        for section, keys in [*keys_of(PPO).items(), *kinds]
        for key, each in keys.items()
        if each.resume == how
    )
