"""The weights of an update as a safetensors file in memory, which vLLM's workers on this machine map.

The same memory is written for each update: fetching new memory from the system, and giving it back, takes several times
as long as the copy.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp
from typing import Final

import torch
from torch import Tensor

from oppo.errors import ModelError, one_line

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

    Attributes:
        path: leads to it while this object lives, in every process of this user.

    Example:
        >>> from safetensors.torch import load_file
        >>> file = WeightFile()
        >>> file.write({"bias": torch.ones(2)})
        >>> load_file(file.path)
        {'bias': tensor([1., 1.])}
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("oppo-weights")
            self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
            weakref.finalize(self, os.close, self._descriptor)
        else:
            self._descriptor, name = mkstemp(prefix="oppo-weights-")
            self.path = Path(name)
            weakref.finalize(self, _remove, self._descriptor, self.path)
        self._memory = torch.zeros(0, dtype=torch.uint8)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write these tensors in place of what was there; of tied ones the first.

        Raises:
            ModelError: a dtype is unknown to the format, or there is too little memory.
        """
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


def untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors by name, the first of those that lie in the same memory."""
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name, tensor in tensors.items():
        first.setdefault((tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())), name)
    return {name: tensors[name].detach().contiguous() for name in first.values()}


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the head of a safetensors file: the length of the entries, 8 bytes, and the entries in JSON."""
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


def _remove(descriptor: int, path: Path) -> None:
    os.close(descriptor)
    with suppress(FileNotFoundError):
        path.unlink()
