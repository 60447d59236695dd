"""Weights of models: loaded in place, all of them or none; sent to another machine; or shared with another process.

::

    model  ──pickled without its tensors──>   skeleton        sent
      │
      └────every storage moved, in place──>   Block           mapped by both: one file descriptor for each model

No process reads shared weights while another writes them: frozen models are never written, and at lookahead 0 trained
models are served only between updates. Weights of another trainer are written in the turn of the served model
(:meth:`oppo.placement.Hosted.load`).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Generic, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from oppo.errors import ModelError, ModelRefused
from oppo.hf.devices import synchronised
from oppo.placement.child import Bulk, packed, unpacked
from oppo.placement.shared_memory import Block

T = TypeVar("T")


@torch.no_grad()
def adopt(module: nn.Module, weights: Mapping[str, object]) -> int:
    """Copy ``weights``, named as in ``state_dict()``, into ``module``, all or none; return how many were copied."""
    # A tensor in the module's own memory is not copied. Of a module with adapters the rest does not change.
    targets: dict[str, Tensor] = module.state_dict(keep_vars=True)
    missing = [name for name in changing(targets) if name not in weights]
    unknown = [name for name in weights if name not in targets]
    if missing or unknown:
        raise ModelError(
            f"{type(module).__name__} cannot take these weights: {len(missing)} missing {missing[:3]}, {len(unknown)} "
            f"unknown {unknown[:3]}; names must be those of its state_dict()"
        )
    copies: list[tuple[Tensor, Tensor]] = []
    for name, value in weights.items():
        target = targets[name]
        if not isinstance(value, Tensor) or value.shape != target.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(f"{type(module).__name__}: {name} should have shape {tuple(target.shape)}, not {found}")
        if value.data_ptr() != target.data_ptr():
            copies.append((target, value))
    for target, value in copies:
        target.copy_(value)
    return len(copies)


def changing(weights: Mapping[str, T]) -> Mapping[str, T]:
    return {name: each for name, each in weights.items() if ".lora_" in name} or weights


class SentWeights(Bulk, dict[str, object]):
    """Weights that may be sent: pickled, their bytes can be taken out of band, so that nothing copies them."""

    # Unpickled, they are on the CPU and read-only: they may lie in memory that others read too. Those of a GPU cross to
    # a process of this machine as handles (CUDA IPC): unpickled, once for each pickle, they are the same memory.

    @property
    def lasts(self) -> bool:
        return not any(isinstance(value, Tensor) and value.is_cuda for value in self.values())

    def portable(self) -> SentWeights:
        return SentWeights({name: each.cpu() if isinstance(each, Tensor) else each for name, each in self.items()})

    def __reduce_ex__(self, protocol: object) -> tuple[object, tuple[object, ...]]:
        del protocol  # of at least 5, see oppo.placement.child
        tensors = {name: value for name, value in self.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in self.items() if name not in tensors}
        if not self.lasts:
            return _opened, ({name: reduce_tensor(tensor.detach()) for name, tensor in tensors.items()}, others)
        return _received, (
            {
                name: (tensor.dtype, tuple(tensor.shape), PickleBuffer(_bytes_of(tensor).numpy().data))
                for name, tensor in tensors.items()
            },
            others,
        )


def _bytes_of(tensor: Tensor) -> Tensor:
    # uint8 [n], on the CPU: the tensor's own where it is contiguous there.
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def _received(
    parts: Mapping[str, tuple[torch.dtype, tuple[int, ...], bytes]], others: Mapping[str, object]
) -> SentWeights:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # received tensors are only read
        return SentWeights(
            {
                name: torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)
                for name, (dtype, shape, data) in parts.items()
            }
            | dict(others)
        )


def _opened(
    handles: Mapping[str, tuple[Callable[..., Tensor], tuple[object, ...]]], others: Mapping[str, object]
) -> SentWeights:
    return SentWeights({name: rebuild(*arguments) for name, (rebuild, arguments) in handles.items()} | dict(others))


def copies(weights: Mapping[str, object]) -> dict[str, object]:
    copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in weights.items()}
    for device in {value.device for value in copied.values() if isinstance(value, Tensor)}:
        synchronised(device)
    return copied


def lie_among(weights: Mapping[str, object], addresses: frozenset[int]) -> bool:
    return any(isinstance(each, Tensor) and each.data_ptr() in addresses for each in weights.values())


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters and buffers: names, dtypes, shapes and every bit, in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


M = TypeVar("M", bound=nn.Module)

ALIGNMENT = 64
"""Bytes: torch allocates tensors at multiples of it on a CPU. Rounding depends on a tensor's address modulo this."""

_blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
"""The blocks of this process that hold models, by address.

A storage in a block is shared in place from then on; moving it again would disconnect the processes that map it.
"""


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayout:
    """A tensor in the shared memory of a model's ``block``; the offset is in elements."""

    block: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    parameter: bool
    requires_grad: bool

    def tensor(self, blocks: Sequence[Block]) -> Tensor:
        flat = torch.frombuffer(blocks[self.block], dtype=self.dtype)
        view = flat.as_strided(self.shape, self.stride, self.offset)
        return nn.Parameter(view, self.requires_grad) if self.parameter else view


class SharedModel(Generic[M]):
    # Pickling moves the weights into shared memory, once; modules and parameters keep their identity. Changes of
    # weights in place, as by an optimizer, apply to both processes.

    def __init__(self, model: M) -> None:
        self._model = model

    def load(self) -> M:
        return self._model

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        tensors: dict[int, Tensor] = {}
        numbers: dict[int, int] = {}

        def numbered(part: object) -> int | None:
            if type(part) not in (Tensor, nn.Parameter, nn.Buffer) or not cast("Tensor", part).numel():
                return None
            number = numbers.setdefault(id(part), len(numbers))
            tensors[number] = cast("Tensor", part)
            return number

        skeleton = packed(self._model, numbered)
        blocks, layouts = share(list(tensors.values()))
        return _rebuilt, (skeleton, tuple(blocks), tuple(layouts))


def share(tensors: Sequence[Tensor]) -> tuple[list[Block], list[TensorLayout]]:
    """Move the memory of ``tensors`` into shared blocks, unless it is there; return the blocks and each layout."""
    # Tensors that overlap still overlap afterwards.
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ModelRefused(
                f"a model on {tensor.device} cannot be shared with another process: host it in a Thread, or on the CPU"
            )
    moved = _moved({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors})
    for tensor in tensors:
        base = tensor.untyped_storage().data_ptr()
        if base in moved:
            block, start = moved[base]
            offset = start // tensor.element_size() + tensor.storage_offset()
            flat = torch.frombuffer(block, dtype=tensor.dtype)
            tensor.data = flat.as_strided(tensor.shape, tensor.stride(), offset)
    bases = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    blocks = {base: _blocks[base] for base in bases}
    layouts = [
        TensorLayout(
            block=list(blocks).index(base),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            parameter=isinstance(tensor, nn.Parameter),
            requires_grad=tensor.requires_grad,
        )
        for base, tensor in zip(bases, tensors, strict=True)
    ]
    return list(blocks.values()), layouts


def _moved(storages: dict[int, torch.UntypedStorage]) -> dict[int, tuple[Block, int]]:
    # Storages outside of blocks are copied into a new block; the starts are in bytes, by old address.
    private = {address: storage for address, storage in storages.items() if address not in _blocks}
    if not private:
        return {}
    starts, size = {}, 0
    for address, storage in private.items():
        starts[address] = size + (address - size) % ALIGNMENT
        size = starts[address] + storage.nbytes()
    block = Block.new(size + -size % ALIGNMENT)
    flat = torch.frombuffer(block, dtype=torch.uint8)
    _blocks[flat.data_ptr()] = block
    for address, storage in private.items():
        start = starts[address]
        flat[start : start + storage.nbytes()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return {address: (block, start) for address, start in starts.items()}


def _rebuilt(skeleton: bytes, blocks: tuple[Block, ...], layouts: tuple[TensorLayout, ...]) -> SharedModel[nn.Module]:
    tensors = [layout.tensor(blocks) for layout in layouts]
    return SharedModel(cast("nn.Module", unpacked(skeleton, tensors.__getitem__)))
