"""Models without weights, on the device ``meta``: their architecture, as ``config.json`` describes it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from oppo.errors import ConfigError
from oppo.hf.loading.directory import require_adapter, require_data, require_no_code
from oppo.hf.loading.fit import require_kind
from oppo.hf.loading.hub import located
from oppo.hf.loading.kinds import Kind
from oppo.hf.loading.models import DTYPES, quiet, reading
from oppo.observe import silent


@quiet()
def outline(
    kind: Kind, path: str | Path, *, dtype: str = "float32", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the model of a directory or hub name without its weights.

    Args:
        kind: of the model.
        path: a directory with ``config.json``, or with an adapter for such a model, or a hub name.
        dtype: as :func:`oppo.hf.loading.models.load_causal` has it.

    Raises:
        ConfigError: there is no such model, its ``config.json`` cannot be used, or there are weights beside it that are
            of a smaller model.
        ModelRefused: the architecture has no model of this kind.
    """
    directory = located(path, weights=False, trust_remote_code=trust_remote_code, tell=silent)
    adapter = require_adapter(directory, allow_pickle=True)
    if adapter is not None:
        directory = located(adapter.base, weights=False, trust_remote_code=trust_remote_code, tell=silent)
    require_no_code(directory, trusted=trust_remote_code)
    with reading(directory, f"no model can be made of {directory / 'config.json'}"):
        weights = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
        if weights:
            tensors = require_data(directory, trusted=trust_remote_code, allow_pickle=True)
            require_kind(kind, directory, tensors, trusted=trust_remote_code)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, **kind.options)
        chosen = DTYPES[dtype]
        given = (config.dtype or torch.float32) if chosen == "auto" else chosen
        with torch.device("meta"):
            model: PreTrainedModel = kind.auto.from_config(  # type: ignore[no-untyped-call]  # transformers'
                config, dtype=given, trust_remote_code=trust_remote_code
            )
    numbers, there = model.num_parameters(), sum(file.stat().st_size for file in weights)
    if weights and numbers > there:
        raise ConfigError(
            f"{directory / 'config.json'} describes {numbers} numbers, but the weights have {there} bytes: expected "
            "the weights of that model"
        )
    return model
