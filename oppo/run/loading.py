"""The models of a run, each loaded for its role and checked against the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from oppo.hf.lora import Quantization
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
from oppo.run.deployment import Deployment

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
        self._models, self._devices = deployment.models, deployment.devices
        self._decodes = not deployment.has_engine
        self._tokenizer = tokenizer

    def policy(self) -> PreTrainedModel:
        path = self._models.policy
        with self.attributed("policy"):
            actor = self._loaded("policy", load_causal, path)
            if self._decodes:
                require_pieces(actor)
            if self._tokenizer.size > (known := vocabulary_of(actor)):
                raise ConfigError(
                    f"the ids of its tokenizer go up to {self._tokenizer.size - 1}, but the model at {path!r} reads "
                    f"those below {known}: take the tokenizer that belongs to the model, or save the model after "
                    "resize_token_embeddings()"
                )
        return actor

    def logprobs(self, name: str) -> Loadable:
        path = {"reference": self._models.reference, **self._models.teachers}[name]
        with self.attributed(name):
            return self._checked(path, self._served(name, "causal", path))

    def teacher(self, name: str) -> tuple[Loadable, HfTokenizer | None]:
        path = self._models.teachers[name]
        with self.attributed(name):
            model = self._served(name, "causal", path)
            if (difference := self._difference(path, model)) is None:
                return model, None
            if isinstance(model, ModelRecipe):
                raise self.not_here(name, path)
            logger.info(f"{path} {difference}: it reads rollouts as text while they grow")
            return model, self.tokenizer(path)

    def critic(self, path: str) -> PreTrainedModel:
        with self.attributed("critic"):
            model = self._loaded("critic", partial(load_scalar, new_head=True), path)
            self.check_tokens(path, model)
        return model

    def reward_kind(self, path: str) -> RewardKind:
        return reward_kind(self._located(path), trusted=self._models.trust_remote_code)

    def scalar_reward(self, key: str, path: str) -> tuple[Loadable, str | None]:
        model = self._served(key, "scalar", path)
        return model, self._difference(path, model)

    def process_reward(self, key: str, path: str) -> Loadable:
        return self._checked(path, self._served(key, "process", path))

    def encoder(self, key: str, path: str) -> Encoder:
        if key.partition(".")[0] in self._devices.apart:
            raise self.not_here(key, path)
        logger.info(f"loading the {key} {path}")
        return load_encoder(path, **self._options(key))

    def tokenizer(self, path: str) -> HfTokenizer:
        return HfTokenizer(load_tokenizer(path, trust_remote_code=self._models.trust_remote_code))

    def recipe(self, name: str, kind: ModelKind, path: str, device: torch.device) -> ModelRecipe:
        models = self._models
        return ModelRecipe(
            path=path,
            kind=kind,
            dtype=models.dtype,
            device=str(device) if name.partition(".")[0] in self._devices.apart - self._devices.remote else device.type,
            attention=models.attention,
            trust_remote_code=models.trust_remote_code,
            allow_pickle=models.allow_pickle,
            ignore_unused=models.ignore_unused_weights,
            quantization=self._quantization(name),
            new_head=name == "critic",
        )

    def not_here(self, key: str, path: str) -> ConfigError:
        if key.partition(".")[0] not in self._devices.remote:
            return ConfigError(
                f"{path} reads text, and on a GPU run.scorers = 'process' serves models that read the policy's tokens: "
                "expected run.scorers = 'thread' or 'auto'"
            )
        return ConfigError(
            f"{path} reads text, and an actor of a cluster serves models that read the policy's tokens: name in "
            f"placement.remote the models that are actors, without {key.partition('.')[0]!r}"
        )

    def _served(self, name: str, kind: ModelKind, path: str) -> Loadable:
        model = name.partition(".")[0]
        if model not in self._devices.apart:
            return self._loaded(name, LOADERS[kind], path)
        recipe = self.recipe(name, kind, path, self._devices.scoring()[model])
        recipe.config()  # an error of a path comes now
        return recipe

    def _loaded(self, name: str, load: Callable[..., PreTrainedModel], path: str) -> PreTrainedModel:
        logger.info(f"loading the {name} {path}")
        model = load(path, quantization=self._quantization(name), **self._options(name))
        require_supported(model.dtype, model.device)
        return model

    def _checked(self, path: str, model: Loadable) -> Loadable:
        self.check_tokens(path, model)
        return model

    def check_tokens(self, path: str, model: Loadable) -> None:
        if (difference := self._difference(path, model)) is not None:
            raise ConfigError(f"{path} {difference}: expected a model with the policy's tokenizer")

    @contextmanager
    def attributed(self, name: str, key: str = "") -> Iterator[None]:
        """Name the setting of a model in the errors of loading it: ``key``, or its key in ``[models]``."""
        try:
            with attributed(name, "it was loaded", _LOADING):
                yield
        except (ConfigError, ModelRefused) as error:
            advice = [_AS_FUNCTION] if name.startswith("reward") else []
            raise type(error)("\n".join([f"{key or f'models.{name}'}: {error}", *advice])) from error

    def _options(self, name: str) -> LoadOptions:
        models = self._models
        return {
            "dtype": models.dtype,
            "device": self._device(name.partition(".")[0]),
            "trust_remote_code": models.trust_remote_code,
            "allow_pickle": models.allow_pickle,
            "ignore_unused": models.ignore_unused_weights,
            "attention": models.attention,
        }

    def _quantization(self, name: str) -> Quantization:
        of_base = name == "policy" or (name == "reference" and self._models.is_reference_on_base)
        return self._models.quantization if of_base else "none"

    def _device(self, model: str) -> torch.device:
        device: torch.device = getattr(self._devices, "actor" if model == "policy" else model)
        return self._devices.trainer[0] if model in self._devices.apart - {"policy"} else device

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
