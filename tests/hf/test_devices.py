"""Devices by name, their threads, cores of the CPU, and errors when memory runs out."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda._utils import _get_device_index

from oppo.errors import ConfigError, ModelError, ModelLost
from oppo.hf import DeviceThread
from oppo.hf.devices import (
    CPU,
    DeviceLayout,
    Devices,
    ModelPlace,
    attributed,
    available_cores,
    device_of,
    full_precision,
    memory_gauges,
    numbered,
    peak_of,
    ran_out,
    use_cores,
    use_stream,
)
from oppo.hf.head import UPDATE_SHARE
from oppo.hf.loading import load_causal
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.ranks import Replicas
from oppo.hf.weights import copies
from oppo.placement import Process, Thread
from oppo.scheduling import GPU_TIME_SLICE
from oppo.simulate.profile import BY_TORCH, BY_TRITON
from tests.hf import tiny
from tests.hf.on_fake_device import VOCABULARY
from tests.kit.forked import Program
from tests.kit.workplace import furnish, run


class Cuda:
    """What stands in for CUDA's calls: it takes arguments as torch does, and notes the calls in their order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done = list[str]()
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        patch.setattr(torch.cuda, "set_device", lambda device: self.note(f"device {_get_device_index(device)}"))
        patch.setattr(torch.cuda, "Stream", lambda device, priority: priority)
        patch.setattr(torch.cuda, "set_stream", lambda priority: self.note(f"stream {priority}"))
        patch.setattr(torch.cuda, "current_stream", lambda: self)
        patch.setattr(torch.cuda, "synchronize", lambda device: self.note(f"waited for {device}"))
        patch.setattr(torch.cuda, "empty_cache", lambda: self.note("gave back"))

    def note(self, what: str) -> None:
        self.done.append(what)

    def synchronize(self) -> None:
        self.note("waited for the stream")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def all_on(device: torch.device) -> Devices:
    return Devices(device, device, (device,), device, device, device, device)


CUDA = all_on(torch.device("cuda", 0))
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA device")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("name", "device"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_cuda_device_has_its_number(name: str, device: str) -> None:
    assert device_of(name) == torch.device(device)


@pytest.mark.usefixtures("two_gpus")
def test_a_device_that_is_not_there_is_an_error_that_names_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"no 'cuda:2' here: torch finds cpu, cuda:0, cuda:1"):
        device_of("cuda:2")


@pytest.mark.usefixtures("two_gpus")
def test_an_exact_run_is_on_the_cpu_where_nothing_else_is_asked_for() -> None:
    assert device_of("auto", deterministic=True) == CPU


@without_cuda
def test_auto_is_the_cpu_where_there_is_nothing_else() -> None:
    assert device_of("auto") == device_of("cpu") == CPU


@without_cuda
def test_a_run_on_a_device_that_is_not_there_ends_with_a_message(tmp_path: Path) -> None:
    code, _, said = run(furnish(tmp_path), "models.device=cuda")
    assert code != 0
    assert "error: models.device: there is no 'cuda' here: torch finds cpu" in said
    assert "Traceback" not in said


def test_a_loaded_model_is_on_the_device_that_was_asked_for(tmp_path: Path) -> None:
    tiny.causal("llama").save_pretrained(tmp_path)
    assert load_causal(tmp_path, device="cpu").device == CPU


def test_scorers_are_beside_the_models_of_a_gpu_in_a_thread() -> None:
    """Whether there is a GPU somewhere says nothing about the models."""
    places = DeviceLayout.of(4, CUDA, "auto")
    assert all(isinstance(place, DeviceThread) for place in (*places.acting, places.scoring["reward"], places.training))
    places.close()
    with pytest.raises(ConfigError, match=r"run\.trainer = 'process' .* on cuda:0: expected run\.trainer = 'thread'"):
        DeviceLayout.of(4, CUDA, "auto", trainer="process")
    with pytest.raises(ConfigError, match=r"the models are on cuda:0: expected run\.policy = 'thread'$"):
        DeviceLayout.of(4, CUDA, "thread", policy="process")


