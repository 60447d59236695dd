"""The settings of a training run: :class:`Settings` checks the sections of :mod:`oppo.app.sections` together.

``[trainer]`` is :class:`oppo.TrainerSettings`; ``[algorithm]`` is the class that ``step.algorithm`` names
(:mod:`oppo.algorithms`); ``[admission]`` and ``[loss]`` hold the settings of parts of one's own (:mod:`oppo.app.own`);
``[vllm]`` holds arguments of vLLM's engine, by its own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

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
from oppo.algorithms.base import Algorithm
from oppo.algorithms.ppo import PPO
from oppo.app.consistency import require_consistent
from oppo.app.devices import PlacementSection
from oppo.app.kinds import NAMED, OWN, Kinds
from oppo.app.own_algorithm import checked, loss_of
from oppo.app.reward_settings import file_of
from oppo.app.sections import (
    DataSection,
    EvalSection,
    ModelsSection,
    RunSection,
    SamplingSection,
    StepSection,
)
from oppo.app.sources import PromptSource, named
from oppo.app.tables import STRICT, Table, adapter
from oppo.declared import (
    MOST,
    Declared,
    declared,
)
from oppo.training import TrainerSettings

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
    """Return the trainer's table with the steps of the run, which its learning-rate schedule spans."""
    if not isinstance(table, Mapping):
        return table
    if "total_steps" in table:
        raise ValueError("total_steps is run.steps: leave it out")
    return {**table, "total_steps": info.data["run"].steps if "run" in info.data else MOST - 1}


