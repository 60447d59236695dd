"""What enters a graph: prompts, checked where they are taken, so that a fault names what came."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from oppo.errors import DataError
from oppo.events import Prompt

_HOW = "oppo.read_prompts makes prompts of a file, and oppo.PromptStream numbers them"


def prompt_of(item: object) -> Prompt:
    """Return the item, which is a prompt that can be generated for.

    Raises:
        DataError: it is something else, or its tokens are not int32 [P] with P of 1 or more.
    """
    if not isinstance(item, Prompt):
        raise DataError(f"a graph reads prompts as oppo.Prompt, token ids with a number; got {item!r:.60}. {_HOW}")
    tokens: object = item.tokens
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1 or not len(tokens):
        came = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else f"{tokens!r:.60}"
        raise DataError(f"the tokens of prompt {item.admission} must be a NumPy array, int32 [1 or more], not {came}")
    return item


def require_new(prompts: Iterable[Prompt], in_flight: Iterable[int]) -> None:
    """Check that none of the rollouts to be opened is in flight, or opened twice.

    Raises:
        DataError: one is; says which number came twice.
    """
    seen = set(in_flight)
    for prompt in prompts:
        if prompt.rollout in seen:
            raise DataError(
                f"prompt {prompt.admission} came again while a rollout of that number is in flight: the number keys "
                "its tokens and its place in the batch, so no two prompts of a run may share one, nor an epoch repeat "
                f"those of another. {_HOW}, anew in each epoch"
            )
        seen.add(prompt.rollout)
