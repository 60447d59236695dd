"""The file in which weights travel to vLLM."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from oppo.errors import ModelError
from oppo.vllm.sync import DTYPES, WeightFile


def assert_holds(file: WeightFile, tensors: dict[str, Tensor]) -> None:
    found = load_file(file.path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_program_reads_what_was_written_last(dtype: torch.dtype) -> None:
    file = WeightFile()
    for value, rows in ((1, 3), (0, 3), (1, 7), (1, 2)):
        tensors = {
            "weight": torch.full((rows, 5), value, dtype=dtype),
            "a": torch.full((3,), value, dtype=dtype),
            "scalar": torch.tensor(value, dtype=dtype),
            "empty": torch.zeros(0, 4, dtype=dtype),
        }
        file.write(tensors)
        assert_holds(file, tensors)


def test_the_first_of_tied_tensors_is_written_and_what_is_not_contiguous_in_its_own_order() -> None:
    file, table = WeightFile(), torch.arange(6.0).view(2, 3)
    file.write({"embedding": table, "head": table, "turned": table.t()})
    assert_holds(file, {"embedding": table, "turned": table.t()})


def test_the_memory_of_one_update_is_that_of_the_next() -> None:
    file = WeightFile()
    file.write({"a": torch.zeros(1000)})
    before = file._memory.data_ptr()
    file.write({"a": torch.ones(1000)})
    assert file._memory.data_ptr() == before


@pytest.mark.parametrize("named", [False, True], ids=["in memory", "with a name"])
def test_nothing_is_left_of_it(named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if named:
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = WeightFile()
    file.write({"a": torch.ones(3)})
    assert_holds(file, {"a": torch.ones(3)})
    path, left = file.path, len(list(tmp_path.iterdir()))
    assert left == named
    del file
    gc.collect()
    assert not path.exists()


def test_a_lack_of_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(ModelError, match=r"no memory for .* bytes of weights on their way to vLLM, .* old"):
        WeightFile().write({"a": torch.ones(3)})


def test_a_dtype_that_the_format_does_not_know_is_named() -> None:
    with pytest.raises(ModelError, match=r"weight a is of torch.complex64, which cannot travel to vLLM: expected one"):
        WeightFile().write({"a": torch.ones(3, dtype=torch.complex64)})
