"""Weight sync to vLLM: what is sent, where it lies, and by which route.

::

    trainer on a CPU, or vLLM there   one safetensors file, which the workers map: in memory, or in a directory that
                                      a server on another machine has too; or, in a cluster, one of that machine
    trainer on the GPU of vLLM        CUDA IPC: handles of the tensors
    trainer on another GPU            NCCL
    adapters alone                    a directory for each version, from which vLLM loads them in place of the last: in
                                      memory or in a directory of two machines; or, in a cluster, on that machine

All workers serve the new weights, or none does. vLLM drives its own transfers (IPC, NCCL) from a thread that blocks,
through a client of blocking calls; here it runs in a worker thread, and the client calls back to the event loop of the
engine. These two routes were written from vLLM's sources and are tested with a stand-in; they have never run on a GPU.

:mod:`oppo.vllm.transfer` is the other side, in the workers.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias
from zlib import crc32

import anyio
import anyio.from_thread
import anyio.to_thread
import torch
from anyio.from_thread import BlockingPortal
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from oppo.durable import temporary
from oppo.errors import ConfigError, ModelError, ModelLost, as_itself, one_line
from oppo.hf.weights import SentWeights
from oppo.vllm.arguments import Route

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from oppo.vllm.surface import AsyncEngine


DTYPES: Final[Mapping[torch.dtype, str]] = {
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
"""Names of dtypes in a safetensors file."""


class WeightFile:
    """A file without a name on Linux, so that nothing is left of it when this process ends, however it ends.

    ``path`` leads to it while this object lives, in every process of this user.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("oppo-weights")
            self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
            weakref.finalize(self, os.close, self._descriptor)
        else:
            kept = ExitStack()
            self.path = kept.enter_context(temporary("weights")) / "weights.safetensors"
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            kept.callback(os.close, self._descriptor)
            weakref.finalize(self, kept.close)
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
        if size == len(self._memory):
            return
        try:
            os.ftruncate(self._descriptor, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._descriptor, 0, size)  # else a lack of memory is a signal, at the first write
            self._memory = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
        except OSError as error:
            raise ModelError(
                f"there is no memory for {size:,} bytes of weights on their way to vLLM, which goes on serving the old "
                f"ones ({one_line(error)}): they are needed once more beside the trainer's and the engine's"
            ) from error


class SharedFile:
    """A file for each update, in a directory that a server on another machine has too; ``path``: of the newest.

    No two have the same name, since a file system of several machines may go on reading what a name once held.
    """

    def __init__(self, directory: Path) -> None:
        kept, self._numbers = ExitStack(), itertools.count()
        try:
            self._folder = kept.enter_context(temporary("weights", directory))
            self._folder.chmod(0o755)  # the server may be another user's
        except OSError as error:
            raise ConfigError(
                f"weights on their way to vLLM cannot be written to {directory} ({one_line(error)}): name a directory "
                "that this machine and the server's both have"
            ) from error
        weakref.finalize(self, kept.close)
        self.path = self._next()

    def _next(self) -> Path:
        return self._folder / f"{next(self._numbers)}.safetensors"

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        before, self.path = self.path, self._next()
        try:
            save_file(untied(tensors), self.path)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"the weights could not be written to {self.path}, and vLLM goes on serving the old ones "
                f"({one_line(error)})"
            ) from error
        before.unlink(missing_ok=True)


class HostedFile:
    """A file, or a directory of adapters, on another machine, of an instance that is hosted there and writes it.

    Args:
        path: of it there.
        load: gives the instance tensors to write and their version, as :meth:`oppo.placement.place.Hosted.load` does.
    """

    def __init__(self, path: Path, load: Callable[[SentWeights, str], Coroutine[object, object, None]]) -> None:
        self.path = path
        self._load = load

    def write(self, tensors: Mapping[str, Tensor], version: str = "") -> Path:
        """Send these tensors, of tied ones the first, and return where they lie; not called on the event loop."""
        anyio.from_thread.run(self._load, SentWeights(untied(tensors)), version)
        return self.path / version


WrittenFile: TypeAlias = WeightFile | SharedFile | HostedFile
"""What takes weights to where a server reads them."""


