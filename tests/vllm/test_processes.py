"""The processes of an engine: what of their environment, and of what runs first in them, is for a CPU only."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from oppo.vllm import plugin
from oppo.vllm.processes import environment


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
    assert registered == ["oppo-file", "oppo-ipc"]
    assert SpinCondition().busy_loop_s == (plugin.SPIN if on_cpu else 1.0)
