"""The end of an engine, as the error of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, Protocol

import anyio

from oppo.errors import ModelLost, OppoError, as_itself, one_line

LOOK: Final = 0.1
"""Seconds between two looks at whether an engine is dead that owes an answer."""


class ReportsDeath(Protocol):
    """vLLM's ``AsyncLLM``, as far as it reports its death."""

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""


class StartedEngine(Protocol):
    """A started engine: :class:`oppo.vllm.VllmEngine`."""

    @property
    def llm(self) -> ReportsDeath:
        """Its ``AsyncLLM``."""

    @property
    def log(self) -> Path:
        """The file that its processes write to."""

    def require_usable(self) -> None:
        """Raise ``ProtocolError`` unless its calls may be made here and now."""


def advice(engine: StartedEngine) -> str:
    """Return what to do when an engine is lost."""
    return (
        "start another engine, or go on from the newest checkpoint (oppo resume); "
        f"what the engine wrote is in {engine.log}"
    )


@contextmanager
def engine_calls(engine: StartedEngine) -> Iterator[None]:
    """Turn whatever a call of the engine raises into :class:`~oppo.errors.ModelLost`, with what to do.

    Raises:
        ModelLost: the engine is dead, or refused the call.
    """
    try:
        yield
    except OppoError:
        raise
    except Exception as error:
        raise ModelLost(
            f"vLLM has failed, and its rollouts are lost with it ({one_line(error)}): {advice(engine)}"
        ) from error


@asynccontextmanager
async def answered(engine: StartedEngine, *, shield: bool = False) -> AsyncIterator[None]:
    """Give up the body, calls of the engine, when the engine dies: it would never answer them.

    Args:
        engine: is started.
        shield: a cancellation from outside waits for the end of the body.

    Raises:
        ModelLost: the engine is dead, or refused a call.
        ProtocolError: the engine is closed, or works on another event loop.
    """
    engine.require_usable()
    died = False

    async def watch() -> None:
        nonlocal died
        while not engine.llm.errored:  # noqa: ASYNC110 - nothing announces it
            await anyio.sleep(LOOK)
        died = True
        calls.cancel_scope.cancel()

    with engine_calls(engine), as_itself(), anyio.CancelScope(shield=shield):
        async with anyio.create_task_group() as calls:
            calls.start_soon(watch, name="watch for the engine's death")
            yield
            calls.cancel_scope.cancel()
    if died:
        raise ModelLost(f"vLLM has died, and its rollouts are lost with it: {advice(engine)}")
