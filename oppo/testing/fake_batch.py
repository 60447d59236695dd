"""A batch to train on, without a run that makes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oppo.declared import require_whole
from oppo.errors import ConfigError
from oppo.events import Batch, Chunk, Finish, Prompt, Response
from oppo.simulate.models import noises
from oppo.stages.advantage import GAE
from oppo.stages.batch import ScoredRollout


def fake_batch(
    lengths: Sequence[int] = (5, 9, 3, 12),
    *,
    prompt_length: int = 4,
    vocabulary: int = 96,
    version: int = 0,
    reference: bool = True,
    critic: bool = True,
    seed: int = 0,
) -> Batch:
    """Return a batch with the advantages of GAE, for :func:`check_trainer` and tests of trainers.

    Args:
        lengths: tokens of each response; a rollout each, and each a prompt of its own.
        prompt_length: tokens of each prompt.
        vocabulary: token ids are below it.
        version: of the weights that made the tokens.
        reference: whether it holds log-probs of a reference.
        critic: whether it holds values and returns.
        seed: of tokens and numbers.

    Raises:
        ConfigError: a number is not whole, or too small.

    Example:
        >>> batch = fake_batch([2, 3], critic=False)
        >>> batch.offsets.tolist(), batch.values
        ([0, 2, 5], None)
    """
    for name, number in (("prompt_length", prompt_length), ("vocabulary", vocabulary)):
        require_whole(name, number, 1, error=ConfigError)
    for length in lengths:
        require_whole("a length", length, 1, error=ConfigError)
    rows: list[ScoredRollout] = []
    for rollout, length in enumerate(lengths):
        ids, log, ref, value = (noises((seed, rollout, what), range(prompt_length + length)) for what in range(4))
        tokens = (ids * vocabulary).astype(np.int32)
        prompt = Prompt(rollout, rollout, tokens[:prompt_length], group=rollout)
        logprobs = (-4 * log[:length]).astype(np.float32)
        chunk = Chunk(rollout, 0, tokens[prompt_length:], logprobs, np.full(length, version, np.int32))
        rows.append(
            ScoredRollout(
                Finish(rollout, Response.empty(prompt).then(chunk), "eos"),
                (-4 * ref[:length]).astype(np.float32) if reference else None,
                float(ref[-1]),
                value[:length].astype(np.float32) if critic else None,
            )
        )
    return GAE(kl=0.05 if reference else 0.0).batch(rows)
