"""A thread as a place: what it promises to callers that are cancelled, and what it says when it cannot work."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from oppo.observe import Span
from oppo.placement import Thread


class Work:
    """Something that is in progress from the moment it says so until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.finished = False

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(10)
        self.finished = True
        return "done"

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 10)


@pytest.mark.parametrize("times", [1, 3])
async def test_a_call_that_has_begun_is_waited_for_when_its_task_is_cancelled(times: int) -> None:
    """As Ctrl-C does, and a timeout of asyncio: neither knows of anyio's shields."""
    work = Work()
    with Thread("model") as thread:
        async with asyncio.TaskGroup() as tasks:
            caller = tasks.create_task(thread.call("work", work))
            await work.until_begun()
            for _ in range(times):
                caller.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            still_waiting = not caller.done()
            work.go_on.set()
        assert still_waiting, "the caller went on though its model was still at work"
        assert caller.cancelled()
        assert work.finished


async def test_a_call_that_has_begun_is_waited_for_when_its_scope_is_cancelled() -> None:
    work = Work()
    with Thread("model") as thread:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(thread.call, "work", work)
                await work.until_begun()
                scope.cancel()
                work.go_on.set()
        assert scope.cancelled_caught
        assert work.finished


async def test_an_error_of_the_work_is_raised_though_the_caller_was_cancelled_meanwhile() -> None:
    work = Work()

    def failing() -> None:
        work()
        raise ZeroDivisionError("no result")

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            caller = tasks.create_task(thread.call("work", failing))
            await work.until_begun()
            caller.cancel()
            await asyncio.sleep(0)
            work.go_on.set()

    with Thread("model") as thread:
        with pytest.raises(ExceptionGroup) as caught:
            await main()
        assert [str(error) for error in caught.value.exceptions] == ["no result"]


async def test_calls_run_in_one_thread_in_order_after_its_setup_and_are_reported() -> None:
    seen: list[tuple[str, int]] = []
    spans: list[Span] = []

    def note(what: str) -> None:
        seen.append((what, threading.get_ident()))

    with Thread("model", listener=spans.append, setup=lambda: note("setup")) as thread:
        async with anyio.create_task_group() as tasks:
            for what in ("first", "second"):
                tasks.start_soon(thread.call, what, note, what)
    assert [what for what, _ in seen] == ["setup", "first", "second"]
    assert len({ident for _, ident in seen} | {threading.get_ident()}) == 2
    assert [(span.track, span.label) for span in spans] == [("model", "first"), ("model", "second")]


async def test_a_setup_that_fails_is_the_callers_error_and_is_tried_again() -> None:
    attempts: list[int] = []

    def setup() -> None:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise ZeroDivisionError("no threads")

    with Thread("model", setup=setup) as thread:
        with pytest.raises(ZeroDivisionError, match="no threads"):
            await thread.call("work", int)
        assert [await thread.call("work", int), await thread.call("work", int)] == [0, 0]
    assert attempts == [0, 1]
