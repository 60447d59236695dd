"""Places for models, and a policy in a thread and in a process; one place serves all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from oppo.hf.devices import use_cores
from oppo.placement import Process, Ranks, Thread
from tests.hf import child, stories
from tests.hf.stories import Serving


@pytest.fixture(autouse=True)
def _one_core() -> None:
    use_cores(1)


@pytest.fixture(scope="module")
def thread() -> Iterator[Thread]:
    with Thread("models", setup=child.ONE) as thread:
        yield thread


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with Process("models", setup=child.ONE) as process:
        yield process


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks("trainer", 2, setup=child.ONE) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def actor_process() -> Iterator[Process]:
    with Process("actor", setup=child.set_up) as process:
        yield process


@pytest.fixture(params=["thread", "process"])
def serving(request: pytest.FixtureRequest) -> Serving:
    if request.param == "thread":
        return stories.serving
    return partial(stories.serving, place=request.getfixturevalue("actor_process"))