def test_scorers_on_a_gpu_may_have_a_process_and_what_reads_the_actor_s_weights_stays() -> None:
    places = DeviceLayout.of(4, CUDA, "process")
    try:
        assert {place.name: type(place) for place in places} == {
            "actor": DeviceThread,
            "scorers on cuda:0": Process,
            "proximal on cuda:0": DeviceThread,
            "trainer": DeviceThread,
            "saver": Thread,
        }
        assert places.scoring["critic"] is places.scoring["reference"] is places.scoring["reward"]
        assert places.place_of("proximal") is not places.place_of("critic")
        assert places.place_of("critic").time_slice == GPU_TIME_SLICE
    finally:
        places.close()


@pytest.mark.usefixtures("two_gpus")
def test_models_of_a_process_on_a_gpu_are_loaded_there() -> None:
    named = {key: ["cuda"] for key in ("policy", "actor", "trainer", "reference", "reward")}
    named |= {"critic": ["cpu"], "teacher": ["cpu"]}
    found = partial(Devices.found, named, str, remote=frozenset({"policy"}))
    assert found(scorers="process").apart == {"policy", "reference", "reward"}
    assert found(scorers="auto").apart == {"policy"}


@pytest.mark.usefixtures("two_gpus")
def test_each_replica_of_a_policy_has_a_gpu_or_the_last_is_refused() -> None:
    named = {key: ["cuda"] for key in ("policy", "actor", "trainer", "reference", "reward", "critic", "teacher")}
    devices = Devices.found(named, str, replicas=2)
    assert [str(device) for device in devices.policies] == ["cuda:0", "cuda:1"]
    assert devices.apart == {"policy"}
    for options in ({"replicas": 3}, {"replicas": 2, "gpus": 1}):
        with pytest.raises(
            ConfigError, match=r"placement\.policy_replicas = \d gives each replica a GPU, .* no 'cuda:"
        ):
            Devices.found(named, str, **options)  # type: ignore[arg-type]  # all are numbers
    remote = Devices.found(named, str, replicas=3, remote=frozenset({"policy"}))
    assert [str(device) for device in remote.policies] == ["cuda"] * 3, "that which Ray gives each"


@pytest.mark.usefixtures("two_gpus")
def test_scorers_on_a_cpu_have_a_process_whatever_else_the_machine_has() -> None:
    places = DeviceLayout.of(4, all_on(CPU), "auto")
    assert isinstance(places.scoring["reward"], Process)
    assert isinstance(places.acting[0], Thread)
    places.close()


def test_a_device_without_a_number_is_the_current_one(cuda: Cuda) -> None:
    bare, first = torch.device("cuda"), torch.device("cuda", 0)
    assert [numbered(each) for each in (bare, first, CPU)] == [torch.device("cuda", 1), first, CPU]
    use_stream(bare)
    assert cuda.done == ["device 1", "stream 0"]
    assert Replicas(devices=(first, bare)).device(1, 2, ActorCritic(tiny.causal())) == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda", ["made", "waited for cuda", "device 1", "stream -1", "worked", "waited for the stream", "read"]),
        ("cpu", ["made", "worked", "read"]),
    ],
)
async def test_what_a_device_s_thread_is_given_and_returns_is_complete(
    device: str, expected: list[str], cuda: Cuda
) -> None:
    with DeviceThread("actor", device, first=True) as place:
        cuda.note("made")
        hosted = place.host(lambda: cuda)
        await hosted.call("work", Cuda.note, "worked")
        cuda.note("read")
    assert cuda.done == expected


def test_copies_of_weights_are_complete_before_the_weights_may_change(cuda: Cuda) -> None:
    with FakeTensorMode():
        copies({"weight": torch.empty(2, device="cuda:1"), "bias": torch.empty(2, device="cuda:1")})
    assert cuda.done == ["waited for cuda:1"]


def test_attention_does_not_plan_each_length_anew() -> None:
    """As cuDNN's does, which torch prefers on newer devices; to have imported the backend is enough."""
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_no_more_cores_are_used_than_the_environment_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert available_cores() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert available_cores() >= 1


