"""Dumps a batch for debugging: arrays as safetensors, the rest as JSON."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from oppo.events import Batch
from oppo.redact import redacted

ARRAYS = (
    "scores", "offsets", "tokens", "versions", "sampled", "logprobs", "proximal", "reference", "values", "rewards",
    "advantages", "returns", "token_rewards", "last_values",
)  # fmt: skip
"""The arrays that a batch may have, under their own names."""


def dump_batch(batch: Batch, folder: Path) -> Path:
    """Write ``batch.safetensors`` and ``batch.json`` into ``folder``, which is made, and return it.

    Row ``r`` owns ``offsets[r] : offsets[r + 1]`` of the per-token arrays and ``prompt_offsets[r] :
    prompt_offsets[r + 1]`` of ``prompts``. ``support_ids`` and ``support_counts`` are the ids that each token was drawn
    from (see :class:`oppo.support.Support`), empty without truncation. Arrays that the batch lacks are left out, and so
    are the data's other columns.

    Raises:
        OSError: a file cannot be written.
    """
    prompts = [response.prompt.tokens for response in batch.responses]
    held = {name: getattr(batch, name) for name in ARRAYS}
    arrays = {name: np.ascontiguousarray(array) for name, array in held.items() if array is not None}
    arrays["prompts"] = np.concatenate([np.zeros(0, np.int32), *prompts])
    arrays["prompt_offsets"] = np.array([*accumulate(map(len, prompts), initial=0)], np.int64)
    support = batch.support(range(len(batch)))
    arrays["support_ids"], arrays["support_counts"] = support.ids, support.counts
    rows = [
        {
            "rollout": response.prompt.rollout,
            "admission": response.prompt.admission,
            "sample": response.prompt.sample,
            "tokens": len(response),
            "reason": reason,
        }
        for response, reason in zip(batch.responses, batch.reasons, strict=True)
    ]
    dropped = [{"rollout": drop.rollout, "reason": redacted(drop.reason)} for drop in batch.dropped]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "batch.safetensors")
    (folder / "batch.json").write_text(json.dumps({"rows": rows, "dropped": dropped}, indent=2) + "\n", "utf-8")
    return folder
