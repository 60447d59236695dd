"""The search for settings with which a run fits the memory of its devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias

from rich.filesize import decimal

from oppo.config.scorers import ModelRewardSection
from oppo.errors import ConfigError, ModelError, ModelRefused, in_toml
from oppo.hf.memory import Load
from oppo.log import logger, routed
from oppo.run.deployment import Deployment
from oppo.run.engines import require_engines
from oppo.run.memory import Expected, Known, crowded, expected, with_micro_batches, with_share

Changes: TypeAlias = Mapping[str, Mapping[str, Any]]  # settings by section and key

_CHECKPOINTING: Final[Changes] = {"trainer": {"gradient_checkpointing": 1}}
_ADAPTERS: Final = {"dtype": "bfloat16", "lora_rank": 16}
_TRUNK: Final = {"shared_trunk": True, "critic": ""}

REMEDIES: Final[Sequence[Changes]] = (
    {},
    _CHECKPOINTING,
    {**_CHECKPOINTING, "models": _ADAPTERS},
    {**_CHECKPOINTING, "models": {**_ADAPTERS, **_TRUNK}},
    {**_CHECKPOINTING, "models": {**_ADAPTERS, "quantization": "nf4"}},
    {**_CHECKPOINTING, "models": {**_ADAPTERS, "quantization": "nf4", **_TRUNK}},
)
"""What a run does to fit, the first that is enough; each costs time or changes what is trained."""

_ALONE: Final[Sequence[Changes]] = (
    {"models": {"dtype": "bfloat16"}},
    {"models": {"lora_rank": 16}},
    {"models": _TRUNK},
    _CHECKPOINTING,
)
"""Changes any of which may be enough."""


@dataclass(frozen=True, slots=True)
class Fit:
    changes: Changes
    deployment: Deployment
    needs: Sequence[Expected]


def fitted(deployment: Deployment) -> Deployment:
    faults = list[str]()
    with routed(), suppress(ConfigError, ModelRefused):  # loading reports the error
        faults = crowded(expected(deployment, None))
    if faults:
        raise ConfigError(f"{'; '.join(faults)}: {advice(deployment, None, {})}")
    load = deployment.load(deployment.settings.data.max_prompt_tokens)
    if deployment.trainer.micro_batch_tokens is None and deployment.devices.trainer[0].type != "cpu":
        logger.info("counting memory, for trainer.micro_batch_tokens")
    with routed(), suppress(ConfigError, ModelError):  # likewise
        deployment = with_micro_batches(deployment, replace(load, chunk=load.response))
    return with_share(deployment, load)


def first_fit(deployment: Deployment, tried: Iterable[Changes], load: Load | None, known: Known) -> Fit | None:
    for changes in tried:
        other = altered(deployment, changes)
        if other is not None and (needs := _fitting(other, load, known)) is not None:
            return Fit(_unlike(deployment, changes), other, needs)
    return None


def altered(deployment: Deployment, changes: Changes) -> Deployment | None:
    """Return a run with changes; ``None``: these settings do not go together."""
    with suppress(ConfigError, ModelError, ModelRefused, ValueError), routed():
        other = Deployment.of(deployment.settings.changed(changes), deployment.assumed)
        require_engines(other)
        return other
    return None


def _fitting(deployment: Deployment, load: Load | None, known: Known) -> Sequence[Expected] | None:
    with suppress(ConfigError, ModelError, ModelRefused, ValueError), routed():
        for asked in (None,) if load is None else (None, deployment.load(load.prompt)):
            needs = expected(deployment, asked, known)
            if crowded(needs, deployment.assumed, spread=deployment.settings.placement.spread):
                return None
        return needs
    return None


def _unlike(deployment: Deployment, changes: Changes) -> Changes:
    # But for what is set already.
    document = deployment.settings.document()
    kept = {
        name: {key: value for key, value in keys.items() if document.get(name, {}).get(key) != value}
        for name, keys in changes.items()
    }
    return {name: keys for name, keys in kept.items() if keys}


def merged(changes: Changes, more: Changes) -> Changes:
    return {name: {**changes.get(name, {}), **more.get(name, {})} for name in {**changes, **more}}


def spelled(changes: Changes) -> Iterator[str]:
    for name, keys in changes.items():
        yield from (f"{name}.{key} = {in_toml(value)}" for key, value in keys.items())


def advice(deployment: Deployment, load: Load | None, known: Known) -> str:
    new = [changes for changes in _ALONE if _unlike(deployment, changes)]
    fits = [fit for changes in new if (fit := first_fit(deployment, [changes], load, known))]
    fits = fits or [fit for fit in [first_fit(deployment, REMEDIES[1:], load, known)] if fit]
    said = [
        f"{', '.join(spelled(fit.changes))} would fit ({decimal(sum(need.bytes.total for need in fit.needs))} in all)"
        for fit in fits
    ]
    others = ["give a model another device, or the trainer several ([placement])", "use smaller models"]
    if load:
        others.insert(0, "have fewer or shorter responses in flight ([step], sampling.max_new_tokens)")
        rewards = deployment.settings.reward_tables.items()
        reads = [
            f"{key}.reading" for key, each in rewards if isinstance(each, ModelRewardSection) and each.reading == "auto"
        ]
        if reads:
            others.insert(1, f"let reward models keep nothing of responses in flight ({', '.join(reads)} = 'whole')")
    most = [
        changes for changes in map(partial(_unlike, deployment), REMEDIES) if changes and altered(deployment, changes)
    ]
    if not fits and most:
        others[0] = f"not even {', '.join(spelled(most[-1]))} would fit: {others[0]}"
    return "; or ".join([*said, *others])
