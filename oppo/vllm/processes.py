"""The processes of an engine: their environment, and their end.

While an engine starts, environment variables are set for the whole process; afterwards they are as they were.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import gettempdir
from typing import Final, Self

import psutil
from torch import Tensor

from oppo.atomic_files import temporary
from oppo.errors import ConfigError, one_line
from oppo.vllm.plugin import LIFELINE, LOG, PARENT, transfer_of
from oppo.vllm.sync import WeightFiles, free_port

DEFAULTS: Final = {  # set for an engine's processes unless the user's environment has another value
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would inherit threads' locks, and torch's thread pool
    "VLLM_LOGGING_COLOR": "0",
}

ON_CPU: Final = {
    # Each weight sync packs the weights anew: in huge pages, and in the memory that the packed ones before have left.
    "GLIBC_TUNABLES": f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={1 << 40}",
}

# Characters that a folder's path may have: one of a socket in it has 37 more, and no system takes more than 103.
SOCKETS: Final = 64
LOOPBACK: Final = "127.0.0.1"
HEALTH: Final = 5.0  # seconds that a server has to say whether it is ready
POLL: Final = 0.2  # seconds until it is asked again
FORMAT: Final = "%(levelname)s %(asctime)s [%(processName)s] %(message)s"


@contextmanager
def environment(files: EngineFiles, cores: Sequence[int] | None, *, on_cpu: bool) -> Iterator[None]:
    # What the processes of an engine inherit.
    file, folder, cache = str(files.log), str(files.folder), f"{gettempdir()}/torchinductor_{os.getuid()}"
    config = files.folder / "logging.json"
    config.write_text(json.dumps(logging_config(file)), encoding="utf-8")
    defaults = {**DEFAULTS, **(ON_CPU if on_cpu else {}), "TORCHINDUCTOR_CACHE_DIR": cache}
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    chosen |= {PARENT: str(os.getpid()), LOG: file, "VLLM_LOGGING_CONFIG_PATH": str(config), "TMPDIR": folder}
    chosen |= {"VLLM_RPC_BASE_PATH": folder if len(folder) <= SOCKETS else gettempdir()}
    if cores is not None and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# In the command of a process that removes the shared memory of those that have ended, and then ends itself.
TRACKER: Final = "multiprocessing.resource_tracker"

# Ends an engine's processes if its standard input ends without a word.
GUARD: Final = f"""
import os, signal, sys
TRACKER = {TRACKER.encode()!r}
if not sys.stdin.buffer.read():
    mark = sys.argv[1].encode()
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{{entry}}/environ", "rb") as file:
                found = mark in file.read().split(bytes(1))
            with open(f"/proc/{{entry}}/cmdline", "rb") as file:
                tracks = TRACKER in file.read()
            if found and not tracks:
                os.kill(int(entry), signal.SIGKILL)
        except (OSError, ValueError):
            pass
"""


def kill_group(leader: int) -> None:
    """Kill the processes of a group, but for the trackers of their shared memory, which outlive them for a moment."""
    for _ in range(100):  # they may start others meanwhile
        found = [process for process in psutil.process_iter() if _works_for(leader, process)]
        if not found:
            return
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)


def _works_for(leader: int, process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline()) if os.getpgid(process.pid) == leader else ""
    except (OSError, psutil.Error):  # it has ended meanwhile
        return False
    return bool(command) and TRACKER not in command


@contextmanager
def guarded() -> Iterator[None]:
    # If this process is killed while an engine starts, the engine's end too, on Linux. They watch their parent
    # themselves once vLLM has loaded its plugins, and before that they wait for it for minutes.
    if sys.platform != "linux":
        yield
        return
    command = [sys.executable, "-I", "-S", "-c", GUARD, f"{PARENT}={os.getpid()}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:  # noqa: S603 - our own code
        try:
            yield
        finally:
            with suppress(BrokenPipeError):
                guard.communicate(b"over")


def logging_config(file: str) -> dict[str, object]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": FORMAT}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": file, "formatter": "plain"}},
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }


@contextmanager
def logging_to(log: Path) -> Iterator[None]:
    # vLLM's own logger in this process writes to the log alone.
    logger = logging.getLogger("vllm")
    handler = logging.FileHandler(log)
    handler.setFormatter(logging.Formatter(FORMAT))
    before, logger.handlers = logger.handlers, [handler]
    propagated, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        used, logger.handlers, logger.propagate = logger.handlers, before, propagated
        for each in {handler, *used}:  # vLLM replaces its logger's handlers when it is imported
            each.close()


class EngineFiles:
    """The log of an engine's processes, and a ``folder`` of their temporary files and sockets that is removed."""

    folder: Path

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._keeps = False
        self._stack = ExitStack()

    @property
    def log(self) -> Path:
        return self._log or self.folder / "vllm.log"

    def keep(self) -> None:
        # A temporary log, which says why an engine failed, stays until this process has ended.
        self._keeps = self._log is None

    def __enter__(self) -> Self:
        self.folder = self._stack.enter_context(temporary("vllm", kept=lambda: self._keeps))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class Children:
    # The processes that this one has started since this object was made.
    def __init__(self) -> None:
        self._before = set(multiprocessing.active_children())
        self._found = set[BaseProcess]()
        self._lock = threading.Lock()

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._seen() if child.pid is not None and child.is_alive()]

    def keep(self) -> None:
        self._seen()
        self._before |= set(multiprocessing.active_children())

    def kill(self) -> None:
        for child in self._seen():
            with suppress(ProcessLookupError, ValueError):
                child.kill()

    def join(self, seconds: float) -> None:
        for child in self._seen():
            child.join(seconds)
        self.kill()
        for child in self._seen():
            child.join()

    def _seen(self) -> list[BaseProcess]:
        with self._lock:  # those that have ended are active no more
            self._found |= set(multiprocessing.active_children()) - self._before
            return list(self._found)


