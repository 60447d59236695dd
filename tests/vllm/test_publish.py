"""Publishing to an engine: files that are written and removed, deadlines, and vLLM's own transfers by a stand-in."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file

from oppo.errors import ModelError, ModelLost
from oppo.vllm.device_publish import Backend, DeviceSender
from oppo.vllm.publish import FileSender

TENSORS = {"first": torch.arange(6.0).reshape(2, 3), "second": torch.ones(2)}


@dataclass
class Receiving:
    """The engine's side: notes its calls, and reads the file while the update goes on."""

    calls: list[str] = field(default_factory=list)
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    fails: Exception | None = None
    seconds: float = 0.0

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append("init")

    async def start_weight_update(self) -> None:
        self.calls.append("start")

    async def update_weights(self, request: Any) -> None:
        self.calls.append("update")
        await anyio.sleep(self.seconds)
        if self.fails is not None:
            raise self.fails
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
        def __init__(self, init: Any, client: Any, source: Any) -> None:
            did.append(f"joined by {init.backend} as one of {init.world_size}")
            self.client, self.source = client, source
            client.init_weight_transfer_engine({"packed": False})

        def send_weights(self) -> None:
            self.client.start_weight_update()
            names = [meta.name for meta in self.source.metadata()]
            assert names == [name for name, _ in self.source]
            did.append(f"sent {', '.join(names)}")
            self.client.update_weights({"names": names})
            self.client.finish_weight_update()

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


def send(receiving: Receiving, *versions: str, sender: Any = None) -> None:
    sender = sender or FileSender()

    async def main() -> None:
        for version in versions:
            await sender.send(receiving, TENSORS, version)

    anyio.run(main)


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
def test_on_gpus_vllm_sends_by_its_own_means(backend: Backend, workers: int, size: int, vllm: list[str]) -> None:
    receiving = Receiving()
    send(receiving, "run-1", "run-2", sender=DeviceSender(backend, workers))
    assert vllm == [f"joined by {backend} as one of {size}", "sent first, second", "sent first, second"]
    once = ["start", "update", "finish None"]
    assert receiving.calls == ["init", *once, "version run-1", *once, "version run-2"]


def test_a_transfer_between_gpus_that_fails_is_a_lost_model() -> None:
    receiving = Receiving(fails=RuntimeError("NCCL error"))
    with pytest.raises(ModelLost, match="NCCL error"):
        send(receiving, "run-1", sender=DeviceSender("nccl", 1))
