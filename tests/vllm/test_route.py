"""The way of weights to an engine: by file, CUDA IPC or NCCL, or refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from oppo.errors import ConfigError
from oppo.vllm.sync import Route, route_of

CPU, FIRST, SECOND, THIRD, FOURTH = (torch.device(each) for each in ("cpu", "cuda:0", "cuda:1", "cuda:2", "cuda:3"))
UUIDS = ["a1", "b2", "c3", "d4"]


@pytest.fixture(autouse=True)
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(UUIDS))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=UUIDS[number]))


@pytest.mark.parametrize(
    ("arguments", "trainer", "expected"),
    [
        ({}, FIRST, Route("ipc", 1, FIRST)),
        ({}, SECOND, Route("nccl", 1, SECOND)),
        ({}, torch.device("cuda"), Route("nccl", 1, SECOND)),
        ({}, CPU, Route("file", 1, CPU)),
        ({"tensor_parallel_size": 2}, CPU, Route("file", 2, CPU)),
        ({"device_ids": [1]}, SECOND, Route("ipc", 1, SECOND)),
        ({"device_ids": [1]}, FIRST, Route("nccl", 1, FIRST)),
        ({"device_ids": ["GPU-b2"]}, SECOND, Route("ipc", 1, SECOND)),
        ({"device_ids": ["GPU-b2"]}, FIRST, Route("nccl", 1, FIRST)),
        ({"device_ids": [1, 2], "tensor_parallel_size": 2}, FIRST, Route("nccl", 2, FIRST)),
        ({"device_ids": [1, 2, 3], "data_parallel_size": 3}, FIRST, Route("nccl", 3, FIRST)),
        ({"data_parallel_size": 2, "tensor_parallel_size": 1}, THIRD, Route("nccl", 2, THIRD)),
        ({"pipeline_parallel_size": 3, "prefill_context_parallel_size": 1}, FOURTH, Route("nccl", 3, FOURTH)),
    ],
)
def test_weights_go_within_a_gpu_or_between_several(
    arguments: dict[str, object], trainer: torch.device, expected: Route
) -> None:
    assert route_of(arguments, trainer, on_cpu=False) == expected


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_cuda_ipc_cannot_share_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ConfigError, match=rf"{name} has expandable_segments:True.*placement\.trainer"):
        route_of({}, FIRST, on_cpu=False)
    assert route_of({}, SECOND, on_cpu=False).backend == "nccl"
    monkeypatch.setenv(name, "expandable_segments:False")
    assert route_of({}, FIRST, on_cpu=False).backend == "ipc"


@pytest.mark.parametrize("trainer", [CPU, FIRST])
def test_an_engine_on_a_cpu_reads_a_file_wherever_the_trainer_is(trainer: torch.device) -> None:
    assert route_of({"tensor_parallel_size": 2}, trainer, on_cpu=True) == Route("file", 2, trainer)


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (
            {"tensor_parallel_size": 2},
            [
                "vllm.tensor_parallel_size = 2 puts vLLM on the GPUs 0, 1, and the trainer is on GPU 1,",
                "set placement.trainer = 'cuda:2', or placement.policy",
            ],
        ),
        (
            {"data_parallel_size": 2, "pipeline_parallel_size": 2},
            [
                "vllm.data_parallel_size = 2, vllm.pipeline_parallel_size = 2 puts vLLM on the GPUs 0, 1, 2, 3",
                "cuda:4",
            ],
        ),
        ({"data_parallel_size": 2, "device_ids": [2, 1]}, ["on the GPUs 2, 1,", "set placement.trainer = 'cuda:0'"]),
        (
            {"device_ids": ["GPU-zz"]},
            [
                "on the GPUs ['GPU-zz']: expected numbers from 0 to 3, or some of GPU-a1",
                "vllm.device_ids",
            ],
        ),
    ],
)
def test_a_trainer_on_one_of_several_gpus_of_the_engine_is_refused_by_name(
    arguments: dict[str, object], sentences: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        route_of(arguments, SECOND, on_cpu=False)
    assert all(sentence in str(caught.value) for sentence in sentences)
