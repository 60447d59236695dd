"""Publishing on GPUs, through vLLM's own transfers: CUDA IPC on one GPU, NCCL between several.

vLLM drives a transfer from a thread that blocks, through a client of blocking calls; here it runs in a worker thread,
and the client calls back to the event loop of the engine. Written from vLLM's sources and tested with a stand-in for
them; it has never run on a GPU.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import anyio.to_thread
import torch
from anyio.from_thread import BlockingPortal
from torch import Tensor

from oppo.errors import ModelError, as_itself
from oppo.vllm.sync import DEADLINE, in_time
from oppo.vllm.sync import Route
from oppo.vllm.sync import untied

if TYPE_CHECKING:
    from oppo.vllm.surface import AsyncEngine


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
    """vLLM's ``VLLMWeightSyncClient``: the calls of an engine, from any thread.

    Attributes:
        portal: leads to the engine's event loop, during an update.
    """

    def __init__(self, llm: AsyncEngine) -> None:
        self.portal: BlockingPortal | None = None
        self._llm = llm

    @property
    def _call(self) -> Any:
        if self.portal is None:
            raise ModelError("vLLM was called between two updates of its weights")
        return self.portal.call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers join."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest  # noqa: PLC0415

        self._call(self._llm.init_weight_transfer_engine, WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._call(self._llm.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the workers load weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest  # noqa: PLC0415

        if handles := update_info.get("ipc_handles"):
            update_info = {**update_info, "ipc_handles": plain(handles)}
        self._call(self._llm.update_weights, WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update."""
        self._call(self._llm.finish_weight_update, weight_version)


_TYPES: Final = (torch.Tensor, torch.storage.TypedStorage, torch.storage.UntypedStorage)

_NAMED: Final[Mapping[str, object]] = {
    **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in _TYPES},
    **{str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)},
}
"""What the handle of a GPU's memory holds besides numbers and bytes."""

Handles: TypeAlias = Sequence[Mapping[str, Sequence[object]]]
"""Of each tensor, by the UUID of its GPU, the arguments of torch's ``rebuild_cuda_tensor``."""


def plain(handles: Handles) -> list[dict[str, list[object]]]:
    """Return handles with names for types, so that they travel without pickles: vLLM then need not allow these.

    Raises:
        ModelError: one holds something else, as a later torch might.
    """
    names = {value: name for name, value in _NAMED.items()}

    def spelt(value: object) -> object:
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, type | torch.dtype) and value not in names:
            raise ModelError(f"the handle of a tensor in a GPU's memory holds {value}, which has no name for vLLM")
        return names.get(value, value) if isinstance(value, type | torch.dtype) else value

    return [{gpu: [spelt(each) for each in arguments] for gpu, arguments in handle.items()} for handle in handles]


def restored(handles: Handles) -> list[dict[str, list[object]]]:
    """Return handles of :func:`plain` with the types themselves."""

    def meant(value: object) -> object:
        return _NAMED.get(value, value) if isinstance(value, str) else value

    return [{gpu: [meant(each) for each in arguments] for gpu, arguments in handle.items()} for handle in handles]


class TrainerSide(Protocol):
    """vLLM's ``TrainerWeightTransferEngine``."""

    def send_weights(self) -> None:
        """Send what the source holds, and wait until the workers have it."""


class DeviceSender:
    """Sends weights from the trainer's GPU to those of vLLM's workers.

    Args:
        route: ``ipc`` or ``nccl``.
        deadline: seconds that a transfer has.
    """

    def __init__(self, route: Route, deadline: float = DEADLINE) -> None:
        self._route = route
        self._deadline = deadline
        self._source = Published()
        self._client: BlockingClient | None = None
        self._trainer: TrainerSide | None = None

    async def send(self, llm: AsyncEngine, tensors: Mapping[str, Tensor], version: str) -> None:
        """Send the weights and wait until all workers serve them; see :class:`oppo.vllm.sync.WeightSender`."""
        self._require_local(tensors)
        self._source.tensors = untied(tensors)
        client = self._client = self._client or BlockingClient(llm)

        def transfer() -> None:
            with current(self._route.trainer):
                self._trainer = self._trainer or self._joined(client)
                self._trainer.send_weights()

        try:
            async with in_time(self._deadline, version):
                with as_itself():
                    async with BlockingPortal() as client.portal:
                        await anyio.to_thread.run_sync(transfer, abandon_on_cancel=True)
                await llm.update_weight_version(version)
        finally:
            client.portal = None

    def _require_local(self, tensors: Mapping[str, Tensor]) -> None:
        expected = self._route.trainer
        for name, tensor in tensors.items():
            if tensor.device != expected:
                raise ModelError(
                    f"weight {name} is on {tensor.device}, and vLLM, which goes on with those that it has, was started "
                    f"for a trainer on {expected}: start the engine with trainer='{tensor.device}'"
                )

    def _joined(self, client: BlockingClient) -> TrainerSide:
        """Return vLLM's side of the trainer, in contact with the workers."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: PLC0415

        init = init_info(self._route)
        trainer: TrainerSide = WeightTransferTrainerFactory.trainer_init(init, client=client, source=self._source)
        return trainer


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make a GPU the one that the thread works on, when it has finished what other threads gave it to do."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        yield


def init_info(route: Route) -> Any:
    """Return how the trainer, as rank 0, and the workers meet."""
    if route.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo  # noqa: PLC0415

        return IPCTrainerInitInfo(rank=0)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # noqa: PLC0415

    return NCCLTrainerInitInfo(
        master_address="127.0.0.1", master_port=free_port(), world_size=1 + route.workers, rank=0
    )


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
