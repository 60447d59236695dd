"""vLLM's engine: its arguments, its processes, its start, its calls as the fake has them, and its death."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from oppo.errors import ConfigError, ModelError, ModelLost
from oppo.liveness.signals import SIGNALS, Stopped, stoppable
from oppo.models import Weights
from oppo.vllm import plugin
from oppo.vllm.arguments import (
    OF_LOGPROBS,
    OF_REWARDS,
    OWNED,
    SETTINGS,
    VALUES,
    check_arguments,
    check_routed_experts,
    engine_arguments,
)
from oppo.vllm.async_llm import heeded
from oppo.vllm.engine import LOOK, ServedWeights
from oppo.vllm.processes import EngineFiles, ServerProcess, environment, starting
from oppo.vllm.sync import FILES
from tests.hf import tiny
from tests.kit.virtual import virtually
from tests.placement.instances import Total
from tests.vllm import scenario
from tests.vllm.bench import WEIGHTS, Bench
from tests.vllm.fakes import BLOCK, FakeAsyncLLM, engine_of, running

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {*OWNED, *SETTINGS, *VALUES, *OF_REWARDS, *OF_LOGPROBS}
    names |= {"dtype", "load_format", "max_num_seqs", "quantization"}
    module = ModuleType("vllm.engine.arg_utils")
    module.__dict__["AsyncEngineArgs"] = make_dataclass("AsyncEngineArgs", names)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
    monkeypatch.setattr("oppo.libraries.find_spec", lambda name: object())


def refused(of: Mapping[str, str] = SETTINGS, **arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_arguments(arguments, of=of)
    return str(caught.value)


@pytest.mark.parametrize(
    ("of", "table"), [(SETTINGS, OWNED), (SETTINGS, SETTINGS), (OF_REWARDS, OF_REWARDS), (OF_LOGPROBS, OF_LOGPROBS)]
)
@pytest.mark.usefixtures("vllm")
def test_what_oppo_sets_is_refused_with_the_reason_and_what_users_choose_passes(
    of: Mapping[str, str], table: Mapping[str, str]
) -> None:
    for name, reason in table.items():
        assert refused(of, **{name: "x"}) == f"vllm.{name} is set by oppo, since {reason}: leave it out"
    for name in SETTINGS:
        check_arguments({name: "x"})
    chosen = {"dtype": "bfloat16", "load_format": "safetensors", "quantization": None, "max_num_seqs": 4}
    check_arguments({**chosen, "distributed_executor_backend": "mp"}, of=of)


@pytest.mark.usefixtures("vllm")
def test_values_that_cannot_work_are_refused() -> None:
    assert refused(distributed_executor_backend="ray").startswith(
        "vllm.distributed_executor_backend = 'ray' is refused, since the engine's processes are on this machine"
    )
    assert refused(distributed_executor_backend=["ray"]).endswith("expected 'mp' or 'uni', or leave it out")
    assert "would begin with random weights" in refused(load_format="dummy")
    with pytest.raises(ConfigError, match=r"vllm\.enable_chunked_prefill = true ends vLLM's engine on a CPU"):
        engine_arguments("model", {"enable_chunked_prefill": True}, on_cpu=True, backend="oppo-file")
    with pytest.raises(ConfigError, match=r"no routed experts on a CPU.*trainer\.router_replay = false"):
        engine_arguments("model", {"enable_return_routed_experts": True}, on_cpu=True, backend="oppo-file")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("enable_prefix_caching", False, "false"),
        ("pipeline_parallel_size", 2, "2"),
        ("decode_context_parallel_size", 2, "2"),
        ("prefill_context_parallel_size", 2, "2"),
    ],
)
def test_experts_are_not_replayed_where_vllm_gives_none(name: str, value: int, shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.router_replay = true .*vllm\.{name} = {shown}:"):
        check_routed_experts({name: value})
    with pytest.raises(ConfigError, match=rf"vllm\.{name} = {shown}"):
        engine_arguments("model", {"enable_return_routed_experts": True, name: value}, on_cpu=False, backend="nccl")
    check_routed_experts({name: 1})


@pytest.mark.usefixtures("vllm")
def test_an_unknown_name_is_refused_with_the_nearest_that_may_be_chosen() -> None:
    assert refused(max_num_seq=3).endswith("has no such argument; did you mean vllm.max_num_seqs?")
    assert "did you mean" not in refused(modell="x"), "of one that is refused nothing is suggested"
    assert refused(max_num_seq=3, model="x").count("\n") == 1


def test_the_page_lists_all_that_is_refused_and_nothing_else() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index("| refused |") :].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted([*OWNED, *SETTINGS])


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_suits_a_cpu_is_set_there_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    before = dict(os.environ)
    with EngineFiles(tmp_path / "vllm.log") as files, environment(files, None, on_cpu=on_cpu):
        assert ("GLIBC_TUNABLES" in os.environ) is on_cpu
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ
    assert dict(os.environ) == before


@pytest.mark.parametrize("on_cpu", [True, False])
def test_readers_sleep_early_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    class SpinCondition:
        def __init__(self) -> None:
            self.busy_loop_s = 1.0

    registered: list[str] = []
    modules = {
        "vllm": {},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: on_cpu)},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {
            "WeightTransferEngineFactory": SimpleNamespace(
                register_engine=lambda name, module, kind: registered.append(name)
            )
        },
        "vllm.distributed.device_communicators": {
            "shm_broadcast": SimpleNamespace(SpinCondition=SpinCondition, SHM_READER_RECHECK_INTERVAL_MS=5000)
        },
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "leave_terminal", lambda: None)
    monkeypatch.setattr(plugin, "starter", lambda: 0)
    monkeypatch.setenv(plugin.PARENT, "1")
    plugin.register()
    assert registered == ["oppo-file", "oppo-ipc", "oppo-nccl"]
    assert SpinCondition().busy_loop_s == (plugin.SPIN if on_cpu else 1.0)


def hold_the_lock() -> None:
    plugin.end_with_parent()
    plugin.end_with_parent()
    Total().hold_the_lock()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_process_that_holds_the_interpreter_lock_dies_with_its_parent(method: str) -> None:
    """It was started by a thread that has ended since."""
    program = (
        "import multiprocessing, threading, time\n"
        "from tests.vllm.test_engine import hold_the_lock\n"
        f"engine = multiprocessing.get_context({method!r}).Process(target=hold_the_lock)\n"
        "thread = threading.Thread(target=engine.start)\nthread.start()\nthread.join()\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        parent.kill()
        assert parent.stdout.read() == "", "the output ends once no process holds it"


SERVER = """
import json, os, sys, tempfile
from multiprocessing.shared_memory import SharedMemory
from http.server import BaseHTTPRequestHandler, HTTPServer
from oppo.placement.child import die_with
from oppo.vllm.plugin import LIFELINE

