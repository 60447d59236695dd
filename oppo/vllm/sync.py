"""Weight sync to vLLM: the files of weights, and the routes by which they travel.

::

    trainer on a CPU, or vLLM there   a safetensors file, which the workers map: in memory, in a directory that a server
                                      on another machine has too, or, in a cluster, on that machine
    adapters alone                    likewise, with PEFT's config: vLLM loads them in place of the last
    trainer on the GPU of vLLM        CUDA IPC: handles of the tensors
    trainer on another GPU            NCCL

All workers serve the new weights, or none does. vLLM drives its own transfers (IPC, NCCL) from a thread that blocks,
through a client of blocking calls; here it runs in a worker thread, and the client calls back to the event loop of the
engine. These two routes were written from vLLM's sources and are tested with a stand-in; they have never run on a GPU.

:mod:`oppo.vllm.sync_worker` is the other side, in the workers.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from zlib import crc32

import anyio
import anyio.from_thread
import anyio.to_thread
import torch
from anyio.from_thread import BlockingPortal
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from oppo.atomic_files import temporary
from oppo.errors import ConfigError, ModelError, ModelLost, as_itself, one_line
from oppo.hf.weights import SentWeights
from oppo.vllm.arguments import Route

if TYPE_CHECKING:
    from oppo.vllm.engine import Engine


DTYPES: Final[Mapping[torch.dtype, str]] = {  # as a safetensors file names them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class MemoryFile:
    """A file of tensors in memory, which every process of this user reads by ``path`` while this object lives."""

    # `save_file` of safetensors cannot write it, since that renames a file beside it.
    def __init__(self) -> None:
        self._descriptor = os.memfd_create("oppo-weights")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        weakref.finalize(self, os.close, self._descriptor)
        self._memory = torch.zeros(0, dtype=torch.uint8)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        kept = untied(tensors)
        header = _header(kept)
        end = len(header)
        self._resize(end + sum(tensor.nbytes for tensor in kept.values()))
        self._memory[:end] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for tensor in kept.values():
            start, end = end, end + tensor.nbytes
            if tensor.nbytes:
                self._memory[start:end].copy_(tensor.view(-1).view(torch.uint8))

    def _resize(self, size: int) -> None:
        if size == len(self._memory):  # pages of the last update are written again, and no new ones are cleared
            return
        try:
            os.ftruncate(self._descriptor, size)
            os.posix_fallocate(self._descriptor, 0, size)  # else a lack of memory is a signal, at the first write
            self._memory = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
        except OSError as error:
            raise ModelError(
                f"there is no memory for {size:,} bytes of weights, needed once more beside the trainer's and "
                f"the engine's ({one_line(error)})"
            ) from error


FILES: Final = {False: "model.safetensors", True: "adapter_model.safetensors"}  # the file of the weights; of an adapter


class WeightFiles:
    """Carries weights to the workers: a directory for each version, with a file of the weights or of an adapter.

    The directories are below ``path`` and go with this object; the next one removes what killed processes have left.
    Every worker has to be able to open ``probe``. Without a ``directory`` the files name memory, of which nothing is
    left when this process ends.
    """

    # No two versions have the same name: a file system of several machines may go on reading what a name once held,
    # and vLLM caches adapters by name and path.

    def __init__(self, directory: Path | None = None, *, adapters: bool = False) -> None:
        self._adapters = adapters
        self._versions: dict[Path, MemoryFile | None] = {}
        in_memory = directory is None and hasattr(os, "memfd_create")
        self._memory = MemoryFile() if in_memory else None
        shared, kept = Path("/dev/shm"), ExitStack()  # noqa: S108 - a service may have a /tmp of its own
        parent = shared if in_memory and shared.is_dir() else directory
        try:
            self.path = self.probe = kept.enter_context(temporary("weights", parent))
            if directory is not None:
                self.path.chmod(0o755)  # the server may be another user's
            if self._memory is not None:
                self.probe = self.path / "probe"
                self.probe.symlink_to(self._memory.path)
        except OSError as error:
            raise ConfigError(
                f"weights on their way to vLLM cannot be written to {parent} ({one_line(error)}): name a directory "
                "that this machine and the server's both have"
            ) from error
        weakref.finalize(self, kept.close)

    def write(self, tensors: Mapping[str, Tensor], version: str) -> Path:
        path, memory = self.path / version, self._memory
        if memory is not None and self._adapters:
            memory = MemoryFile()
        try:
            rmtree(path, ignore_errors=True)  # of the same version, which has failed
            path.mkdir()
            file = path / FILES[self._adapters]
            if memory is None:
                save_file(untied(tensors), file)
            else:
                memory.write(tensors)
                file.symlink_to(memory.path)
            if self._adapters:
                (path / "adapter_config.json").write_text(json.dumps(_adapter_config(tensors)))
        except (OSError, SafetensorError, ModelError) as error:
            rmtree(path, ignore_errors=True)
            raise ModelError(
                f"the weights could not be written to {path}, and vLLM goes on serving the old ones ({one_line(error)})"
            ) from error
        self._versions[path] = memory
        # An adapter is served until the next one is loaded.
        for old in list(self._versions)[: -2 if self._adapters else -1]:
            rmtree(old, ignore_errors=True)
            del self._versions[old]
        return path


def _adapter_config(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    rank = max(each.shape[0] for name, each in tensors.items() if ".lora_A." in name)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,  # the matrices are scaled
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
    }


class HostedFiles:
    """:class:`WeightFiles` of an instance that is hosted on another machine; ``load`` gives it tensors to write."""

    def __init__(self, path: Path, load: Callable[[SentWeights, str], Coroutine[object, object, None]]) -> None:
        self.path = self.probe = path
        self._load = load

    def write(self, tensors: Mapping[str, Tensor], version: str) -> Path:
        """Send these tensors, and return where they lie; not called on the event loop."""
        anyio.from_thread.run(self._load, SentWeights(untied(tensors)), version)
        return self.path / version


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name, tensor in tensors.items():
        first.setdefault((tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())), name)
    return {name: tensors[name].detach().contiguous() for name in first.values()}


SAMPLED: Final = 256  # elements of a tensor that its fingerprint is of, at most


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the fingerprint of each tensor: dtype, shape, and a checksum of elements sampled all over it."""
    found = {}
    for name, tensor in tensors.items():
        step = max(1, -(-tensor.numel() // SAMPLED))
        sample = tensor.detach().reshape(-1)[::step].contiguous().cpu().view(torch.uint8)
        kind = str(tensor.dtype).removeprefix("torch.")
        found[name] = f"{kind} {list(tensor.shape)} {crc32(sample.numpy().tobytes()):08x}"
    return found


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    # The length of the entries, 8 bytes, and the entries in JSON.
    entries, end = dict[str, object](), 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ModelError(
                f"weight {name} is of {tensor.dtype}, which cannot travel to vLLM: expected one of "
                f"{', '.join(str(each) for each in DTYPES)}"
            )
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    return len(text).to_bytes(8, "little") + text


DEADLINE: Final = 600.0  # seconds after which an engine that takes no weights counts as lost


class FileSender:
    """Sends weights, or adapters alone, through files. Adapters go beside the base, which the workers keep."""

    def __init__(
        self, files: WeightFiles | HostedFiles | None = None, *, adapts: bool = False, deadline: float = DEADLINE
    ) -> None:
        self._files = files or WeightFiles(adapters=adapts)
        self._adapts = adapts
        self._deadline = deadline
        self._initialised = False

    async def send(self, engine: Engine, tensors: Mapping[str, Tensor], version: str) -> None:
        path = await anyio.to_thread.run_sync(self._files.write, tensors, version)
        prints = await anyio.to_thread.run_sync(fingerprints, untied(tensors))
        file = str(path / FILES[self._adapts])
        async with in_time(self._deadline, version):
            if self._adapts:
                await engine.load_adapter(version, str(path))
                # No other call of vLLM has the workers check it without an update, which would unload the adapter.
                await engine.init_transfer({"adapter": file, "prints": prints})
                await engine.name_version(version)
                return
            if not self._initialised:
                await engine.init_transfer({})
                self._initialised = True
            await engine.start_update()
            await engine.update({"path": file, "prints": prints})
            await engine.finish_update(version)


@asynccontextmanager
async def in_time(deadline: float, version: str) -> AsyncIterator[None]:
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


@dataclass
class Sent:
    """vLLM's ``WeightSource`` over the weights of the latest update."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta  # noqa: PLC0415 - takes seconds to import

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())


class BlockingClient:
    """vLLM's ``VLLMWeightSyncClient``: the calls of an engine, from any thread, during an update."""

    portal: BlockingPortal

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.portal.call(self._engine.init_transfer, init_info)

    def start_weight_update(self) -> None:
        self.portal.call(self._engine.start_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if handles := update_info.get("ipc_handles"):
            update_info = {**update_info, "ipc_handles": plain(handles)}
        self.portal.call(self._engine.update, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.portal.call(self._engine.finish_update, weight_version)


_TYPES: Final = (torch.Tensor, torch.storage.TypedStorage, torch.storage.UntypedStorage)

_NAMED: Final[Mapping[str, object]] = {  # types in the handle of a GPU's memory besides numbers and bytes
    **{f"{kind.__module__}.{kind.__qualname__}": kind for kind in _TYPES},
    **{str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)},
}

# Of each tensor, by the UUID of its GPU, the arguments of torch's ``rebuild_cuda_tensor``.
Handles: TypeAlias = Sequence[Mapping[str, Sequence[object]]]


def plain(handles: Handles) -> list[dict[str, list[object]]]:
    """Return handles with names for types, so that they travel without pickles: vLLM then need not allow these."""
    names = {value: name for name, value in _NAMED.items()}

    def spelt(value: object) -> object:
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, type | torch.dtype) and value not in names:
            raise ModelError(f"the handle of a tensor in a GPU's memory holds {value}, which has no name for vLLM")
        return names.get(value, value) if isinstance(value, type | torch.dtype) else value

    return [{gpu: [spelt(each) for each in arguments] for gpu, arguments in handle.items()} for handle in handles]


def restored(handles: Handles) -> list[dict[str, list[object]]]:
    def meant(value: object) -> object:
        return _NAMED.get(value, value) if isinstance(value, str) else value

    return [{gpu: [meant(each) for each in arguments] for gpu, arguments in handle.items()} for handle in handles]


class DeviceSender:
    """Sends weights from the trainer's GPU to the GPUs of vLLM's workers, by CUDA IPC or NCCL."""

    def __init__(self, route: Route, deadline: float = DEADLINE) -> None:
        self._route = route
        self._deadline = deadline
        self._source = Sent()
        self._client: BlockingClient | None = None
        self._trainer: Any = None  # vLLM's TrainerWeightTransferEngine

    async def send(self, engine: Engine, tensors: Mapping[str, Tensor], version: str) -> None:
        self._check_local(tensors)
        self._source.tensors = untied(tensors)
        client, device = self._client or BlockingClient(engine), self._route.trainer
        self._client = client

        def transfer() -> None:
            with torch.cuda.device(device):
                torch.cuda.synchronize(device)  # other threads have given it work
                self._trainer = self._trainer or self._joined(client)
                self._trainer.send_weights()

        try:
            async with in_time(self._deadline, version):
                with as_itself():
                    async with BlockingPortal() as client.portal:
                        await anyio.to_thread.run_sync(transfer, abandon_on_cancel=True)
                await engine.name_version(version)
        finally:
            self._source.tensors = {}  # a mixture's are copies

    def _check_local(self, tensors: Mapping[str, Tensor]) -> None:
        expected = self._route.trainer
        for name, tensor in tensors.items():
            if tensor.device != expected:
                raise ModelError(
                    f"weight {name} is on {tensor.device}, and vLLM, which goes on with those that it has, was started "
                    f"for a trainer on {expected}: start the engine with trainer='{tensor.device}'"
                )

    def _joined(self, client: BlockingClient) -> Any:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: PLC0415 - an extra

        if self._route.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo  # noqa: PLC0415

            init = IPCTrainerInitInfo(rank=0)
        else:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # noqa: PLC0415

            address, size = self._route.address, 1 + self._route.workers
            init = NCCLTrainerInitInfo(master_address=address, master_port=free_port(), world_size=size, rank=0)
        return WeightTransferTrainerFactory.trainer_init(init, client=client, source=self._source)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
