"""Settings of every test: schedules by one number, one torch thread each, no network, no model on an event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from oppo.log import routed

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests share few cores
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell that runs the tests in the background
    # Tests send it to themselves and to the programs they start, which inherit that it is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["pytest_oppo"]  # ours, also where the package was installed before it had a plugin

FEW = 60
os.environ.setdefault("OPPO_SCHEDULES", str(FEW))  # read by other tests too
SCHEDULES = int(os.environ["OPPO_SCHEDULES"])
"""How many random schedules are tried in all, at least."""

PROPERTIES = 12
"""At least as many property tests share them."""

settings.register_profile(
    "oppo",
    max_examples=max(10, SCHEDULES // PROPERTIES),
    deadline=None,
    derandomize=SCHEDULES <= FEW,  # few are the same each time: a test fails by what was changed
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
)
settings.load_profile("oppo")


@pytest.fixture(autouse=True)
def _forwards_off_the_loop() -> Iterator[None]:
    """Raise out of any module's forward pass on an event loop's thread, of the tests' oracles too."""
    from torch.nn.modules.module import register_module_forward_pre_hook  # after the settings above

    def check(module: object, inputs: object) -> None:
        with suppress(RuntimeError):  # there is no loop in this thread
            asyncio.get_running_loop()
            raise AssertionError(f"the forward pass of {type(module).__name__} runs on the event loop's thread")

    hook = register_module_forward_pre_hook(check)
    yield
    hook.remove()


@pytest.fixture(autouse=True)
def _own_search_path() -> Iterator[None]:
    """Leave no folder of a test's user code where later tests import from."""
    found = list(sys.path)
    yield
    sys.path[:] = found


@pytest.fixture(autouse=True, scope="module")
def _no_authorities() -> Iterator[None]:
    """Let no client take 20 ms to load the authorities of TLS: it calls a server on this machine."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("SSL_CERT_FILE", raising=False)
        patched.setenv("SSL_CERT_DIR", str(Path(__file__).parent))
        yield


@pytest.fixture(autouse=True, scope="session")
def _small_pages() -> Iterator[None]:
    """Let the pages of the tests' runs hold pictures: with plotly.js, hundreds of them would fill a small disk."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("oppo.report.page.LIBRARY", "a_package_that_is_not_installed")
        yield


@pytest.fixture
def messages() -> Iterator[list[str]]:
    said: list[str] = []
    with routed(said.append):
        yield said


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Let new threads compute with one torch thread, whatever a run in this process has chosen before."""
    import torch  # after the settings above

    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of garbage collections: it stays, and is most of the heap."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left() -> Iterator[None]:
    """Raise after a module that leaves the process other than it was, or a thread that keeps the others from theirs."""
    before = _circumstances()
    yield
    assert _circumstances() == before
    busy = threading.active_count() > 1 and all(_a_thread_computes() for _ in range(3))
    assert not busy, f"what computes is one of {threading.enumerate()}"


def _circumstances() -> list[object]:
    handlers = {each: signal.getsignal(each) for each in signal.valid_signals() - {signal.SIGALRM}}  # pytest-timeout's
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return [cores, handlers, sys.gettrace(), threading.gettrace()]


def _a_thread_computes() -> bool:
    began, own = time.process_time(), time.thread_time()
    time.sleep(0.02)
    return time.process_time() - began - (time.thread_time() - own) > 0.015


@pytest.fixture(autouse=True, scope="session")
def _small_models_attend_in_segments() -> Iterator[None]:
    from tests.hf.child import SEGMENT_BYTES  # after the settings above: it imports torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oppo.hf.kv.attention.SEGMENT_BYTES", SEGMENT_BYTES)
        yield


@pytest.fixture(autouse=True, scope="session")
def _children_are_forked() -> Iterator[None]:
    """Let a child process begin where its imports are done; tests of processes themselves start interpreters."""
    from tests.kit.forked import ForkedChildren

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oppo.placement.process.subprocess", ForkedChildren)
        yield
