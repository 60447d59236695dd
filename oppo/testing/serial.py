"""Responses and scores without a graph, one model after the other: what streamed results are compared with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

import anyio

from oppo.errors import ProtocolError
from oppo.events import Finish, Prompt, Response
from oppo.models import Decode, Policy, Scorer

T = TypeVar("T")


async def respond_serially(policy: Policy, prompts: Sequence[Prompt]) -> list[Finish]:
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


async def score_serially(scorer: Scorer[T], finished: Sequence[Finish]) -> Sequence[T]:
    """Return the scorer's result for each finished rollout, each read as one piece."""
    await scorer.extend([part for event in finished for part in (event.response.prompt, event.response.chunk())])
    return await scorer.finish(finished)
