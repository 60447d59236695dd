"""Evaluation on held-out prompts: a policy's responses, their scores, and paired differences."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio
import numpy as np

from oppo.errors import ProtocolError
from oppo.events import Finish, FloatArray, Prompt, Response
from oppo.models import Decode, Policy, Scorer

T = TypeVar("T")


async def respond(policy: Policy, prompts: Sequence[Prompt]) -> list[Finish]:
    """Return the finished rollouts of ``prompts``, in order, decoded as one batch."""
    decodes = await policy.open(prompts)
    finished: list[Finish | None] = [None] * len(prompts)

    async def read(k: int, prompt: Prompt, decode: Decode) -> None:
        piece = await decode.read(sys.maxsize)
        chunk = piece.chunk(prompt.rollout, 0)
        match piece.state:
            case "eos" | "stop" | "length" as reason:
                finished[k] = Finish(prompt.rollout, Response.empty(prompt).then(chunk), reason)
            case state:
                raise ProtocolError(f"rollout {prompt.rollout}: reading it whole ended with state {state!r}")
        await decode.aclose()

    async with policy.decoding(decodes, lambda _ended: False), anyio.create_task_group() as readers:
        for k, (prompt, decode) in enumerate(zip(prompts, decodes, strict=True)):
            readers.start_soon(read, k, prompt, decode)
    return [event for event in finished if event is not None]


async def score_all(scorer: Scorer[T], finished: Sequence[Finish]) -> Sequence[T]:
    """Return the scorer's result for each finished rollout, each read as one piece."""
    await scorer.extend([part for event in finished for part in (event.response.prompt, event.response.chunk())])
    return await scorer.finish(finished)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Scores of the same prompts before and after.

    Attributes:
        before, after: mean scores.
        spread: standard deviation of the scores before.
        gain: mean of the paired differences, after minus before.
        half_width: of the 95 % confidence interval of the gain (normal approximation).
    """

    before: float
    after: float
    spread: float
    gain: float
    half_width: float


def compare(before: FloatArray, after: FloatArray) -> Comparison:
    """Return the change of scores that are paired by prompt.

    Args:
        before, after: float32 [N], N >= 2.

    Raises:
        ValueError: the arrays differ in length or hold fewer than two scores.
    """
    if before.shape != after.shape or before.ndim != 1 or len(before) < 2:
        raise ValueError(f"expected two score arrays of one length >= 2, got shapes {before.shape} and {after.shape}")
    difference = after.astype(np.float64) - before
    return Comparison(
        before=float(before.mean(dtype=np.float64)),
        after=float(after.mean(dtype=np.float64)),
        spread=float(before.std(ddof=1, dtype=np.float64)),
        gain=float(difference.mean()),
        half_width=1.96 * float(difference.std(ddof=1)) / math.sqrt(len(difference)),
    )