class AdapterFolder:
    """A directory for each version of an adapter: vLLM knows what it has cached by an adapter's name and path.

    Two are there, the newest and the one that is served until it is loaded. They go with this object; those of killed
    processes are removed by the next.

    Args:
        directory: in which they are; ``None``: they name matrices in memory, of which nothing is left when this process
            ends, however it ends.

    Attributes:
        path: of the directory of all versions.
    """

    def __init__(self, directory: Path | None = None) -> None:
        memory, kept = Path("/dev/shm"), ExitStack()  # noqa: S108 - the directory in it is this run's own
        parent = directory or (memory if memory.is_dir() else None)
        try:
            self.path = kept.enter_context(temporary("adapters", parent))
        except OSError as error:
            raise ConfigError(
                f"adapters on their way to vLLM cannot be written to {parent} ({one_line(error)}): name a directory "
                "that this machine and the server's both have"
            ) from error
        weakref.finalize(self, kept.close)
        self._in_memory = directory is None
        self._versions: dict[Path, WeightFile | None] = {}

    def write(self, tensors: Mapping[str, Tensor], version: str) -> Path:
        for old in list(self._versions)[:-1]:
            rmtree(old, ignore_errors=True)
            del self._versions[old]
        path, rank = self.path / version, max(each.shape[0] for name, each in tensors.items() if ".lora_A." in name)
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,  # the matrices are scaled
            "target_modules": sorted({name.split(".")[-3] for name in tensors}),
            "bias": "none",
        }
        file = WeightFile() if self._in_memory else None
        try:
            path.mkdir()
            (path / "adapter_config.json").write_text(json.dumps(config))
            if file is None:
                save_file(untied(tensors), path / MATRICES)
            else:
                file.write(tensors)
                (path / MATRICES).symlink_to(file.path)
        except (OSError, SafetensorError, ModelError) as error:
            rmtree(path, ignore_errors=True)
            raise ModelError(
                f"the adapter could not be written to {path}, and vLLM goes on with the old one ({one_line(error)})"
            ) from error
        self._versions[path] = file
        return path


MATRICES: Final = "adapter_model.safetensors"
"""The file of an adapter's matrices."""


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name, tensor in tensors.items():
        first.setdefault((tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())), name)
    return {name: tensors[name].detach().contiguous() for name in first.values()}


SAMPLED: Final = 256
"""Elements of a tensor that its fingerprint is of, at most."""


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what tells each tensor from another of its name: dtype, shape, and a checksum of elements all over it.

    Example:
        >>> fingerprints({"bias": torch.ones(2)})
        {'bias': 'float32 [2] d5065190'}
    """
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


SHOWN = 3
"""Names that an error lists."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """Names and shapes of a model's weights.

    Attributes:
        model: its name, for errors.
        shapes: of everything in its ``state_dict``.
        needed: names of parameters; of those that are tied to one another, one is enough.
        outline: transformers' model of the same config, without weights, if a checkpoint has them in another form.
    """

    model: str
    shapes: Mapping[str, tuple[int, ...]]
    needed: tuple[frozenset[str], ...]
    outline: PreTrainedModel | None = None

    @classmethod
    def of(cls, model: str, config: PretrainedConfig, *, trust_remote_code: bool = False) -> Self:
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - it takes seconds
        from transformers.core_model_loading import Transpose, revert_weight_conversion  # noqa: PLC0415 - likewise

        from oppo.hf.model_files import CAUSAL  # noqa: PLC0415 - likewise

        with torch.device("meta"):
            made = CAUSAL.made(config, trust_remote_code=trust_remote_code)
        conversions = get_model_conversion_mapping(made, add_legacy=False)
        if any(isinstance(each, Transpose) for one in conversions for each in getattr(one, "operations", ())):
            raise ConfigError(
                f"checkpoints of {type(made).__name__} ({model}) have matrices transposed, and vLLM has not been seen "
                "to take those in a weight sync: set models.engine = 'transformers'"
            )
        tied: dict[int, set[str]] = {}
        for name, parameter in made.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), set()).add(name)
        state = made.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        outline = None if revert_weight_conversion(made, state).keys() == state.keys() else made
        return cls(model, shapes, tuple(frozenset(names) for names in tied.values()), outline)

    def require(self, tensors: Mapping[str, Tensor]) -> None:
        missing = [min(names) for names in self.needed if not names & tensors.keys()]
        unknown = [name for name in tensors if name not in self.shapes]
        other = [
            f"{name} {list(tensors[name].shape)}, not {list(shape)}"
            for name, shape in self.shapes.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ]
        faults = {"missing": missing, "unknown": unknown, "of another shape": other}
        said = [f"{len(names)} {what} ({_some(names)})" for what, names in faults.items() if names]
        if said:
            raise ModelError(
                f"these are not the weights of {self.model}, which vLLM serves: {', '.join(said)}; it goes on with "
                "those that it has: sync the model that the engine was started with, or start it with the model "
                "that is trained"
            )

    def as_saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights in the form of checkpoints, which vLLM reads: experts, one tensor here, are many there."""
        from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - it takes seconds

        return dict(tensors) if self.outline is None else revert_weight_conversion(self.outline, dict(tensors))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")


