"""The memory that the models of a run will need, each on its device, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from rich.filesize import decimal
from transformers import PreTrainedModel

from oppo.app.compose import most_extra
from oppo.app.critics import critic_source
from oppo.app.layout import scored
from oppo.app.reward_models import ModelReading
from oppo.app.settings import Settings
from oppo.declared import declared
from oppo.errors import ConfigError, ModelRefused
from oppo.hf.device import CPU
from oppo.hf.device_layout import Devices
from oppo.hf.loading.encoders import transformer_of
from oppo.hf.loading.hub import located
from oppo.hf.loading.kinds import CAUSAL, CLASSIFIER, EMBEDDER, PROCESS, SCALAR, Kind
from oppo.hf.loading.outline import outline
from oppo.hf.loading.reward_kind import RewardKind, reward_kind
from oppo.hf.lora import add_lora
from oppo.hf.memory.capacity import free
from oppo.hf.memory.estimate import (
    Bytes,
    Load,
    at_rest,
    of_critic,
    of_policy,
    of_process,
    of_reference,
    of_reward,
    of_trainer,
)
from oppo.hf.serve.policy import PREFILL_TOKENS
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.trunk import value_model_on
from oppo.models import Sampling, SamplingSettings
from oppo.observe import silent

KINDS: Final[Mapping[RewardKind, Kind]] = {
    "scalar": SCALAR,
    "process": PROCESS,
    "classifier": CLASSIFIER,
    "similarity": EMBEDDER,
}
_SERVED: Final = {"reference": of_reference, "critic": of_critic, "proximal": of_reference}

_SMALLER: Final[Sequence[tuple[str, Mapping[str, Mapping[str, object]]]]] = (
    ("models.dtype = 'bfloat16'", {"models": {"dtype": "bfloat16"}}),
    ("models.lora_rank = 16", {"models": {"lora_rank": 16}}),
    ("both", {"models": {"dtype": "bfloat16", "lora_rank": 16}}),
)
"""Changes that need less memory."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Memory that a model will need on its device; weights that several models share count for the first.

    Attributes:
        model: its name, with the number of a training rank.
        bytes: at its worst moment.
        elsewhere: the device is one of another machine, whose memory is not known here.
    """

    model: str
    device: torch.device
    bytes: Bytes
    elsewhere: bool = False

    @property
    def where(self) -> str:
        """The device, and whether it is in the cluster."""
        return f"{self.device} in the cluster" if self.elsewhere else str(self.device)


@dataclass(frozen=True, slots=True)
class Outlines:
    """Makes the models of a run without their weights."""

    settings: Settings

    def actor(self) -> PreTrainedModel:
        """Return the policy with its adapters, if any."""
        models = self.settings.models
        actor = self._made("policy", CAUSAL, models.policy)
        if models.lora_rank:
            add_lora(actor, models.lora_rank, models.lora_alpha)
        return actor

    def reference(self) -> PreTrainedModel:
        """Return the reference."""
        return self._made("reference", CAUSAL, self.settings.models.reference)

    def reward(self, key: str, load: Load | None) -> Bytes:
        """Return what a reward model needs; of one that reads whole responses the weights alone are known."""
        path, found = self.settings.models.rewards[key].source, self.kind(key)
        directory = transformer_of(self._located(path)) if found == "similarity" else path
        make = partial(self._made, key, KINDS[found], str(directory))
        if load is None or found in {"classifier", "similarity"}:
            return Bytes(at_rest(make).weights)
        return (of_process if found == "process" else of_reward)(make, load)

    def kind(self, key: str) -> RewardKind:
        """Return the kind of a reward model."""
        reading = ModelReading.of(self.settings.models, key)
        trusted = self.settings.models.trust_remote_code
        return reading.kind(reward_kind(self._located(reading.source), trusted=trusted))

    def _located(self, path: str) -> Path:
        trusted = self.settings.models.trust_remote_code
        return located(path, weights=False, trust_remote_code=trusted, tell=silent)

    def critic(self) -> PreTrainedModel:
        """Return the critic, on a trunk of its own."""
        models = self.settings.models
        if models.shared_trunk:
            return value_model_on(self._made("policy", CAUSAL, models.policy))
        judges = {key: part.source for key, part in models.rewards.items() if not part.is_function}
        fit = [path for key, path in judges.items() if self.kind(key) == "scalar"]
        return self._made("critic", SCALAR, critic_source(models, fit))

    def trained(self) -> ActorCritic:
        """Return the models that are trained."""
        actor = self.actor()
        if not self.settings.algorithm.has_critic:
            return ActorCritic(actor)
        return ActorCritic(actor, value_model_on(actor) if self.settings.models.shared_trunk else self.critic())

    def _made(self, key: str, kind: Kind, path: str) -> PreTrainedModel:
        models = self.settings.models
        try:
            return outline(kind, path, dtype=models.dtype, trust_remote_code=models.trust_remote_code)
        except (ConfigError, ModelRefused) as error:
            raise type(error)(f"models.{key}: {error}") from error


def load_of(settings: Settings, prompt: int) -> Load:
    """Return the most that a run asks of its models, with prompts of up to ``prompt`` tokens."""
    response, chunk = settings.sampling.max_new_tokens, settings.step.chunk
    rollouts = settings.step.batch + most_extra(settings.step)
    return Load(rollouts, prompt, response, chunk if isinstance(chunk, int) else response)


def expected(settings: Settings, devices: Devices, load: Load | None) -> list[Expected]:
    """Return what each model of a run needs.

    Args:
        devices: of the models.
        load: the most that is asked of them; ``None``: nothing, so that they hold weights, and what training keeps.

    Raises:
        ConfigError: there is no such model.
        ModelRefused: one cannot be used.
    """
    made = Outlines(settings)
    needs = [Expected("policy", devices.policy, _policy(settings, made, load), "policy" in devices.elsewhere)]
    for model in scored(settings):
        device, elsewhere = devices.scoring()[model], model in devices.elsewhere
        if model != "reward":
            make = made.critic if model == "critic" else made.actor if model == "proximal" else made.reference
            served = _served(make, _SERVED[model], load)
            shares = _shares_the_policy_s(settings, devices, model)
            needs.append(Expected(model, device, replace(served, weights=0) if shares else served, elsewhere))
        for key, part in settings.models.rewards.items() if model == "reward" else ():
            if not part.is_function:
                needs.append(Expected(key, device, made.reward(key, load), elsewhere))
    unshared = None
    if settings.shares_weights:
        apart = {"policy": made.actor, "critic": made.critic}
        unshared = sum(at_rest(make).weights for model, make in apart.items() if model in devices.elsewhere)
    return [*needs, *_training(settings, devices, _trainer(settings, made, load), unshared)]


def _policy(settings: Settings, made: Outlines, load: Load | None) -> Bytes:
    if load is None or settings.models.engine != "transformers":
        return Bytes(at_rest(made.actor).weights)
    return of_policy(made.actor, load, _sampling(settings), prefill_tokens=PREFILL_TOKENS)


def _served(
    make: Callable[[], PreTrainedModel], of: Callable[[Callable[[], PreTrainedModel], Load], Bytes], load: Load | None
) -> Bytes:
    return Bytes(at_rest(make).weights) if load is None else of(make, load)


def _shares_the_policy_s(settings: Settings, devices: Devices, model: str) -> bool:
    """Return whether a model that scores is served over the policy's weights, or those that are trained."""
    models = settings.models
    if model == "reference":
        apart = devices.reference != devices.actor or model in devices.elsewhere
        return bool(models.lora_rank) and models.reference == models.policy and not apart
    if model == "proximal":
        return settings.shares_weights or "policy" not in devices.elsewhere
    return model == "critic" and models.shared_trunk


