"""Places of this machine: what holds in each, threads, and priorities of calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup

from oppo.errors import ModelLost
from oppo.observe import Span
from oppo.placement import Inline, Process, Thread
from oppo.placement.shared_memory import Block
from oppo.scheduling import DEFAULT_TIME_SLICE, Preempted, Preemptible, Priority, TimeSlice, Urgent
from oppo.testing import run_virtual
from tests.placement.instances import Slate, Total


def test_virtual_time_goes_on_around_it() -> None:
    async def main() -> tuple[int, float]:
        total = Inline("total").host(Total)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 5)
            for number in range(4):
                tasks.start_soon(total.call, "add", Total.add, number)
        return await total.call("add", Total.add, 0), anyio.current_time()

    assert run_virtual(main) == (6, 5.0)


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


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_call_that_has_begun_is_waited_for_when_its_task_is_cancelled(times: int, fails: bool) -> None:
    """As Ctrl-C does, and a timeout of asyncio: neither knows of anyio's shields."""
    work = Work()

    def done() -> None:
        work()
        if fails:
            raise ZeroDivisionError("no result")

    with Thread("model") as thread:
        caller = asyncio.create_task(thread.call("work", done))
        await work.until_begun()
        for _ in range(times):
            caller.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not caller.done(), "the caller went on though its model was still at work"
        work.go_on.set()
        await asyncio.wait([caller])
    assert work.finished
    assert caller.cancelled() != fails
    assert not fails or str(caller.exception()) == "no result"


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


async def test_calls_run_in_one_thread_in_order_after_its_setup_and_are_reported() -> None:
    seen: list[tuple[str, int]] = []
    spans: list[Span] = []

    def note(what: str) -> None:
        seen.append((what, threading.get_ident()))

    with Thread("model", setup=lambda: note("setup")) as thread:
        thread.listener = spans.append
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


@asynccontextmanager
async def busy(thread: Thread) -> AsyncIterator[TaskGroup]:
    """Yield tasks whose calls wait in the thread, which works until the body ends."""
    work = Work()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(thread.call, "work", work)
        await work.until_begun()
        yield tasks
        await anyio.wait_all_tasks_blocked()
        work.go_on.set()


