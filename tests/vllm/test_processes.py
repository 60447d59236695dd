"""The processes of an engine: what of their environment, and of what runs first in them, is for a CPU only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import load_file

from oppo.errors import ConfigError
from oppo.vllm import plugin
from oppo.vllm.processes import EngineFiles, ServerProcess, environment
from oppo.vllm.sync import FILES
from tests.placement.instances import Total

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


def hold_the_lock(begun: Path) -> None:
    plugin.end_with_parent()
    plugin.end_with_parent()
    Total().hold_the_lock(begun)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_process_that_holds_the_interpreter_lock_dies_with_its_parent(tmp_path: Path, method: str) -> None:
    """It was started by a thread that has ended since."""
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    program = (
        "import multiprocessing, threading, time\nfrom pathlib import Path\n"
        "from tests.vllm.test_processes import hold_the_lock\n"
        f"begun = Path({str(begun)!r})\n"
        f"engine = multiprocessing.get_context({method!r}).Process(target=hold_the_lock, args=(begun,))\n"
        "thread = threading.Thread(target=engine.start)\nthread.start()\nthread.join()\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    with parent:
        assert parent.stdout is not None
        assert begun.read_text() == "begun"
        parent.kill()
        assert parent.stdout.read() == "", "the output ends once no process holds it"


SERVER = """
import json, os, sys, tempfile
from multiprocessing.shared_memory import SharedMemory
from http.server import BaseHTTPRequestHandler, HTTPServer
from oppo.placement.lifeline import die_with
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
