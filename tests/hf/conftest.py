"""A policy in a thread and in a process; one child serves all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from oppo.placement import Process
from tests.hf import child, stories
from tests.hf.stories import Serving


@pytest.fixture(scope="module")
def actor_process() -> Iterator[Process]:
    with Process("actor", setup=child.set_up) as process:
        yield process


@pytest.fixture(params=["thread", "process"])
def serving(request: pytest.FixtureRequest) -> Serving:
    if request.param == "thread":
        return stories.serving
    return partial(stories.serving, place=request.getfixturevalue("actor_process"))