if "--fails" in sys.argv:
    print("ValueError: no such model", flush=True)
    sys.exit(3)
die_with(int(os.environ[LIFELINE]))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        said = {"arguments": sys.argv[1:], "environment": dict(os.environ), "block": block.name, "socket": socket}
        self.wfile.write(json.dumps(said).encode())

block, (_, socket) = SharedMemory(create=True, size=8), tempfile.mkstemp()
print("it listens", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of vLLM's server, which says how it was started."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setattr("oppo.vllm.arguments.computes_on_cpu", lambda: True)

    def arguments(model: str, given: dict[str, object], **_: object) -> dict[str, object]:
        return {"model": model, **given}

    monkeypatch.setattr("oppo.vllm.arguments.engine_arguments", arguments)


@pytest.mark.usefixtures("stand_in")
def test_a_server_is_reached_when_it_is_made_and_ends_with_its_process(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    given = {"max_num_seqs": 8, "enforce_eager": True, "enable_prefix_caching": False, "seed": None}
    server = ServerProcess("actor", given, key="canary-of-the-server", adapters=4, cores=3, log=log)
    assert server.whereabouts(writes=False) == (server.url, None)
    url, path = server.whereabouts(writes=True)
    found = httpx.get(url).json()
    flags = " ".join(found["arguments"])
    assert "--model actor --max-num-seqs 8 --enforce-eager --no-enable-prefix-caching --enable-lora" in flags
    assert '--weight-transfer-config {"backend": "oppo-file"} --host 127.0.0.1 --port ' in flags
    assert "canary" not in flags, "others on this machine can read the command line"
    wanted = {
        "VLLM_API_KEY": "canary-of-the-server",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "OMP_NUM_THREADS": "3",
        plugin.PARENT: str(os.getpid()),
    }
    assert {name: found["environment"][name] for name in wanted} == wanted
    assert path is not None
    server.write({"layers.0.q_proj.lora_A.weight": torch.ones(2, 1)}, "7")
    assert load_file(path / "7" / FILES[True]).popitem()[1].tolist() == [[1.0], [1.0]]
    assert log.read_text().startswith("it listens")
    for _ in range(2):
        server.end()
    assert not path.exists()
    assert not Path(found["socket"]).exists()
    block, patience = Path("/dev/shm", found["block"]), time.monotonic() + 60
    while block.exists():
        assert time.monotonic() < patience, "what tracks its shared memory was killed too"
        time.sleep(0.05)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.usefixtures("stand_in")
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    with pytest.raises(ConfigError, match=f"could not be started with actor: .*no such model.*{log}"):
        ServerProcess("actor", {"fails": True}, key="canary", log=log)


@pytest.fixture
def handled_by_default() -> Iterator[None]:
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.usefixtures("handled_by_default")
def test_the_handler_is_called_when_the_body_has_ended(number: signal.Signals) -> None:
    steps: list[str] = []

    def start() -> None:
        with stoppable(), heeded():
            with suppress(KeyboardInterrupt):
                signal.raise_signal(number)
            steps.append("went on")

    with pytest.raises(Stopped) as caught:
        start()
    assert caught.value.by is number
    assert not steps
    assert signal.getsignal(number) is signal.default_int_handler


@pytest.mark.usefixtures("handled_by_default")
def test_a_handler_that_raises_nothing_ends_the_body_too_and_other_errors_threads_and_ignored_signals_stay() -> None:
    heard: list[object] = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, before := lambda number, frame: heard.append(number))

    def work() -> None:
        with heeded():
            heard.append(signal.getsignal(signal.SIGINT))

    with heeded():
        signal.raise_signal(signal.SIGHUP)
    with pytest.raises(ValueError, match="its own"), heeded():
        raise ValueError("its own")
    with pytest.raises(KeyboardInterrupt), heeded():
        signal.raise_signal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert heard == [signal.SIGINT, before]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("overrun", "late"), [(0, 0.0), (2, 0.0), (0, 0.002)])
