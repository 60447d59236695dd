"""Counting the bytes of tensors that are alive, with data or without."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_aten = torch.ops.aten
_NUMBER = frozenset({_aten._local_scalar_dense.default, _aten.item.default})  # noqa: SLF001 - an operator's name


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations create in this context, while they are alive.

    Attributes:
        now: bytes alive.
        peak: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.now = self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run an operation and count what it created."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._counted or not size:
            return
        self._counted.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size


class WithoutData(LiveBytes):
    """The same for tensors without data: where an operation asks for data, masks are true and numbers are 1.

    So rows have no padding, which holds for rows of one length, and a search for few ids falls back to all of them.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Run an operation, or answer for it, and count what it created."""
        if func in _NUMBER:
            return True if args[0].dtype == torch.bool else 1
        if func is _aten.nonzero.default:
            return args[0].new_zeros((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if func is _aten.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1]):
            return args[0].reshape(-1, *args[0].shape[args[1][0].dim() :]).clone()
        return super().__torch_dispatch__(func, types, args, kwargs)


def strip(module: ModuleT) -> ModuleT:
    """Return a module made on the ``meta`` device with parameters and buffers as on a CPU, but without data.

    Called in the context of :func:`without_data`, which counts them.
    """
    stripped = dict[int, Tensor]()

    def like(tensor: Tensor) -> Tensor:
        if id(tensor) not in stripped:
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            stripped[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if is_parameter else bare
        return stripped[id(tensor)]

    for part in module.modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            setattr(part, name, like(tensor))
    return module


@contextmanager
def without_data() -> Iterator[LiveBytes]:
    """Let tensors that are created inside have no data, and count their bytes.

    Example:
        >>> with without_data() as live:
        ...     half = torch.zeros(1000, 1000).sum(1)
        >>> live.now, live.peak
        (4000, 4004000)
    """
    with FakeTensorMode(allow_non_fake_inputs=True), WithoutData() as live:
        yield live
