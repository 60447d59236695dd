"""Models in shared memory: the structure is sent to another process, and both processes map the weights.

::

    model  ──pickled without its tensors──>   skeleton        sent
      │
      └────every storage moved, in place──>   Block           mapped by both: one file descriptor for each model

No process reads weights while another writes them: frozen models are never written, and at lookahead 0 trained models
are served only between updates. Weights of another trainer are written in the turn of the served model
(:meth:`oppo.placement.Hosted.load`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from oppo.errors import ModelRefused
from oppo.placement.shared_memory import Block
from oppo.placement.wire import packed, unpacked

M = TypeVar("M", bound=nn.Module)
M_co = TypeVar("M_co", bound=nn.Module, covariant=True)

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


class Source(Protocol[M_co]):
    """Where a model comes from, in the process that needs it."""

    def load(self) -> M_co:
        """Return the model."""


class SharedModel(Generic[M]):
    """A model that crosses to another process over the same weights.

    Pickling moves the weights into shared memory, once; modules and parameters keep their identity. Changes of weights
    in place, as by an optimizer, apply to both processes.
    """

    def __init__(self, model: M) -> None:
        self._model = model

    def load(self) -> M:
        return self._model

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        tensors: dict[int, Tensor] = {}
        numbers: dict[int, int] = {}

        def numbered(part: object) -> int | None:
            if not _shareable(part):
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


def _shareable(part: object) -> bool:
    return type(part) in (Tensor, nn.Parameter, nn.Buffer) and cast("Tensor", part).numel() > 0


def _rebuilt(skeleton: bytes, blocks: tuple[Block, ...], layouts: tuple[TensorLayout, ...]) -> SharedModel[nn.Module]:
    tensors = [layout.tensor(blocks) for layout in layouts]
    return SharedModel(cast("nn.Module", unpacked(skeleton, tensors.__getitem__)))
