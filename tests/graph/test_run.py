from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import anyio
import pytest
import trio
import uvloop

from oppo.errors import DeadlockError, GraphError, OppoError, ProtocolError, as_itself
from oppo.graph import Graph, GraphBuilder, Receiver, Sender, Snapshot, Step, Wait
from oppo.graph.run import COLLECTION
from oppo.observe import Span
from oppo.testing import run_virtual
from tests.graph.stages import Boom, Collect, Diary, Fail, Relay, Stuck, Take, line


def left_over() -> set[asyncio.Task[object]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


async def results_of(graph: Graph[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    async with graph.open(range(100)) as run:
        results = [result async for result in run.steps(count)]
    assert not left_over()
    return results


def test_steps_end_when_the_data_ends() -> None:
    async def main() -> None:
        async with line().open(range(7)) as run:
            assert [result async for result in run.steps(10)] == [(0, 1, 2), (3, 4, 5), (6,)]
            assert await run.step() is None

    run_virtual(main)


@pytest.mark.parametrize(("before", "meanwhile"), [(700, COLLECTION), (0, 0), (90_000, 90_000)])
def test_garbage_is_looked_for_seldom_while_a_run_is_open_unless_that_was_chosen(before: int, meanwhile: int) -> None:
    usual = gc.get_threshold()

    async def main() -> int:
        async with line().open(range(7)):
            return gc.get_threshold()[0]

    try:
        gc.set_threshold(before, 11, 12)
        assert run_virtual(main) == meanwhile
        assert gc.get_threshold() == (before, 11, 12)
    finally:
        gc.set_threshold(*usual)


def test_the_source_is_taken_from_only_when_asked_and_keeps_its_place() -> None:
    async def main() -> None:
        given: list[int] = []

        async def numbers() -> AsyncIterator[int]:
            for number in range(100):
                given.append(number)
                yield number
                await anyio.sleep(1)

        source = numbers()
        async with line().open(source) as run:
            assert await run.step() == (0, 1, 2)
            assert given == [0, 1, 2]
            await anyio.sleep(10)
            assert await run.step() == (3, 4, 5)
            assert given == [0, 1, 2, 3, 4, 5]
        assert await anext(source) == 6, "who made the source may go on with it"
        await source.aclose()  # type: ignore[attr-defined]  # an async generator, by its body

    run_virtual(main)


def test_the_source_cannot_be_joined() -> None:
    class Peek(Relay):
        async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
            items.drain_nowait()

    with pytest.raises(ProtocolError, match="put a stage between it and a join"):
        run_virtual(results_of, line().replace(take=Peek()), 1)


def test_hooks_are_called_in_order() -> None:
    async def main() -> list[str]:
        diary = Diary()
        async with line().replace(relay=diary).open(range(5)) as run:
            async for _ in run.steps(4):
                await anyio.sleep(0.5)
        return diary.lines

    assert run_virtual(main) == [
        "enter",
        "run 0 as relay, 4 to go, at 0.0",
        "observe (0, 1, 2)",
        "run 1 as relay, 3 to go, at 0.5",
        "observe (3, 4)",
        "run 2 as relay, 2 to go, at 1.0",
        "exit",
    ]


def test_a_stage_is_left_in_peace_when_the_run_is_cancelled() -> None:
    async def main() -> list[str]:
        diary = Diary()
        with anyio.move_on_after(1):
            async with line().replace(relay=diary, collect=Stuck()).open(range(9)) as run:
                await run.step(remaining=1)
        assert anyio.current_time() == 2.0, "leaving takes the diary a second"
        assert not left_over()
        return diary.lines

    assert run_virtual(main) == ["enter", "run 0 as relay, 1 to go, at 0.0", "exit"]


def test_stages_may_hold_task_groups_while_the_run_is_open() -> None:
    class Pump(Relay):
        async def __aenter__(self) -> None:
            self.tasks = await anyio.create_task_group().__aenter__()
            self.tasks.start_soon(anyio.sleep, 1_000)

        async def __aexit__(self, *error: object) -> None:
            self.tasks.cancel_scope.cancel()
            await self.tasks.__aexit__(None, None, None)

    async def main() -> None:
        with anyio.move_on_after(1):
            async with line().replace(take=Stuck(), relay=Pump(), collect=Pump()).open(range(9)) as run:
                await run.step()
        assert not left_over()

    run_virtual(main)


def test_a_failing_hook_is_named() -> None:
    class Bad(Diary):
        def observe(self, result: tuple[int, ...], step: Step, /) -> None:
            raise Boom("no")

    with pytest.raises(Boom) as caught:
        run_virtual(results_of, line().replace(relay=Bad()), 1)
    raised, where = caught.value.__notes__
    assert raised.startswith(f"raised by Bad.observe() at {__file__}:")
    assert where == "in observe() of stage 'relay' of graph 'line', step 1"


class Door(Relay):
    """A relay that cannot be entered, or left."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails

    async def __aenter__(self) -> Self:
        if self.fails == "enter":
            raise OSError("the door is locked")
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.fails == "leave":
            raise OSError("the door is locked")


@pytest.mark.parametrize(("fails", "where"), [("enter", "while opening"), ("leave", "while closing")])
def test_a_stage_that_cannot_be_opened_or_closed_is_named(fails: str, where: str) -> None:
    graph = line().replace(relay=Door(fails))
    with pytest.raises(OSError, match="locked") as caught:
        run_virtual(results_of, graph, 1)
    assert caught.value.__notes__ == [f"{where} stage 'relay' of graph 'line'"]


def test_an_error_while_closing_does_not_hide_the_error_that_ended_the_run() -> None:
    diary = Diary()
    g: GraphBuilder[int] = GraphBuilder("line")
    first = g.add("first", diary, g.prompts)
    second = g.add("second", Door("leave"), first)
    graph = g.build(g.add("third", Collect(), g.add("fail", Fail(), second)))
    with pytest.raises(Boom, match="bad item 0") as caught:
        run_virtual(results_of, graph, 1)
    assert "in stage 'fail' of graph 'line', step 1" in caught.value.__notes__
    assert (
        "and then, while closing stage 'second' of graph 'line', OSError: the door is locked" in caught.value.__notes__
    )
    assert diary.lines[-1] == "exit", "the others are closed all the same"


def test_of_several_errors_the_first_is_raised_and_names_the_others() -> None:
    class Sore(Relay):
        async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
            try:
                await anyio.sleep(10)
            finally:
                raise Boom("while being torn down")

    with pytest.raises(Boom, match="bad item 0") as caught:
        run_virtual(results_of, line().replace(relay=Fail(1.0), collect=Sore()), 1)
    assert caught.value.__notes__ == [
        "in stage 'relay' of graph 'line', step 1",
        "and then Boom: while being torn down (in stage 'collect' of graph 'line', step 1)",
    ]


def test_a_reader_never_takes_what_a_failed_stage_sent_for_everything() -> None:
    finished: list[int] = []

    class Late(Relay):
        async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
            async for item in items:
                await out.send(item)
                raise Boom("after one item")

    class Note(Collect):
        async def run(self, items: Receiver[int], *, out: Sender[tuple[int, ...]]) -> None:
            finished.extend([item async for item in items])

    with pytest.raises(Boom):
        run_virtual(results_of, line().replace(relay=Late(), collect=Note()), 1)
    assert finished == []


def test_a_run_whose_step_failed_refuses_to_go_on() -> None:
    async def main() -> None:
        async with line().replace(relay=Fail()).open(range(9)) as run:
            with pytest.raises(Boom):
                await run.step()
            with pytest.raises(GraphError, match="cannot run step 1: step 1 did not come to its end"):
                await run.step()

    run_virtual(main)


def test_a_closed_run_refuses_to_go_on() -> None:
    async def main() -> None:
        async with line().open(range(9)) as run:
            pass
        with pytest.raises(GraphError, match="its run is closed"):
            await run.step()

    run_virtual(main)


def test_steps_of_one_run_do_not_overlap() -> None:
    async def main() -> None:
        async with line().replace(relay=Relay(1.0)).open(range(9)) as run, anyio.create_task_group() as tasks:
            tasks.start_soon(run.step)
            await anyio.sleep(0.5)
            with pytest.raises(GraphError, match="a step is running"):
                await run.step()

    run_virtual(main)


def test_a_stage_may_be_in_one_open_run_only() -> None:
    async def main() -> None:
        graph = line()
        async with graph.open(range(9)):
            with pytest.raises(GraphError, match="stage 'take' of graph 'line' is in another open run"):
                async with graph.replace(relay=Relay()).open(range(9)):
                    pass
        async with graph.open(range(9)) as run:
            assert await run.step() == (0, 1, 2)

    run_virtual(main)


def test_a_second_result_is_an_error() -> None:
    g = GraphBuilder[int]("many")
    graph = g.build(g.add("take", Take(), g.prompts))

    async def main() -> None:
        async with graph.open(range(9)) as run:
            await run.step()

    with pytest.raises(ProtocolError, match="'take' sent a second result; a step results in exactly one item"):
        run_virtual(main)


class Impatient(Relay):
    """Reads one item and returns."""

    async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
        async for item in items:
            await out.send(item)
            break


def test_a_stage_that_leaves_items_unread_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="the reader of 'take->relay' returned and left 2 items unread") as caught:
        run_virtual(results_of, line().replace(relay=Impatient()), 1)
    assert caught.value.__notes__ == ["in stage 'relay' of graph 'line', step 1"]


def test_a_stage_that_returns_before_its_input_sends_again_is_an_error() -> None:
    g = GraphBuilder[int]("slow")
    taken = g.add("take", Take(), g.prompts)
    slow = g.add("slow", Relay(1.0), taken)
    graph = g.build(g.add("collect", Collect(), g.add("relay", Impatient(), slow)))
    with pytest.raises(ProtocolError, match="sent into 'slow->relay', whose reader has returned already"):
        run_virtual(results_of, graph, 1)


def test_a_stage_may_return_when_its_inputs_hold_nothing_more() -> None:
    assert run_virtual(results_of, line().replace(take=Take(1), relay=Impatient()), 2) == [(0,), (1,)]


def test_a_deadlock_shows_the_channel_table() -> None:
    with pytest.raises(DeadlockError) as caught:
        run_virtual(results_of, line(capacity=1).replace(collect=Stuck()), 1)
    message = str(caught.value)
    assert "every task waits and nothing can wake one" in message
    assert "line.collect" in message
    assert "graph 'line', step 1" in message
    table = {row.split()[0]: row.split(maxsplit=2)[1:] for row in message.splitlines()[2:]}
    assert table["prompts"] == ["3", "taken idle"]
    assert table["take->relay"] == ["1/1", "closed"]
    assert table["relay->collect"] == ["1/1", "1 waiting to send"]


def test_tables_of_steps_that_are_over_are_not_shown() -> None:
    async def main() -> None:
        async with line().open(range(9)) as run:
            await run.step()
            await anyio.sleep_forever()

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    assert "line" not in str(caught.value)


def test_leaving_the_loop_over_steps_early_leaves_nothing() -> None:
    async def main() -> None:
        async with line().open(range(9)) as run:
            async for result in run.steps(3):
                assert result == (0, 1, 2)
                break
            assert await run.step() == (3, 4, 5)
        assert not left_over()

    run_virtual(main)


@dataclass
class Recorder:
    """Keeps everything it is told."""

    items: list[tuple[int, str, object, float]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    steps: list[tuple[int, object, Mapping[str, Mapping[str, int]]]] = field(default_factory=list)

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        self.items.append((step, stage, item, at))

    def on_span(self, span: Span) -> None:
        self.spans.append(span)

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        self.steps.append((step, result, channels))


def test_observers_are_told_what_a_stage_says_of_a_result() -> None:
    class Saying(Relay):
        def observe(self, result: tuple[int, ...], step: Step, /) -> str | None:
            return f"made {result}" if 0 in result else None

    recorder = Recorder()

    async def main() -> None:
        async with line().replace(relay=Saying()).open(range(5), observers=[recorder]) as run:
            async for _ in run.steps(2):
                pass

    run_virtual(main)
    assert [item for item in recorder.items if "made" in str(item)] == [(0, "relay", "made (0, 1, 2)", 0.0)]


def test_observers_are_told_of_items_spans_and_steps() -> None:
    recorder = Recorder()

    async def main() -> None:
        async with line().replace(relay=Relay(1.0)).open(range(4), observers=[recorder]) as run:
            async for _ in run.steps(5):
                pass

    run_virtual(main)
    assert [at for step, stage, _, at in recorder.items if (step, stage) == (0, "relay")] == [1.0, 2.0, 3.0]
    assert (1, "collect", (3,), 4.0) in recorder.items
    spans = {(span.track, span.start, span.end) for span in recorder.spans}
    assert {("take", 0.0, 0.0), ("relay", 0.0, 3.0), ("step", 0.0, 3.0), ("step", 3.0, 4.0)} <= spans
    assert [(step, result) for step, result, _ in recorder.steps] == [(0, (0, 1, 2)), (1, (3,))]
    counters = recorder.steps[0][2]["take->relay"]
    assert counters["sent"] == counters["received"] == 3


@pytest.mark.parametrize("method", ["on_item", "on_span", "on_step"])
def test_an_observer_that_raises_is_named(method: str) -> None:
    class Clumsy(Recorder):
        def __getattribute__(self, name: str) -> object:
            if name == method:
                raise Boom("clumsy")
            return super().__getattribute__(name)

    async def main() -> None:
        async with line().open(range(9), observers=[Clumsy()]) as run:
            await run.step()

    with pytest.raises(Boom) as caught:
        run_virtual(main)
    (note, *_) = caught.value.__notes__
    assert note.startswith(f"raised by the observer Clumsy, which must not raise, at {__file__}:")


@dataclass(frozen=True)
class Tokens:
    """A measure."""

    count: int


@dataclass(frozen=True)
class Seconds:
    """Another."""

    spent: float


class Count:
    """Relays, and records how many items there were."""

    async def run(self, items: Receiver[int], *, out: Sender[int], step: Step) -> None:
        count = 0
        async for item in items:
            count += 1
            await out.send(item)
        step.record(Tokens(count))
        step.record(Seconds(0.5))


@dataclass
class Tell:
    """Results in the step's number and what was recorded in it."""

    observed: list[tuple[int, int]] = field(default_factory=list)

    async def run(self, items: Receiver[int], *, out: Sender[tuple[int, list[tuple[str, Tokens]]]], step: Step) -> None:
        if [item async for item in items]:
            await out.send((step.index, step.recorded(Tokens)))

    def observe(self, result: object, step: Step, /) -> None:
        self.observed.append((step.index, len(step.recorded(Seconds))))


def test_what_a_stage_records_in_a_step_is_known_by_its_class_and_in_no_other_step() -> None:
    tell = Tell()

    async def main() -> list[object]:
        g: GraphBuilder[int] = GraphBuilder("counted")
        counted = g.add("count", Count(), g.add("take", Take(), g.prompts))
        async with g.build(g.add("tell", tell, counted)).open(range(5)) as run:
            return [result async for result in run.steps(9)]

    assert run_virtual(main) == [(0, [("count", Tokens(3))]), (1, [("count", Tokens(2))])]
    assert tell.observed == [(0, 1), (1, 1)]


class Even:
    """Results in the items of a step if their sum is even; otherwise the step results in nothing."""

    async def run(self, items: Receiver[int], *, out: Sender[tuple[int, ...]]) -> None:
        got = tuple([item async for item in items])
        if got and sum(got) % 2 == 0:
            await out.send(got)


def test_a_step_that_results_in_nothing_does_not_end_the_run() -> None:
    async def main(count: int) -> tuple[list[tuple[int, ...]], bool, int]:
        async with line().replace(take=Take(1), collect=Even()).open(range(6)) as run:
            results = [result async for result in run.steps(count)]
            return results, run.ended, run.state_dict()["steps"]

    assert run_virtual(main, 99) == ([(0,), (2,), (4,)], True, 7)
    assert run_virtual(main, 2) == ([(0,)], False, 2)


def test_a_single_step_says_whether_it_was_past_the_end() -> None:
    async def main() -> list[tuple[tuple[int, ...] | None, bool]]:
        async with line().replace(take=Take(1), collect=Even()).open(range(2)) as run:
            return [(await run.step(), run.ended) for _ in range(3)]

    assert run_virtual(main) == [((0,), False), (None, False), (None, True)]


class Sum:
    """Results in the sum of its items, and of those of an input by name if it is connected."""

    async def run(
        self, items: Receiver[int], /, *, out: Sender[tuple[int, ...]], more: Receiver[int] | None = None
    ) -> None:
        total = sum([item async for item in items])
        if more is not None:
            total += 100 * sum([item async for item in more])
        if total:
            await out.send((total,))


class Text:
    """Sends text."""

    async def run(self, items: Receiver[int], *, out: Sender[str]) -> None:
        async for item in items:
            await out.send(str(item))


class Needy:
    """Wants an input by name."""

    async def run(self, items: Receiver[int], /, *, out: Sender[tuple[int, ...]], more: Receiver[int]) -> None:
        await Sum().run(items, out=out, more=more)


def summed(*, connected: bool) -> Graph[tuple[int, ...]]:
    g: GraphBuilder[int] = GraphBuilder("summed")
    taken = g.add("take", Take(), g.prompts)
    again = g.add("again", Relay(1.0), taken) if connected else None
    return g.build(g.add("sum", Sum(), taken, more=again))


def test_an_input_by_name_is_read_where_it_is_connected() -> None:
    async def main(graph: Graph[tuple[int, ...]]) -> list[tuple[int, ...]]:
        async with graph.open(range(5)) as run:
            return [result async for result in run.steps(2)]

    assert run_virtual(main, summed(connected=False)) == [(3,), (7,)]
    assert run_virtual(main, summed(connected=True)) == [(303,), (707,)]
    rebuilt = summed(connected=False).rebuild(again=(Relay(), "take"), sum=(Sum(), "take", {"more": "again"}))
    assert run_virtual(main, rebuilt) == [(303,), (707,)]


@pytest.mark.parametrize(
    ("stage", "named", "message"),
    [
        (Sum(), {"less": "again"}, "'sum' is given less='again', but the inputs by name of Sum.run are: more"),
        (Collect(), {"more": "again"}, "but the inputs by name of Collect.run are: none"),
        (Sum(), {"more": "text"}, "'sum' reads int from 'text', which sends str"),
        (Needy(), {}, "'sum' is not given 'more', which Needy.run wants by name: connect it with g.add('sum', ..., "),
        (Sum(), {"more": "take"}, "'sum' reads 'take' 2 times: once is enough"),
    ],
)
def test_an_input_by_name_that_does_not_fit_is_refused(stage: Sum, named: dict[str, str], message: str) -> None:
    g: GraphBuilder[int] = GraphBuilder("wrong")
    taken = g.add("take", Take(), g.prompts)
    streams: dict[str, Any] = {
        "take": taken,
        "again": g.add("again", Relay(), taken),
        "text": g.add("text", Text(), taken),
    }
    with pytest.raises(GraphError) as caught:
        g.build(g.add("sum", stage, taken, **{each: streams[name] for each, name in named.items()}))
    assert message in str(caught.value)


class Double:
    """Sends everything twice, at once."""

    async def run(self, numbers: Receiver[int], /, *, out: Sender[int]) -> None:
        async for number in numbers:
            await out.send(number)
            await out.send(number)


class Last:
    """Sends the last number when there are no more."""

    async def run(self, numbers: Receiver[int], /, *, out: Sender[int]) -> None:
        every = [number async for number in numbers]
        await out.send(every[-1])


async def snapshots(*times: float) -> list[Snapshot]:
    async def numbers() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await anyio.sleep(100)

    g: GraphBuilder[int] = GraphBuilder("three", capacity=1)
    doubled = g.add("double", Double(), g.prompts)
    graph = g.build(g.add("last", Last(), g.add("slow", Relay(1.0), doubled)))
    seen: list[Snapshot] = []
    async with graph.open(numbers()) as run:
        assert not run.snapshots()

        async def look() -> None:
            for at in times:
                await anyio.sleep(at - anyio.current_time())
                seen.extend(run.snapshots())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            await run.step()
        assert not run.snapshots()
    return seen


def test_a_snapshot_tells_waiting_for_an_item_from_waiting_for_room() -> None:
    early, late = run_virtual(snapshots, 0.5, 50.0)
    assert early.waits == (Wait("double", "slow", "room"), Wait("last", "slow", "an item"))
    assert early.working == ["slow"]
    assert early.message() == "double waits for slow to make room; last waits for slow; slow is at work"
    assert early.channels["double->slow"]["waiting_senders"] == 1
    assert late.message() == "double waits for prompts; slow waits for double; last waits for slow"
    assert late.doing("double") == "waits for prompts"
    assert "double->slow" in late.table


def test_a_stage_that_has_returned_does_nothing() -> None:
    assert Snapshot(0, ("reward",), (), {}, "").doing("generate") == ""
    assert Snapshot(0, ("reward",), (), {}, "").doing("reward") == "at work"


async def raise_it() -> None:
    """Raise what awaiting a task that one has cancelled oneself raises."""
    raise asyncio.CancelledError


async def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await anyio.sleep(1)


class EndingsImpatient(Relay):
    """A stage in which a cancellation arises that nobody outside has asked for."""

    def __init__(self, cancel: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._cancel = cancel

    async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
        async for _ in items:
            await self._cancel()


@pytest.mark.parametrize("cancel", [raise_it, cancel_own_task])
def test_a_stage_that_is_cancelled_from_within_ends_the_run_by_an_error(cancel: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(ProtocolError, match=r"nothing had cancelled this call|cancelled itself"):
        run_virtual(results_of, line().replace(relay=EndingsImpatient(cancel)), 3)


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def go_on() -> None:
        async with line().replace(relay=Relay(1000.0)).open(range(9)) as run:
            await run.step()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(go_on())
        await anyio.sleep(0.01)
        task.cancel()
    assert task.cancelled()
    with anyio.move_on_after(0.01) as scope:
        await go_on()
    assert scope.cancelled_caught


def test_errors_of_a_kind_are_named_once_with_their_number() -> None:
    class Many(Relay):
        async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
            with as_itself():
                async with anyio.create_task_group() as tasks:
                    for number in range(30):
                        tasks.start_soon(self.fail, number)
                    tasks.start_soon(self.stumble)

        async def fail(self, number: int) -> None:
            raise Boom(f"rollout {number} is lost")

        async def stumble(self) -> None:
            raise KeyError("gold")

    with pytest.raises(Boom, match="rollout 0 is lost") as caught:
        run_virtual(results_of, line().replace(relay=Many()), 1)
    assert caught.value.__notes__ == [
        "and 29 more like it",
        "and then KeyError: 'gold'",
        "in stage 'relay' of graph 'line', step 1",
    ]


def test_under_trio_a_message_says_what_to_run_it_with() -> None:
    async def main() -> None:
        async with line().open(range(9)):
            raise AssertionError

    with pytest.raises(OppoError, match=r"oppo runs on asyncio, uvloop included.*anyio\.run\(main\)"):
        trio.run(main)


def test_uvloop_runs_the_same_steps() -> None:
    assert uvloop.run(results_of(line(), 2)) == [(0, 1, 2), (3, 4, 5)]
