"""Writes the journeys of ``docs/architecture.md``, as a small run makes them: ``python -m docs.make_journeys``.

A token is followed by its behaviour log-prob and a setting by its value, which nothing else has, through the arguments
and results of the package's functions; weights by the functions that run while they are synced. A function whose
arguments hold the value counts, whether it looks at it or not. An object is looked into once its method has had the
value; a stage never is. A function that holds a setting in the ``Settings`` or the ``Deployment`` alone does not count.

The page is written anew only where the modules differ: two threads may reach two modules in either order.
"""  # noqa: INP001 - a script beside its page

from __future__ import annotations

import functools
import inspect
import re
import sys
import tempfile
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Final
from unittest.mock import patch

import anyio
import numpy as np
import torch
from pydantic import BaseModel

import oppo
from oppo.config.settings import Settings
from oppo.events import Batch
from oppo.hf.train.trainer import HfTrainer
from oppo.models import Sampling
from oppo.placement import Inline
from oppo.run.deployment import Deployment
from oppo.vllm import VllmPolicy
from oppo.vllm.sync import FileSender
from tests.hf import tiny
from tests.kit.workplace import furnish, oppo as run
from tests.vllm.fakes import FakeAsyncLLM, engine_of, running

PAGE: Final = Path(__file__).with_name("architecture.md")
BEGIN, END = "<!-- made by docs/make_journeys.py -->", "<!-- until here -->"
PACKAGE: Final = Path(oppo.__file__).parent
ASIDE: Final = ("oppo/report/", "oppo/liveness/", "oppo/observe.py", "oppo/errors.py", "oppo/log.py")
"""No stations: the observers of a run, and what calls functions with errors or messages told apart."""
SCORING: Final = ("oppo/stages/score.py", "oppo/scorers.py", "oppo/hf/serve/scorers.py")
"""What these call with a token is a branch of its way."""
DEEPEST: Final = 5
"""Containers in containers that are looked into."""
RATE: Final = 1.2345e-3
LOSS: Final = ("oppo/losses/policy.py", "__call__")


@dataclass(frozen=True)
class Journey:
    """The modules that something passes, in the order in which it came to them, and the types that held it."""

    title: str
    modules: Sequence[str]
    containers: Sequence[str] = ()

    def text(self) -> str:
        """Return its lines of the page."""
        held = f" It is held by {', '.join(f'`{name}`' for name in self.containers)}." if self.containers else ""
        head = textwrap.fill(f"{self.title}: {len(self.modules)} modules.{held}", 120, break_on_hyphens=False)
        listed = "\n".join(f"{number}. `{module}`" for number, module in enumerate(self.modules, 1))
        return f"{head}\n\n{listed}\n"


class Tracer:
    """Follows a value through the package's functions.

    Args:
        is_it: whether a value that is no container is the followed one, or an array that has it.
        until: the module and the function with which the journey ends, as it returns.
        branch: modules whose calls, and the calls that these make, are beside the way.
        closed: types that are looked into only where they are made; who passes on what they hold counts too.
    """

    def __init__(
        self,
        is_it: Callable[[object], bool],
        until: Callable[[str, str], bool] = lambda module, function: False,
        *,
        branch: Sequence[str] = (),
        closed: tuple[type, ...] = (),
    ) -> None:
        self.modules: dict[str, None] = {}
        self.beside: dict[str, None] = {}
        self.containers: dict[str, None] = {}
        self._is_it = is_it
        self._until = until
        self._branch = tuple(branch)
        self._closed = closed
        self._arrived = False

    def look(self, module: str, frame: FrameType, event: str, result: object) -> None:
        """See a call of a function, or its return."""
        if self._arrived:
            return
        values = inspect.getargvalues(frame)
        names = [*values.args, *filter(None, (values.varargs, values.keywords))]
        given = [values.locals[name] for name in names if name != "self" and name in values.locals]
        taken = any(self._holds(value, DEEPEST) for value in given)
        made = _attributes(result) if isinstance(result, self._closed) else [result]
        if taken or any(self._holds(value, DEEPEST) for value in made):
            caller = frame.f_back if taken and self._closed else None
            if caller is not None and (passing := _module_of(caller.f_code.co_filename)):
                self.modules.setdefault(passing)
            branch = bool(self._branch) and _is_within(frame, self._branch)
            (self.beside if branch else self.modules).setdefault(module)
            if event == "return":
                self._name(values.locals.get("self"))
                self._arrived = self._until(module, frame.f_code.co_name)

    def _holds(self, value: object, depth: int) -> bool:
        if self._is_it(value):
            return True
        found = depth > 0 and not isinstance(value, self._closed)
        found = found and any(self._holds(each, depth - 1) for each in _inside(value))
        if found and (is_dataclass(value) or isinstance(value, BaseModel)):
            self.containers.setdefault(type(value).__qualname__)
        return found

    def _name(self, owner: object) -> None:
        if _is_open(owner) and any(self._holds(each, DEEPEST) for each in _attributes(owner)):
            self.containers.setdefault(type(owner).__qualname__)


