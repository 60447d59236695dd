"""The models that settings name, each loaded for its role and checked against the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import PreTrainedModel

from oppo.app.settings import ModelsSection
from oppo.errors import ConfigError, ModelRefused
from oppo.hf.introspection import vocabulary
from oppo.hf.loading.directory import holds_tokenizer
from oppo.hf.loading.hub import located
from oppo.hf.loading.models import load_causal, load_scalar, load_tokenizer
from oppo.hf.out_of_memory import attributed
from oppo.hf.text import Text
from oppo.hf.train.precision import require_supported

_LOADING = "choose models.dtype = 'bfloat16', or a smaller model"

_AS_FUNCTION = (
    "A reward of another kind (several labels, another tokenizer, no causal model) is served as a function: set "
    "models.reward = 'file.py:function', which is given prompts and completions as text "
    "(oppo.rewards.FunctionReward)."
)


class RoleLoader:
    """Loads the models of a run; an error names the setting that asked for the model, and what to do."""

    def __init__(self, models: ModelsSection, text: Text, device: torch.device, tell: Callable[[str], None]) -> None:
        self._models = models
        self._text = text
        self._device = device
        self._tell = tell
        self._actor: PreTrainedModel | None = None

    def causal(self, name: str) -> PreTrainedModel:
        """Return the causal language model of ``models.<name>``; the first is the policy."""
        return self._checked(name, load_causal)

    def scalar(self, name: str, *, new_head: bool = False) -> PreTrainedModel:
        """Return the model of ``models.<name>`` as one that gives one number."""
        return self._checked(name, partial(load_scalar, new_head=new_head))

    def _checked(self, name: str, load: Callable[..., PreTrainedModel]) -> PreTrainedModel:
        models = self._models
        with self._loading(name) as path:
            model = load(
                path,
                dtype=models.dtype,
                device=self._device,
                trust_remote_code=models.trust_remote_code,
                allow_pickle=models.allow_pickle,
                ignore_unused=models.ignore_unused_weights,
                attention=models.attention,
                tell=self._tell,
            )
            require_supported(model.dtype, model.device)
            self._require_same_tokens(name, model)
        return model

    @contextmanager
    def _loading(self, name: str) -> Iterator[str]:
        path = str(getattr(self._models, name))
        self._tell(f"loading the {name} {path}")
        try:
            with attributed(name, "it was loaded", _LOADING):
                yield path
        except (ConfigError, ModelRefused) as error:
            advice = [_AS_FUNCTION] if name == "reward" else []
            raise type(error)("\n".join([f"models.{name}: {error}", *advice])) from error

    def _require_same_tokens(self, name: str, model: PreTrainedModel) -> None:
        """Refuse a model that reads the policy's token ids differently: it would score gibberish."""
        if self._actor is None:
            self._actor = model
            return
        path, policy = str(getattr(self._models, name)), self._models.policy
        ours, theirs = vocabulary(self._actor), vocabulary(model)
        if theirs < ours:
            raise ConfigError(
                f"{path} knows the token ids below {theirs}, but the policy {policy} may choose any below {ours}: "
                "expected a model of the same vocabulary"
            )
        if path == policy:
            return
        trusted = self._models.trust_remote_code
        if not holds_tokenizer(located(path, weights=False, trust_remote_code=trusted, tell=self._tell)):
            return  # nothing to compare
        other = Text(load_tokenizer(path, trust_remote_code=trusted, tell=self._tell))
        if (difference := self._text.differs(other)) is not None:
            raise ConfigError(f"{path} does not share the policy's tokenizer: {difference}")
