"""A profile for ``oppo simulate``: hardware, models and lengths in a TOML file, checked as settings are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ValidationError

from oppo.config.load import Faults, overridden, parsed
from oppo.declared import STRICT, Table, declared
from oppo.errors import ConfigError
from oppo.simulate.costs import GPUS, MODELS, Gpu, Transformer
from oppo.simulate.profile import (
    EngineSection,
    LayoutSection,
    LengthsSection,
    ModelsSection,
    Profile,
    ScheduleSection,
    WorkloadSection,
)


class ProfileFile(BaseModel):
    """The sections of a profile; ``[gpus.NAME]`` and ``[sizes.NAME]`` add to those that are known."""

    model_config = STRICT

    workload: Annotated[WorkloadSection, Table()]
    lengths: Annotated[LengthsSection, Table()]
    models: Annotated[ModelsSection, Table()]
    layout: Annotated[LayoutSection, Table()]
    engine: Annotated[EngineSection, Table()] = EngineSection()
    schedule: Annotated[ScheduleSection, Table()] = ScheduleSection()
    gpus: dict[str, Annotated[Gpu, Table()]] = {}
    sizes: dict[str, Annotated[Transformer, Table()]] = {}


KINDS = {
    "workload": WorkloadSection,
    "lengths": LengthsSection,
    "models": ModelsSection,
    "layout": LayoutSection,
    "engine": EngineSection,
    "schedule": ScheduleSection,
    "gpus": Gpu,
    "sizes": Transformer,
}
"""The class of each section, or of its tables."""


def load_profile(path: Path, overrides: Sequence[str] = ()) -> Profile:
    """Return the profile in a TOML file, with ``section.key=value`` overrides.

    Raises:
        ConfigError: the file cannot be read or is no TOML, or a setting is unknown, missing or out of range.
    """
    return profile_of(overridden(parsed(path), overrides), path.absolute().parent)


def profile_of(document: Mapping[str, object], folder: Path) -> Profile:
    """Return the profile of a parsed file that lies in ``folder``.

    Raises:
        ConfigError: a setting is unknown, missing or out of range, or a name of a GPU or a model is unknown.
    """
    try:
        file = ProfileFile.model_validate(document)
    except ValidationError as error:
        keys = {name: declared(kind) for name, kind in KINDS.items()}
        raise ConfigError(Faults(keys, list(KINDS), named=("gpus", "sizes")).describe(error)) from error
    profile = Profile(
        workload=file.workload,
        lengths=file.lengths,
        models=file.models,
        layout=file.layout,
        engine=file.engine,
        schedule=file.schedule,
        gpus={**GPUS, **file.gpus},
        sizes={**MODELS, **file.sizes},
        folder=folder,
    )
    profile.system()
    return profile
