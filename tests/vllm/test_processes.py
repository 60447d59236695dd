"""The processes of an engine: what of their environment, and of what runs first in them, is for a CPU only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from oppo.vllm import plugin
from oppo.vllm.processes import environment
from tests.placement.instances import Total

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_suits_a_cpu_is_set_there_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    before = dict(os.environ)
    with environment(tmp_path / "vllm.log", None, on_cpu=on_cpu):
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
