"""What transformers computes of the responses that vLLM has written, with weights that changed in between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import anyio.to_thread
import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from oppo.events import Chunk, FloatArray, Prompt


async def logprobs(
    models: Sequence[PreTrainedModel], prompt: Prompt, pieces: Sequence[Chunk], *, kept: bool = False
) -> FloatArray:
    """Return the log-prob of each token under the weights that made it, float32 [n].

    Args:
        models: by version.
        kept: keys and values of tokens stay those of the weights that read them; otherwise the weights that make a
            token have read all before it.
    """
    tokens = np.concatenate([piece.tokens for piece in pieces])
    versions = np.concatenate([piece.versions for piece in pieces])
    borders = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(tokens)]
    sequence = torch.tensor([[*prompt.tokens.tolist(), *tokens.tolist()]])

    @torch.no_grad()
    def forward() -> FloatArray:
        found, cache, before = np.zeros(len(tokens), np.float32), DynamicCache(), len(prompt.tokens)
        for start, end in pairwise(borders):
            read = before + start - 1 if kept and start else 0
            model = models[int(versions[start])]
            logits = model(
                sequence[:, read : before + end - 1],
                past_key_values=cache if kept else None,
                position_ids=torch.arange(read, before + end - 1)[None],
                use_cache=kept,
            ).logits[0, start - end :]
            found[start:end] = logits.float().log_softmax(-1)[range(end - start), tokens[start:end].tolist()]
        return found

    return await anyio.to_thread.run_sync(forward)
