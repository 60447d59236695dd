"""A device that is not there: fake tensors on it, whose operations follow a device's rules and are counted.

PyTorch's fake tensors have shapes, dtypes and devices, and refuse most operations on tensors of several devices. Here
they are of a backend without kernels, so that a build of torch for CPUs runs forward, backward and optimizer. To
register it changes the whole process: a test starts a process for it.

Results are zeros and true, so it says nothing about numbers; streams and races do not exist; recomputation of
activations does not run on it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves

from oppo.hf.memory import ModuleT, WithoutData, strip

aten = torch.ops.aten

JOINS = frozenset({"cat", "stack"})
"""Operations in which fake tensors, unlike a device, take a tensor without dimensions from another device."""

COPIES = frozenset({"_to_copy", "copy_"})

NO_KERNEL = frozenset({"device", "detach_", "empty", "empty_like", "new_empty"})
"""Operations that launch nothing, beside views."""

TENSORS_A_LAUNCH = 64
"""Tensors that one launch copies, of a list of dense ones."""

INDEXING = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default})
"""Operations that take indices from the CPU, and send them to the device."""


class _Absent(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        """Return false, so that fake tensors never touch the device."""
        return False

    def device_count(self) -> int:
        """Return 0: its random numbers have no state to keep."""
        return 0


def register() -> None:
    """Make the device ``gpu`` known to this process."""
    backend_registration._setup_privateuseone_for_python_backend("gpu", backend_module=_Absent())
    for holder, name, value in (
        (FakeTensorMode, "avoid_device_init", property(lambda mode: True)),
        (FakeTensor, "numpy", _numpy),
        (FakeTensor, "data_ptr", lambda tensor: id(tensor.untyped_storage()) + tensor.storage_offset()),
        (FakeTensor, "tolist", lambda tensor: tensor.cpu().numpy().tolist()),
    ):
        setattr(holder, name, value)


def _numpy(tensor: FakeTensor) -> NDArray[np.generic]:
    if tensor.device.type != "cpu":
        raise TypeError(f"cannot convert a tensor on {tensor.device} to numpy at {_place()}")
    return np.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class Watch(WithoutData):
    """Counts what makes the host wait, by place, and refuses what a device refuses.

    Attributes:
        waits: results that were read back: each waits until the device has done all its work.
        uploads: tensors that were sent to a device.
        kernels: operations on a device that are a kernel at least.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.uploads, self.kernels = Counter[str](), Counter[str](), Counter[str]()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        if name == "to":  # in inference mode it comes as a whole
            with self:
                return func.decompose(*args, **kwargs)  # type: ignore[attr-defined]  # an operator's
        inputs = _devices((args, kwargs))
        if name in JOINS and len(inputs) > 1:
            raise RuntimeError(f"{name} of tensors on {sorted(map(str, inputs))} at {_place()}")
        if _on_device(inputs) and _reads_back(func, args):
            self.waits[_place()] += 1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        outputs = _devices(result)
        if name in COPIES:
            self._transferred(name, args, outputs)
        elif func in INDEXING and len(inputs) > 1:
            self.uploads[_place()] += 1
        if _on_device(inputs | outputs) and (launches := _launches(func, name, args)):
            self.kernels[_place()] += launches
        return result

    def _transferred(self, name: str, args: Sequence[Any], outputs: set[torch.device]) -> None:
        source = args[1] if name == "copy_" else args[0]
        was, now = _on_device(_devices(source)), _on_device(outputs)
        if was and not now:
            self.waits[_place()] += 1
        elif now and not was:
            self.uploads[_place()] += 1

    def taken(self) -> dict[str, object]:
        """Return the counts as JSON values, and begin anew."""
        found = {"waits": dict(self.waits), "uploads": dict(self.uploads), "kernels": dict(self.kernels)}
        self.waits, self.uploads, self.kernels = Counter[str](), Counter[str](), Counter[str]()
        return dict[str, object](found)


def _launches(func: Any, name: str, args: Sequence[Any]) -> int:
    if func.is_view or name in NO_KERNEL:
        return 0
    if not name.startswith("_foreach"):
        return 1
    together = all(each.is_contiguous() for each in tree_leaves(args) if isinstance(each, Tensor))
    return -(-len(args[0]) // TENSORS_A_LAUNCH) if together else len(args[0])


def _devices(values: object) -> set[torch.device]:
    return {each.device for each in tree_leaves(values) if isinstance(each, Tensor)}


def _on_device(devices: set[torch.device]) -> bool:
    return any(each.type == "gpu" for each in devices)


def _reads_back(func: Callable[..., object], args: Sequence[Any]) -> bool:
    """Return whether the host needs a result: a number, or how many elements of a mask are true."""
    if func in {aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default}:
        return True
    return func in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])


def _place() -> str:
    """Return the innermost line of the package on the stack."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if "/oppo/" in file and not file.endswith("live_bytes.py"):
            return f"oppo/{file.rpartition('/oppo/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"


def moved(module: ModuleT, device: str = "gpu:0") -> ModuleT:
    """Return a module made on the ``meta`` device, on a device; called in the context of :func:`watched`."""
    with torch.device(device):
        return strip(module)


@contextmanager
def watched() -> Iterator[Watch]:
    """Let tensors that are created inside be fake, and count what is done with them."""
    with FakeTensorMode(allow_non_fake_inputs=True), Watch() as watch:
        yield watch
