"""The models of a run, each loaded for its role and checked against the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from oppo.app.sections import ModelsSection
from oppo.errors import ConfigError, ModelRefused
from oppo.hf.as_text.encoder import Encoder
from oppo.hf.introspection import vocabulary
from oppo.hf.loading.directory import holds_tokenizer
from oppo.hf.loading.encoders import load_encoder
from oppo.hf.loading.hub import located
from oppo.hf.loading.models import LoadOptions, load_causal, load_process, load_scalar, load_tokenizer
from oppo.hf.loading.precision import require_supported
from oppo.hf.loading.reward_kind import RewardKind, reward_kind
from oppo.hf.out_of_memory import attributed
from oppo.hf.text import Text

_LOADING = "choose models.dtype = 'bfloat16', or a smaller model"

_AS_FUNCTION = (
    "A reward of another kind is served as a function: set models.reward = 'file.py:function', which is given prompts "
    "and completions as text (oppo.rewards.FunctionReward)."
)


class RoleLoader:
    """Loads the models of a run; errors name the setting of the model and the remedy."""

    def __init__(self, models: ModelsSection, text: Text, device: torch.device, tell: Callable[[str], None]) -> None:
        self._models = models
        self._text = text
        self._device = device
        self._tell = tell
        self._actor: PreTrainedModel | None = None

    def causal(self, name: str) -> PreTrainedModel:
        """Return the causal language model of ``models.<name>``; the first is the policy."""
        return self._loaded(name, load_causal)

    def critic(self, path: str) -> PreTrainedModel:
        """Return the model of the critic at ``path``; its head may be new."""
        return self._loaded("critic", partial(load_scalar, new_head=True), path)

    def reward_kind(self) -> RewardKind:
        """Return the kind of the reward model, by its architecture and by how it is to read."""
        models = self._models
        with self._attributed("reward"):
            kind = reward_kind(self._located(models.reward), trusted=models.trust_remote_code)
            if kind == "scalar" and (models.reward_reading == "whole" or models.reward_label):
                kind = "classifier"
            if models.reward_column and kind != "similarity":
                raise ConfigError(
                    f"{models.reward} is no sentence encoder, which would compare a response with the column that "
                    f"models.reward_column = {models.reward_column!r} names: leave it out"
                )
            if kind == "similarity" and not models.reward_column:
                raise ConfigError(
                    f"{models.reward} is a sentence encoder, whose reward is the similarity of a response to a text of "
                    "its row: set models.reward_column to the column of that text"
                )
        return kind

    def scalar_reward(self) -> tuple[PreTrainedModel, str | None]:
        """Return the reward model with one label, and its tokenizer's difference to the policy's, in words.

        ``None``: it reads the policy's tokens as they are.
        """
        model = self._loaded("reward", load_scalar, check=False)
        with self._attributed("reward"):
            return model, self._difference(self._models.reward, model)

    def process_reward(self) -> PreTrainedModel:
        """Return the token-classification model of ``models.reward``, which shares the policy's tokenizer."""
        return self._loaded("reward", load_process)

    def encoder(self) -> Encoder:
        """Return the model of ``models.reward`` that reads whole texts."""
        self._tell(f"loading the reward {self._models.reward}")
        with self._attributed("reward"):
            return load_encoder(self._models.reward, **self._options())

    def reward_tokenizer(self) -> Text:
        """Return the reward model's own tokenizer."""
        with self._attributed("reward"):
            return self._tokenizer(self._models.reward)

    def _tokenizer(self, path: str) -> Text:
        return Text(load_tokenizer(path, trust_remote_code=self._models.trust_remote_code, tell=self._tell))

    def _loaded(
        self, name: str, load: Callable[..., PreTrainedModel], path: str = "", *, check: bool = True
    ) -> PreTrainedModel:
        path = path or str(getattr(self._models, name))
        self._tell(f"loading the {name} {path}")
        with self._attributed(name):
            model = load(path, **self._options())
            require_supported(model.dtype, model.device)
            if self._actor is None:
                self._actor = model
            elif check and (difference := self._difference(path, model)) is not None:
                raise ConfigError(f"{path} {difference}: expected a model with the policy's tokenizer")
        return model

    @contextmanager
    def _attributed(self, name: str) -> Iterator[None]:
        """Name the setting of a model in its errors."""
        try:
            with attributed(name, "it was loaded", _LOADING):
                yield
        except (ConfigError, ModelRefused) as error:
            advice = [_AS_FUNCTION] if name == "reward" else []
            raise type(error)("\n".join([f"models.{name}: {error}", *advice])) from error

    def _options(self) -> LoadOptions:
        models = self._models
        return {
            "dtype": models.dtype,
            "device": self._device,
            "trust_remote_code": models.trust_remote_code,
            "allow_pickle": models.allow_pickle,
            "ignore_unused": models.ignore_unused_weights,
            "attention": models.attention,
            "tell": self._tell,
        }

    def _located(self, path: str) -> Path:
        return located(path, weights=False, trust_remote_code=self._models.trust_remote_code, tell=self._tell)

    def _difference(self, path: str, model: PreTrainedModel) -> str | None:
        """Return how a model reads token ids otherwise than the policy, in words: its scores would mean nothing."""
        policy = self._models.policy
        has_tokenizer = path != policy and holds_tokenizer(self._located(path))
        if has_tokenizer and (difference := self._text.differs(self._tokenizer(path))) is not None:
            return f"does not share the policy's tokenizer ({difference})"
        ours, theirs = vocabulary(self._actor or model), vocabulary(model)
        if theirs < ours:
            return f"knows the token ids below {theirs}, but the policy {policy} may choose any below {ours}"
        return None