def test_a_thread_that_has_said_how_many_cores_it_uses_keeps_them_whatever_another_says_next() -> None:
    said, another_said = threading.Event(), threading.Event()
    seen: list[int] = []

    def actor() -> None:
        use_cores(1)
        said.set()
        another_said.wait(10)
        seen.append(torch.get_num_threads())

    def trainer() -> None:
        said.wait(10)
        use_cores(2)
        seen.append(torch.get_num_threads())
        another_said.set()

    threads = [threading.Thread(target=work) for work in (actor, trainer)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [1, 2]


class Model:
    def too_much(self) -> torch.Tensor:
        return torch.empty(1 << 50, dtype=torch.uint8)

    def number(self, text: str) -> int:
        return int(text)


async def test_the_allocators_own_error_is_attributed_to_the_model_in_its_place() -> None:
    with Thread("scorers") as thread:
        critic = ModelPlace(thread, "critic", "lower step.batch").host(Model)
        with pytest.raises(
            ModelError, match=r"the critic ran out of memory while it did 'extend': lower step.batch \("
        ) as caught:
            await critic.call("extend", Model.too_much)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert await critic.call("extend", Model.number, "7") == 7, "the thread goes on"


async def test_other_errors_pass_as_they_are() -> None:
    with Thread("scorers") as thread:
        critic = ModelPlace(thread, "critic", "lower step.batch").host(Model)
        with pytest.raises(ValueError, match="invalid literal"):
            await critic.call("extend", Model.number, "x")
        thread.close()
        with pytest.raises(ModelLost):
            await critic.call("extend", Model.number, "7")


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (KeyError("out of memory"), False),
        (None, False),
    ],
)
def test_what_says_that_memory_ran_out_is_recognised(error: BaseException | None, is_so: bool) -> None:
    assert ran_out(error) is is_so


def test_a_cause_counts_too() -> None:
    outer = ConfigError("no model could be loaded")
    outer.__cause__ = MemoryError()
    expected = pytest.raises(ModelError, match="the reward ran out of memory while it was loaded: take a smaller one")
    with expected, attributed("reward", "it was loaded", "take a smaller one"):
        raise outer


