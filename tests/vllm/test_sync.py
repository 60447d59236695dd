"""Weight sync to vLLM: the weights that an engine takes, the file they lie in, the route, and vLLM's own transfers."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from oppo.errors import ConfigError, ModelError, ModelLost
from oppo.vllm.arguments import Backend, Route, route_of
from oppo.vllm.engine import ServedWeights
from oppo.vllm.sync import (
    DTYPES,
    FILES,
    SAMPLED,
    DeviceSender,
    FileSender,
    MemoryFile,
    WeightFiles,
    fingerprints,
    plain,
    restored,
)

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
    ("arguments", "messages"),
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
    arguments: dict[str, object], messages: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        route_of(arguments, SECOND, on_cpu=False)
    assert all(message in str(caught.value) for message in messages)


def assert_holds(file: MemoryFile, tensors: dict[str, Tensor]) -> None:
    found = load_file(file.path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_program_reads_what_was_written_last(dtype: torch.dtype) -> None:
    file = MemoryFile()
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
    file, table = MemoryFile(), torch.arange(6.0).view(2, 3)
    file.write({"embedding": table, "head": table, "turned": table.t()})
    assert_holds(file, {"embedding": table, "turned": table.t()})


def test_the_memory_of_one_update_is_that_of_the_next() -> None:
    file = MemoryFile()
    file.write({"a": torch.zeros(1000)})
    before = file._memory.data_ptr()
    file.write({"a": torch.ones(1000)})
    assert file._memory.data_ptr() == before


@pytest.mark.parametrize("named", [False, True], ids=["in memory", "with a name"])
def test_nothing_is_left_of_it(named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if named:
        monkeypatch.delattr(os, "memfd_create")
    files = WeightFiles()
    file = files.write({"a": torch.ones(3)}, "1") / FILES[False]
    assert load_file(file)["a"].tolist() == [1.0, 1.0, 1.0]
    assert file.is_symlink() is not named
    del files
    gc.collect()
    assert not [*tmp_path.iterdir()]


@given(st.integers(0, 2000), st.integers(0, 1999), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_fingerprint_tells_tensors_apart_by_type_shape_and_what_is_all_over_them(
    size: int, at: int, dtype: torch.dtype
) -> None:
    tensor = torch.arange(size, dtype=torch.float32).to(dtype)
    (found,) = fingerprints({"it": tensor}).values()
    assert fingerprints({"it": tensor.clone()}) == {"it": found}
    assert fingerprints({"it": tensor[None]}) != {"it": found}
    assert not size or fingerprints({"it": tensor + 3}) != {"it": found}
    if at < size and at % max(1, -(-size // SAMPLED)) == 0:
        changed = tensor.clone()
        changed[at] -= 4096
        assert fingerprints({"it": changed}) != {"it": found}


def test_a_dtype_that_the_format_does_not_know_is_named() -> None:
    with pytest.raises(ModelError, match=r"weight a is of torch.complex64, which cannot travel to vLLM: expected one"):
        MemoryFile().write({"a": torch.ones(3, dtype=torch.complex64)})


def config(**changes: Any) -> LlamaConfig:
    made = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def weights(**changes: Any) -> dict[str, Tensor]:
    return LlamaForCausalLM(config(**changes)).state_dict()


@pytest.mark.parametrize("tied", [False, True])
def test_a_models_own_weights_pass_whether_tied_ones_come_once_or_twice(tied: bool) -> None:
    served = ServedWeights.of("actor", config(tie_word_embeddings=tied))
    model = LlamaForCausalLM(config(tie_word_embeddings=tied))
    served.require(model.state_dict())
    served.require(dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1}, r"actor, which vLLM serves: 9 missing \(model\.layers\.1\..*\.\.\.\); it goes on"),
        ({"num_hidden_layers": 3}, r"actor, which vLLM serves: 9 unknown \(model\.layers\.2\..*\.\.\.\)"),
        ({"vocab_size": 33}, r"2 of another shape \(model\.embed_tokens\.weight \[33, 8\], not \[32, 8\], lm_head"),
        ({"attention_bias": True}, r"8 unknown \(model\.layers\.0\.self_attn\.q_proj\.bias"),
    ],
)
def test_those_of_another_model_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ServedWeights.of("actor", config()).require(weights(**changes))


def test_an_output_layer_of_its_own_is_missed_where_it_is_not_tied() -> None:
    without = {name: tensor for name, tensor in weights().items() if name != "lm_head.weight"}
    with pytest.raises(ModelError, match=r"1 missing \(lm_head\.weight\)"):
        ServedWeights.of("actor", config()).require(without)
    ServedWeights.of("actor", config(tie_word_embeddings=True)).require(without)


def test_it_takes_no_memory() -> None:
    large = ServedWeights.of("actor", config(vocab_size=10_000_000, hidden_size=10_000, intermediate_size=10_000))
    assert large.shapes["lm_head.weight"] == (10_000_000, 10_000)
    assert torch.empty(0).device.type == "cpu"


TENSORS = {"first": torch.arange(6.0).reshape(2, 3), "second": torch.ones(2)}
HANDLES = [
    {"GPU": (torch.Tensor, torch.Size([2, 3]), (3, 1), 0, torch.storage.TypedStorage, torch.bfloat16, 1, b"h", None)}
]


@dataclass
class Receiving:
    """The engine's side: notes its calls, and reads the file while the update goes on."""

    calls: list[str] = field(default_factory=list)
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    fails: Exception | None = None
    seconds: float = 0.0
    handles: Any = None

    async def agree(self, info: Any) -> None:
        self.calls.append("init")

    async def start_update(self) -> None:
        self.calls.append("start")

    async def update(self, info: Any) -> None:
        self.calls.append("update")
        await anyio.sleep(self.seconds)
        if self.fails is not None:
            raise self.fails
        self.handles = info.get("ipc_handles")
        if "path" in info:
            self.files.append(Path(info["path"]))
            self.read = load_file(self.files[-1])

    async def finish_update(self, version: str | None = None) -> None:
        self.calls.append(f"finish {version}")

    async def name_version(self, version: str) -> None:
        self.calls.append(f"version {version}")


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for the modules of vLLM that weight sync imports; returns what its trainer's side did."""
    did: list[str] = []

    class Trainer:
        """As vLLM's: with NCCL the workers are called from a thread of its own, beside the transfer."""

        def __init__(self, init: Any, client: Any, source: Any) -> None:
            did.append(f"joined by {init.backend} as one of {init.world_size} on {did[-1]}")
            self.client, self.source, self.apart = client, source, init.backend == "nccl"
            self._call(client.init_weight_transfer_engine, {"packed": False})

        def _call(self, call: Any, argument: Any) -> None:
            if not self.apart:
                call(argument)
                return
            with ThreadPoolExecutor(max_workers=1) as thread:
                thread.submit(call, argument).result()

        def send_weights(self) -> None:
            self.client.start_weight_update()
            names = [meta.name for meta in self.source.metadata()]
            assert names == [name for name, _ in self.source]
            did.append(f"sent {', '.join(names)}")
            handles = {} if self.apart else {"ipc_handles": HANDLES}
            self._call(self.client.update_weights, {"names": names, **handles})
            self.client.finish_weight_update()

    @contextmanager
    def at(device: torch.device) -> Iterator[None]:
        did.append(str(device))
        yield

    monkeypatch.setattr(torch.cuda, "device", at)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: did.append(f"{device} was waited for"))

    def info(backend: str) -> Any:
        return lambda **given: SimpleNamespace(backend=backend, **{"world_size": 1, **given})

    base = SimpleNamespace(
        WeightTransferInitRequest=SimpleNamespace,
        WeightTransferUpdateRequest=SimpleNamespace,
        ParamMeta=lambda name, dtype, shape: SimpleNamespace(name=name, dtype=dtype, shape=shape),
    )
    factory = SimpleNamespace(
        WeightTransferTrainerFactory=SimpleNamespace(
            trainer_init=lambda init, *, client, source: Trainer(init, client, source)
        )
    )
    found: dict[str, object] = {
        "base": base,
        "factory": factory,
        "ipc_engine": SimpleNamespace(IPCTrainerInitInfo=info("ipc")),
        "nccl_engine": SimpleNamespace(NCCLTrainerInitInfo=info("nccl")),
    }
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, f"vllm.distributed.weight_transfer.{name}", module)
    return did


