"""``oppo.testing`` as a pytest plugin, which pytest finds where oppo is installed; its tests alone import oppo.

``@pytest.mark.virtual`` runs an ``async def`` test in virtual time; on a module or a class, all of those in it. Other
plugins for async tests leave it alone, in any mode. Async fixtures are theirs: they run in real time, on other loops.

==================  ==========================================================================================
fixture             is
==================  ==========================================================================================
``recorder``        an observer that keeps all that a run tells (:class:`oppo.testing.Recorder`); afterwards the
                    run is validated
``new_recorder``    returns such an observer at each call, for tests of several runs
``overlap``         ``overlap(one, other)``: seconds in which two stages of ``recorder``'s run worked together
``hidden_fraction`` ``hidden_fraction()``: the fraction of its scoring that decoding or training hid
``story``           ``story(rollout)``: all that happened to a rollout in it
``fake_batch``      ``fake_batch(lengths, ...)``: a batch to train on (:func:`oppo.testing.fake_batch`)
``check_admission`` ``await check_admission(make)``: checks an admission (:func:`oppo.testing.check_admission`)
==================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from oppo.events import Batch
    from oppo.testing import Happening, Recorder

Collected: TypeAlias = "pytest.Item | pytest.Collector | list[pytest.Item | pytest.Collector] | None"

MARKER = "virtual"


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", f"{MARKER}: run an async test in virtual time: the clock starts at 0, and jumps where all tasks wait"
    )


# pytest looks for hooks among the names that begin with pytest_, those with a specname too.
@pytest.hookimpl(specname="pytest_pycollect_makeitem")
def pytest_without_backends(collector: pytest.Collector, obj: object) -> None:
    """Take from a virtual test the backends that anyio's plugin has just given it: it runs once, on a loop of ours."""
    marks = getattr(obj, "pytestmark", None)
    if isinstance(marks, list) and (_is_virtual(collector) or any(mark.name == MARKER for mark in marks)):
        marks[:] = [mark for mark in marks if (mark.name, mark.args) != ("usefixtures", ("anyio_backend",))]


@pytest.hookimpl(specname="pytest_pycollect_makeitem", wrapper=True, trylast=True)
def pytest_collected() -> Generator[None, Collected, Collected]:
    """Make each virtual test a function that other plugins see as an ordinary one."""
    made = yield
    for item in made if isinstance(made, list) else [made]:
        _make_ordinary(item)
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Do so again where a plugin that repeats tests has fetched the function anew."""
    _make_ordinary(item)


def _is_virtual(node: pytest.Collector | pytest.Item) -> bool:
    return node.get_closest_marker(MARKER) is not None


def _make_ordinary(item: object) -> None:
    if not isinstance(item, pytest.Function) or not _is_virtual(item):
        return
    if iscoroutinefunction(item.obj):
        item.obj = _in_virtual_time(item.obj)
    elif (given := getattr(item.obj, "hypothesis", None)) is not None and iscoroutinefunction(given.inner_test):
        given.inner_test = _in_virtual_time(given.inner_test)


def _in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        __tracebackhide__ = True
        from oppo.testing import run_virtual  # noqa: PLC0415 - only tests in virtual time pay for its import

        run_virtual(partial(test, *args, **kwargs))

    return run


@pytest.fixture
def new_recorder() -> Iterator[Callable[[], Recorder]]:
    """Return an observer of a run at each call; each is validated when the test is over."""
    from oppo.testing import Recorder  # noqa: PLC0415 - see above

    made: list[Recorder] = []

    def make(*, source: str = "generate") -> Recorder:
        made.append(Recorder(source=source))
        return made[-1]

    yield make
    for recorder in made:
        recorder.validate()


@pytest.fixture
def recorder(new_recorder: Callable[[], Recorder]) -> Recorder:
    """Return an observer that keeps all that a run tells: ``graph.open(prompts, observers=[recorder])``."""
    return new_recorder()


@pytest.fixture
def overlap(recorder: Recorder) -> Callable[[str, str], float]:
    """Return ``overlap(one, other)``: the seconds in which two stages worked at the same time."""
    return recorder.overlap


@pytest.fixture
def hidden_fraction(recorder: Recorder) -> Callable[[], float]:
    """Return ``hidden_fraction()``: the fraction of the scoring time that decoding or training hid."""
    return recorder.hidden_fraction


@pytest.fixture
def story(recorder: Recorder) -> Callable[[int], list[Happening]]:
    """Return ``story(rollout)``: all that happened to a rollout, in order."""
    return recorder.story


@pytest.fixture
def fake_batch() -> Callable[..., Batch]:
    """Return ``fake_batch(lengths, ...)``: a batch with the advantages of GAE."""
    from oppo.testing import fake_batch  # noqa: PLC0415 - see above

    return fake_batch


@pytest.fixture
def check_admission() -> Callable[..., Coroutine[Any, Any, None]]:
    """Return ``check_admission(make)``, the conformance check of an admission."""
    from oppo.testing import check_admission  # noqa: PLC0415 - see above

    return check_admission
