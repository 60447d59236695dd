"""Publishing on GPUs, through vLLM's own transfers: CUDA IPC on one GPU, NCCL between several.

vLLM drives a transfer from a thread that blocks, through a client of blocking calls; here it runs in a worker thread,
and the client calls back to the event loop of the engine. Written from vLLM's sources and tested with a stand-in for
them; it has never run on a GPU.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import anyio.from_thread
import anyio.to_thread
from torch import Tensor

from oppo.vllm.publish import DEADLINE, in_time
from oppo.vllm.weight_file import untied

if TYPE_CHECKING:
    from oppo.vllm.surface import AsyncEngine

Backend: TypeAlias = Literal["ipc", "nccl"]


@dataclass
class Published:
    """vLLM's ``WeightSource`` over the weights of the latest update."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def metadata(self) -> list[Any]:
        """Return vLLM's ``ParamMeta`` of each tensor, in the order of iteration."""
        from vllm.distributed.weight_transfer.base import ParamMeta  # noqa: PLC0415 - takes seconds to import

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


class BlockingClient:
    """vLLM's ``VLLMWeightSyncClient``: the calls of an engine, from a worker thread of its event loop."""

    def __init__(self, llm: AsyncEngine) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers join."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest  # noqa: PLC0415

        anyio.from_thread.run(self._llm.init_weight_transfer_engine, WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        """Begin an update."""
        anyio.from_thread.run(self._llm.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        """Have the workers load weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest  # noqa: PLC0415

        anyio.from_thread.run(self._llm.update_weights, WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update."""
        anyio.from_thread.run(self._llm.finish_weight_update, weight_version)


class TrainerSide(Protocol):
    """vLLM's ``TrainerWeightTransferEngine``."""

    def send_weights(self) -> None:
        """Send what the source holds, and wait until the workers have it."""


class DeviceSender:
    """Sends weights from the trainer's GPU to those of vLLM's workers.

    Args:
        backend: ``ipc`` where one worker shares the trainer's GPU, else ``nccl``.
        workers: number of vLLM's workers.
        deadline: seconds that a transfer has.
    """

    def __init__(self, backend: Backend, workers: int, deadline: float = DEADLINE) -> None:
        self._backend: Backend = backend
        self._workers = workers
        self._deadline = deadline
        self._source = Published()
        self._trainer: TrainerSide | None = None

    async def send(self, llm: AsyncEngine, tensors: Mapping[str, Tensor], version: str) -> None:
        """Send the weights and wait until all workers serve them; see :class:`oppo.vllm.publish.WeightSender`."""
        self._source.tensors = untied(tensors)

        def transfer() -> None:
            if self._trainer is None:
                self._trainer = self._joined(BlockingClient(llm))
            self._trainer.send_weights()

        async with in_time(self._deadline, version):
            await anyio.to_thread.run_sync(transfer, abandon_on_cancel=True)
            await llm.update_weight_version(version)

    def _joined(self, client: BlockingClient) -> TrainerSide:
        """Return vLLM's side of the trainer, in contact with the workers."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: PLC0415

        init = init_info(self._backend, self._workers)
        trainer: TrainerSide = WeightTransferTrainerFactory.trainer_init(init, client=client, source=self._source)
        return trainer


def init_info(backend: Backend, workers: int) -> Any:
    """Return how the trainer, as rank 0, and the workers meet."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo  # noqa: PLC0415

        return IPCTrainerInitInfo(rank=0)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # noqa: PLC0415

    return NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=free_port(), world_size=1 + workers, rank=0)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
