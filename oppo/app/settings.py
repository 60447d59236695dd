"""The settings of a training run: :class:`Settings` checks the sections of :mod:`oppo.app.sections` together.

``[trainer]`` is :class:`oppo.TrainerSettings`; ``[algorithm]`` is the class that ``step.algorithm`` names
(:mod:`oppo.algorithms`); ``[vllm]`` holds arguments of vLLM's engine, by its own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated

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

from oppo.algorithms.algorithm import Algorithm
from oppo.algorithms.ppo import PPO
from oppo.app.consistency import require_consistent
from oppo.app.own_algorithm import find
from oppo.app.sections import DataSection, ModelsSection, RunSection, SamplingSection, StepSection, file_of
from oppo.app.tables import STRICT, Table, adapter
from oppo.declared import (
    MOST,
    Declared,
    declared,
)
from oppo.training import TrainerSettings


def algorithm_of(document: Mapping[str, object]) -> type[Algorithm] | None:
    """Return the algorithm that a document names; ``None`` for an unknown name.

    Raises:
        ConfigError: it is in a file, and cannot be loaded.
    """
    step = document.get("step")
    default = StepSection().algorithm
    return find(step.get("algorithm", default) if isinstance(step, Mapping) else default)


def _chosen(table: object, info: ValidationInfo) -> Algorithm:
    chosen: Algorithm = PPO() if info.context is None else adapter(info.context).validate_python(table)
    return chosen


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
    data: Annotated[DataSection, Table()]
    sampling: Annotated[SamplingSection, Table()] = SamplingSection()
    step: Annotated[StepSection, Table()] = StepSection()
    algorithm: Annotated[SkipValidation[Algorithm], PlainValidator(_chosen)] = Field({}, validate_default=True)
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
        return cls.model_validate(document, context=algorithm_of(document))

    @property
    def shares_weights(self) -> bool:
        """Whether the weights that are trained are those that are served."""
        shares = self.models.share_weights
        return self.step.lookahead == 0 if shares is None else shares

    @property
    def run_directory(self) -> Path:
        """The folder that the run writes."""
        return Path(self.run.directory) / self.run.name

    @property
    def files(self) -> dict[str, Path]:
        """The files that the run reads besides its models, each under the setting that names it."""
        rewards = {f"models.{key}": part.source for key, part in self.models.rewards.items()}
        code = {**rewards, "models.environment": self.models.environment, "step.algorithm": self.step.algorithm}
        found = {name: file for name, spec in code.items() if (file := file_of(spec)) is not None}
        return {"data.prompts": Path(self.data.prompts), **found}

    def tables(self) -> dict[str, dict[str, object]]:
        """Return every setting as in a file, by section and key; ``None`` for an absent key."""
        declared = {
            name: {key: _spelt(getattr(getattr(self, name), key)) for key in keys}
            for name, keys in keys_of(type(self.algorithm)).items()
        }
        return {**declared, "vllm": dict(self.vllm)} if self.vllm else declared

    def changed(self, changes: Mapping[str, Mapping[str, object]]) -> Settings:
        """Return these settings with ``changes``, by section and key."""
        tables = self.tables()
        return Settings.of({name: {**tables.get(name, {}), **changes.get(name, {})} for name in {**tables, **changes}})

    def toml(self) -> str:
        """Return the resolved file: loading it from any folder gives these settings again."""
        tables = {
            name: {key: value for key, value in keys.items() if value is not None}
            for name, keys in self.tables().items()
        }
        return tomli_w.dumps(tables)


def _spelt(value: object) -> object:
    """Return a value as in a file: a table of tables, where it is one, without absent keys."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: {key: each for key, each in asdict(table).items() if each is not None} for name, table in value.items()
    }


def keys_of(algorithm: type[Algorithm]) -> dict[str, dict[str, Declared]]:
    """Return the declaration of every key for an algorithm, by section and key."""
    kinds = {
        name: algorithm if name == "algorithm" else each.annotation for name, each in Settings.model_fields.items()
    }
    return {
        name: {key: each for key, each in declared(kind).items() if key != "total_steps"}
        for name, kind in kinds.items()
        if isinstance(kind, type) and is_dataclass(kind)
    }
