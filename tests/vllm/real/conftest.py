"""One engine for the whole run: starting it takes longer than most tests."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import httpx
import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oppo.atomic_files import temporary
from oppo.models import Sampling, Weights
from oppo.placement import Thread
from oppo.vllm import VllmEngine, VllmPolicy
from oppo.vllm.processes import kill_group
from oppo.vllm.sync import free_port

VOCABULARY = 512


def tiny_actor(seed: int = 0, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    """Return an actor with heads that vLLM's kernels take, and distributions that are far from uniform.

    It has so many layers that a decode step outlasts the reading of its tokens here: a weight sync in the midst of
    decoding would otherwise come after its end.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        actor: LlamaForCausalLM = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=12,
                num_attention_heads=2,
                max_position_embeddings=1024,
                initializer_range=0.1,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
            )
        )
    actor.eval()
    return actor


def engine_processes() -> set[int]:
    """Return the ids of the processes below this one that belong to an engine."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            status = (entry / "status").read_text() if entry.name.isdecimal() else ""
        except OSError:  # it has ended meanwhile
            continue
        if "VLLM" in status.partition("\n")[0] and f"PPid:\t{os.getpid()}\n" in status:
            found.add(int(entry.name))
    return found


def blocks_of(pids: Iterable[int]) -> set[Path]:
    """Return the blocks of shared memory, as engines have them, that processes have mapped.

    A killed engine's are removed when the process that started it ends.
    """
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            found |= {Path(each) for each in re.findall(r"/dev/shm/psm_\w+", Path(f"/proc/{pid}/maps").read_text())}
    return found


def left_behind() -> set[Path]:
    """Return the sockets and files, as engines have them, that no process of this machine uses."""
    names = ("oppo-vllm-*", "vllm_dist_*", "????????-????-????-????-????????????")
    found = {path for name in names for path in Path(gettempdir()).glob(name)}
    used = Path("/proc/net/unix").read_text()
    return {path for path in found if str(path) not in used}


def require_swept(before: set[Path]) -> None:
    """Fail unless nothing more is left than before, once the next engine has started."""
    deadline = time.monotonic() + 60
    while left := left_behind() - before:
        assert time.monotonic() < deadline, left
        with temporary("vllm"):  # as the next engine's start takes what killed ones left
            time.sleep(0.2)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_in_the_end() -> Iterator[None]:
    before = left_behind()
    yield
    gc.collect()
    require_swept(before)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(900):
        assert process.poll() is None, log.read_text()[-3000:]
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").is_success:
                return
        time.sleep(0.2)
    raise TimeoutError(log.read_text()[-3000:])


@contextmanager
def scoring_server(directory: Path, folder: Path, *flags: str) -> Iterator[str]:
    """Yield the URL of a server that is started as errors say, but for a small machine."""
    port, log = free_port(), folder / "server.log"
    small = "--dtype float32 --kv-cache-memory-bytes 268435456 --enforce-eager --host 127.0.0.1"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    environment = {
        **os.environ,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "PYTHONWARNINGS": "ignore",
    }
    with TemporaryDirectory() as own, log.open("ab") as file:  # it is killed, and leaves its sockets and files
        process = subprocess.Popen(
            [*command, "--port", str(port), *flags, *small.split()],
            env={**environment, "VLLM_RPC_BASE_PATH": own, "TMPDIR": own},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            wait_until_healthy(url := f"http://127.0.0.1:{port}", process, log)
            yield url
        finally:
            kill_group(process.pid)
            process.wait()


@pytest.fixture
def thread() -> Iterator[Thread]:
    with Thread("scorers", setup=lambda: torch.set_num_threads(1)) as thread:
        yield thread


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of :func:`tiny_actor`."""
    directory = tmp_path_factory.mktemp("actor")
    tiny_actor().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def started(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """The engine of all tests that do not end it, with the weights of whichever test synced last."""
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    with VllmEngine.start(directory, arguments={"max_num_seqs": 16}, cores=1, log=log) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def engine(started: VllmEngine) -> VllmEngine:
    """The engine with the weights of :func:`tiny_actor`, whatever tests before this one have synced."""
    policy = VllmPolicy(started, sampling=Sampling(max_new_tokens=1))
    await policy.load(Weights(0, tiny_actor().state_dict()))
    return started
