"""The ruler's end of a contestant: a process that runs steps when asked, and waits otherwise.

A contestant is any program that writes ``{"ready": {...}}`` when it has loaded everything, and then answers each line
``{"run": n}`` on its standard input with a line ``{"steps": [...]}`` of n :class:`StepRecord`, or with an object
``{"error": "..."}``. It ends when its input does. Nothing else may be on its standard output; its standard error
goes to a file.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.ladder.record import StepRecord
from oppo import observe
from oppo.errors import ModelLost, ProtocolError

PATIENCE: Final = 1800.0
"""Seconds that a contestant may take for one answer."""
TAIL: Final = 1500
"""Characters of standard error that an error quotes."""


class Contestant:
    """A running contestant; a context manager that ends it.

    Args:
        name: shown in figures and errors.
        command: the program and its arguments.
        log: gets its standard error.
        environment: its environment variables.
        patience: seconds that an answer may take.

    Raises:
        ModelLost: the program cannot be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self.name = name
        self.peak_rss_mb = 0.0
        self._log = log
        self._patience = patience
        self._unread = b""
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=None if environment is None else dict(environment),
                )
        except OSError as error:
            raise ModelLost(f"contestant {name!r} cannot be started: {error}; its command is {command[0]}") from error

    def ready(self) -> Mapping[str, object]:
        """Return what the contestant tells of itself, once it has loaded everything.

        Raises:
            ModelLost: it ended, said that it failed, or took too long.
            ProtocolError: it said something else.
        """
        answer = self._answer("get ready")
        told = answer.get("ready")
        if not isinstance(told, Mapping):
            raise ProtocolError(f'contestant {self.name!r} must begin with {{"ready": {{...}}}}, but said {answer}')
        return told

    def ask(self, steps: int) -> None:
        """Ask for so many steps; the answer is read by :meth:`steps`.

        Raises:
            ModelLost: it has ended.
        """
        pipe = self._process.stdin
        try:
            if pipe is not None:
                pipe.write(json.dumps({"run": steps}).encode() + b"\n")
                pipe.flush()
        except BrokenPipeError:
            raise self._lost("was asked for more steps") from None

    def run(self, steps: int) -> list[StepRecord]:
        """Have the contestant run so many steps and return their records.

        Raises:
            ModelLost: it ended, said that it failed, or took too long.
            ProtocolError: it said something else.
        """
        self.ask(steps)
        answer = self._answer(f"run {steps} steps")
        told = answer.get("steps")
        if not isinstance(told, list) or len(told) != steps:
            raise ProtocolError(f"contestant {self.name!r} was asked for {steps} steps, but said {answer}")
        peak = answer.get("peak_rss_mb")
        self.peak_rss_mb = float(peak) if isinstance(peak, int | float) else 0.0
        return [StepRecord.of(step) for step in told]

    def close(self) -> None:
        """End the contestant: its input ends, and after ten seconds it is killed; idempotent."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it is gone, and what was written last with it
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self._process.kill()
        self.close()

    def _answer(self, doing: str) -> Mapping[str, object]:
        line = self._line(doing)
        try:
            answer: object = json.loads(line)
        except ValueError as error:
            raise ProtocolError(f"contestant {self.name!r} must answer in JSON, but said {line[:200]!r}") from error
        if not isinstance(answer, Mapping):
            raise ProtocolError(f"contestant {self.name!r} must answer with an object, but said {line[:200]!r}")
        if "error" in answer:
            raise ModelLost(f"contestant {self.name!r} could not {doing}: {answer['error']}")
        return answer

    def _line(self, doing: str) -> bytes:
        """Return the next line of its standard output."""
        pipe = self._process.stdout
        if pipe is None:
            raise self._lost(doing)
        until = observe.now() + self._patience
        while b"\n" not in self._unread:
            readable, _, _ = select.select([pipe], [], [], max(0.0, until - observe.now()))
            if not readable:
                raise ModelLost(f"contestant {self.name!r} was to {doing} and has not answered for {self._patience} s")
            more = os.read(pipe.fileno(), 1 << 16)
            if not more:
                raise self._lost(doing)
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _lost(self, doing: str) -> ModelLost:
        code = self._process.wait()
        said = self._log.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ModelLost(f"contestant {self.name!r} was to {doing} and ended with {how}; it said last:\n{said}")
