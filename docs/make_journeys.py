"""Writes the journeys at the end of ``docs/architecture.md``: ``python -m docs.make_journeys``.

A small run is traced. A token is followed by its behaviour log-prob and a setting by its value, both of which occur
once, through the arguments and results of every function of the package; weights by whatever runs while they are
synced. What a module keeps to itself is not seen, and a function whose arguments hold the followed value counts,
whether it looks at it or not.
"""  # noqa: INP001 - a script beside its page

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import torch

import oppo
from tests.workplace import furnish, oppo as run

PAGE: Final = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- journeys: made by docs/make_journeys.py -->", "<!-- end of journeys -->"
PACKAGE: Final = Path(oppo.__file__).parent
DEEPEST: Final = 5
"""Containers in containers that are looked into."""
RATE: Final = 1.2345e-3
"""The learning rate, a value that nothing else has."""


class Tracer:
    """Records, in order, the modules of the package whose functions the followed value enters or leaves.

    Attributes:
        modules: each once, in the order in which the value came to them.
        containers: names of the types that held it.
    """

    def __init__(self, is_it: Callable[[object], bool]) -> None:
        self.modules: dict[str, None] = {}
        self.containers: dict[str, None] = {}
        self._is_it = is_it

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Record in this thread and in those that start meanwhile."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # takes None, which typeshed does not know

    def _profile(self, frame: FrameType, event: str, result: Any) -> None:
        module = module_of(frame.f_code.co_filename)
        if module is None or event not in {"call", "return"}:
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals[name] for name in names if name != "self" and name in frame.f_locals]
        if any(self._holds(value, DEEPEST) for value in ([result] if event == "return" else values)):
            self.modules.setdefault(module)

    def _holds(self, value: object, depth: int) -> bool:
        if self._is_it(value):
            return True
        if depth == 0 or value is None or isinstance(value, (str, bytes, int, float)):
            return False
        inside = children(value)
        if found := any(self._holds(each, depth - 1) for each in inside):
            self.containers.setdefault(type(value).__qualname__)
        return found


def children(value: object) -> Sequence[object]:
    """Return what a container of values holds; nothing of an object that is more than its fields."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)[:64]
    if isinstance(value, Mapping):
        return list(value.values())[:64]
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name, None) for each in fields(value)]
    return ()


def module_of(file: str) -> str | None:
    """Return ``oppo/hf/lora.py`` for a file of the package."""
    path = Path(file)
    return f"oppo/{path.relative_to(PACKAGE).as_posix()}" if path.is_relative_to(PACKAGE) else None


def same(number: float) -> Callable[[object], bool]:
    """Return whether a value is the number, or an array that has it."""

    def holds(value: object) -> bool:
        if isinstance(value, float):
            return value == number
        if isinstance(value, torch.Tensor):
            value = value.detach().numpy() if value.device.type == "cpu" and value.is_floating_point() else None
        return isinstance(value, np.ndarray) and value.dtype.kind == "f" and bool((value == number).any())

    return holds


def first_logprob() -> tuple[Callable[[object], bool], list[float]]:
    """Return a predicate that is never true, and the list into which it puts the first behaviour log-prob it meets."""
    from oppo.events import Batch

    found: list[float] = []

    def look(value: object) -> bool:
        if isinstance(value, Batch) and not found:
            found.append(float(value.logprobs[0]))
        return False

    return look, found


def traced(folder: Path, is_it: Callable[[object], bool], name: str) -> Tracer:
    tracer = Tracer(is_it)
    with tracer.tracing():
        run(folder, "", f"run.name={name}", "run.steps=1", f"trainer.learning_rate={RATE}", "run.exact=true", "run.panel=off")
    return tracer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        folder = furnish(Path(where))
        look, found = first_logprob()
        traced(folder, look, "found")
        token = traced(folder, same(found[0]), "token")
        setting = traced(folder, same(RATE), "setting")
    for each in (token, setting):
        print(len(each.modules), list(each.modules), len(each.containers), list(each.containers))
