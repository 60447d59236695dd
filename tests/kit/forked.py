"""Processes that need not import torch: they are forked from a server that has done so.

A new interpreter takes seconds for its imports, which dozens of tests would pay. What is forked begins where a new
interpreter would be after them; what a test has to say of interpreters themselves is not for this.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired
from types import TracebackType
from typing import Any, Self

import pytest

_SERVER = multiprocessing.get_context("forkserver")
_PRELOADED = ["oppo.cli", "oppo.run.train", "oppo.run.models", "oppo.testing"]
_SERVER.set_forkserver_preload(_PRELOADED)


def preload(*modules: str) -> None:
    """Import further modules in the server, unless it has started."""
    _SERVER.set_forkserver_preload([*_PRELOADED, *modules])


class _Forked:
    """A process that is forked from the server, used like :class:`subprocess.Popen`."""

    def __init__(self, args: Sequence[str], target: Callable[..., None], *arguments: object) -> None:
        self.args = args
        self._process = _SERVER.Process(target=target, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Program(_Forked):
    """Python code as a program, with pipes for what it says.

    Args:
        code: of the program.
        arguments: ``sys.argv[1:]``.
        environment: variables beside those there are.
        folder: where it works; here unless given.
        forks: its children are forked from the server too.
    """

    def __init__(
        self,
        code: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        *,
        forks: bool = False,
    ) -> None:
        read_out, write_out = os.pipe()
        read_err, write_err = os.pipe()
        said = (_Fd(write_out), _Fd(write_err))
        argv = ["-c", *arguments]
        super().__init__(
            argv, _run, (code, argv), dict(environment or {}), str(folder or Path.cwd()), said, _address(forks)
        )
        for end in (write_out, write_err):
            os.close(end)
        self.stdout = os.fdopen(read_out, encoding="utf-8")
        self.stderr = os.fdopen(read_err, encoding="utf-8")

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it says on either stream until it ends."""
        with ThreadPoolExecutor(2) as readers:
            said = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except TimeoutExpired:
                self.kill()
                raise
            out, err = (each.result() for each in said)
        return out, err

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.kill()
        self.stdout.close()
        self.stderr.close()
        self._process.join()


class Child(_Forked):
    """A child of :mod:`oppo.placement.process`, started with the arguments that it gives ``subprocess.Popen``."""

    def __init__(self, args: Sequence[str], *, stdin: int, pass_fds: Sequence[int]) -> None:
        del stdin
        *_, name, fd, lifeline = args[: 4 + len(pass_fds)]
        assert [fd, lifeline] == [str(each) for each in pass_fds], f"not the arguments of the child {name}"
        ends = [_Fd(each) for each in (*pass_fds, 1, 2)]
        super().__init__(args, _serve, ends, args[4 + len(pass_fds) :], dict(os.environ), str(Path.cwd()))


class ForkedChildren:
    """Stands for the module ``subprocess`` where children are started."""

    Popen = Child
    DEVNULL = DEVNULL
    TimeoutExpired = TimeoutExpired


def is_alive(pid: int) -> bool:
    """Return whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class _Fd:
    """A descriptor that goes to the process that is started, open there under another number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[object, tuple[object]]:
        return _detached, (DupFd(self.number),)


def _detached(descriptor: DupFd) -> int:  # type: ignore[valid-type]  # a function, in whose place a class stands
    number: int = descriptor.detach()  # type: ignore[attr-defined]
    return number


def _serve(ends: tuple[int, ...], path: list[str], environment: dict[str, str], folder: str) -> None:
    from oppo.placement.child import serve  # has been imported by the server

    connection, lifeline, *said = ends
    _speak(said)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    serve(connection, lifeline)


def _speak(said: Sequence[int]) -> None:
    for standard, ours in enumerate(said, 1):
        os.dup2(ours, standard)
        os.close(ours)


def _server() -> Any:
    return forkserver._forkserver


def _address(forks: bool) -> str | None:
    if not forks:
        return None
    forkserver.ensure_running()
    return str(_server()._forkserver_address)


def _share(address: str) -> None:
    # What is forked keeps the server alive, but is not told where it listens.
    server = _server()
    server._forkserver_address, server.ensure_running = address, lambda: None
    pytest.MonkeyPatch().setattr("oppo.placement.process.subprocess", ForkedChildren)


def _run(
    program: tuple[str, list[str]], environment: dict[str, str], folder: str, said: tuple[int, int], address: str | None
) -> None:
    _speak(said)
    if address is not None:
        _share(address)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and its forks may block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.update(environment)
    os.chdir(folder)
    code, sys.argv = program
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
