"""The end of an engine, as the error of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import anyio

from oppo.errors import ModelLost, OppoError, as_itself, one_line
from oppo.vllm.surface import AsyncEngine

LOOK: Final = 0.1
"""Seconds between two looks at whether an engine is dead that owes an answer."""

_ADVICE: Final = (
    "go on from the newest checkpoint (oppo resume); vllm.log in the run directory has what the engine wrote"
)


@contextmanager
def engine_calls() -> Iterator[None]:
    """Turn whatever a call of the engine raises into :class:`~oppo.errors.ModelLost`, with what to do.

    Raises:
        ModelLost: the engine is dead, or refused the call.
    """
    try:
        yield
    except OppoError:
        raise
    except Exception as error:
        raise ModelLost(f"vLLM has failed, and its rollouts are lost with it ({one_line(error)}): {_ADVICE}") from error


@asynccontextmanager
async def answered(llm: AsyncEngine, *, shield: bool = False) -> AsyncIterator[None]:
    """Give up the body, calls of the engine, when the engine dies: it would never answer them.

    Args:
        llm: the engine.
        shield: a cancellation from outside waits for the end of the body.

    Raises:
        ModelLost: the engine is dead, or refused a call.
    """
    died = False

    async def watch() -> None:
        nonlocal died
        while not llm.errored:  # noqa: ASYNC110 - nothing announces it
            await anyio.sleep(LOOK)
        died = True
        calls.cancel_scope.cancel()

    with engine_calls(), as_itself(), anyio.CancelScope(shield=shield):
        async with anyio.create_task_group() as calls:
            calls.start_soon(watch, name="watch for the engine's death")
            yield
            calls.cancel_scope.cancel()
    if died:
        raise ModelLost(f"vLLM has died, and its rollouts are lost with it: {_ADVICE}")
