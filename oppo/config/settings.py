"""The settings of a training run: the tables of its file, what follows from them, and the rules between them.

``[trainer]`` is :class:`oppo.TrainerSettings`; ``[algorithm]`` is the class that ``step.algorithm`` names
(:mod:`oppo.algorithms`); ``[admission]`` and ``[loss]`` hold the settings of user extensions
(:mod:`oppo.config.extensions`); ``[vllm]`` holds arguments of vLLM's engine, by its own names, or the URLs of its
servers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeAlias, cast

import tomli_w
from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, SkipValidation, ValidationInfo, model_validator

from oppo.admission import Admission
from oppo.algorithms.base import OF_THE_LOSS, Algorithm
from oppo.algorithms.distill import Distill
from oppo.algorithms.ppo import PPO, ReinforcePP
from oppo.config.environment import AgentsSection, EnvironmentSection, environment_fault
from oppo.config.extensions import NAMED, OWN, algorithm_of, checked, extension, loss_of, made, table_of
from oppo.config.scorers import (
    ENVIRONMENT,
    REWARD_KINDS,
    ModelRewardSection,
    RewardList,
    RewardSection,
    ScorerSection,
    TeacherSection,
    VllmRewardSection,
    file_of,
    teacher_fault,
)
from oppo.config.sections import (
    ROWS,
    VERIFIERS,
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
from oppo.declared import MOST, STRICT, Declared, Resume, Table, adapter, changed, declared, table_in
from oppo.errors import in_toml
from oppo.training import OF_THE_CRITIC, TrainerSettings
from oppo.user_code import is_of_a_file

if TYPE_CHECKING:
    from oppo.losses import Loss


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


class Settings(BaseModel):
    """All settings of a run, checked; see :func:`oppo.config.load.load_settings`."""

    model_config = STRICT

    run: Annotated[RunSection, Table()] = RunSection()
    models: Annotated[ModelsSection, Table()]
    rewards: RewardList
    teacher: Annotated[TeacherSection, Table()] = TeacherSection()
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        self.own_admission()  # which may refuse its settings
        for words, applies in RULES.items():
            if found := applies(self):
                raise ValueError(words.format(s=self, found=found))
        return self

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
        shares = self.models.share_weights
        alone = not self.step.lookahead and not self.step.stream_updates and self.trains_where_it_serves
        return alone if shares is None else shares

    @property
    def devices(self) -> Mapping[str, tuple[str, ...]]:
        # without a teacher no device of one is looked for
        found = self.placement.names(self.models.device)
        return found if self.teachers else {**found, "teacher": ("cpu",)}

    @property
    def teachers(self) -> Mapping[str, str]:
        return {"teacher": self.models.policy} if self.teacher.own else self.models.teachers

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
        found = {key: each for key, each in self.reward_tables.items() if isinstance(each, VllmRewardSection)}
        return {key: each for key, each in found.items() if not each.url}

    @property
    def on_vllm(self) -> Mapping[str, ScorerSection]:
        return {name: each for name, each in self.scorers.items() if each.engine == "vllm"}

    @property
    def can_be_remote(self) -> frozenset[str]:
        models = self.models
        can = {
            "policy": not self.on_server and not models.shared_trunk and self.run.policy == "thread",
            "reference": self.has_reference and "reference" not in self.on_vllm,
            "reward": any(isinstance(each, ModelRewardSection) for each in self.rewards) and not self.reward_engines,
            "critic": self.algorithm.has_critic and not models.shared_trunk,
            "teacher": bool(self.teachers) and not self.on_vllm.keys() & self.teachers.keys(),
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
        return "urls" in self.vllm

    @property
    def starts_servers(self) -> bool:
        apart = self.placement.policy_replicas > 1 or "policy" in self.remote
        return self.models.engine == "vllm" and apart and not self.on_server

    @property
    def sources(self) -> Sources:
        return {**named("data.prompts", self.data.prompts), **named("eval.prompts", self.eval.prompts)}

    @property
    def run_directory(self) -> Path:
        return Path(self.run.directory) / self.run.name

    @property
    def files(self) -> dict[str, Path]:
        code = {
            **{f"agents.program of {name}": each.taskset for name, each in self.sources.items()},
            **{f"{key}.source": reward.source for key, reward in self.reward_tables.items()},
            **{f"step.{name}": getattr(self.step, name) for name in NAMED},
        }
        return (
            {name: each.file for name, each in self.sources.items() if each.file is not None}
            | {name: file for name, spec in code.items() if (file := file_of(spec)) is not None}
            | self.environment.files
            | self.agents.files
            | self.data.files
        )

    @property
    def keys(self) -> dict[str, dict[str, Declared]]:
        return keys_of(type(self.algorithm), {name: getattr(self.step, name) for name in OWN})

    def tables(self) -> dict[str, dict[str, object]]:
        found = {
            name: {key: _spelt(getattr(getattr(self, name), key)) for key in keys} for name, keys in self.keys.items()
        }
        found |= {key: {**asdict(reward)} for key, reward in self.reward_tables.items()}
        found |= {"scorers": {name: asdict(each) for name, each in self.scorers.items()}} if self.scorers else {}
        return {**found, "vllm": dict(self.vllm)} if self.vllm else found

    def spanning(self, steps: int) -> Self:
        run = replace(self.run, steps=min(steps, self.run.steps))
        return self.model_copy(update={"run": run, "trainer": replace(self.trainer, total_steps=steps)})

    def changed(self, changes: Mapping[str, Mapping[str, object] | Sequence[object]]) -> Self:
        document = self.document()
        for name, keys in changes.items():
            document[name] = {**document.get(name, {}), **keys} if isinstance(keys, Mapping) else keys
        return type(self).of(document)

    def document(self) -> dict[str, Any]:
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
    tables: dict[str, Any] = {name: each.annotation for name, each in Settings.model_fields.items()}
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


def _those(faults: Mapping[str, object]) -> str:
    return "; ".join(words for words, holds in faults.items() if holds)


Sources: TypeAlias = Mapping[str, PromptSource]


def _first_source(sources: Sources, holds: Callable[[PromptSource], object]) -> tuple[str, PromptSource] | None:
    return next((each for each in sources.items() if holds(each[1])), None)


def _idle_of_source(sources: Sources) -> tuple[str, str, str, str] | None:
    for key, source in sources.items():
        of_others = {"split", "subset", "column"} if source.taskset else {"config"}
        if idle := sorted(changed(source, of_others)):
            other = "a taskset has no such" if source.taskset else "only a taskset has one"
            return key, source.path, idle[0], other
    return None


def _idle_of_loss(algorithm: Any) -> str:
    penalty = {"kl", "kl_estimator"} if getattr(algorithm, "kl_in", "") == "loss" else set()
    return ", ".join(f"algorithm.{name}" for name in changed(algorithm, OF_THE_LOSS | penalty))


def _unknown_scorer(scorers: Iterable[str], known: Sequence[str]) -> tuple[str, str, str] | None:
    for name in (name for name in scorers if name not in known):
        expected = f"expected {' or '.join(known)}" if known else "this run has neither a reference nor a teacher"
        role = name.partition(".")[0]
        remedy = f"name one in models.{role}" if role in {"reference", "teacher"} else "correct its name"
        return json.dumps(name) if "." in name else name, expected, remedy
    return None


def _by_timing(s: Settings) -> str:
    rewards = [key for key, each in s.reward_tables.items() if isinstance(each, VllmRewardSection)]
    step, batched = s.step, next(iter([*rewards, *(f"scorers.{name}" for name in s.on_vllm)]), "")
    placed = [(s.placement.key_of(model), device) for model, devices in s.devices.items() for device in devices]
    gpus = {f"{key} = {device!r}: only 'cpu' or 'auto'": True for key, device in placed if device.startswith("cuda")}
    return _those(
        {
            "models.engine = 'vllm', which chooses its batches by time": s.models.engine == "vllm",
            f"{batched}.engine = 'vllm', which chooses its batches by time": batched,
            "step.admission = 'adaptive', which decides by time": step.admission == "adaptive",
            "step.admission = 'continuous', in which rollouts join others when a place is free": (
                step.admission == "continuous"
            ),
            "step.weight_sync = 'in-flight', which syncs weights when they are ready": step.weight_sync == "in-flight",
            f"models.dtype = {s.models.dtype!r}: only 'float32'": s.models.dtype not in {"float32", "by-device"},
            **gpus,
        }
    )


def _why_here(s: Settings) -> tuple[str, str] | None:
    if not (impossible := s.remote - s.can_be_remote):
        return None
    named_algorithm = f"step.algorithm = {s.step.algorithm!r}"
    why = {
        "policy": "vllm.urls names the servers of it, which others start"
        if s.on_server
        else "models.shared_trunk = true makes the critic a head on its trunk"
        if s.models.shared_trunk
        else f"run.policy = {s.run.policy!r} serves it on this machine",
        "reference": "scorers.reference.engine = 'vllm' serves it"
        if "reference" in s.on_vllm
        else f"{named_algorithm} refers to none, and models.reference names none",
        "reward": f"{next(iter(s.reward_engines))}.engine = 'vllm' starts an engine on this machine"
        if s.reward_engines
        else "[[rewards]] names no model that transformers serves",
        "critic": "models.shared_trunk = true makes it a head on the policy's trunk"
        if s.models.shared_trunk
        else f"{named_algorithm} has none",
        "teacher": "vLLM serves one ([scorers])"
        if s.on_vllm.keys() & s.models.teachers.keys()
        else "models.teacher names none",
        "trainer": "its first rank is here, and placement.trainer names no other",
    }
    return min(impossible), why[min(impossible)]


def _numbered(
    placement: PlacementSection, devices: Mapping[str, Sequence[str]], remote: Collection[str]
) -> tuple[str, str] | None:
    for model in sorted(remote):
        there = devices[model][1:] if model == "trainer" else devices[model]
        for device in (device for device in there if ":" in device):
            return placement.key_of(model), device
    return None


def _unlike_replicas(s: Settings) -> str:
    return _those(
        {
            "vllm.urls, which name servers, one engine each": s.on_server,
            "run.deterministic = true, and bits depend on the rollouts of an engine": s.run.deterministic,
            "run.policy = 'process', which replicas are by themselves": s.run.policy == "process",
            "models.shared_trunk = true, which makes the critic a head on weights of this process": (
                s.models.shared_trunk
            ),
        }
    )


def _unlike_sleep(s: Settings) -> str:
    step, engine = s.step, s.models.engine
    return _those(
        {
            f"models.engine = {engine!r}, which cannot sleep: only 'vllm' can": engine != "vllm",
            "vllm.urls, since others start and end servers": s.on_server,
            "placement.policy_replicas or placement.remote, since servers decode then": s.starts_servers,
            f"step.lookahead = {step.lookahead}, which decodes while the policy is trained": step.lookahead > 0,
            "step.stream_updates = true, which decodes while the policy is trained": step.stream_updates,
            "step.kv_on_sync = 'keep', since an engine that sleeps has no KV cache": step.kv_on_sync == "keep",
        }
    )


def _unlike_a_sum(s: Settings) -> str:
    algorithm, trainer = s.algorithm, s.trainer
    scale = getattr(algorithm, "scale_scores", "")
    faults = {
        "run.deterministic = true, and parts come in an order that depends on timing": s.run.deterministic,
        "models.share_weights = true, and gradients are computed while responses are decoded": s.models.share_weights,
        f"trainer.epochs = {trainer.epochs}": trainer.epochs > 1,
        f"trainer.minibatches = {trainer.minibatches}": trainer.minibatches > 1,
        f"step.algorithm = {s.step.algorithm!r}, whose advantages are not those of a group alone": (
            algorithm.has_critic or algorithm.responses < 2 or isinstance(algorithm, ReinforcePP | Distill)
        ),
        f"trainer.router_aux_loss = {trainer.router_aux_loss}": trainer.router_aux_loss,
        f"algorithm.scale_scores = {scale!r}": scale in {"batch", "each_reward"},
        "algorithm.score_norm = true": getattr(algorithm, "score_norm", False),
        "algorithm.kl_target": getattr(algorithm, "kl_target", None) is not None,
        "algorithm.dynamic_sampling = true": getattr(algorithm, "selects", False),
    }
    loss = s.trained_loss()
    if any(faults.values()) or getattr(loss, "divisor", None) is not None:
        return _those(faults)
    return f"a loss, {type(loss).__name__}, that divides by sizes of several kinds"


def _loss_of_a_file(loss: Callable[[], Loss], run: RunSection, ranks: int) -> tuple[str, str] | None:
    if not (apart := run.trainer == "process") and ranks == 1:
        return None
    kind, key = type(loss()), "run.trainer = 'process'" if apart else "placement.trainer, with ranks,"
    return (key, kind.__name__) if is_of_a_file(kind) else None


def _of_a_critic(models: ModelsSection, trainer: TrainerSettings, placement: PlacementSection) -> str:
    given = {f"models.{key}": value for key, value in changed(models, {"critic", "shared_trunk"}).items()}
    given |= {f"trainer.{key}": value for key, value in changed(trainer, OF_THE_CRITIC).items()}
    given |= {f"placement.{key}": value for key, value in changed(placement, {"critic"}).items()}
    return ", ".join(f"{name} = {in_toml(value)}" for name, value in given.items())


def _uneven(batch: int, responses: int, minibatches: int, loss: Callable[[], Loss]) -> tuple[int, str] | None:
    units = batch * responses, "responses"
    if responses > 1 and minibatches > 1 and loss().unit == "group":
        units = batch, "groups"
    return units if units[0] % minibatches else None


RULES: Final[Mapping[str, Callable[[Settings], object]]] = {
    "{found[0]} = {found[1].path!r} is a taskset, and agents.program does not run its tasks: set agents.program = "
    "'verifiers'": lambda s: s.agents.program != VERIFIERS and _first_source(s.sources, lambda source: source.taskset),
    "agents.program = 'verifiers' runs tasks of tasksets, and {found[0]} = {found[1].path!r} is none: name one as "
    "'verifiers:NAME', or another program": (
        lambda s: (
            s.agents.program == VERIFIERS
            and _first_source(s.sources, lambda source: not source.taskset and source.path != ROWS)
        )
    ),
    "{found[0]} = {found[1]!r} has a {found[2]}, and {found[3]}: leave it out": lambda s: _idle_of_source(s.sources),
    "data.drop_last is of whole batches from one source, and data.prompts has weights: leave one of them out": (
        lambda s: s.data.drop_last and _first_source(s.sources, lambda source: source.weight is not None)
    ),
    "agents.{found[0]} is of an agent, and agents.program names none: leave it out": (
        lambda s: not s.agents.program and sorted(changed(s.agents, {each.name for each in fields(s.agents)}))
    ),
    "agents.roles = {s.agents.roles} has no role that the policy plays, so nothing would be trained: set one of them "
    "to 'policy'": lambda s: s.agents.roles and not s.agents.trained,
    "agents.roles names roles of an agent, and the tasks of agents.program = 'verifiers' know none: leave them out": (
        lambda s: s.agents.roles and s.agents.program == VERIFIERS
    ),
    "the policy plays {found[0]} in agents.roles, each in a conversation of its own, and {found[1]}: freeze all roles "
    "but one, or change that": lambda s: s.agents.single(s.run, s.step),
    "agents.public_url = {s.agents.public_url!r} leads to a port, and agents.port = 0 is any that is free: set it": (
        lambda s: s.agents.public_url and not s.agents.port
    ),
    "agents.program = {s.agents.program!r} has an agent that answers, and shows tools of its own: leave {found} out": (
        lambda s: (
            s.agents.program
            and (f"environment.{s.environment.answering}" if s.environment.answering else s.data.tools and "data.tools")
        )
    ),
    "data.over_long = 'truncate' would cut off what an agent has said first: filter such prompts, or raise "
    "data.max_prompt_tokens": lambda s: s.agents.program and s.data.over_long == "truncate",
    "the agent is given whole rows, so that no column holds the prompt: leave column out": (
        lambda s: (
            s.agents.program
            and (s.data.column != "prompt" or _first_source(s.sources, lambda source: source.column is not None))
        )
    ),
    "agents.program = {s.agents.program!r} has an agent that returns the reward: leave [[rewards]] out": (
        lambda s: s.agents.program and s.rewards
    ),
    "{found[0]}.source = 'environment' is what an environment says, and neither environment.factory nor "
    "environment.source names one: give a class or a function of a file, or another source": (
        lambda s: (
            not (s.environment.factory or s.environment.source)
            and [key for key, reward in s.reward_tables.items() if reward.source == ENVIRONMENT]
        )
    ),
    "algorithm.{found[0]} = {found[1]!r} is of turns, and nothing answers a turn: set environment.source, "
    "environment.tools, environment.factory or agents.program, or leave algorithm.{found[0]} out": (
        lambda s: (
            not (s.environment.answering or s.agents.program)
            and next(iter(changed(cast("Any", s.algorithm), {"credit", "over"}).items()), None)
        )
    ),
    "algorithm.credit = 'state' compares turns in equal states, and {found} says of none in which state it is: set "
    "credit = 'turns', or give an environment.factory or environment.source that does": (
        lambda s: (
            getattr(s.algorithm, "credit", "") == "state"
            and ("agents.program" if s.agents.program else s.environment.tools and "environment.tools")
        )
    ),
    "step.loss = {s.step.loss!r} is trained in place of the algorithm's loss, which alone reads {found}: leave that "
    "out, or make it a setting of yours in [loss]": lambda s: s.step.loss and _idle_of_loss(s.algorithm),
    "{found}": lambda s: (
        environment_fault(s.environment, s.data, s.step, s.algorithm, privileged=s.teacher.privileged)
        or teacher_fault(
            s.teacher, s.models, s.placement, s.step, s.algorithm, program=s.agents.program, scored=bool(s.rewards)
        )
    ),
    "[scorers.{found[0]}] serves no model of this run: {found[1]}; {found[2]}, or leave the table out": (
        lambda s: _unknown_scorer(s.scorers, [*(["reference"] if s.has_reference else []), *s.models.teachers])
    ),
    "the reference is the adapter {s.models.adapter!r} on the policy's base, and vLLM would be given a model: leave "
    "[scorers.reference] out, or name a whole model in models.reference": (
        lambda s: "reference" in s.on_vllm and s.models.adapter and s.models.reference in {"", s.models.adapter}
    ),
    "the reference has the policy's weights in 4 bits (models.quantization = {s.models.quantization!r}), and vLLM "
    "would have them whole: leave [scorers.reference] out, or name another model in models.reference": (
        lambda s: (
            "reference" in s.on_vllm
            and s.models.quantization != "none"
            and s.models.policy == (s.models.reference or s.models.adapter or s.models.policy)
        )
    ),
    "algorithm.scale_scores = 'each_reward' compares each of several rewards, and [[rewards]] has one, a model: give "
    "several with names, or another scale_scores": (
        lambda s: getattr(s.algorithm, "scale_scores", "") == "each_reward" and s.reward_models and len(s.rewards) == 1
    ),
    "{found} is about scores, and there are none without [[rewards]]: give a reward, or leave that out": (
        lambda s: (
            not (s.rewards or s.agents.program)
            and " and ".join(["eval.prompts"] * bool(s.eval.prompts) + ["run.keep_best = true"] * s.run.keep_best)
        )
    ),
    "run.deterministic = true makes every bit independent of timing, which does not go with {found}: change that, or "
    "leave it out": lambda s: s.run.deterministic and _by_timing(s),
    "run.policy = 'process' places an actor of transformers, and vLLM has processes of its own: leave it out, or set "
    "models.engine = 'transformers'": lambda s: s.models.engine == "vllm" and s.run.policy == "process",
    "sampling.top_p = {s.sampling.top_p} draws from the most likely tokens, and vLLM does not say which those were, "
    "though log-probs are among them: bound them by sampling.top_k too, or set models.engine = 'transformers'": (
        lambda s: s.models.engine == "vllm" and s.sampling.top_p < 1 and not s.sampling.top_k
    ),
    "[vllm] holds {found}, which only vLLM reads, and models.engine = {s.models.engine!r}: set models.engine = "
    "'vllm', or leave [vllm] out": lambda s: s.models.engine != "vllm" and ", ".join(s.vllm),
    "step.lookahead = {s.step.lookahead} trains while the next step is decoded, and models.share_weights = true "
    "would change the weights meanwhile: leave share_weights out": (
        lambda s: s.step.lookahead and s.models.share_weights
    ),
    "models.share_weights = true trains the weights that are served, and placement.trainer = {found[0]} is not where "
    "they are served: leave one of the two out": (
        lambda s: s.models.share_weights and not s.trains_where_it_serves and [list(s.devices["trainer"])]
    ),
    "placement.remote has {found[0]!r}, and {found[1]}: leave it out": _why_here,
    "{found[0]} names {found[1]!r}, and an actor has the GPU that Ray gives it: expected 'cuda' or 'cpu'": (
        lambda s: _numbered(s.placement, s.devices, s.remote)
    ),
    "models.shared_trunk = true makes the critic a head on the policy's trunk, which is on {s.actor_device!r}, and "
    "{found[0]} = {found[1]!r}: set placement.critic = {s.actor_device!r}": (
        lambda s: (
            s.models.shared_trunk
            and s.devices["critic"][0] != s.actor_device
            and (s.placement.key_of("critic"), s.devices["critic"][0])
        )
    ),
    "placement.trainer = {found} has devices of several kinds, and ranks exchange tensors of one: name GPUs only, or "
    "'cpu' only": (
        lambda s: len({device.partition(":")[0] for device in s.devices["trainer"]}) > 1 and list(s.devices["trainer"])
    ),
    "placement.trainer = {found} names a device twice: expected one of its own for each rank, or a cluster for all "
    "ranks but the first (--ray, placement.cluster)": (
        lambda s: (
            s.devices["trainer"][0] != "cpu"
            and len(set(s.devices["trainer"])) < len(s.devices["trainer"])
            and "trainer" not in s.remote
            and list(s.devices["trainer"])
        )
    ),
    "placement.cluster is given, and no model of this run would be in it: the rewards are functions, there is no "
    "reference, critic or second rank; name the policy in placement.remote, or leave the cluster out": (
        lambda s: s.placement.cluster and not s.remote
    ),
    "run.trainer = 'process' is one process, and placement.trainer has {found} ranks, each a process: leave "
    "run.trainer out": (
        lambda s: s.run.trainer == "process" and len(s.devices["trainer"]) > 1 and len(s.devices["trainer"])
    ),
    "placement.policy_replicas = {s.placement.policy_replicas} does not go with {found}: change that, or leave it "
    "out": lambda s: s.placement.policy_replicas > 1 and _unlike_replicas(s),
    "placement.share = 'sleep' lets the engine sleep while the policy is trained, which does not go with {found}: "
    "change that, or leave share out": lambda s: s.placement.share == "sleep" and _unlike_sleep(s),
    "step.weight_sync = 'in-flight' syncs weights while the next step is decoded, and with step.lookahead = 0 "
    "nothing is decoded then: set step.lookahead to 1 or more, or leave weight_sync out": (
        lambda s: s.step.weight_sync == "in-flight" and not s.step.lookahead
    ),
    "step.weight_sync = 'in-flight' changes the policy while the critic reads, and models.shared_trunk = true makes "
    "them one model: leave one of the two out": lambda s: s.step.weight_sync == "in-flight" and s.models.shared_trunk,
    "step.stream_updates = true trains a group before the batch is complete, which does not go with {found}: change "
    "that, or leave stream_updates out": lambda s: s.step.stream_updates and _unlike_a_sum(s),
    "trainer.optimizer = 'muon' trains matrices of layers, and models.lora_rank or adapter trains adapters, which "
    "have AdamW: leave optimizer out": lambda s: s.trainer.optimizer == "muon" and s.models.adapts,
    "models.{found} would be of new adapters, and models.lora_rank = 0 adds none: give a rank, or leave that out": (
        lambda s: not s.models.lora_rank and " and models.".join(changed(s.models, {"lora_experts", "lora"}))
    ),
    "trainer.router_replay = true trains with the experts that were chosen while decoding, and the correction for "
    "stale tokens in [algorithm] recomputes log-probs with experts chosen anew, so their ratio would be that of two "
    "models: leave one of the two out": lambda s: s.trainer.router_replay and s.algorithm.corrects,
    "{found[0]} takes the loss to another process, which cannot import {found[1]} from a file: leave that out, or "
    "keep the class in an installed package": (
        lambda s: _loss_of_a_file(s.trained_loss, s.run, len(s.devices["trainer"]))
    ),
    "[eval] has {found}, and nothing is evaluated without held-out prompts: give eval.prompts, or leave that out": (
        lambda s: not s.eval.prompts and ", ".join(changed(s.eval, declared(EvalSection).keys() - {"prompts", "seed"}))
    ),
    "step.algorithm = {s.step.algorithm!r} has no critic and cannot use {found}: leave that out": (
        lambda s: not s.algorithm.has_critic and _of_a_critic(s.models, s.trainer, s.placement)
    ),
    "trainer.minibatches = {s.trainer.minibatches} does not divide the {found[0]} {found[1]} of step.batch = "
    "{s.step.batch}: optimizer steps would be of several sizes; expected a divisor": (
        lambda s: _uneven(s.step.batch, s.algorithm.responses, s.trainer.minibatches, s.trained_loss)
    ),
    "step.admission = 'tail-batched' begins late responses anew in a later step, and algorithm.dynamic_sampling = "
    "true needs whole groups in this one: choose another admission, or set dynamic_sampling = false": (
        lambda s: getattr(s.algorithm, "selects", False) and s.step.admission == "tail-batched"
    ),
    "step.algorithm = {s.step.algorithm!r} takes {s.algorithm.responses} responses to each prompt, and "
    "sampling.temperature = 0 makes them all the same: give one above 0": (
        lambda s: s.algorithm.responses > 1 and s.sampling.temperature == 0
    ),
}
"""Refused combinations, the first that applies: the message, formatted with the settings ``s`` and the ``found`` result
of the condition; and the condition."""
