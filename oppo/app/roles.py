"""The models of a run, each loaded for its role and checked against the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from oppo.app.sections import ModelsSection
from oppo.errors import ConfigError, ModelRefused
from oppo.hf.as_text.encoder import Encoder
from oppo.hf.device_layout import Devices
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

    def __init__(self, models: ModelsSection, text: Text, devices: Devices, tell: Callable[[str], None]) -> None:
        self._models = models
        self._text = text
        self._devices = devices
        self._tell = tell
        self._actor: PreTrainedModel | None = None

    def causal(self, name: str) -> PreTrainedModel:
        """Return the causal language model of ``models.<name>``; the first is the policy."""
        path = str(getattr(self._models, name))
        with self.attributed(name):
            return self._checked(path, self._loaded(name, load_causal, path))

    def critic(self, path: str) -> PreTrainedModel:
        """Return the model of the critic at ``path``; its head may be new."""
        with self.attributed("critic"):
            return self._checked(path, self._loaded("critic", partial(load_scalar, new_head=True), path))

    def reward_kind(self, path: str) -> RewardKind:
        """Return the kind of a reward model, by its architecture."""
        return reward_kind(self._located(path), trusted=self._models.trust_remote_code)

    def scalar_reward(self, key: str, path: str) -> tuple[PreTrainedModel, str | None]:
        """Return a reward model with one label, and its tokenizer's difference to the policy's, in words.

        ``None``: it reads the policy's tokens as they are.
        """
        model = self._loaded(key, load_scalar, path)
        return model, self._difference(path, model)

    def process_reward(self, key: str, path: str) -> PreTrainedModel:
        """Return a token-classification model, which shares the policy's tokenizer."""
        return self._checked(path, self._loaded(key, load_process, path))

    def encoder(self, key: str, path: str) -> Encoder:
        """Return a model that reads whole texts."""
        self._tell(f"loading the {key} {path}")
        return load_encoder(path, **self._options(key))

    def tokenizer(self, path: str) -> Text:
        """Return the tokenizer that comes with a model."""
        return Text(load_tokenizer(path, trust_remote_code=self._models.trust_remote_code, tell=self._tell))

    def _loaded(self, name: str, load: Callable[..., PreTrainedModel], path: str) -> PreTrainedModel:
        self._tell(f"loading the {name} {path}")
        model = load(path, **self._options(name))
        require_supported(model.dtype, model.device)
        return model

    def _checked(self, path: str, model: PreTrainedModel) -> PreTrainedModel:
        """Return a model that reads token ids as the policy does; the first is the policy."""
        if self._actor is None:
            self._actor = model
        elif (difference := self._difference(path, model)) is not None:
            raise ConfigError(f"{path} {difference}: expected a model with the policy's tokenizer")
        return model

    @contextmanager
    def attributed(self, name: str) -> Iterator[None]:
        """Name the setting of a model in the errors of loading it."""
        try:
            with attributed(name, "it was loaded", _LOADING):
                yield
        except (ConfigError, ModelRefused) as error:
            advice = [_AS_FUNCTION] if name.startswith("reward") else []
            raise type(error)("\n".join([f"models.{name}: {error}", *advice])) from error

    def _options(self, name: str) -> LoadOptions:
        """Return the options of loading the model of ``models.<name>``."""
        models = self._models
        return {
            "dtype": models.dtype,
            "device": getattr(self._devices, name.partition(".")[0]),
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
        if has_tokenizer and (difference := self._text.differs(self.tokenizer(path))) is not None:
            return f"does not share the policy's tokenizer ({difference})"
        ours, theirs = vocabulary(self._actor or model), vocabulary(model)
        if theirs < ours:
            return f"knows the token ids below {theirs}, but the policy {policy} may choose any below {ours}"
        return None
