"""Programs in processes of their own that need not import torch: they are forked from a server that has done so.

A new interpreter takes seconds for its imports, which dozens of tests would pay. What is forked begins where a new
interpreter would be after them; what a test has to say of interpreters themselves is not for this.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import TimeoutExpired
from types import TracebackType
from typing import Self

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["oppo.cli", "oppo.app.train", "oppo.app.assemble", "oppo.testing"])


class Program:
    """Python code as a program, used like :class:`subprocess.Popen` with pipes for what it says.

    Args:
        code: of the program.
        arguments: ``sys.argv[1:]``.
        environment: variables beside those there are.
        folder: where it works; here unless given.
    """

    def __init__(
        self,
        code: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.args = ["-c", *arguments]
        read_out, write_out = os.pipe()
        read_err, write_err = os.pipe()
        self._process = _SERVER.Process(
            target=_run,
            args=(
                code,
                self.args,
                dict(environment or {}),
                str(folder or Path.cwd()),
                (_Fd(write_out), _Fd(write_err)),
            ),
        )
        self._process.start()
        for end in (write_out, write_err):
            os.close(end)
        self.stdout = os.fdopen(read_out, encoding="utf-8")
        self.stderr = os.fdopen(read_err, encoding="utf-8")

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

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.kill()
        self.stdout.close()
        self.stderr.close()
        self._process.join()


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


def _run(code: str, argv: list[str], environment: dict[str, str], folder: str, said: tuple[int, int]) -> None:
    for standard, ours in enumerate(said, 1):
        os.dup2(ours, standard)
        os.close(ours)
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = argv
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
