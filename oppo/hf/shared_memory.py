"""A model in memory that several processes see: its structure crosses to another process, its weights stay put.

::

    model  ──pickled, its tensors set aside──>  skeleton        sent
      │
      └────every storage moved, in place────>   Block           mapped by both: one file descriptor for each model

Sharing is safe because nobody writes while somebody reads: frozen models are never written, and at lookahead 0 those
that are trained are served between updates only. Who replaces weights from outside of the update does it in the turn of
the model that is served (:meth:`oppo.placement.Hosted.call_local`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from oppo.errors import ModelRefused
from oppo.placement.block import Block
from oppo.placement.wire import packed, unpacked

_ALIGNMENT = 64
"""Bytes: a storage keeps its address modulo this when it is moved, since kernels choose by it how they round."""

_blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
"""The blocks in which models of this process lie, by address: as the address space, there is one for the process.

A storage that lies in one of them is shared as it is, whoever shares it next; moving it again would cut off the
process that sees it there already.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Lying:
    """Where a tensor lies in shared memory, and what it is.

    Attributes:
        block: which of the model's blocks.
        offset: of its first element, in elements from the beginning of the block.
        parameter: whether it is a parameter rather than a plain tensor.
    """

    block: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    parameter: bool
    requires_grad: bool

    def tensor(self, blocks: Sequence[Block]) -> Tensor:
        """Return the tensor, over the memory of the block."""
        flat = torch.frombuffer(blocks[self.block], dtype=self.dtype)
        found = flat.as_strided(self.shape, self.stride, self.offset)
        return nn.Parameter(found, self.requires_grad) if self.parameter else found


class SharedModel:
    """Pickles ``model`` so that what is unpickled, in another process, computes with the very same weights.

    Pickling moves the weights into shared memory, once; modules, parameters and whoever holds them stay what they
    are. Weights that are changed in place, as by an optimizer, are changed for both.

    Raises:
        ModelRefused: when pickled; a tensor is not on the CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        tensors: dict[int, Tensor] = {}
        numbers: dict[int, int] = {}

        def aside(part: object) -> int | None:
            if not _shareable(part):
                return None
            number = numbers.setdefault(id(part), len(numbers))
            tensors[number] = cast("Tensor", part)
            return number

        skeleton = packed(self._model, aside)
        blocks, lying = share(list(tensors.values()))
        return _rebuilt, (skeleton, tuple(blocks), tuple(lying))


def share(tensors: Sequence[Tensor]) -> tuple[list[Block], list[Lying]]:
    """Move the memory of ``tensors`` into shared blocks, unless it lies there, and return where each of them lies.

    Tensors that overlap go on doing so.

    Raises:
        ModelRefused: a tensor is not on the CPU.
    """
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
    blocks: dict[int, Block] = {}
    lying = []
    for tensor in tensors:
        base = tensor.untyped_storage().data_ptr()
        blocks.setdefault(base, _blocks[base])
        lying.append(
            Lying(
                block=list(blocks).index(base),
                offset=int(tensor.storage_offset()),
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                parameter=isinstance(tensor, nn.Parameter),
                requires_grad=tensor.requires_grad,
            )
        )
    return list(blocks.values()), lying


def _moved(storages: dict[int, torch.UntypedStorage]) -> dict[int, tuple[Block, int]]:
    """Copy the storages that lie in no block into a new one; return for each, by address, where it begins there."""
    private = {address: storage for address, storage in storages.items() if address not in _blocks}
    if not private:
        return {}
    starts, size = {}, 0
    for address, storage in private.items():
        starts[address] = size + (address - size) % _ALIGNMENT
        size = starts[address] + storage.nbytes()
    block = Block.new(size + -size % _ALIGNMENT)
    flat = torch.frombuffer(block, dtype=torch.uint8)
    _blocks[flat.data_ptr()] = block
    for address, storage in private.items():
        start = starts[address]
        flat[start : start + storage.nbytes()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return {address: (block, start) for address, start in starts.items()}


def _shareable(part: object) -> bool:
    return type(part) in (Tensor, nn.Parameter, nn.Buffer) and cast("Tensor", part).numel() > 0


def _rebuilt(skeleton: bytes, blocks: tuple[Block, ...], lying: tuple[Lying, ...]) -> object:
    tensors = [each.tensor(blocks) for each in lying]
    return unpacked(skeleton, tensors.__getitem__)
