"""The models of a run, each loaded for its role and checked against the policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel

from oppo.app.sections import ModelsSection
from oppo.errors import ConfigError, ModelRefused
from oppo.hf.device_layout import Devices
from oppo.hf.introspection import vocabulary
from oppo.hf.loading.directory import holds_tokenizer
from oppo.hf.loading.hub import located
from oppo.hf.loading.models import load_causal, load_scalar, load_tokenizer
from oppo.hf.loading.precision import require_supported
from oppo.hf.out_of_memory import attributed
from oppo.hf.text import Text

_LOADING = "choose models.dtype = 'bfloat16', or a smaller model"

_AS_FUNCTION = (
    "A reward of another kind (several labels, another tokenizer, no causal model) is served as a function: set "
    "models.reward = 'file.py:function', which is given prompts and completions as text "
    "(oppo.rewards.FunctionReward)."
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
        return self._loaded(name, load_causal)

    def scalar(self, name: str, *, path: str = "", new_head: bool = False) -> PreTrainedModel:
        """Return the sequence-classification model of ``models.<name>``, with one label.

        Args:
            name: the key, in errors and notices.
            path: directory or hub name, unless the key's value is it.
            new_head: make a head for a model without one.
        """
        return self._loaded(name, partial(load_scalar, new_head=new_head), path)

    def _loaded(self, name: str, load: Callable[..., PreTrainedModel], path: str = "") -> PreTrainedModel:
        models = self._models
        path = path or str(getattr(models, name))
        self._tell(f"loading the {name} {path}")
        try:
            with attributed(name, "it was loaded", _LOADING):
                model = load(
                    path,
                    dtype=models.dtype,
                    device=getattr(self._devices, name.partition(".")[0]),
                    trust_remote_code=models.trust_remote_code,
                    allow_pickle=models.allow_pickle,
                    ignore_unused=models.ignore_unused_weights,
                    attention=models.attention,
                    tell=self._tell,
                )
                require_supported(model.dtype, model.device)
                self._require_same_tokens(path, model)
        except (ConfigError, ModelRefused) as error:
            advice = [_AS_FUNCTION] if name.startswith("reward") else []
            raise type(error)("\n".join([f"models.{name}: {error}", *advice])) from error
        return model

    def _require_same_tokens(self, path: str, model: PreTrainedModel) -> None:
        """Check that a model reads token ids as the policy does: otherwise its scores mean nothing."""
        if self._actor is None:
            self._actor = model
            return
        policy, ours, theirs = self._models.policy, vocabulary(self._actor), vocabulary(model)
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
