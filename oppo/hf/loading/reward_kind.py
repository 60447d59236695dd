"""The kind of reward model in a directory, by its architecture, before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from oppo.errors import ConfigError, ModelRefused
from oppo.hf.introspection import score_head
from oppo.hf.loading.directory import ADAPTER, CONFIG, read_object, require_no_code
from oppo.hf.loading.encoders import MODULES
from oppo.hf.loading.models import quiet

RewardKind: TypeAlias = Literal["scalar", "process", "classifier", "similarity"]
"""One number at the last token, streamed; one at each step, streamed; a label's logit of the whole; a similarity."""


@quiet()
def reward_kind(directory: Path, *, trusted: bool = False) -> RewardKind:
    """Return the kind of reward model that a directory holds.

    A sequence classification model is ``scalar`` if transformers applies its head to the last token of a causal model,
    and otherwise a ``classifier``. A token classification model is ``process``. What sentence-transformers has written
    is ``similarity``, and so is an encoder without a head. Everything else is ``scalar``, to be refused when it is
    loaded.

    Raises:
        ConfigError: the config is damaged, or needs code that is not trusted.
    """
    if (directory / MODULES).is_file():
        return "similarity"
    if (directory / ADAPTER).is_file() or not (directory / CONFIG).is_file():
        return "scalar"
    require_no_code(directory, trusted=trusted)
    architectures = read_object(directory / CONFIG).get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if name.endswith("ForTokenClassification"):
        return "process"
    if name.endswith("ForSequenceClassification"):
        return "scalar" if _scores_the_last_token(directory, trusted=trusted) else "classifier"
    headless = name.endswith("Model") and not name.endswith("LMHeadModel")
    return "similarity" if headless else "scalar"


def _scores_the_last_token(directory: Path, *, trusted: bool) -> bool:
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trusted, num_labels=1)
        with torch.device("meta"):
            score_head(AutoModelForSequenceClassification.from_config(config, trust_remote_code=trusted))
    except ModelRefused:
        return False
    except Exception as error:  # any kind: a damaged config reaches deep into transformers
        raise ConfigError(f"no model can be made of {directory / CONFIG}: {error}") from error
    return True
