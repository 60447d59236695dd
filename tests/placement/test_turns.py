"""Who comes first in a thread that several share: what is ahead keeps it, and what is polite leaves it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from oppo.errors import ModelLost
from oppo.placement import GaveWay, Thread, ahead, giving_way
from tests.placement.test_thread import Work


async def test_between_two_calls_that_are_ahead_nobody_slips_in() -> None:
    work, seen = Work(), list[str]()

    async def urgently() -> None:
        with ahead():
            await thread.call("first", seen.append, "first")
            await anyio.sleep(0.01)  # the thread has nothing to do, and somebody waits for it
            await thread.call("second", seen.append, "second")

    with Thread("scorers") as thread:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(thread.call, "work", work)
            await work.until_begun()
            tasks.start_soon(thread.call, "other", seen.append, "other")
            tasks.start_soon(urgently)
            await anyio.wait_all_tasks_blocked()
            work.go_on.set()
    assert seen == ["first", "second", "other"]


async def test_one_that_is_ahead_does_not_wait_for_another_that_is() -> None:
    done, seen = anyio.Event(), list[str]()

    async def one() -> None:
        with ahead():
            await thread.call("one", seen.append, "one")
            await done.wait()
            seen.append("end of one")

    async def another() -> None:
        with ahead():
            await thread.call("another", seen.append, "another")
        done.set()

    with Thread("scorers") as thread, anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            tasks.start_soon(another)
    assert seen == ["one", "another", "end of one"]


async def test_a_task_that_outlives_what_was_ahead_keeps_nobody_waiting() -> None:
    over, seen = anyio.Event(), list[str]()

    async def left_behind() -> None:
        await over.wait()
        await thread.call("left behind", seen.append, "left behind")

    with Thread("scorers") as thread, anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            with ahead():
                tasks.start_soon(left_behind)
                await thread.call("ahead", seen.append, "ahead")
            over.set()
            await anyio.wait_all_tasks_blocked()
            await thread.call("other", seen.append, "other")
    assert seen == ["ahead", "left behind", "other"]


async def test_an_error_ends_what_is_ahead() -> None:
    with Thread("scorers") as thread, anyio.fail_after(10):
        with pytest.raises(ZeroDivisionError), ahead():
            await thread.call("divide", lambda: 1 // 0)
        assert await thread.call("other", int) == 0


async def test_a_thread_that_is_closed_does_what_it_has_been_given_whoever_is_ahead() -> None:
    work, seen = Work(), list[str]()
    thread = Thread("scorers")
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(thread.call, "work", work)
            await work.until_begun()
            tasks.start_soon(thread.call, "other", seen.append, "other")
            with ahead():
                async with anyio.create_task_group() as urgent:
                    urgent.start_soon(thread.call, "ahead", seen.append, "ahead")
                    await anyio.wait_all_tasks_blocked()
                    work.go_on.set()
                thread.close()
                with pytest.raises(ModelLost):
                    await thread.call("late", int)
    assert seen == ["ahead", "other"]


class Polite:
    """Calls something and gives way as soon as it is told to."""

    def __init__(self, thread: Thread) -> None:
        self.better = False
        self.gave_way = False
        self.seen: list[str] = []
        self._thread = thread

    async def __call__(self) -> None:
        try:
            with giving_way(lambda: self.better):
                for what in ("first", "second"):
                    await self._thread.call(what, self.seen.append, what)
        except GaveWay:
            self.gave_way = True


@asynccontextmanager
async def waiting() -> AsyncIterator[tuple[Thread, Polite, Work]]:
    """Give a thread, a polite call that waits there, and what it waits for."""
    work = Work()
    with Thread("scorers") as thread:
        polite = Polite(thread)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(thread.call, "work", work)
            await work.until_begun()
            tasks.start_soon(polite)
            await anyio.wait_all_tasks_blocked()
            yield thread, polite, work


async def test_what_gives_way_while_it_waits_is_not_done() -> None:
    async with waiting() as (thread, polite, work):
        polite.better = True
        work.go_on.set()
        assert await thread.call("other", int) == 0, "its place in the line is free"
    assert polite.gave_way
    assert not polite.seen


async def test_what_waits_for_one_that_is_ahead_gives_way_before_that_has_ended() -> None:
    async with waiting() as (thread, polite, work):
        with ahead():
            polite.better = True
            work.go_on.set()
            await thread.call("ahead", int)
            await anyio.wait_all_tasks_blocked()
            assert polite.gave_way


async def test_what_has_begun_gives_way_no_more_and_neither_does_what_follows_it() -> None:
    work = Work()
    with Thread("scorers") as thread:
        polite = Polite(thread)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(polite)
            while not polite.seen:
                await anyio.lowlevel.checkpoint()
            polite.better = True
            tasks.start_soon(thread.call, "work", work)
            await work.until_begun()
            work.go_on.set()
    assert polite.seen == ["first", "second"]
    assert not polite.gave_way