def cores_of(chosen: int | slice | None) -> list[int] | None:
    if chosen is None or sys.platform != "linux":
        return None
    available = sorted(os.sched_getaffinity(0))
    return available[slice(chosen) if isinstance(chosen, int) else chosen] or available  # all where that is empty


def last_line(log: Path, containing: str = "") -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = next((line for line in reversed(lines) if line.strip() and containing in line), "")
    return found.rpartition("] ")[2].strip()


@contextmanager
def starting(model: str | Path, files: EngineFiles, cores: Sequence[int] | None, *, on_cpu: bool) -> Iterator[None]:
    with guarded(), environment(files, cores, on_cpu=on_cpu):
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            files.keep()
            cause = last_line(files.log, "Error: ") or one_line(error)
            share = "gpu_memory_utilization, or give the other models another GPU"
            hint = f"; lower vllm.{share}" if "GPU memory utilization" in cause else ""
            raise ConfigError(
                f"vLLM could not be started with {model}: {cause}{hint}; everything that it wrote is in {files.log}"
            ) from error


class ServerProcess:
    """A vLLM server that this process starts, waits for, and takes along when it ends, however it ends.

    A place makes it where it should decode: in another process, or in an actor on another machine. ``address`` returns
    that machine's, as the server is reached.
    """

    def __init__(
        self,
        model: str | Path,
        given: Mapping[str, object],
        *,
        key: str,
        address: Callable[[], str] = lambda: LOOPBACK,
        backend: str = "file",
        adapters: int = 0,
        cores: int | None = None,
        log: Path | None = None,
    ) -> None:
        from oppo.vllm.arguments import computes_on_cpu, engine_arguments, lora_arguments  # noqa: PLC0415 - of vLLM

        on_cpu, host, port = computes_on_cpu(), address(), free_port()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        lora = lora_arguments(adapters) if adapters else {}
        arguments = {
            **engine_arguments(str(model), {**given, **lora}, on_cpu=on_cpu, backend=transfer_of(backend)),
            "weight_transfer_config": {"backend": transfer_of(backend)},
            "host": host,
            "port": port,
            "enable_scale_out": True,
        }
        chosen = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_API_KEY": key,
            **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if adapters else {}),
            **({"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(cores)} if cores and on_cpu else {}),
        }
        self._lifeline: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._written: WeightFiles | None = None
        self._adapts = adapters > 0
        self._kept = ExitStack()
        files = self._kept.enter_context(EngineFiles(log))
        with ExitStack() as unless_ready:
            unless_ready.callback(self.end)
            with starting(model, files, None, on_cpu=on_cpu):
                self._start([*as_flags(arguments)], chosen, files.log)
            unless_ready.pop_all()

    def _start(self, flags: list[str], chosen: Mapping[str, str], log: Path) -> None:
        import httpx  # noqa: PLC0415 - an extra

        held, self._lifeline = os.pipe()
        try:
            with log.open("ab") as written:
                process = self._process = subprocess.Popen(  # noqa: S603 - our own arguments
                    [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags],
                    env={**os.environ, **chosen, LIFELINE: str(held)},
                    stdin=subprocess.DEVNULL,
                    stdout=written,
                    stderr=written,
                    pass_fds=(held,),
                    start_new_session=True,
                )
        finally:
            os.close(held)
        while (ended := process.poll()) is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=HEALTH, trust_env=False).is_success:
                    return
            time.sleep(POLL)
        raise RuntimeError(f"it ended with exit code {ended}")

    def whereabouts(self, *, writes: bool) -> tuple[str, Path | None]:
        if writes:
            self._written = WeightFiles(adapters=self._adapts)
        return self.url, None if self._written is None else self._written.path

    def write(self, tensors: Mapping[str, Tensor], version: str) -> None:
        if self._written is not None:
            self._written.write(tensors, version)

    def end(self) -> None:
        """End the server and its processes, and remove the files written for it; idempotent."""
        lifeline, process = self._lifeline, self._process
        self._lifeline = self._process = self._written = None
        if lifeline is not None:
            os.close(lifeline)
        if process is not None:
            kill_group(process.pid)  # the engine's processes, which may not watch it yet
            process.wait()
        self._kept.close()


def as_flags(arguments: Mapping[str, object]) -> Iterator[str]:
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield f"--{flag}"
            if isinstance(value, Mapping):
                yield json.dumps(value)
            else:
                yield ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