@virtually
async def test_the_fake_generates_as_vllm_does(overrun: int, late: float) -> None:
    llm = FakeAsyncLLM(length=lambda prompt: 1, overrun=overrun, late=late)
    async with running(llm):
        await scenario.generating(engine_of(llm), {})


@pytest.mark.parametrize("seconds", [0.0, 0.1])
@virtually
async def test_the_fake_scores_and_reads_prompts_as_vllm_does(seconds: float) -> None:
    engines = [engine_of(FakeAsyncLLM(answers_after=seconds)) for _ in range(2)]
    await scenario.pooling(engines[0], BLOCK, anyio.lowlevel.checkpoint)
    await scenario.reading(engines[1], BLOCK)


class Silent(FakeAsyncLLM):
    """Dies in a call, which returns no more."""

    def __init__(self, last: str) -> None:
        super().__init__()
        setattr(self, last, self._die)

    async def _die(self, *_: object, **__: object) -> None:
        await anyio.sleep(0.05)
        self.die()
        await anyio.sleep_forever()


@pytest.mark.parametrize("call", ["add_request", "resume_generation", "pause_generation"])
def test_decoding_ends_when_the_engine_dies_in_a_call(call: str) -> None:
    bench = Bench(Silent(call))

    with pytest.raises(ModelLost, match=r"vLLM has (died|failed).*go on from the newest checkpoint"):
        bench.play(3, cut_at=1)


@pytest.mark.parametrize("call", ["reset_prefix_cache", "pause_generation"])
def test_syncing_ends_when_the_engine_dies_in_a_call(call: str) -> None:
    bench = Bench(Silent(call))

    async def main() -> None:
        with anyio.CancelScope(shield=True):
            await bench.policy.load(Weights(1, WEIGHTS))

    with pytest.raises(ModelLost, match="vLLM has died"):
        bench.run(main)


@virtually
async def test_a_call_that_is_answered_takes_no_time_and_raises_its_own_error() -> None:
    engine, start = engine_of(FakeAsyncLLM()), anyio.current_time()
    async with engine.answered():
        await anyio.sleep(3 * LOOK)
    assert anyio.current_time() == pytest.approx(start + 3 * LOOK)
    with pytest.raises(ModelError, match="its own"):
        async with engine.answered():
            raise ModelError("its own")
    with pytest.raises(ModelLost, match="KeyError: 'unknown'"):
        async with engine.answered(shield=True):
            raise KeyError("unknown")


@virtually
async def test_a_cancellation_from_outside_waits_for_a_shielded_call_only() -> None:
    for shield, took in ((False, 1.0), (True, 5.0)):
        start = anyio.current_time()
        with anyio.move_on_after(1.0):
            async with engine_of(FakeAsyncLLM()).answered(shield=shield):
                await anyio.sleep(5.0)
        assert anyio.current_time() == pytest.approx(start + took)


def test_an_engine_without_its_share_of_a_gpu_names_the_setting(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("[core] ValueError: Free memory on device is less than desired GPU memory utilization (0.92)\n")
    with (
        EngineFiles(log) as files,
        pytest.raises(ConfigError, match=r"Free memory on device.*lower vllm\.gpu_memory_utilization"),
        starting("actor", files, None, on_cpu=True),
    ):
        raise RuntimeError("it ended")


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
    served.check(model.state_dict())
    served.check(dict(model.named_parameters()))


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
        ServedWeights.of("actor", config()).check(weights(**changes))


def test_an_output_layer_of_its_own_is_missed_where_it_is_not_tied() -> None:
    without = {name: tensor for name, tensor in weights().items() if name != "lm_head.weight"}
    with pytest.raises(ModelError, match=r"1 missing \(lm_head\.weight\)"):
        ServedWeights.of("actor", config()).check(without)
    ServedWeights.of("actor", config(tie_word_embeddings=True)).check(without)


def test_it_takes_no_memory() -> None:
    large = ServedWeights.of("actor", config(vocab_size=10_000_000, hidden_size=10_000, intermediate_size=10_000))
    assert large.shapes["lm_head.weight"] == (10_000_000, 10_000)
    assert torch.empty(0).device.type == "cpu"


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_weights_of_a_mixture_are_sent_as_its_checkpoint_has_them(name: str, tmp_path: Path) -> None:
    model = tiny.mixture(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = ServedWeights.of(name, model.config).as_saved(model.state_dict())
    assert sent.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[each]) for each, tensor in sent.items())