def _trainer(settings: Settings, made: Outlines, load: Load | None) -> Bytes:
    if load is None:
        return at_rest(made.trained)
    return of_trainer(made.trained, load, _sampling(settings), settings.trainer, settings.trained_loss())


def _training(settings: Settings, devices: Devices, whole: Bytes, unshared: int | None) -> list[Expected]:
    """Return what each training rank needs, of what one that has everything needs.

    Args:
        unshared: bytes of trained weights that are not served here; ``None``: all.
    """
    ranks, own = devices.trainer, whole.weights if unshared is None else unshared
    if len(ranks) == 1:
        return [Expected("trainer", ranks[0], replace(whole, weights=own))]
    parts = len(ranks) if settings.placement.shard else 1
    needs = [Expected("trainer, whole weights", CPU, Bytes(own))] if own else []
    for rank, device in enumerate(ranks):
        in_place = rank == 0 and parts == 1 and device == CPU
        needs.append(
            Expected(
                f"trainer, rank {rank}",
                device,
                replace(
                    whole,
                    weights=0 if in_place else whole.weights // parts,
                    optimizer=whole.optimizer // parts,
                    gradients=whole.gradients // parts,
                ),
                elsewhere=rank > 0 and "trainer" in devices.elsewhere,
            )
        )
    return needs


def _sampling(settings: Settings) -> Sampling:
    named = declared(SamplingSettings).keys() - {"stop_strings"}
    return Sampling(**{name: getattr(settings.sampling, name) for name in named})


def by_device(needs: Iterable[Expected]) -> dict[torch.device, list[Expected]]:
    """Return what is needed on each device of this machine."""
    found: dict[torch.device, list[Expected]] = {}
    for each in needs:
        if each.elsewhere:
            continue
        found.setdefault(each.device, []).append(each)
    return found


def crowded(needs: Iterable[Expected]) -> list[str]:
    """Return a sentence about each device that has less memory than its models need."""
    sentences = []
    for device, models in by_device(needs).items():
        total, there = sum(each.bytes.total for each in models), free(device)
        if total > there:
            each = ", ".join(f"{one.model} {decimal(one.bytes.total)}" for one in models)
            sentences.append(f"{device} has {decimal(there)} free, and its models need {decimal(total)} ({each})")
    return sentences


def require_memory(settings: Settings, devices: Devices) -> None:
    """Check, before anything is loaded, that the weights of all models, and what training keeps, fit.

    What cannot be estimated is left to loading, which says what is wrong with it.

    Raises:
        ConfigError: they do not; it says what each model needs, and what would fit.
    """
    try:
        found = crowded(expected(settings, devices, None))
    except (ConfigError, ModelRefused):
        return
    if found:
        raise ConfigError(f"{'; '.join(found)}: {advice(settings, devices, None)}")


def advice(settings: Settings, devices: Devices, load: Load | None) -> str:
    """Return what would need less memory, and whether that fits."""
    fitting = []
    for name, changes in _SMALLER:
        try:
            needs = expected(settings.changed(changes), devices, load)
        except (ConfigError, ModelRefused, ValueError):
            continue
        if not crowded(needs):
            fitting.append(f"{name} would fit ({decimal(sum(each.bytes.total for each in needs))} in all)")
    return "; ".join(
        [
            *(fitting or ["neither models.dtype = 'bfloat16' nor models.lora_rank = 16 would fit"]),
            "or give a model another device, or the trainer several ([placement]), or use smaller models",
        ]
    )