DEADLINE: Final = 600.0
"""Seconds after which an engine that takes no weights counts as lost."""


@dataclass(frozen=True, slots=True)
class InitRequest:
    init_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    update_info: dict[str, Any]


class WeightSender(Protocol):
    """Gives an engine the weights of an update."""

    async def send(self, llm: AsyncEngine, tensors: Mapping[str, Tensor], version: str) -> None:
        """Have every worker serve ``tensors``, by their names in transformers; the engine is paused meanwhile."""


class FileSender:
    """Sends weights through a file, which vLLM's workers map.

    Args:
        deadline: seconds that the engine has.
        file: by default one in memory, for workers on this machine.
    """

    def __init__(self, deadline: float = DEADLINE, file: WrittenFile | None = None) -> None:
        self._deadline = deadline
        self._agreed = False
        self._file = file or WeightFile()

    async def send(self, llm: AsyncEngine, tensors: Mapping[str, Tensor], version: str) -> None:
        await anyio.to_thread.run_sync(self._file.write, tensors)
        prints = await anyio.to_thread.run_sync(fingerprints, untied(tensors))
        await self._load(llm, {"path": str(self._file.path), "prints": prints}, version)

    async def _load(self, llm: AsyncEngine, update: dict[str, Any], version: str) -> None:
        async with in_time(self._deadline, version):
            if not self._agreed:
                await llm.init_weight_transfer_engine(InitRequest({}))
                self._agreed = True
            await llm.start_weight_update()
            await llm.update_weights(UpdateRequest(update))
            await llm.finish_weight_update(weight_version=version)


class AdapterSender:
    """Sends adapters alone: the workers put their products beside the base, which they keep.

    Args:
        made: returns vLLM's request for the adapter of a name and a path; ``replaces``: in the place of the one before.
        folder: takes them to where the workers read them; by default one in memory, for workers on this machine.
        deadline: seconds that the engine has.

    Attributes:
        adapter: vLLM's request for the newest, which each request of a policy names; ``None`` before the first.
    """

    def __init__(
        self,
        made: Callable[[str, str, bool], object],
        folder: AdapterFolder | HostedFile | None = None,
        deadline: float = DEADLINE,
    ) -> None:
        self._made = made
        self._folder = folder or AdapterFolder()
        self._deadline = deadline
        self.adapter: object | None = None

    async def send(self, llm: AsyncEngine, tensors: Mapping[str, Tensor], version: str) -> None:
        path = await anyio.to_thread.run_sync(self._folder.write, tensors, version)
        prints = await anyio.to_thread.run_sync(fingerprints, tensors)
        async with in_time(self._deadline, version):
            await llm.add_lora(self._made(version, str(path), True))
            # an update of the weights would unload it
            await llm.init_weight_transfer_engine(InitRequest({"adapter": str(path / MATRICES), "prints": prints}))
            await llm.update_weight_version(version)
        self.adapter = self._made(version, str(path), False)


@asynccontextmanager
async def in_time(deadline: float, version: str) -> AsyncIterator[None]:
    """Give the body, which has the engine load weights, some seconds."""
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
        self._call(self._llm.init_weight_transfer_engine, InitRequest(init_info))

    def start_weight_update(self) -> None:
        self._call(self._llm.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if handles := update_info.get("ipc_handles"):
            update_info = {**update_info, "ipc_handles": plain(handles)}
        self._call(self._llm.update_weights, UpdateRequest(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
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
        self._source = Sent()
        self._client: BlockingClient | None = None
        self._trainer: TrainerSide | None = None

    async def send(self, llm: AsyncEngine, tensors: Mapping[str, Tensor], version: str) -> None:
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
            self._source.tensors = {}  # a mixture's are copies

    def _require_local(self, tensors: Mapping[str, Tensor]) -> None:
        expected = self._route.trainer
        for name, tensor in tensors.items():
            if tensor.device != expected:
                raise ModelError(
                    f"weight {name} is on {tensor.device}, and vLLM, which goes on with those that it has, was started "
                    f"for a trainer on {expected}: start the engine with trainer='{tensor.device}'"
                )

    def _joined(self, client: BlockingClient) -> TrainerSide:
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
    if route.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo  # noqa: PLC0415

        return IPCTrainerInitInfo(rank=0)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # noqa: PLC0415

    return NCCLTrainerInitInfo(
        master_address=route.address, master_port=free_port(), world_size=1 + route.workers, rank=0
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
