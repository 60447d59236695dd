"""Signals ask a run to end, then end it; they are left alone outside of it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import anyio
import anyio.lowlevel
import pytest

from oppo.errors import RewardError, contained, exits_told
from oppo.liveness.signals import SIGNALS, Stopped, interruptible, stoppable
from oppo.observe import Observer, Span
from oppo.testing import prompts, run_virtual
from tests.kit.pipelines import Pipeline, Setting

each_signal = pytest.mark.parametrize("number", SIGNALS)


@pytest.fixture(autouse=True)
def handled_by_default() -> Iterator[None]:
    """Whatever the one who runs the tests ignores, as a shell does for what it runs in the background."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def test_what_was_noted_while_it_ended_is_kept() -> None:
    async def make_steps() -> None:
        async with interruptible():
            signal.raise_signal(signal.SIGTERM)
            await anyio.lowlevel.checkpoint()
            signal.raise_signal(signal.SIGTERM)
            try:
                await anyio.sleep(10)
            except anyio.get_cancelled_exc_class() as error:
                error.add_note("saving the models: the disk is full")
                raise

    with pytest.raises(Stopped) as caught:
        await make_steps()
    assert caught.value.__notes__ == ["saving the models: the disk is full"]


@each_signal
async def test_the_first_asks_and_the_second_ends(number: signal.Signals) -> None:
    told: list[signal.Signals] = []
    steps: list[str] = []

    async def make_steps() -> None:
        async with interruptible(told.append) as interrupt:
            signal.raise_signal(number)
            await anyio.lowlevel.checkpoint()
            assert interrupt.by is number
            assert told == [number]
            steps.append("asked")
            signal.raise_signal(signal.SIGINT)
            await anyio.sleep(10)
            steps.append("went on")

    with pytest.raises(Stopped) as caught:
        await make_steps()
    assert steps == ["asked"]
    assert caught.value.by is number


@pytest.mark.parametrize("lookahead", [0, 1])
async def test_the_second_ends_a_run_of_which_steps_are_in_flight(lookahead: int) -> None:
    async def make_steps() -> None:
        async with Pipeline(Setting()).graph().open(prompts(99), lookahead=lookahead) as run, interruptible():
            async for _ in run.steps(20):
                signal.raise_signal(signal.SIGINT)
                await anyio.lowlevel.checkpoint()
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(Stopped):
        await make_steps()


@pytest.mark.parametrize(("freed", "passes"), [(False, [0]), (True, [0, 1])])
async def test_while_the_event_loop_is_blocked_a_later_one_is_raised_where_it_is(
    *, freed: bool, passes: list[int]
) -> None:
    passed = list[int]()

    async def block() -> None:
        async with interruptible() as interrupt:
            for number in range(4):
                signal.raise_signal(signal.SIGTERM)
                assert interrupt.by is signal.SIGTERM
                passed.append(number)
                if freed and number == 0:
                    await anyio.lowlevel.checkpoint()

    with pytest.raises(Stopped):
        await block()
    assert passed == passes


async def test_what_the_process_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with interruptible() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            await anyio.lowlevel.checkpoint()
            assert interrupt.by is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_what_handled_them_before_does_so_again() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    async with interruptible():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_in_another_thread_nothing_is_ever_asked() -> None:
    asked: list[object] = []

    async def main() -> None:
        async with interruptible() as interrupt:
            asked.append(interrupt.by)

    thread = threading.Thread(target=anyio.run, args=(main,))
    thread.start()
    thread.join()
    assert asked == [None]


@each_signal
@pytest.mark.parametrize("moment", [0, 1, 2, 7, 40])
def test_a_program_is_stopped_in_an_event_loop_without_a_complaint_of_any_task(
    number: signal.Signals, moment: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As ``oppo simulate`` is: it comes in whatever task runs, and steps are in flight."""
    moments = 0

    class Signalled(Observer):
        def on_span(self, span: Span) -> None:
            """Leave it."""

        def on_step(self, step: int, result: object, channels: object) -> None:
            """Leave it."""

        def on_item(self, step: int, stage: str, item: object, at: float) -> None:
            nonlocal moments
            del step, stage, item, at
            if moments == moment:
                signal.raise_signal(number)
            moments += 1

    async def simulate() -> None:
        async with Pipeline(Setting()).graph().open(prompts(99), observers=[Signalled()], lookahead=1) as run:
            async for _ in run.steps(20):
                pass

    with pytest.raises(Stopped) as caught, stoppable():
        run_virtual(simulate)
    gc.collect()  # a task whose error was not retrieved says so when it goes
    assert caught.value.by is number
    assert caplog.text == ""


def test_a_second_signal_ends_what_blocks_the_event_loop_of_a_program() -> None:
    async def block() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it went on")

    with pytest.raises(Stopped), stoppable():
        anyio.run(block)


@pytest.mark.parametrize("ignored", [None, *SIGNALS])
@each_signal
async def test_user_code_does_not_hold_back_the_second_signal_whichever_other_is_ignored(
    number: signal.Signals, ignored: signal.Signals | None
) -> None:
    if ignored not in {None, number}:
        signal.signal(ignored, signal.SIG_IGN)

    async def user_code() -> None:
        with contained(RewardError):
            signal.raise_signal(number)

    async def block() -> None:
        async with interruptible():
            signal.raise_signal(number)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(user_code)

    with pytest.raises(Stopped):
        await block()


def test_an_exit_of_user_code_is_an_error_while_the_body_of_any_thread_lasts() -> None:
    before, opened, go_on = os._exit, threading.Event(), threading.Event()

    def last() -> None:
        with exits_told():
            opened.set()
            go_on.wait()

    thread = threading.Thread(target=last)
    with exits_told():
        thread.start()
        opened.wait()
    with pytest.raises(RewardError, match=r"os\._exit\(3\)"), contained(RewardError):
        os._exit(3)
    go_on.set()
    thread.join()
    assert os._exit is before


def test_a_cancellation_that_no_signal_caused_stays_one() -> None:
    with pytest.raises(asyncio.CancelledError), stoppable():
        raise asyncio.CancelledError


IGNORED = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
import tests.conftest
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
child = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
subprocess.run([sys.executable, "-c", child], check=True)
"""


def test_tests_in_the_background_of_a_shell_which_ignores_ctrl_c_and_their_children_do_not() -> None:
    subprocess.run([sys.executable, "-c", IGNORED], check=True)
