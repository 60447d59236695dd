"""The models of a run, each loaded for its role and checked against the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from oppo.config.sections import ModelsSection
from oppo.errors import ConfigError, ModelRefused
from oppo.hf.as_text.whole import Encoder, load_encoder
from oppo.hf.devices import attributed
from oppo.hf.loading import (
    LOADERS,
    Loadable,
    LoadOptions,
    ModelKind,
    ModelRecipe,
    load_causal,
    load_scalar,
    load_tokenizer,
    require_supported,
    vocabulary_of,
)
from oppo.hf.model_files import (
    ADAPTER,
    RewardKind,
    holds_tokenizer,
    located,
    read_object,
    require_adapter,
    reward_kind,
)
from oppo.hf.model_parts import require_pieces
from oppo.hf.tokenizer import HfTokenizer
from oppo.log import logger
from oppo.run.deployment import Deployment, Role

_LOADING = "choose models.dtype = 'bfloat16', or a smaller model"

_AS_FUNCTION = (
    "A reward of another kind is served as a function: set its source to 'file.py:function', which is given "
    "prompts and completions as text (oppo.rewards.FunctionReward)."
)


def adapter_of(models: ModelsSection) -> Path:
    """Return the directory of ``models.adapter``, once its files say that it is for ``models.policy``."""
    try:
        directory = located(models.adapter, weights=True)
        base = str(read_object(directory / ADAPTER).get("base_model_name_or_path"))
        same = _same_model(base, models.policy)
        if same:
            require_adapter(directory, allow_pickle=None)
    except ConfigError as error:
        raise ConfigError(f"models.adapter: {error}") from error
    if not same:
        raise ConfigError(
            f"models.adapter: {models.adapter} is for the model {base!r}, and models.policy is {models.policy!r}: set "
            f"models.policy = {base!r}, or name an adapter for the policy; if both are the same model, say so by "
            f"base_model_name_or_path in {directory / ADAPTER}"
        )
    return directory


def _same_model(*names: str) -> bool:
    one, other = (Path(name).expanduser() for name in names)
    if one.is_dir() and other.is_dir():
        return one.resolve() == other.resolve()
    # a model of a hub may have a copy here
    return names[0] == names[1] or ((one.is_dir() or other.is_dir()) and one.name == other.name)


class RoleLoader:
    """Loads the models of a run; errors name the setting of the model and the remedy."""

    def __init__(self, deployment: Deployment, tokenizer: HfTokenizer) -> None:
        self._deployment, self._models, self._devices = deployment, deployment.models, deployment.devices
        self._tokenizer = tokenizer

    def policy(self) -> PreTrainedModel:
        role = self._deployment.roles["policy"]
        with self.attributed(role):
            actor = self._loaded(role, load_causal)
            if not self._deployment.has_engine:
                require_pieces(actor)
            if self._tokenizer.size > (known := vocabulary_of(actor)):
                raise ConfigError(
                    f"the ids of its tokenizer go up to {self._tokenizer.size - 1}, but the model at {role.source!r} "
                    f"reads those below {known}: take the tokenizer that belongs to the model, or save the model after "
                    "resize_token_embeddings()"
                )
        return actor

    def reference(self) -> Loadable:
        role = self._deployment.roles["reference"]
        with self.attributed(role):
            return self._checked(role, self._served(role, "causal"))

    def teacher(self, role: Role) -> tuple[Loadable, HfTokenizer | None]:
        with self.attributed(role):
            model = self._served(role, "causal")
            if (difference := self._difference(role.source, model)) is None:
                return model, None
            if isinstance(model, ModelRecipe):
                raise self.not_here(role)
            logger.info(f"{role.source} {difference}: it reads rollouts as text while they grow")
            return model, self.tokenizer(role.source)

    def critic(self, source: str) -> tuple[PreTrainedModel, Loadable]:
        """Return the critic that begins as the model at ``source``, as it is trained and as it is served."""
        role = replace(self._deployment.roles["critic"], source=source)
        with self.attributed(role):
            model = self._loaded(role, partial(load_scalar, new_head=True))
            self.check_tokens(role, model)
        return model, self.recipe(role, "scalar") if role.apart else model

    def reward_kind(self, path: str) -> RewardKind:
        return reward_kind(self._located(path), trusted=self._models.trust_remote_code)

    def scalar_reward(self, role: Role) -> tuple[Loadable, str | None]:
        model = self._served(role, "scalar")
        return model, self._difference(role.source, model)

    def process_reward(self, role: Role) -> Loadable:
        return self._checked(role, self._served(role, "process"))

    def encoder(self, role: Role) -> Encoder:
        if role.apart:
            raise self.not_here(role)
        logger.info(f"loading the {role.name} {role.source}")
        return load_encoder(role.source, **self._options(role))

    def tokenizer(self, path: str) -> HfTokenizer:
        return HfTokenizer(load_tokenizer(path, trust_remote_code=self._models.trust_remote_code))

    def recipe(self, role: Role, kind: ModelKind, device: torch.device | None = None) -> ModelRecipe:
        """Return how a model is loaded on ``device``; by default on that on which it is served."""
        models, device = self._models, device or role.device
        return ModelRecipe(
            path=role.source,
            kind=kind,
            dtype=models.dtype,
            device=str(device) if role.apart and not role.remote else device.type,
            attention=models.attention,
            trust_remote_code=models.trust_remote_code,
            allow_pickle=models.allow_pickle,
            ignore_unused=models.ignore_unused_weights,
            quantization=role.quantization,
            new_head=role.name == "critic",
        )

    def not_here(self, role: Role) -> ConfigError:
        if not role.remote:
            return ConfigError(
                f"{role.source} reads text, and on a GPU run.scorers = 'process' serves models that read the policy's "
                "tokens: expected run.scorers = 'thread' or 'auto'"
            )
        return ConfigError(
            f"{role.source} reads text, and an actor of a cluster serves models that read the policy's tokens: name in "
            f"placement.remote the models that are actors, without {role.model!r}"
        )

    def _served(self, role: Role, kind: ModelKind) -> Loadable:
        if not role.apart:
            return self._loaded(role, LOADERS[kind])
        recipe = self.recipe(role, kind)
        recipe.config()  # an error of a path comes now
        return recipe

    def _loaded(self, role: Role, load: Callable[..., PreTrainedModel]) -> PreTrainedModel:
        logger.info(f"loading the {role.name} {role.source}")
        model = load(role.source, quantization=role.quantization, **self._options(role))
        require_supported(model.dtype, model.device)
        return model

    def _checked(self, role: Role, model: Loadable) -> Loadable:
        self.check_tokens(role, model)
        return model

    def check_tokens(self, role: Role, model: Loadable) -> None:
        if (difference := self._difference(role.source, model)) is not None:
            raise ConfigError(f"{role.source} {difference}: expected a model with the policy's tokenizer")

    @contextmanager
    def attributed(self, role: Role, key: str = "") -> Iterator[None]:
        """Name a setting of a model in the errors of loading it: ``key``, or the setting of its source."""
        try:
            with attributed(role.name, "it was loaded", _LOADING):
                yield
        except (ConfigError, ModelRefused) as error:
            advice = [_AS_FUNCTION] if role.model == "reward" else []
            raise type(error)("\n".join([f"{key or role.key}: {error}", *advice])) from error

    def _options(self, role: Role) -> LoadOptions:
        models, devices = self._models, self._devices
        here = devices.trainer[0] if role.apart else role.device
        return {
            "dtype": models.dtype,
            "device": devices.actor if role.name == "policy" else here,
            "trust_remote_code": models.trust_remote_code,
            "allow_pickle": models.allow_pickle,
            "ignore_unused": models.ignore_unused_weights,
            "attention": models.attention,
        }

    def _located(self, path: str) -> Path:
        return located(path, weights=False, trust_remote_code=self._models.trust_remote_code)

    def _difference(self, path: str, model: Loadable) -> str | None:
        policy = self._models.policy
        has_tokenizer = path != policy and holds_tokenizer(self._located(path))
        if has_tokenizer and (difference := self._tokenizer.differs(self.tokenizer(path))) is not None:
            return f"does not share the policy's tokenizer ({difference})"
        ours, theirs = self._tokenizer.size, vocabulary_of(model)
        if theirs < ours:
            return f"knows the token ids below {theirs}, but those of the policy {policy} go up to {ours - 1}"
        return None


def critic_source(models: ModelsSection, rewards: Sequence[str], fit: Sequence[str]) -> str:
    # its own model, unless that is a reward model that is unfit to be a critic
    if models.critic in fit or models.critic not in rewards:
        return models.critic
    return next(iter(fit), models.policy)
