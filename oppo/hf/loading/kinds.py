"""The kinds of model that are loaded: the class that transformers has for each, and what it must have."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from oppo.hf.introspection import score_head, token_head

AutoClass: TypeAlias = type[
    AutoModel | AutoModelForCausalLM | AutoModelForSequenceClassification | AutoModelForTokenClassification
]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model.

    Attributes:
        auto: the class that loads it.
        mapping: has the config classes of which transformers has such a model.
        name: in errors.
        options: of ``from_pretrained``.
        require: refuses a model without the layers that serving it needs.
        streamed: whether it is served row by row, as sequences grow, and is probed for that.
        optional: prefixes of weights that serving does without, which may be missing.
    """

    auto: AutoClass
    mapping: Container[type[PreTrainedConfig]]
    name: str
    options: Mapping[str, Any]
    require: Callable[[PreTrainedModel], object]
    streamed: bool = True
    optional: tuple[str, ...] = ()


def _anything(model: PreTrainedModel) -> None:
    del model


CAUSAL: Final = Kind(AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING, "causal language model", {}, _anything)

SCALAR: Final = Kind(
    AutoModelForSequenceClassification,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "sequence classification model with one label",
    {"num_labels": 1},
    score_head,
)

PROCESS: Final = Kind(
    AutoModelForTokenClassification,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    "token classification model",
    {},
    token_head,
)

CLASSIFIER: Final = Kind(
    AutoModelForSequenceClassification,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "sequence classification model",
    {},
    _anything,
    streamed=False,
)

EMBEDDER: Final = Kind(AutoModel, MODEL_MAPPING, "text encoder", {}, _anything, streamed=False, optional=("pooler.",))
