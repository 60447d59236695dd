"""Publishing to an engine: files that are written and removed, deadlines, and vLLM's own transfers by a stand-in."""

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
from safetensors.torch import load_file
from torch import Tensor

from oppo.errors import ModelError, ModelLost
from oppo.vllm.sync import Backend, DeviceSender, FileSender, Route, plain, restored

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

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append("init")

    async def start_weight_update(self) -> None:
        self.calls.append("start")

    async def update_weights(self, request: Any) -> None:
        self.calls.append("update")
        await anyio.sleep(self.seconds)
        if self.fails is not None:
            raise self.fails
        self.handles = request.update_info.get("ipc_handles")
        if "path" in request.update_info:
            self.files.append(Path(request.update_info["path"]))
            self.read = load_file(self.files[-1])

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")

    async def update_weight_version(self, new_version: str) -> None:
        self.calls.append(f"version {new_version}")


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for the modules of vLLM that publishing imports; returns what its trainer's side did."""
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
    assert len(set(receiving.files)) == 1
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
    with pytest.raises(ModelError, match=r"goes on serving the old ones .*No space left") as caught:
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
