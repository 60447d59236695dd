"""Publishing to an engine: the trained weights go to vLLM's workers, all of them or none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import anyio
import anyio.to_thread
from torch import Tensor

from oppo.errors import ModelLost, as_itself, one_line
from oppo.vllm.sync import WeightFile

if TYPE_CHECKING:
    from oppo.vllm.surface import AsyncEngine

DEADLINE: Final = 600.0
"""Seconds after which an engine that takes no weights counts as lost."""


GRACE: Final = 20.0
"""Seconds for which a cancellation waits while an engine takes weights."""


class WeightSender(Protocol):
    """Gives an engine the weights of an update."""

    async def send(self, llm: AsyncEngine, tensors: Mapping[str, Tensor], version: str) -> None:
        """Have every worker serve ``tensors``, by their names in transformers; the engine is paused meanwhile.

        Raises:
            ModelError: the weights could not be sent; the old ones are served.
            ModelLost: it is not known which weights are served, or the engine is dead.
        """


class FileSender:
    """Sends weights through a file in memory, which vLLM's workers map: for workers on this machine.

    Args:
        deadline: seconds that the engine has.
    """

    def __init__(self, deadline: float = DEADLINE) -> None:
        self._deadline = deadline
        self._agreed = False
        self._file = WeightFile()

    async def send(self, llm: AsyncEngine, tensors: Mapping[str, Tensor], version: str) -> None:
        """Write the file, and have the workers load it; see :class:`WeightSender`."""
        await anyio.to_thread.run_sync(self._file.write, tensors)
        await self._load(llm, self._file.path, version)

    async def _load(self, llm: AsyncEngine, path: Path, version: str) -> None:
        from vllm.distributed.weight_transfer.base import (  # noqa: PLC0415 - takes seconds to import
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )

        async with in_time(self._deadline, version):
            if not self._agreed:
                await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
                self._agreed = True
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(update_info={"path": str(path)}))
            await llm.finish_weight_update(weight_version=version)


@asynccontextmanager
async def cancelled_after(seconds: float) -> AsyncIterator[None]:
    """Give the body so many more seconds when it is cancelled from outside."""

    async def outside() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            body.deadline = min(body.deadline, anyio.current_time() + seconds)

    with as_itself():
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope(shield=True) as body:
                tasks.start_soon(outside, name="watch for a cancellation")
                yield
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def in_time(deadline: float, version: str) -> AsyncIterator[None]:
    """Give the body, which has the engine load weights, some seconds.

    Raises:
        ModelLost: it took longer, or raised an error: which weights are served is unknown.
    """
    try:
        with anyio.fail_after(deadline):
            yield
    except TimeoutError as error:
        raise ModelLost(
            f"vLLM took no weights within {deadline:.0f} s, so which it serves is unknown: go on from the newest "
            "checkpoint (oppo resume)"
        ) from error
    except Exception as error:
        raise ModelLost(
            f"vLLM could not load the weights of version {version}, so which it serves is unknown "
            f"({one_line(error)}): go on from the newest checkpoint (oppo resume)"
        ) from error