def test_the_peak_of_a_cpu_is_measured_once_and_the_threads_stay_as_they_were() -> None:
    before = torch.get_num_threads()
    one = peak_of(CPU, torch.float32, 1)
    assert 1e8 < one == peak_of(CPU, torch.float32, 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H200", torch.float32, 989e12 / 2),
        ("NVIDIA GeForce RTX 4090", torch.float16, 165e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 0.0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, 0.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, 0.0),
        ("Tesla T4", torch.float16, 0.0),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_data_sheet(
    name: str, dtype: torch.dtype, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_of.__wrapped__(torch.device("cuda", 0), dtype, 1) == peak


def test_the_memory_of_the_gpu_that_has_most_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {first: 2**30, second: 3 * 2**29}.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", {first: 2**33, second: 2**30}.__getitem__)
    found = {name: gauge() for name, gauge in memory_gauges([CPU, first, second]).items()}
    assert found == {"memory/allocated": 1.5, "memory/reserved": 8.0}
    assert not memory_gauges([CPU])


def test_the_speed_of_a_model_is_that_of_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (torch.device("cuda", number) for number in range(3))
    shares = {CPU: 1.0, first: 10.0, second: 100.0, third: 0.0}
    monkeypatch.setattr("oppo.hf.devices.peak_of", lambda device, dtype, cores: shares[device] * cores)
    found = Devices(first, first, (first, second), second, CPU, second, second)
    speeds = {model: found.speed(model, torch.float32, 8, 2) for model in ("policy", "trainer", "reward", "critic")}
    assert speeds == {"policy": 2 * 4 * 10, "trainer": 4 * 110, "reward": 4 * 111, "critic": 4 * 111}
    unknown = replace(found, critic=third, remote=frozenset({"policy"}))
    assert unknown.speed("reward", torch.float32, 8, 1) == unknown.speed("policy", torch.float32, 8, 1) == 0


async def test_a_trainer_gives_back_memory_after_a_call_where_others_are_on_its_device(cuda: Cuda) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    for trainer, given_back in ((first, ["gave back"]), (second, [])):
        places = DeviceLayout.of(2, Devices(first, first, (trainer,), first, first, first, first), "auto")
        for place in (places.training, *places.acting):
            await place.host(Model).call("work", Model.number, "7")
        places.close()
        assert [what for what in cuda.done if what == "gave back"] == given_back
        cuda.done.clear()


def test_float32_is_computed_in_tf32_but_where_models_are_compared() -> None:
    assert torch.backends.cuda.matmul.allow_tf32
    with full_precision():
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32


Found = Mapping[str, Mapping[str, Any]]
DECODE: Mapping[str, tuple[int, int]] = {
    "prefill": (1, 2),
    "first step": (1, 1),
    "step": (1, 0),
    "after an end": (1, 1),
    "last": (1, 0),
    "prefill of another version": (2, 2),
}
SCORER: Mapping[str, tuple[int, int]] = {"prompts": (0, 1), "chunks": (0, 1), "finish": (1, 0)}
REFERENCE: Mapping[str, tuple[int, int]] = {**SCORER, "chunks": (0, 6)}  # it sends the supports of tokens too
BUDGET: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "decode": DECODE,
    "decode, six layers": DECODE,
    "decode, large vocabulary": DECODE,
    "decode, drawn by Triton": DECODE,
    "decode, greedy": {"step": (1, 0), "after an end": (1, 1)},
    "truncated sampling": {"all": (4, 0)},
    "images, one sample": {"decode": (3, 4), "prompts": (1, 2)},
    "images, four samples": {"decode": (3, 4), "prompts": (1, 2)},
    "reference": REFERENCE,
    "reference, 16 rows": REFERENCE,
    **{f"{scorer}{rows}": SCORER for scorer in ("reward", "process reward", "critic") for rows in ("", ", 16 rows")},
    "PPO": {"update": (5, 3 * 2)},
    "PPO, shared trunk": {"update": (5, 3 * 2)},
    "GRPO": {"update": (4, 3 * 2)},
    "adapters": {"update": (4, 3 * 2)},
    "adapters, merged": {"all": (0, 0)},
    "streamed update": {"accumulate": (2, 2 * 2), "commit": (6, 2)},
    "weight sync": {"sync": (0, 0), "copies": (0, 0)},
    "states of one layer": {"grown": (0, 0), "shrunk": (0, 0)},
    "states of 24 layers": {"grown": (0, 0), "shrunk": (0, 0)},
    "update of logits": {"update": (4, 3 * 2)},
    "update of logits, 8 at a time": {"update": (4, 3 * 2)},
    "update of logits, an eighth at a time": {"update": (4, 3 * 2)},
    "update of logits, by Triton": {"update": (4, 3 * 2)},
}
"""By work and phase: how often the host may wait for the device, and what it may send there.

The counts are of two layers, eight rows that decode, four that are scored, and three micro-batches, unless a name says
more. None grows with the layers or the rows.
"""
KERNELS_OF_A_LAYER = 3
"""Of ours in a decode step, beside those of the model's own layers: the new keys, the new values, attention."""
KERNELS_OF_AN_END = 8  # launched because a row has ended in the decode step before, with any number of layers
DRAWING = {"decode": 12, "decode, large vocabulary": 106, "decode, drawn by Triton": 4}
"""Kernels that a decode step launches to draw its tokens: of a small table noise is made ahead; Triton adds two."""


MOVED = {"update of logits": BY_TORCH, "update of logits, by Triton": BY_TRITON}
"""Bytes for each logit that kernels read and write in an update whose logits are computed a chunk at a time, twice.

Of 34, the products write 8 and read 4 of the gradient's 16 bits, to which 6 convert it; the rest is Triton's: two
passes that read, and one that reads and writes.
"""


@pytest.fixture(scope="module")
def found() -> Found:
    """Return what each work did; in a process of its own, which the device changes for good."""
    with Program("from tests.hf.on_fake_device import main\nmain()") as program:
        out, said = program.communicate()
    assert program.returncode == 0, said
    loaded: dict[str, dict[str, Any]] = json.loads(out)
    assert loaded.keys() == {*BUDGET, "the harness"}
    return loaded


@pytest.mark.parametrize("work", [*BUDGET, "the harness"])
def test_every_tensor_is_on_the_device_of_its_model(work: str, found: Found) -> None:
    assert "error" not in found[work], found[work]["error"]


@pytest.mark.parametrize("work", BUDGET)
def test_the_host_waits_for_the_device_no_more_than_it_must(work: str, found: Found) -> None:
    phases: Found = found[work]["phases"]
    for phase, (waits, uploads) in BUDGET[work].items():
        assert sum(phases[phase]["waits"].values()) <= waits, (phase, phases[phase]["waits"])
        assert sum(phases[phase]["uploads"].values()) <= uploads, (phase, phases[phase]["uploads"])
        assert sum(phases[phase]["kernels"].values()) > 0, f"{phase}: nothing ran on the device"


def test_a_row_that_ends_costs_kernels_that_do_not_grow_with_the_layers_and_a_layer_few(found: Found) -> None:
    def kernels(work: str, phase: str, *files: str) -> int:
        places = found[work]["phases"][phase]["kernels"]
        return sum(count for place, count in places.items() if place.startswith(files or "oppo"))

    for phase in ("step", "after an end", "last"):
        two, six = (
            kernels(work, phase, "oppo/hf/kv/cache.py", "oppo/hf/kv/attention.py")
            for work in ("decode", "decode, six layers")
        )
        assert six - two <= 4 * KERNELS_OF_A_LAYER, phase
    two, six = (
        kernels(work, "prefill of another version", "oppo/hf/kv/cache.py", "oppo/hf/kv/attention.py")
        for work in ("decode", "decode, six layers")
    )
    assert six - two <= 4 * 2 * KERNELS_OF_A_LAYER, "of two passes: rows move in as many launches"
    for work in ("decode", "decode, six layers"):
        assert kernels(work, "after an end") - kernels(work, "step") <= KERNELS_OF_AN_END


def test_a_tower_reads_a_prompt_once_for_all_samples_in_each_place(found: Found) -> None:
    for phase in ("decode", "prompts"):
        one, four = (
            found[f"images, {count}"]["phases"][phase]["moved"]["3x32x32"] for count in ("one sample", "four samples")
        )
        assert one == four > 0  # bytes of its pixels


@pytest.mark.parametrize("work", DRAWING)
def test_tokens_are_drawn_in_few_launches(work: str, found: Found) -> None:
    for phase in ("step", "after an end", "last"):
        places: Mapping[str, int] = found[work]["phases"][phase]["kernels"]
        assert sum(count for place, count in places.items() if place.startswith("oppo/hf/serve/")) <= DRAWING[work]


def test_recurrent_states_grow_and_shrink_in_launches_that_do_not_grow_with_the_layers(found: Found) -> None:
    one, many = (found[f"states of {layers}"]["phases"] for layers in ("one layer", "24 layers"))
    for phase in ("grown", "shrunk"):
        assert sum(many[phase]["kernels"].values()) == sum(one[phase]["kernels"].values()) <= 6, phase


@pytest.mark.parametrize("work", MOVED)
def test_an_update_moves_few_bytes_for_each_logit(work: str, found: Found) -> None:
    update: Found = found[work]["phases"]["update"]
    logits = 6 * 16 * VOCABULARY  # of as many tokens, in as many chunks
    assert update["moved"][f"16x{VOCABULARY}"] <= MOVED[work] * logits


def test_each_chunk_of_logits_moves_eighteen_bytes_of_a_weight(found: Found) -> None:
    """Three products read it in 16 bits, one writes its gradient so, which is added to a sum in float32."""
    large, small, least = (
        found[f"update of logits{size}"]["phases"]["update"]["moved"][f"{tiny.HIDDEN}x{VOCABULARY}"]
        for size in ("", ", 8 at a time", ", an eighth at a time")
    )
    once = 18 * tiny.HIDDEN * VOCABULARY
    assert small - large == 6 * once, "of 12 chunks in place of 6"
    assert least - large <= (3 * UPDATE_SHARE - 6) * once, "of eight chunks, or fewer, for each of three micro-batches"


def test_rows_of_any_length_decode_as_one_segment(found: Found) -> None:
    """Launching the kernels of a second segment takes longer than reading what it saves."""
    phases: Found = found["decode"]["phases"]
    assert {name: phases[name]["segments"] for name in ("step", "after an end", "last")} == {
        "step": 1,
        "after an end": 1,
        "last": 1,
    }


def test_the_device_refuses_and_counts_what_a_real_one_does(found: Found) -> None:
    phases: Found = found["the harness"]["phases"]
    assert all("cpu" in phases[name]["refused"] for name in ("joined", "added"))
    assert "gpu:1" in phases["between"]["refused"]
    assert "numpy" in phases["to_numpy"]["refused"]
    assert sum(phases["waits"]["waits"].values()) == 5
    assert sum(phases["uploads"]["uploads"].values()) == 4
