"""Weight sync to vLLM: what is sent, where it lies, by which route, when it is served, and what a failure means."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import Tensor

from oppo.errors import ConfigError, ModelError, ModelLost, ProtocolError
from oppo.events import Prompt
from oppo.log import routed
from oppo.models import Weights
from oppo.vllm.arguments import Backend, Route, route_of
from oppo.vllm.engine import GRACE, ServedWeights
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
from tests.kit.virtual import virtually
from tests.vllm.bench import WEIGHTS, Bench, varied
from tests.vllm.fakes import FakeAsyncLLM, FakeSender, running

CPU, FIRST, SECOND, THIRD, FOURTH = (torch.device(each) for each in ("cpu", "cuda:0", "cuda:1", "cuda:2", "cuda:3"))
UUIDS = ["a1", "b2", "c3", "d4"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(UUIDS))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=UUIDS[number]))


@pytest.mark.parametrize(
    ("arguments", "trainer", "expected"),
    [
        ({}, FIRST, Route("ipc", 1, FIRST)),
        ({}, torch.device("cuda"), Route("nccl", 1, SECOND)),
        ({"tensor_parallel_size": 2}, CPU, Route("file", 2, CPU)),
        ({"device_ids": [1]}, SECOND, Route("ipc", 1, SECOND)),
        ({"device_ids": ["GPU-b2"]}, SECOND, Route("ipc", 1, SECOND)),
        ({"device_ids": ["GPU-b2"]}, FIRST, Route("nccl", 1, FIRST)),
        ({"device_ids": [1, 2, 3], "data_parallel_size": 3}, FIRST, Route("nccl", 3, FIRST)),
        ({"data_parallel_size": 2, "tensor_parallel_size": 1}, THIRD, Route("nccl", 2, THIRD)),
        ({"pipeline_parallel_size": 3, "prefill_context_parallel_size": 1}, FOURTH, Route("nccl", 3, FOURTH)),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_weights_go_within_a_gpu_or_between_several_and_to_a_cpu_by_a_file(
    arguments: dict[str, object], trainer: torch.device, expected: Route
) -> None:
    assert route_of(arguments, trainer, on_cpu=False) == expected
    assert route_of(arguments, trainer, on_cpu=True) == Route("file", expected.workers, trainer)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.usefixtures("gpus")
def test_memory_that_cuda_ipc_cannot_share_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(ConfigError, match=rf"{name} has expandable_segments:True.*placement\.trainer"):
        route_of({}, FIRST, on_cpu=False)
    assert route_of({}, SECOND, on_cpu=False).backend == "nccl"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"data_parallel_size": 2, "pipeline_parallel_size": 2},
            (
                r"vllm\.data_parallel_size = 2, vllm\.pipeline_parallel_size = 2 puts vLLM on the GPUs 0, 1, 2, 3, and "
                r"the trainer is on GPU 1,.* set placement\.trainer = 'cuda:4', or placement\.policy"
            ),
        ),
        ({"data_parallel_size": 2, "device_ids": [2, 1]}, r"on the GPUs 2, 1,.* set placement\.trainer = 'cuda:0'"),
        (
            {"device_ids": ["GPU-zz"]},
            r"on the GPUs \['GPU-zz'\]: expected numbers from 0 to 3, or some of GPU-a1.*vllm\.device_ids",
        ),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_a_trainer_on_one_of_several_gpus_of_the_engine_is_refused_by_name(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        route_of(arguments, SECOND, on_cpu=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_program_reads_what_was_written_last_in_the_memory_of_the_update_before(dtype: torch.dtype) -> None:
    file, memory = MemoryFile(), list[int]()
    for value, rows in ((1, 3), (0, 3), (1, 7), (1, 2)):
        table = torch.full((rows, 5), value, dtype=dtype)
        tensors = {
            "weight": table,
            "tied": table,
            "turned": table.t(),
            "scalar": torch.tensor(value, dtype=dtype),
            "empty": torch.zeros(0, 4, dtype=dtype),
        }
        file.write(tensors)
        memory.append(file._memory.data_ptr())
        found = load_file(file.path)
        assert found.keys() == tensors.keys() - {"tied"}
        for name, tensor in found.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, tensors[name])
    assert memory[0] == memory[1]
    with pytest.raises(ModelError, match=r"weight a is of torch.complex64, which cannot travel to vLLM: expected one"):
        file.write({"a": torch.ones(3, dtype=torch.complex64)})


@pytest.mark.parametrize("named", [False, True], ids=["in memory", "with a name"])
def test_nothing_is_left_of_it(named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if named:
        monkeypatch.delattr(os, "memfd_create")
    files = WeightFiles()
    file = files.write({"a": torch.ones(3)}, "1") / FILES[False]
    assert load_file(file)["a"].tolist() == [1.0, 1.0, 1.0]
    assert file.is_symlink() is not named
    path, probe = files.path, files.probe
    assert probe.exists()
    assert (probe.resolve() == file.resolve()) is not named, "who can open it can read the weights"
    assert (path.parent == tmp_path) is (named or not Path("/dev/shm").is_dir()), (
        "services may have a /tmp of their own"
    )
    del files
    gc.collect()
    assert not path.exists()
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

    async def init_transfer(self, info: Any) -> None:
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


@pytest.fixture
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
NCCL = Route("nccl", 1, GPU)
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


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("receiving", "sender", "tensors", "message"),
    [
        (
            Receiving(fails=RuntimeError("no such parameter")),
            FileSender(),
            TENSORS,
            r"weights of version run-1, .*no such parameter.*oppo resume",
        ),
        (Receiving(seconds=30.0), FileSender(deadline=0.01), TENSORS, r"took no weights within 0 s, .*oppo resume"),
        (Receiving(fails=RuntimeError("NCCL error")), DeviceSender(NCCL), ON_GPU, "NCCL error"),
        (Receiving(seconds=5.0), DeviceSender(NCCL, deadline=0.05), ON_GPU, "took no weights within 0 s"),
    ],
    ids=["file fails", "file late", "GPU fails", "GPU late"],
)
def test_an_engine_that_loads_no_weights_in_time_is_a_lost_model(
    receiving: Receiving, sender: FileSender | DeviceSender, tensors: Mapping[str, Tensor], message: str
) -> None:
    with pytest.raises(ModelLost, match=message):
        send(receiving, "run-1", sender=sender, tensors=tensors)


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


@pytest.mark.usefixtures("vllm")
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


@pytest.mark.parametrize(("kv_on_sync", "recomputed"), [("keep", 0), ("recompute", 2)])
@virtually
async def test_deferred_rollouts_keep_their_kv_cache_or_compute_them_again(kv_on_sync: str, recomputed: int) -> None:
    bench = Bench(keywords={"kv_on_sync": kv_on_sync})
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1)
        await bench.policy.load(Weights(1, WEIGHTS))
        await bench.policy.load(Weights(2))
        await bench.policy.load(Weights(3, WEIGHTS))
        await bench.step(await bench.policy.open([Prompt(9, 9, np.array([12], np.int32))]))
    assert bench.llm.recomputed == recomputed
    assert len(bench.llm.updates) == 2, "an actor that was not trained is not sent"
    salts = {request.salt for request in bench.llm.done}
    assert len(salts) == 2, "no prefix of other weights is used"


def unmerged() -> dict[str, object]:
    raise MemoryError("too large")


@pytest.mark.parametrize(
    ("weights", "fails", "error", "message"),
    [
        (Weights(1, WEIGHTS), ModelError("no room"), ModelError, "no room"),
        (Weights(1, {"bias": torch.zeros(1)}), None, ModelError, r"not the weights of fake, .*: 1 missing \(weight\)"),
        (Weights(1, WEIGHTS, merge=unmerged), None, MemoryError, "too large"),
    ],
    ids=["not sent", "of another model", "not merged"],
)
def test_weights_that_cannot_be_synced_leave_the_engine_decoding_with_the_old_ones(
    weights: Weights, fails: Exception | None, error: type[Exception], message: str
) -> None:
    bench = Bench(sender=FakeSender(fails=fails))
    bench.engine.weights = ServedWeights("fake", {"weight": (1,)}, (frozenset({"weight"}),))

    async def sync_weights() -> None:
        await anyio.sleep(0.015)
        with pytest.raises(error, match=message):
            await bench.policy.load(weights)
        assert bench.policy.version == 0
        await bench.policy.load(Weights(2, WEIGHTS))

    bench.play(2, beside=sync_weights, threads=True)
    assert sorted(bench.reported) == [[0], [1]]
    assert set(bench.versions(0)) <= {0, 2}
    assert len(bench.llm.updates) == 1


@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [True, False])
def test_adapters_that_rounding_would_take_away_are_refused_or_where_the_dtype_was_chosen_warned_of_once(
    served: torch.dtype, chosen: bool
) -> None:
    bench, said = Bench(FakeAsyncLLM(dtype=served)), list[str]()
    bench.engine.dtype_chosen = chosen
    base = torch.full((4,), 0.5, dtype=torch.bfloat16)
    state = {"head.base_layer.weight": base}

    def adding(*changes: float) -> Callable[[], dict[str, object]]:
        return lambda: {"head.weight": base.float() + torch.tensor(changes)}

    async def main() -> None:
        await bench.policy.load(Weights(1, state, merge=adding(1e-4, -1e-4, 1e-4, 0.25)))
        lost = bench.policy.sync_metrics["sync/rounding_loss"]
        assert lost == (0.0 if served == torch.float32 else pytest.approx(3**0.5 * 1e-4 / 0.25, rel=0.01))
        assert not said, "of less than a hundredth"
        for version in (2, 3):
            await bench.policy.load(Weights(version, state, merge=adding(1e-4, 1e-4, 1e-4, 1e-4)))

    if served == torch.bfloat16 and not chosen:
        with pytest.raises(ModelError, match=r"bfloat16.*dtype = 'float32'"):
            bench.run(main, threads=True)
        return
    with routed(said.append):
        bench.run(main, threads=True)
    assert len(said) == (served == torch.bfloat16)
    assert all("syncing version 2" in each and "bfloat16" in each and "100%" in each for each in said)


def test_the_error_of_a_rollout_that_a_sync_drains_ends_its_decoding_and_not_the_sync_weights() -> None:
    bench = Bench(FakeAsyncLLM(overrun=2, logprob=lambda position: float("nan") if position > 3 else -1.0))

    with pytest.raises(ModelError, match="which is not finite"):
        bench.play(2, load=0.015)
    assert bench.policy.version == 1


@virtually
async def test_the_error_of_a_rollout_that_came_late_is_raised_when_it_is_decoded_on() -> None:
    bench = Bench(FakeAsyncLLM(overrun=0, late=0.012, logprob=lambda position: float("nan") if position > 3 else -1.0))
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(2))
        with anyio.move_on_after(0.025):
            await bench.step(decodes)
        await bench.policy.load(Weights(1, WEIGHTS))
        assert bench.policy.version == 1
        await decodes[1].aclose()
        with pytest.raises(ModelError, match="which is not finite"):
            await bench.step(decodes[:1])


@pytest.mark.parametrize(
    "failure", [ModelLost("vLLM took no weights within 600 s"), RuntimeError("a worker refused")], ids=["late", "other"]
)
@virtually
async def test_an_engine_whose_weights_are_unknown_decodes_nothing_any_more(failure: Exception) -> None:
    bench = Bench(sender=FakeSender(fails=failure))
    made: list[int] = []
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(2))

        async def sync_weights() -> None:
            await anyio.sleep(0.015)
            with pytest.raises(ModelLost, match=str(failure)):
                await bench.policy.load(Weights(1, WEIGHTS))
            made.append(bench.policy.tokens)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sync_weights)
            with pytest.raises(ModelLost, match=str(failure)):
                await bench.step(decodes)
        await anyio.sleep(1)
        made.append(sum(len(request.tokens) for request in bench.llm.requests.values()))
        again = await bench.policy.open(varied(1))
        for _ in range(2):
            with pytest.raises(ModelLost, match=f"nothing is decoded any more: .*{failure}"):
                await bench.step(again)
            with pytest.raises(ModelLost, match=f"nothing is decoded any more: .*{failure}"):
                await bench.policy.load(Weights(2, WEIGHTS))
            again = await bench.policy.open(varied(1))
        for decode in decodes:
            await decode.aclose()
    assert made[0] == made[1], "no token was made after the failure"
    assert bench.policy.version == 0


@virtually
async def test_a_cancelled_sync_ends_first_and_takes_effect() -> None:
    bench = Bench(sender=FakeSender(seconds=0.1))

    async def sync_weights() -> None:
        await anyio.sleep(0.015)
        with anyio.move_on_after(0.03) as scope:
            await bench.policy.load(Weights(1, WEIGHTS))
        assert scope.cancel_called
        assert bench.policy.version == 1

    async with running(bench.llm):
        decodes = await bench.policy.open(varied(2))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sync_weights)
            await bench.step(decodes)
    assert bench.versions(0)[-1] == 1
    assert bench.llm.updates == [bench.policy._label(1)]


@virtually
async def test_a_cancelled_sync_that_does_not_end_leaves_the_engine_lost() -> None:
    bench = Bench(sender=FakeSender(seconds=10 * GRACE))
    async with running(bench.llm):
        start = anyio.current_time()
        with anyio.move_on_after(1.0):
            await bench.policy.load(Weights(1, WEIGHTS))
        assert anyio.current_time() == pytest.approx(start + 1.0 + GRACE)
        with pytest.raises(ModelLost, match=r"syncing version 1 was cancelled before .* unknown: .* fake.log"):
            await bench.step(await bench.policy.open(varied(1)))


def test_an_engine_that_keeps_the_kv_cache_of_other_weights_is_lost() -> None:
    class Keeping(FakeAsyncLLM):
        async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
            return False

    bench = Bench(Keeping())

    async def main() -> None:
        await bench.policy.load(Weights(1, WEIGHTS))

    with pytest.raises(ModelLost, match="kept the KV cache of the weights before version 1"):
        bench.run(main)


def test_an_engine_works_on_one_event_loop() -> None:
    bench = Bench()

    async def main() -> None:
        await bench.step(await bench.policy.open(varied(1)))

    bench.run(main)
    with pytest.raises(ProtocolError, match="the engine of fake works on the event loop that used it first"):
        bench.run(main)


@virtually
async def test_a_closed_engine_is_named_and_its_rollouts_can_be_closed() -> None:
    bench = Bench()
    async with running(bench.llm):
        decodes = await bench.policy.open(varied(3))
        await bench.step(decodes, cut_at=1)
        bench.engine.close()
        bench.engine.close()
        for decode in decodes:
            await decode.aclose()
        with pytest.raises(ProtocolError, match="the engine of fake was closed"):
            await bench.step(await bench.policy.open(varied(1)))
        with pytest.raises(ProtocolError, match="the engine of fake was closed"):
            await bench.policy.load(Weights(1, WEIGHTS))


def adapting(folder: Path, **given: Any) -> Bench:
    return Bench(sender=FileSender(WeightFiles(folder, adapters=True), adapts=True), adapts=True, **given)


def adapted(version: int) -> Weights:
    """Return weights with an adapter that differs in each version, and cannot be merged."""

    def merge() -> dict[str, object]:
        raise AssertionError("adapters alone are sent")

    path = "base_model.model.layers.0.q_proj"
    matrices = {f"{path}.lora_A.weight": torch.ones(2, 4), f"{path}.lora_B.weight": torch.full((4, 2), 1.0 + version)}
    return Weights(version, WEIGHTS, merge=merge, adapters=lambda: matrices)


def test_adapters_alone_are_sent_each_version_by_a_path_of_its_own(tmp_path: Path) -> None:
    bench = adapting(tmp_path)
    bench.engine.weights = ServedWeights("fake", {"other": (1,)}, (frozenset({"other"}),))
    seen: list[dict[str, torch.Tensor]] = []

    async def main() -> None:
        decodes = await bench.policy.open(varied(3))
        with pytest.raises(ProtocolError, match=r"fake was started for adapters and has none yet.*policy.load"):
            await bench.step(decodes)
        for version in (1, 2, 3):
            await bench.policy.load(adapted(version))
            assert bench.policy.sync_metrics == {"sync/rounding_loss": 0.0, "sync/bytes": 16 * 4}
            seen.append(load_file(Path(bench.llm.adapters[-1].path) / FILES[True]))
            await bench.step(decodes, cut_at=1)
            decodes = [each for each in decodes if not each.ended]
        await bench.policy.load(Weights(4))

    bench.run(main, threads=True)
    labels = [bench.policy._label(version) for version in (1, 2, 3)]
    assert [(each.name, each.replaces) for each in bench.llm.adapters] == [(label, True) for label in labels]
    assert [float(each.popitem()[1].max()) for each in map(dict, seen)] == [2.0, 3.0, 4.0]
    assert [request.lora.name for request in bench.llm.done] == [labels[0]] * 3, "deferred requests stay as they are"
    assert not any(request.lora.replaces for request in bench.llm.done), "vLLM would load it in each decode step"
    assert bench.policy.version == 4
    (folder,) = tmp_path.iterdir()
    assert {each.name for each in folder.iterdir()} == {*labels[1:]}, "older ones are gone"
    assert json.loads((folder / labels[2] / "adapter_config.json").read_text())["target_modules"] == ["q_proj"]
    checked = bench.llm.transfers[-1].init_info
    assert checked == {
        "adapter": str(folder / labels[2] / FILES[True]),
        "prints": fingerprints(seen[-1]),
    }


def test_an_engine_of_adapters_refuses_weights_without_and_goes_on_with_the_old_one(tmp_path: Path) -> None:
    bench = adapting(tmp_path)

    def in_the_way(name: str) -> None:
        (folder,) = tmp_path.iterdir()
        (folder / name).write_text("no directory")

    async def main() -> None:
        await bench.policy.load(adapted(1))
        with pytest.raises(ModelError, match=r"fake was started for adapters, and these weights have none"):
            await bench.policy.load(Weights(2, WEIGHTS))
        in_the_way(bench.policy._label(3))
        with pytest.raises(ModelError, match=r"could not be written to .* goes on serving the old ones"):
            await bench.policy.load(adapted(3))
        await bench.step(await bench.policy.open(varied(1)))

    bench.run(main, threads=True)
    assert set(bench.versions(0)) == {1}


def test_matrices_in_memory_go_with_their_process_however_it_ends_and_what_names_them_with_the_next() -> None:
    program = (
        "import os, signal, torch\nfrom oppo.vllm.sync import WeightFiles\nfolder = WeightFiles(adapters=True)\n"
        "print(folder.write({'a.lora_A.weight': torch.ones(2, 1)}, '1') / 'adapter_model.safetensors', flush=True)\n"
        "os.read(0, 1)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True) as killed:
        assert killed.stdout is not None
        file = Path(killed.stdout.readline().strip())
        assert load_file(file)["a.lora_A.weight"].tolist() == [[1.0], [1.0]], "another process reads them"
        killed.communicate("x")
    assert not file.exists()
    assert file.is_symlink()
    folder = WeightFiles(adapters=True)
    assert not file.is_symlink()
    path = folder.path
    del folder
    gc.collect()
    assert not path.exists()
