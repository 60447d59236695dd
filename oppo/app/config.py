"""The settings of a training run: a TOML file in, checked and resolved, and the same file out with every default.

An error names section and key, what was expected and what came; one error lists all faults of a file. Paths, those of
``--set`` included, are relative to the folder of the file and come out absolute, so the resolved file can be moved.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from oppo.app.config_errors import SettingsFaults, require_public
from oppo.app.kinds import NAMED
from oppo.app.overrides import overridden, seeded, with_correction
from oppo.app.paths import resolved
from oppo.app.reward_settings import RewardPart
from oppo.app.settings import Settings
from oppo.app.sources import within
from oppo.errors import ConfigError
from oppo.user_code import SPEC


def load(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings of the TOML file at ``path``, with ``section.key=value`` overrides, paths resolved.

    Raises:
        ConfigError: the file cannot be read or is no TOML, or a setting is unknown, missing or out of range.
    """
    return resolve(overridden(parsed(path), overrides), path.absolute().parent)


def parsed(path: Path) -> dict[str, object]:
    """Return the document in a TOML file.

    Raises:
        ConfigError: the file cannot be read or is no TOML.
    """
    try:
        return tomllib.loads(_text(path))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # TOML, UTF-8, a number too long, a NUL in the path
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def resolve(document: Mapping[str, object], folder: Path) -> Settings:
    """Return the settings of a parsed file that lies in ``folder``.

    Raises:
        ConfigError: a setting is unknown, missing or out of range.
    """
    document = _with_files(document, folder)
    try:
        settings = Settings.of(with_correction(seeded(document)))
    except ValidationError as error:
        raise ConfigError(SettingsFaults.of(document).describe(error)) from error
    models = settings.models
    models = replace(models, reward=_reward(models.reward, folder))
    policy = _model(models.policy, folder)
    own_critic = next(iter(models.reward_models), policy)
    if models.shared_trunk or not settings.algorithm.has_critic:
        own_critic = ""
    found = settings.model_copy(
        update={
            "run": replace(settings.run, directory=resolved(settings.run.directory, folder)),
            "models": replace(
                models,
                policy=policy,
                reference=_model(models.reference, folder) or (policy if settings.has_reference else ""),
                critic=_model(models.critic, folder) or own_critic,
                environment=_model(models.environment, folder),
            ),
            "data": replace(settings.data, prompts=within(settings.data.prompts, folder)),
            "eval": replace(settings.eval, prompts=within(settings.eval.prompts, folder)),
        }
    )
    require_public(found.tables())
    return found


def _text(path: Path) -> str:
    """Return a file's text; what is no regular file may never end, and is not opened."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is no regular file")
    return path.read_text(encoding="utf-8")


def _spec(text: str, folder: Path) -> str:
    """Return ``file.py:name`` with the file's path."""
    file, _, name = text.rpartition(":")
    return f"{resolved(file, folder)}:{name}"


def _with_files(document: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """Return the document with the paths of an algorithm's file and of others whose code declares a table."""
    step = document.get("step")
    if not isinstance(step, Mapping):
        return document
    named = {name: step.get(name) for name in NAMED}
    found = {name: _spec(spec, folder) for name, spec in named.items() if isinstance(spec, str) and SPEC.match(spec)}
    return {**document, "step": {**step, **found}} if found else document


def _reward(reward: str | Mapping[str, RewardPart], folder: Path) -> str | Mapping[str, RewardPart]:
    """Return a reward, or each of several, as :func:`_model` does."""
    if isinstance(reward, str):
        return _model(reward, folder)
    return {name: replace(part, source=_model(part.source, folder)) for name, part in reward.items()}


def _model(text: str, folder: Path) -> str:
    """Return a hub name as it is, and an absolute path for what exists in ``folder`` or is spelt as a path."""
    if SPEC.match(text):
        return _spec(text, folder)
    spelt_as_path = text.startswith((".", "/", "~"))
    return resolved(text, folder) if text and (spelt_as_path or os.path.lexists(folder / text)) else text