class Log:
    """An instance that notes who called it."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, who: str) -> None:
        self.seen.append(who)


async def noted(thread: Thread, log: Log, who: str, priority: Priority) -> None:
    await thread.host(lambda: log).at(priority).call(who, Log.note, who)


async def test_nothing_comes_between_two_urgent_calls_of_one_context() -> None:
    log = Log()

    async def urgently() -> None:
        with Urgent() as priority:
            await noted(thread, log, "first", priority)
            await anyio.sleep(0.01)  # the thread has nothing to do, and somebody waits for it
            await noted(thread, log, "second", priority)

    with Thread("scorers") as thread:
        async with busy(thread) as tasks:
            tasks.start_soon(thread.call, "other", log.note, "other")
            tasks.start_soon(urgently)
    assert log.seen == ["first", "second", "other"]


async def test_urgent_calls_overtake_those_that_wait_but_not_the_one_in_progress() -> None:
    log = Log()

    async def urgently(who: str) -> None:
        with Urgent() as priority:
            await noted(thread, log, who, priority)

    with Thread("scorers") as thread:
        async with busy(thread) as tasks:
            for who in ("first", "second"):
                tasks.start_soon(thread.call, who, log.note, who)
            for who in ("urgent", "more urgent"):
                tasks.start_soon(urgently, who)
            await anyio.wait_all_tasks_blocked()
            assert not log.seen
    assert log.seen == ["urgent", "more urgent", "first", "second"]


async def test_an_urgent_call_does_not_wait_for_the_end_of_another_urgent_context() -> None:
    done, log = anyio.Event(), Log()

    async def one() -> None:
        with Urgent() as priority:
            await noted(thread, log, "one", priority)
            await done.wait()
            log.note("end of one")

    async def another() -> None:
        with Urgent() as priority:
            await noted(thread, log, "another", priority)
        done.set()

    with Thread("scorers") as thread, anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            tasks.start_soon(another)
    assert log.seen == ["one", "another", "end of one"]


async def test_the_end_of_the_urgent_context_and_an_error_release_the_queue() -> None:
    log = Log()
    with Thread("scorers") as thread, anyio.fail_after(10):
        with Urgent() as ended:
            await noted(thread, log, "urgent", ended)
        await noted(thread, log, "late", ended)
        with pytest.raises(ZeroDivisionError), Urgent() as priority:
            await thread.host(int).at(priority).call("divide", lambda one: one // 0)
        await thread.call("other", log.note, "other")
    assert log.seen == ["urgent", "late", "other"]


@pytest.mark.parametrize("between", [True, False], ids=["between two calls", "while its call is in progress"])
async def test_a_cancelled_task_releases_what_it_held(between: bool) -> None:
    work, first = Work(), anyio.Event()

    async def urgently() -> None:
        with Urgent() as priority:
            await thread.host(lambda: None).at(priority).call("first", lambda _: None)
            first.set()
            if between:
                await anyio.sleep_forever()
            await thread.host(lambda: work).at(priority).call("second", Work.__call__)

    with Thread("scorers") as thread, anyio.fail_after(10):
        async with asyncio.TaskGroup() as tasks:
            caller = tasks.create_task(urgently())
            await first.wait()
            if not between:
                await work.until_begun()
            other = tasks.create_task(thread.call("other", int))
            await anyio.wait_all_tasks_blocked()
            assert not other.done()
            caller.cancel()
            work.go_on.set()
        assert caller.cancelled()
        assert other.result() == 0


async def test_a_thread_that_is_closed_makes_pending_calls_whoever_holds_its_queue() -> None:
    work, log = Work(), Log()
    thread = Thread("scorers")
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(thread.call, "work", work)
            await work.until_begun()
            tasks.start_soon(thread.call, "other", log.note, "other")
            with Urgent() as priority:
                async with anyio.create_task_group() as urgent:
                    urgent.start_soon(noted, thread, log, "urgent", priority)
                    await anyio.wait_all_tasks_blocked()
                    work.go_on.set()
                thread.close()
                with pytest.raises(ModelLost):
                    await thread.call("late", int)
    assert log.seen == ["urgent", "other"]


class Reader:
    """Makes two calls with one preemptible priority, and can be told of something better to do."""

    def __init__(self, thread: Thread) -> None:
        self.better = False
        self.preempted = False
        self.log = Log()
        self._thread = thread

    async def __call__(self) -> None:
        priority = Preemptible(lambda: self.better)
        try:
            for who in ("first", "second"):
                await noted(self._thread, self.log, who, priority)
        except Preempted:
            self.preempted = True


@asynccontextmanager
async def waiting() -> AsyncIterator[tuple[Thread, Reader, Work]]:
    """Give a thread, a reader whose preemptible call waits there, and what that waits for."""
    work = Work()
    with Thread("scorers") as thread:
        reader = Reader(thread)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(thread.call, "work", work)
            await work.until_begun()
            tasks.start_soon(reader)
            await anyio.wait_all_tasks_blocked()
            yield thread, reader, work


async def test_a_preempted_call_is_not_made() -> None:
    async with waiting() as (thread, reader, work):
        reader.better = True
        work.go_on.set()
        assert await thread.call("other", int) == 0, "its place in the queue is free"
    assert reader.preempted
    assert not reader.log.seen


async def test_a_call_is_preempted_while_another_holds_the_queue() -> None:
    async with waiting() as (thread, reader, work):
        with Urgent() as priority:
            reader.better = True
            work.go_on.set()
            await noted(thread, Log(), "urgent", priority)
            await anyio.wait_all_tasks_blocked()
            assert reader.preempted


async def test_neither_a_call_that_has_begun_is_preempted_nor_those_that_follow_it() -> None:
    work = Work()
    with Thread("scorers") as thread:
        reader = Reader(thread)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader)
            while not reader.log.seen:
                await anyio.lowlevel.checkpoint()
            reader.better = True
            tasks.start_soon(thread.call, "work", work)
            await work.until_begun()
            work.go_on.set()
    assert reader.log.seen == ["first", "second"]
    assert not reader.preempted


async def test_a_process_acts_on_priorities_too_for_calls_there_and_for_local_ones() -> None:
    work, order = Work(), list[int]()
    with Process("scorers") as process, anyio.fail_after(60):
        total, shared = process.host(Total), process.host(partial(Slate, Block.new(8)))

        async def add(number: int, priority: Priority) -> None:
            await total.at(priority).call("add", Total.add, number)
            order.append(number)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shared.load, lambda _, __: work(), None)
            await work.until_begun()
            tasks.start_soon(add, 1, Priority())
            with Urgent() as priority:
                async with anyio.create_task_group() as urgent:
                    urgent.start_soon(add, 2, priority)
                    urgent.start_soon(shared.at(priority).load, lambda _, number: order.append(number), 3)
                    await anyio.wait_all_tasks_blocked()
                    work.go_on.set()
            preempted = total.at(Preemptible(lambda: True))
            with pytest.raises(Preempted):
                await preempted.call("add", Total.add, 4)
        assert sorted(order[:2]) == [2, 3], "both urgent calls come first"
        assert order[2:] == [1]


@pytest.mark.parametrize("kind", [Inline, Thread, Process])
def test_a_place_says_how_long_a_call_should_last_that_nobody_waits_for(kind: type[Inline | Thread | Process]) -> None:
    short = TimeSlice(seconds=0.05)
    with kind("default") as default, kind("short") as place:
        place.time_slice = short
        assert default.host(int).time_slice == DEFAULT_TIME_SLICE
        assert place.host(int).at(Priority()).time_slice == short


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ({"seconds": 0.0}, "seconds must be more than 0, not 0.0"),
        ({"rise": 0.9}, "rise must be at least 1, not 0.9"),
        ({"seconds": float("nan")}, "must be a finite number"),
    ],
)
def test_a_time_slice_that_cannot_be_is_refused(arguments: dict[str, float], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        TimeSlice(**arguments)


async def test_a_place_without_a_queue_makes_every_call() -> None:
    with Inline("inline") as place:
        assert await place.host(int).at(Preemptible(lambda: True)).call("look", abs) == 0
