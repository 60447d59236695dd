"""Writes the three journeys of ``docs/architecture.md``, as a small run makes them: ``python -m docs.make_journeys``.

A token is followed by its behaviour log-prob and a setting by its value, which nothing else has, through the arguments
and results of the package's functions; weights by the functions that run while they are synced. A function whose
arguments hold the value counts, whether it looks at it or not; what an object keeps to itself does not.

The page is written anew only where the modules differ: two threads may reach two modules in either order.
"""  # noqa: INP001 - a script beside its page

from __future__ import annotations

import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import anyio
import numpy as np
import torch

import oppo
from oppo.events import Batch
from oppo.hf.train.trainer import HfTrainer
from oppo.models import Sampling
from oppo.placement import Inline
from oppo.vllm import VllmPolicy
from oppo.vllm.sync import FileSender
from tests.hf import tiny
from tests.kit.workplace import furnish, oppo as run
from tests.vllm.fakes import FakeAsyncLLM, engine_of, running

PAGE: Final = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- made by docs/make_journeys.py -->", "<!-- until here -->"
PACKAGE: Final = Path(oppo.__file__).parent
OBSERVERS: Final = ("oppo/report/", "oppo/liveness/", "oppo/observe.py")
DEEPEST: Final = 5
"""Containers in containers that are looked into."""
RATE: Final = 1.2345e-3


@dataclass(frozen=True)
class Journey:
    """The modules that something passes, in the order in which it came to them, and the types that held it."""

    title: str
    modules: Sequence[str]
    containers: Sequence[str] = ()

    def text(self) -> str:
        """Return its lines of the page."""
        held = f" It is held by {', '.join(f'`{name}`' for name in self.containers)}." if self.containers else ""
        return f"{self.title}: {len(self.modules)} modules.{held}\n\n{_wrapped(self.modules)}\n"


def _wrapped(modules: Sequence[str]) -> str:
    return "\n".join(f"{number}. `{module}`" for number, module in enumerate(modules, 1))


class Tracer:
    """Follows a value through the package's functions, in this thread and in those that start meanwhile.

    Args:
        is_it: whether a value that is no container is the followed one, or an array that has it.
        until: beginning of the names of the modules with which the journey ends.
    """

    def __init__(self, is_it: Callable[[object], bool], until: str = "") -> None:
        self.modules: dict[str, None] = {}
        self.containers: dict[str, None] = {}
        self._is_it = is_it
        self._until = until
        self._arrived = False

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace the body."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, result: Any) -> None:
        module = _module_of(frame.f_code.co_filename)
        if module is None or self._arrived or event not in {"call", "return"} or module.startswith(OBSERVERS):
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [frame.f_locals[name] for name in names if name != "self" and name in frame.f_locals]
        if any(self._holds(value, DEEPEST) for value in ([result] if event == "return" else given)):
            self.modules.setdefault(module)
            self._arrived = bool(self._until) and module.startswith(self._until)

    def _holds(self, value: object, depth: int) -> bool:
        if self._is_it(value):
            return True
        found = depth > 0 and any(self._holds(each, depth - 1) for each in _inside(value))
        if found and is_dataclass(value):
            self.containers.setdefault(type(value).__qualname__)
        return found


def _inside(value: object) -> Sequence[object]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name, None) for each in fields(value)]
    return ()


def _module_of(file: str) -> str | None:
    path = Path(file)
    return f"oppo/{path.relative_to(PACKAGE).as_posix()}" if path.is_relative_to(PACKAGE) else None


def _equal(number: float) -> Callable[[object], bool]:
    def holds(value: object) -> bool:
        if isinstance(value, float):
            return value == number
        if isinstance(value, torch.Tensor):
            return value.device.type == "cpu" and value.is_floating_point() and bool((value.detach() == number).any())
        return isinstance(value, np.ndarray) and value.dtype.kind == "f" and bool((value == number).any())

    return holds


def _step(folder: Path, name: str, tracer: Tracer) -> Tracer:
    settings = (
        f"run.name={name}",
        "run.steps=1",
        "run.deterministic=true",
        "run.panel=off",
        f"trainer.learning_rate={RATE}",
    )
    with tracer.tracing():
        if code := run(folder, "", *settings):
            raise RuntimeError(f"the run ended with exit code {code}")
    return tracer


def _token_and_setting() -> Iterator[Journey]:
    found: list[float] = []

    def noted(value: object) -> bool:
        if isinstance(value, Batch) and not found:
            found.append(float(value.logprobs[0]))
        return False

    with tempfile.TemporaryDirectory() as where:
        folder = furnish(Path(where))
        _step(folder, "noted", Tracer(noted))
        token = _step(folder, "token", Tracer(_equal(found[0]), "oppo/losses/"))
        setting = _step(folder, "setting", Tracer(_equal(RATE), "oppo/hf/train/optim"))
    yield Journey("A token, from the decode loop to the loss", list(token.modules), list(token.containers))
    yield Journey("A setting, `trainer.learning_rate`, from the file to its use", list(setting.modules))


def _weights() -> Journey:
    tracer = Tracer(lambda _: True)

    async def main() -> None:
        sampling = Sampling(max_new_tokens=4)
        trainer = HfTrainer(tiny.causal("llama", seed=1), sampling=sampling, place=Inline("trainer"))
        llm = FakeAsyncLLM()
        engine = engine_of(llm)
        engine.sender = FileSender()
        async with running(llm):
            policy = VllmPolicy(engine, sampling=sampling)
            with tracer.tracing():
                await trainer.sync_weights(policy)

    anyio.run(main)
    return Journey("Weights, from the trainer to vLLM", list(tracer.modules))


def journeys() -> list[Journey]:
    """Return the three."""
    return [*_token_and_setting(), _weights()]


def written(page: str) -> list[set[str]]:
    """Return the modules of each journey of a page."""
    made = page.partition(BEGIN)[2].partition(END)[0]
    return [set(re.findall(r"^\d+\. `(\S+)`", part, re.MULTILINE)) for part in made.split(" modules.")[1:]]


def main() -> None:
    """Write the page anew where its modules are no longer those of the code."""
    page = PAGE.read_text(encoding="utf-8")
    found = journeys()
    if written(page) != [set(each.modules) for each in found]:
        before, _, rest = page.partition(BEGIN)
        made = "\n".join(each.text() for each in found)
        PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