def send(receiving: Receiving, *versions: str, sender: Any = None, tensors: Mapping[str, Tensor] = TENSORS) -> None:
    sender = sender or FileSender()

    async def main() -> None:
        for version in versions:
            await sender.send(receiving, tensors, version)

    anyio.run(main)


class OnGpu(Tensor):
    """Says that it is on the second GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's is a descriptor in C, with no setter either
        return GPU


GPU = torch.device("cuda", 1)
ON_GPU = {name: tensor.as_subclass(OnGpu) for name, tensor in TENSORS.items()}


def test_weights_travel_in_a_file_that_is_written_anew() -> None:
    receiving = Receiving()
    send(receiving, "run-1", "run-2")
    once = ["start", "update"]
    assert receiving.calls == ["init", *once, "finish run-1", *once, "finish run-2"]
    assert {name: tensor.tolist() for name, tensor in receiving.read.items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }
    assert len(set(receiving.files)) == 2, "no two have the same name"
    gc.collect()
    assert not receiving.files[0].exists()


def test_weights_that_an_engine_does_not_load_are_a_lost_model() -> None:
    receiving = Receiving(fails=RuntimeError("no such parameter"))
    with pytest.raises(ModelLost, match=r"weights of version run-1, .*no such parameter.*oppo resume"):
        send(receiving, "run-1")


def test_an_engine_that_takes_too_long_is_a_lost_model() -> None:
    with pytest.raises(ModelLost, match=r"took no weights within 0 s, .*oppo resume"):
        send(Receiving(seconds=30.0), "run-1", sender=FileSender(deadline=0.01))


def test_weights_that_cannot_be_written_leave_the_old_ones_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    receiving = Receiving()
    with pytest.raises(ModelError, match=r"goes on serving the old ones .*no memory for .*No space left") as caught:
        send(receiving, "run-1")
    assert not isinstance(caught.value, ModelLost)
    assert receiving.calls == []


@pytest.mark.parametrize(("backend", "workers", "size"), [("ipc", 1, 1), ("nccl", 3, 4)])
def test_on_gpus_vllm_sends_by_its_own_means_from_the_gpu_of_the_trainer(
    backend: Backend, workers: int, size: int, vllm: list[str]
) -> None:
    receiving = Receiving()
    send(receiving, "run-1", "run-2", sender=DeviceSender(Route(backend, workers, GPU)), tensors=ON_GPU)
    waited = ["cuda:1", "cuda:1 was waited for"]
    joined = f"joined by {backend} as one of {size} on cuda:1 was waited for"
    assert vllm == [*waited, joined, "sent first, second", *waited, "sent first, second"]
    once = ["start", "update", "finish None"]
    assert receiving.calls == ["init", *once, "version run-1", *once, "version run-2"]


def test_handles_of_the_memory_of_a_gpu_travel_without_pickles() -> None:
    receiving = Receiving()
    send(receiving, "run-1", sender=DeviceSender(Route("ipc", 1, GPU)), tensors=ON_GPU)
    ((gpu, sent),) = receiving.handles[0].items()
    assert (gpu, {type(each) for each in sent}) == ("GPU", {str, list, int, bytes, type(None)})
    ((_, had),) = restored(receiving.handles)[0].items()
    assert [tuple(each) if isinstance(each, list) else each for each in had] == list(HANDLES[0]["GPU"])
    with pytest.raises(ModelError, match="Parameter"):
        plain([{"GPU": (torch.nn.Parameter,)}])


def test_weights_on_another_device_than_announced_are_refused_before_anything_is_sent(vllm: list[str]) -> None:
    receiving = Receiving()
    with pytest.raises(ModelError, match=r"weight first is on cpu, .* on cuda:1: start the engine with trainer='cpu'"):
        send(receiving, "run-1", sender=DeviceSender(Route("ipc", 1, GPU)))
    assert receiving.calls == vllm == []


def test_a_transfer_between_gpus_that_fails_is_a_lost_model() -> None:
    receiving = Receiving(fails=RuntimeError("NCCL error"))
    with pytest.raises(ModelLost, match="NCCL error"):
        send(receiving, "run-1", sender=DeviceSender(Route("nccl", 1, GPU)), tensors=ON_GPU)


def test_a_transfer_between_gpus_has_a_deadline() -> None:
    sender = DeviceSender(Route("nccl", 1, GPU), deadline=0.05)
    with pytest.raises(ModelLost, match="took no weights within 0 s"):
        send(Receiving(seconds=5.0), "run-1", sender=sender, tensors=ON_GPU)