class Settings(BaseModel):
    """All settings of a run, checked; see :func:`oppo.app.config.load`."""

    model_config = STRICT

    run: Annotated[RunSection, Table()] = RunSection()
    models: Annotated[ModelsSection, Table()]
    placement: Annotated[PlacementSection, Table()] = PlacementSection()
    data: Annotated[DataSection, Table()]
    sampling: Annotated[SamplingSection, Table()] = SamplingSection()
    step: Annotated[StepSection, Table()] = StepSection()
    algorithm: Annotated[SkipValidation[Algorithm], PlainValidator(_algorithm)] = Field({}, validate_default=True)
    admission: Annotated[SkipValidation[object], PlainValidator(_own)] = Field({}, validate_default=True)
    loss: Annotated[SkipValidation[object], PlainValidator(_own)] = Field({}, validate_default=True)
    eval: Annotated[EvalSection, Table()] = EvalSection()
    trainer: Annotated[TrainerSettings, Table(), BeforeValidator(_spanning)] = Field({}, validate_default=True)
    vllm: dict[str, object] = Field({})
    """Arguments of vLLM's engine, by its own names; :mod:`oppo.app.engines` checks them before anything is loaded."""

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        require_consistent(self)
        return self

    @classmethod
    def of(cls, document: Mapping[str, object]) -> Settings:
        """Return the settings of a document.

        Raises:
            ValidationError: a setting is unknown, missing or out of range.
        """
        return cls.model_validate(document, context=Kinds.of(document))

    @property
    def kinds(self) -> Kinds:
        """The classes of the tables whose keys depend on what ``[step]`` names."""
        return Kinds.of({"step": {name: getattr(self.step, name) for name in NAMED}})

    def own_admission(self) -> Admission | None:
        """Return a new admission of one's own; ``None`` where ``step.admission`` names one of ours.

        Raises:
            ConfigError: it cannot be made.
        """
        return cast("Admission | None", self.kinds.make("admission", self.admission, self.step))

    def trained_loss(self) -> Loss:
        """Return the loss that is trained: the algorithm's, or one's own; this loads torch.

        Raises:
            ConfigError: it cannot be made.
        """
        return cast("Loss | None", self.kinds.make("loss", self.loss, self.step)) or loss_of(self.algorithm)

    @property
    def shares_weights(self) -> bool:
        """Whether the weights that are trained are those that are served."""
        shares = self.models.share_weights
        alone = not self.step.lookahead and not self.step.stream_updates and self.trains_where_it_serves
        return alone if shares is None else shares

    @property
    def devices(self) -> Mapping[str, tuple[str, ...]]:
        """The devices by model: ``policy``, ``trainer``, ``reference``, ``reward`` and ``critic``."""
        return self.placement.names(self.models.device)

    @property
    def actor_device(self) -> str:
        """The device on which transformers loads the policy here: where it decodes, or else where it is trained.

        Ranks on GPUs have the whole weights on the CPU only. What reads the policy again is then beside the reference.
        """
        devices = self.devices
        if self.models.engine == "transformers" and "policy" not in self.elsewhere:
            return devices["policy"][0]
        ranks = devices["trainer"]
        by_ranks = len(ranks) > 1 and ranks[0] != "cpu" and "reference" not in self.elsewhere
        return devices["reference"][0] if by_ranks else ranks[0]

    @property
    def trains_where_it_serves(self) -> bool:
        """Whether updates are made on the device of the policy and the critic that transformers serves here, if any.

        Ranks are processes, which share no memory of GPUs.
        """
        devices, models = self.devices, {"critic"} if self.algorithm.has_critic else set()
        if self.models.engine == "transformers":
            models.add("policy")
        ranks = devices["trainer"]
        if len(ranks) > 1 and ranks[0] != "cpu":
            return False
        served = {device for model in models - self.elsewhere for device in devices[model]}
        return not served or served == set(ranks)

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference: one that is named, or the policy as it began, if the algorithm refers to it."""
        return bool(self.models.reference) or self.algorithm.refers

    @property
    def can_be_elsewhere(self) -> frozenset[str]:
        """The models of this run that can be actors of a cluster."""
        models = self.models
        can = {
            "policy": models.engine == "transformers" and not models.shared_trunk and self.run.policy == "thread",
            "reference": self.has_reference,
            "reward": bool(models.reward_models),
            "critic": self.algorithm.has_critic and not models.shared_trunk,
            "trainer": len(self.devices["trainer"]) > 1,
        }
        return frozenset(name for name, possible in can.items() if possible)

    @property
    def elsewhere(self) -> frozenset[str]:
        """The models that are actors of a cluster; of the ``trainer``, every rank but the first."""
        if not self.placement.cluster:
            return frozenset()
        return frozenset(self.placement.remote) or self.can_be_elsewhere - {"policy"}

    @property
    def run_directory(self) -> Path:
        """The folder that the run writes."""
        return Path(self.run.directory) / self.run.name

    @property
    def files(self) -> dict[str, Path]:
        """The files and directories that the run reads besides its models, each under the setting that names it."""
        rewards = {f"models.{key}": part.source for key, part in self.models.rewards.items()}
        steps = {f"step.{name}": getattr(self.step, name) for name in NAMED}
        code = {**rewards, "models.environment": self.models.environment, **steps}
        found = {name: file for name, spec in code.items() if (file := file_of(spec)) is not None}
        prompts = {**named("data.prompts", self.data.prompts), **named("eval.prompts", self.eval.prompts)}
        return {name: each.file for name, each in prompts.items() if each.file is not None} | found

    def tables(self) -> dict[str, dict[str, object]]:
        """Return every setting as in a file, by section and key; ``None`` for an absent key."""
        declared = {
            name: {key: _spelt(getattr(getattr(self, name), key)) for key in keys}
            for name, keys in keys_of(type(self.algorithm), self.kinds).items()
        }
        return {**declared, "vllm": dict(self.vllm)} if self.vllm else declared

    def spanning(self, steps: int) -> Settings:
        """Return these settings with a learning-rate schedule that spans ``steps``, as many as the prompts last for.

        Raises:
            ConfigError: the warm-up does not end before.
        """
        return self.model_copy(update={"trainer": replace(self.trainer, total_steps=steps)})

    def changed(self, changes: Mapping[str, Mapping[str, object]]) -> Settings:
        """Return these settings with ``changes``, by section and key."""
        tables = self.tables()
        return Settings.of({name: {**tables.get(name, {}), **changes.get(name, {})} for name in {**tables, **changes}})

    def document(self) -> dict[str, dict[str, object]]:
        """Return the resolved file, parsed: resolving it in any folder gives these settings again."""
        return {
            name: {key: value for key, value in keys.items() if value is not None}
            for name, keys in self.tables().items()
        }

    def toml(self) -> str:
        """Return the resolved file: loading it from any folder gives these settings again."""
        return tomli_w.dumps(self.document())


def _spelt(value: object) -> object:
    """Return a value as in a file: a table of tables, or a list of them, where it is one, without absent keys."""
    if isinstance(value, tuple) and any(isinstance(each, PromptSource) for each in value):
        return [each.table() for each in cast("tuple[PromptSource, ...]", value)]
    if not isinstance(value, Mapping):
        return value
    return {
        name: {key: each for key, each in asdict(table).items() if each is not None} for name, table in value.items()
    }


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
