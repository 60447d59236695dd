"""A score of each token on the trunk of any causal language model: where transformers has no sequence classifier of it.

The class is made of the causal model's. Its trunk has the same name, so that it takes the weights of the same
checkpoint, and it is called and saved as transformers would call it, ``Lfm2ForSequenceClassification`` for example.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, cast

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from oppo.errors import ModelRefused
from oppo.hf.introspection import backbone

_ENDINGS: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForImageTextToText")


@cache
def scored(causal: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the class of models with the trunk of ``causal`` and a ``score`` layer on its last hidden states."""
    base = next(each for each in causal.__mro__[1:] if each.__name__.endswith("PreTrainedModel"))
    name = causal.__name__
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    attributes = {"_causal": causal, "config_class": causal.config_class, "__module__": __name__}
    return cast("type[PreTrainedModel]", type(f"{name}ForSequenceClassification", (_Scored, base), attributes))


def _unfilled(causal: type[PreTrainedModel]) -> PreTrainedModel:
    kind = scored(causal)
    return kind.__new__(kind)


class _Scored(GenericForSequenceClassification):
    """Before ``PreTrainedModel`` in the order of its classes.

    Attributes:
        left_out: prefixes of the weights of the causal model that are not the trunk's.
    """

    _causal: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig) -> None:
        super(GenericForSequenceClassification, self).__init__(config)
        whole = self._causal(config)
        trunk = backbone(whole)
        parts = {name: child is trunk for name, child in whole.named_children()}
        if not any(parts.values()):
            raise ModelRefused(f"{type(whole).__name__} holds its trunk inside of another part: expected it as a part")
        self.base_model_prefix = next(name for name, is_trunk in parts.items() if is_trunk)
        self.left_out = tuple(f"{name}." for name, is_trunk in parts.items() if not is_trunk)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, trunk)
        self.score = nn.Linear(whole.get_output_embeddings().weight.shape[1], config.num_labels, bias=False)
        self.post_init()

    def __reduce__(self) -> tuple[object, ...]:  # another process makes the class, which no module has
        return _unfilled, (self._causal,), self.__dict__

    @classmethod
    def is_custom_code(cls) -> bool:
        """As the causal model: transformers sets the buffers of its own models, and converts their old checkpoints."""
        return bool(cls._causal.is_custom_code())

    @classmethod
    def from_config(cls, config: PreTrainedConfig, *, trust_remote_code: bool = False, **options: Any) -> Any:
        del trust_remote_code
        return cls._from_config(config, **options)

    @classmethod
    def from_pretrained(cls, path: Any, *, num_labels: int = 1, trust_remote_code: bool = False, **options: Any) -> Any:
        config = AutoConfig.from_pretrained(path, num_labels=num_labels, trust_remote_code=trust_remote_code)
        return super().from_pretrained(path, config=config, **options)