@contextmanager
def tracing(*tracers: Tracer) -> Iterator[None]:
    """Trace the body, in this thread and in those that start meanwhile."""

    def profile(frame: FrameType, event: str, result: Any) -> None:
        if event in {"call", "return"} and (module := _module_of(frame.f_code.co_filename)):
            for tracer in tracers:
                tracer.look(module, frame, event, result)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _is_within(frame: FrameType | None, modules: tuple[str, ...]) -> bool:
    while frame is not None:
        if _module_of(frame.f_code.co_filename) in modules:
            return True
        frame = frame.f_back
    return False


def _inside(value: object) -> Sequence[object]:
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, functools.partial):
        return [*value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return [each for cell in value.__closure__ or () for each in _content(cell)]
    if _is_open(value) and (is_dataclass(value) or isinstance(value, BaseModel)):
        return _attributes(value)
    return ()


def _content(cell: Any) -> Sequence[object]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return ()


def _is_open(value: object) -> bool:
    return type(value).__module__.startswith("oppo.") and not isinstance(value, type) and not hasattr(value, "run")


def _attributes(value: object) -> Sequence[object]:
    slots = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


@functools.cache
def _module_of(file: str) -> str | None:
    path = Path(file)
    module = f"oppo/{path.relative_to(PACKAGE).as_posix()}" if path.is_relative_to(PACKAGE) else ""
    return None if module.startswith(ASIDE) else module or None


def _equal(number: float) -> Callable[[object], bool]:
    def holds(value: object) -> bool:
        if isinstance(value, float):
            return value == number
        if isinstance(value, torch.Tensor):
            return value.device.type == "cpu" and value.is_floating_point() and bool((value.detach() == number).any())
        return isinstance(value, np.ndarray) and value.dtype.kind == "f" and bool((value == number).any())

    return holds


def _step(folder: Path, name: str) -> None:
    settings = (
        f"run.name={name}",
        "run.steps=1",
        "run.deterministic=true",
        "run.panel=off",
        f"trainer.learning_rate={RATE}",
    )
    if code := run(folder, "", *settings):
        raise RuntimeError(f"the run ended with exit code {code}")


def _token_and_setting() -> Iterator[Journey]:
    found: list[float] = []
    update = HfTrainer.update

    def noted(self: HfTrainer, batch: Batch) -> Any:
        found.append(float(batch.logprobs[0]))
        return update(self, batch)

    with tempfile.TemporaryDirectory() as where:
        folder = furnish(Path(where))
        with patch.object(HfTrainer, "update", noted):
            _step(folder, "noted")
        token = Tracer(_equal(found[0]), lambda module, name: (module, name) == LOSS, branch=SCORING)
        setting = Tracer(
            _equal(RATE), lambda module, _: module == "oppo/hf/train/optim.py", closed=(Settings, Deployment)
        )
        with tracing(token, setting):
            _step(folder, "traced")
    beside = [each for each in token.beside if each not in token.modules]
    yield Journey("A token, from the decode loop to the loss", list(token.modules), list(token.containers))
    yield Journey("Beside it, the scorers read the token", beside)
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
            with tracing(tracer):
                await trainer.sync_weights(policy)

    anyio.run(main)
    return Journey("Weights, from the trainer to an `AsyncLLM` in its process, a fake one", list(tracer.modules))


def journeys() -> list[Journey]:
    """Return the three, and the branch of the first."""
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
