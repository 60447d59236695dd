"""The ladder's end of a contestant: a process that runs steps on request.

A contestant is any program that writes ``{"ready": {...}}`` when it has loaded everything, and then answers each line
``{"run": n}`` on its standard input with a line ``{"steps": [...]}`` of n :class:`StepRecord`, or with an object
that has an ``"error"``. It ends when its input does. Its standard output holds nothing else; its standard error goes to
a file.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from benchmarks import CHECKOUT
from oppo import observe
from oppo.admission.protocol import Json
from oppo.errors import ModelLost, ProtocolError


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one contestant; a peer cannot measure the optional fields."""

    seconds: float  # wall time of the whole step
    tokens: int  # response tokens trained
    samples: int  # responses trained
    capped: int = 0  # of them, those cut off at the cap
    as_announced: float = 1.0  # fraction of them with the announced length
    deferred: int = 0  # responses deferred to the next step
    # decode, score, update: busy seconds of each phase
    decode: float = 0.0
    score: float = 0.0
    update: float = 0.0
    exposed: float = 0.0  # seconds of scoring beside no decoding or training
    busy: Mapping[str, float] = field(default_factory=dict)  # busy seconds of each model
    decode_steps: int = 0  # of the actor; 0 if its engine does not count them
    decoded: int = 0  # tokens it made, those of unfinished responses included
    bottleneck: Mapping[str, float] = field(default_factory=dict)  # the step's metrics of its bottleneck
    weight_sync: float = 0.0  # seconds of the weight sync
    observed: Mapping[str, Json] = field(default_factory=dict)  # the controllers' observation of it, as JSON
    # by model and label, the number of calls and their seconds
    work: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def for_simulation(self) -> dict[str, object]:
        names = ("seconds", "tokens", "samples", "update", "weight_sync", "observed", "work")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, answer: object) -> StepRecord:
        names = {each.name for each in fields(cls)}
        if not isinstance(answer, Mapping) or not {"seconds", "tokens", "samples"} <= answer.keys():
            raise ProtocolError(f"expected a step with seconds, tokens and samples, got {answer!r}")
        record = cls(**{name: value for name, value in answer.items() if name in names})
        if not (record.seconds > 0 and record.tokens > 0 and record.samples > 0):
            raise ProtocolError(f"expected a step that took time and trained something, got {answer!r}")
        return record


PATIENCE: Final = 1800.0  # most seconds for one answer


TAIL: Final = 1500  # characters of standard error in an error


class Contestant:
    """A running contestant; a context manager that ends it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        source: Path = CHECKOUT,
        patience: float = PATIENCE,
    ) -> None:
        # Without the environment's limits on threads
        limits = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
        environment = {name: value for name, value in os.environ.items() if name not in limits}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source), environment.get("PYTHONPATH"))))
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
                    env=environment,
                    cwd=source,
                )
        except OSError as error:
            raise ModelLost(f"contestant {name!r} cannot be started: {error}; its command is {command[0]}") from error

    def ready(self) -> Mapping[str, object]:
        """Return the contestant's facts once it has loaded everything."""
        answer = self.answer("get ready")
        facts = answer.get("ready")
        if not isinstance(facts, Mapping):
            raise ProtocolError(f'contestant {self.name!r} must begin with {{"ready": {{...}}}}, but said {answer}')
        return facts

    def run(self, steps: int) -> list[StepRecord]:
        self.say({"run": steps})
        answer = self.answer(f"run {steps} steps")
        records = answer.get("steps")
        if not isinstance(records, list) or len(records) != steps:
            raise ProtocolError(f"contestant {self.name!r} was asked for {steps} steps, but said {answer}")
        peak = answer.get("peak_rss_mb")
        self.peak_rss_mb = float(peak) if isinstance(peak, int | float) else 0.0
        return [StepRecord.of(record) for record in records]

    def say(self, request: Mapping[str, object]) -> None:
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
        except BrokenPipeError:
            raise self._lost("was asked for more") from None

    def kill(self) -> None:
        """End the contestant, and what it has started, at once."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for each in (*process.children(recursive=True), process):
                each.kill()

    def close(self) -> None:
        """End the contestant: its input ends, and after ten seconds it is killed; idempotent."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # the process is gone
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self.kill()
        self.close()

    def answer(self, doing: str, patience: float | None = None) -> Mapping[str, object]:
        """Return the next answer; :class:`~oppo.errors.ModelLost` if there is none for ``patience`` seconds."""
        line = self._line(doing, self._patience if patience is None else patience)
        try:
            answer: object = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, Mapping):
            raise ProtocolError(f"contestant {self.name!r} must answer with a JSON object, but said {line[:200]!r}")
        if "error" in answer:
            raise ModelLost(f"contestant {self.name!r} could not {doing}: {answer['error']}")
        return answer

    def _line(self, doing: str, patience: float) -> bytes:
        pipe = self._process.stdout
        if pipe is None:
            raise self._lost(doing)
        until = observe.now() + patience
        while b"\n" not in self._unread:
            readable, _, _ = select.select([pipe], [], [], max(0.0, until - observe.now()))
            if not readable:
                raise ModelLost(f"contestant {self.name!r} was to {doing} and has not answered for {patience:.4g} s")
            received = os.read(pipe.fileno(), 1 << 16)
            if not received:
                raise self._lost(doing)
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _lost(self, doing: str) -> ModelLost:
        code = self._process.wait()
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ModelLost(f"contestant {self.name!r} was to {doing} and ended with {how}; it said last:\n{tail}")


# Between a mode and the commit that ran it, in the name of a contestant that is not of this checkout
EARLIER: Final = "@"


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant to run: its name, its command, a remark on its settings, and the checkout that it runs."""

    name: str
    command: tuple[str, ...]
    remark: str = ""
    source: Path = CHECKOUT

    def start(self, logs: Path) -> Contestant:
        return Contestant(self.name, self.command, log=logs / f"{self.name}.log", source=self.source)
