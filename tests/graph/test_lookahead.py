"""Steps that begin before earlier ones have ended: when they begin, how they fail, and when nothing is alive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import anyio
import pytest
from hypothesis import given, strategies as st

from oppo.errors import DeadlockError, GraphError
from oppo.graph import Graph, GraphBuilder, Receiver, Run, Sender, Step
from oppo.testing import run_virtual
from tests.graph.stages import Boom, Collect, Diary, Fail, Relay, Stuck, Take, line
from tests.kit.virtual import virtually

Seconds = Callable[[int], float]


@dataclass(eq=False)
class Phase:
    """Works for some seconds in each step, then passes everything on."""

    seconds: Seconds
    begun: list[tuple[int, float]] = field(default_factory=list)

    async def run(self, items: Receiver[int], *, out: Sender[int], step: Step) -> None:
        received = [item async for item in items]
        self.begun.append((step.index, anyio.current_time()))
        await anyio.sleep(self.seconds(step.index))
        for item in received:
            await out.send(item)


def phases(*seconds: float | Seconds) -> Graph[tuple[int, ...]]:
    """Return a chain of one stage for each duration, the first of which takes two items of the source a step."""
    g = GraphBuilder[int]("phases")
    stream = g.add("take", Take(2), g.prompts)
    for k, duration in enumerate(seconds):
        constant = duration if callable(duration) else lambda _, duration=duration: duration
        stream = g.add(f"phase{k}", Phase(constant), stream)
    return g.build(g.add("collect", Collect(), stream))


async def ends_of(graph: Graph[tuple[int, ...]], lookahead: int, count: int = 6) -> list[float]:
    async with graph.open(range(1000), lookahead=lookahead) as run:
        return [anyio.current_time() async for _ in run.steps(count)]


def durations(graph: Graph[tuple[int, ...]], lookahead: int) -> set[float]:
    """Return the seconds between the ends of steps, once the pipeline is full."""
    ends = run_virtual(ends_of, graph, lookahead)
    return {later - earlier for earlier, later in pairwise(ends[2:])}


def test_a_step_takes_the_sum_of_its_phases_without_lookahead_and_their_maximum_with_enough() -> None:
    decode, score, update = 4.0, 1.0, 3.0
    assert durations(phases(decode, score, update), 0) == {decode + score + update}
    assert durations(phases(decode, score + update), 1) == {max(decode, score + update)}
    assert durations(phases(decode, score, update), 2) == {max(decode, score, update)}
    assert durations(phases(2.0, 2.0, 2.0), 1) == {2.0, 4.0}, "two steps alive leave one of three phases idle"


@given(
    lookahead=st.integers(0, 4),
    seconds=st.lists(st.lists(st.integers(0, 5), min_size=7, max_size=7), min_size=1, max_size=3),
)
def test_results_do_not_depend_on_how_fast_the_stages_are(lookahead: int, seconds: list[list[int]]) -> None:
    graph = phases(*[lambda step, own=own: float(own[step]) for own in seconds])

    async def main() -> list[tuple[int, ...]]:
        async with graph.open(range(11), lookahead=lookahead) as run:
            return [result async for result in run.steps(7)]

    assert run_virtual(main) == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10,)]
    for k in range(len(seconds)):
        phase = graph.stage(f"phase{k}", Phase)
        steps, starts = zip(*phase.begun, strict=True)
        assert list(steps) == sorted(set(steps)), "a stage runs the steps in order"
        ends = [start + seconds[k][step] for step, start in phase.begun]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)), "and one at a time"


@given(lookahead=st.integers(0, 3), waits=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_a_step_begins_with_a_known_number_of_results_observed(lookahead: int, waits: list[int]) -> None:
    seen: list[tuple[int, int]] = []

    @dataclass(eq=False)
    class Watching(Take):
        observed: int = 0

        async def run(self, items: Receiver[int], *, out: Sender[int], step: Step) -> None:  # type: ignore[override]
            seen.append((step.index, step.observed))
            assert self.observed >= step.observed
            await super().run(items, out=out)

        def observe(self, result: tuple[int, ...], step: Step, /) -> None:
            self.observed += 1

    graph = phases(1.0, lambda step: float(waits[step])).replace(take=Watching(2))

    async def main() -> None:
        async with graph.open(range(1000), lookahead=lookahead) as run:
            async for _ in run.steps(8):
                await anyio.sleep(waits[len(seen) % 8])  # a caller who takes time of its own changes nothing

    run_virtual(main)
    assert seen == [(k, max(0, k - lookahead)) for k in range(8)]


@virtually
async def test_remaining_counts_the_steps_that_are_alive() -> None:
    diary = Diary()
    async with line().replace(relay=diary).open(range(99), lookahead=2) as run:
        assert [result async for result in run.steps(3)] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert [entry for entry in diary.lines if "run" in entry] == [
        f"run {k} as relay, {3 - k} to go, at 0.0" for k in range(3)
    ]


def test_an_error_ends_the_steps_behind_it_and_leaves_nothing() -> None:
    diary = Diary()
    g = GraphBuilder[int]("failing")
    taken = g.add("diary", diary, g.add("take", Take(), g.prompts))
    graph = g.build(g.add("collect", Collect(), g.add("fail", FailLater(0.0), taken)))

    async def main() -> list[tuple[int, ...]]:
        results: list[tuple[int, ...]] = []
        async with graph.open(range(99), lookahead=2) as run:
            with pytest.raises(Boom, match="step 1") as caught:
                await extend(results, run)
            assert any("in stage 'fail' of graph 'failing', step 2" in note for note in caught.value.__notes__)
            with pytest.raises(GraphError, match="step 2 did not come to its end"):
                await run.step()
        assert len(asyncio.all_tasks()) == 1
        return results

    assert run_virtual(main) == [(0, 1, 2)]
    assert diary.lines[-1] == "exit"


async def extend(results: list[tuple[int, ...]], run: Run[tuple[int, ...]]) -> None:
    async for result in run.steps(9):
        results.append(result)  # noqa: PERF401 - an error leaves those before it


@virtually
async def test_an_error_ahead_waits_until_the_steps_before_it_have_ended() -> None:
    graph = line().replace(take=TakeOrFail(), relay=Relay(1.0))
    async with graph.open(range(99), lookahead=1) as run:
        assert await run.step() == (0, 1, 2)
        assert anyio.current_time() == 3.0
        with pytest.raises(Boom, match="nothing for step 1"):
            await run.step()
        assert anyio.current_time() == 3.0


@dataclass(eq=False)
class TakeOrFail(Take):
    """Fails in step 1."""

    async def run(self, items: Receiver[int], *, out: Sender[int], step: Step) -> None:  # type: ignore[override]
        if step.index == 1:
            raise Boom("nothing for step 1")
        await super().run(items, out=out)


def test_an_error_of_a_step_that_nobody_asks_for_is_raised_when_the_run_is_left() -> None:
    async def main() -> None:
        async with line().replace(take=TakeOrFail()).open(range(99), lookahead=1) as run:
            await run.step()

    with pytest.raises(Boom, match="nothing for step 1"):
        run_virtual(main)


def test_an_error_of_the_caller_comes_before_those_of_steps_ahead() -> None:
    async def main() -> None:
        async with line().replace(take=TakeOrFail()).open(range(99), lookahead=1) as run:
            await run.step()
            raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="the caller's own") as caught:
        run_virtual(main)
    assert "nothing for step 1" in str(caught.value.__notes__)


@virtually
async def test_cancellation_ends_every_step() -> None:
    with anyio.move_on_after(2.5) as scope:
        async with line().replace(relay=Relay(1.0)).open(range(99), lookahead=3) as run:
            async for _ in run.steps(9):
                pass
    assert scope.cancelled_caught
    assert anyio.current_time() == 2.5
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_scope_within_the_run_catches_its_own_cancellation(lookahead: int) -> None:
    """A watchdog and a second Ctrl-C end a run by one, and raise an error for it."""

    async def main() -> float:
        async with line().replace(relay=Relay(1.0)).open(range(99), lookahead=lookahead) as run:
            with anyio.move_on_after(2.5) as scope:
                async for _ in run.steps(9):
                    pass
            assert scope.cancelled_caught
            with pytest.raises(GraphError, match="did not come to its end"):
                await run.step()
            return anyio.current_time()

    assert run_virtual(main) == 2.5


@virtually
async def test_leaving_early_discards_the_steps_ahead() -> None:
    async with line().replace(relay=Relay(1.0)).open(range(99), lookahead=2) as run:
        async for result in run.steps(9):
            assert result == (0, 1, 2)
            assert run.alive == [1, 2]
            break
    assert len(asyncio.all_tasks()) == 1


def test_the_data_may_end_while_steps_are_alive() -> None:
    async def main() -> list[tuple[int, ...]]:
        async with line().open(range(7), lookahead=3) as run:
            results = [result async for result in run.steps(20)]
            assert run.ended
            assert run.alive == []
            assert run.state_dict()["steps"] == 7, "the steps that were alive found nothing either"
            return results

    assert run_virtual(main) == [(0, 1, 2), (3, 4, 5), (6,)]


@virtually
async def test_the_state_is_given_when_nothing_is_alive() -> None:
    async with line().open(range(99), lookahead=2) as run:
        states = []
        async for _ in run.steps(7, drain_after=lambda index: index % 3 == 2):
            if not run.alive:
                states.append(run.state_dict()["steps"])
            else:
                with pytest.raises(GraphError, match="have begun; drain the run first"):
                    run.state_dict()
        assert states == [3, 6, 7]


@virtually
async def test_a_drain_that_nobody_planned_ends_what_is_alive_and_then_goes_on() -> None:
    async with line().open(range(99), lookahead=2) as run:
        await run.step()
        run.drain()
        alive = []
        for _ in range(4):
            await run.step()
            alive.append(list(run.alive))
        assert alive == [[2], [], [4, 5], [5, 6]]


def test_a_deadlock_names_every_step_that_is_alive() -> None:
    async def main() -> None:
        async with line().replace(collect=Stuck()).open(range(99), lookahead=1) as run:
            await run.step()

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    assert "graph 'line', step 1" in str(caught.value)
    assert "graph 'line', step 2" in str(caught.value)


@virtually
async def test_snapshots_are_of_each_step_that_is_alive() -> None:
    graph = phases(2.0, 3.0)
    async with graph.open(range(99), lookahead=1) as run, anyio.create_task_group() as tasks:
        tasks.start_soon(run.step)
        await anyio.sleep(3.0)
        assert [(each.step, each.working) for each in run.snapshots()] == [(1, ["phase1"]), (2, ["phase0"])]


@dataclass(eq=False)
class Syncing:
    """Waits, at the end of its work, until ``phase0`` of the later steps is over, and notes when that was."""

    seconds: float
    ended: list[tuple[int, float]] = field(default_factory=list)

    async def run(self, items: Receiver[int], *, out: Sender[tuple[int, ...]], step: Step) -> None:
        received = tuple([item async for item in items])
        await anyio.sleep(self.seconds)
        await step.later("phase0")
        self.ended.append((step.index, anyio.current_time()))
        if received:
            await out.send(received)


@given(
    lookahead=st.integers(0, 3),
    count=st.integers(1, 6),
    body=st.integers(0, 9),
    fast=st.sampled_from([0.0, 1.0, 7.0]),
)
@virtually
async def test_a_stage_can_wait_for_the_later_steps_whatever_the_caller_does(
    lookahead: int, count: int, body: int, fast: float
) -> None:
    graph = phases(2.0).replace(collect=Syncing(fast))
    async with graph.open(range(1000), lookahead=lookahead) as run:
        async for _ in run.steps(count):
            await anyio.sleep(body)
    begun = dict(graph.stage("phase0", Phase).begun)
    ended = dict(graph.stage("collect", Syncing).ended)
    for step, at in ended.items():
        last = min(step + lookahead, count - 1)
        assert begun[last] + 2.0 <= at, "the last step that may begin before the end of this one has passed"
        assert last + 1 not in begun or at <= begun[last + 1], "and the next one has not begun"


@virtually
async def test_a_step_does_not_wait_for_a_later_one_that_has_failed() -> None:
    graph = phases(2.0, 1.0).replace(phase0=FailLater(2.0), collect=Syncing(1.0))
    async with graph.open(range(1000), lookahead=2) as run:
        assert await run.step() == (0, 1)
        with pytest.raises(Boom, match="step 1"):
            await run.step()


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.5])
def test_when_a_later_step_has_failed_nothing_goes_on_in_those_behind_it(seconds: float) -> None:
    """A stage of step 0 waits for ``phase0`` of steps 1 and 2; step 1 fails while step 2 is in it."""
    working: list[int] = []

    @dataclass(eq=False)
    class Working(Phase):
        async def run(self, items: Receiver[int], *, out: Sender[int], step: Step) -> None:
            working.append(step.index)
            try:
                await super().run(items, out=out, step=step)
            finally:
                working.remove(step.index)

    @dataclass(eq=False)
    class Alone(Syncing):
        async def run(self, items: Receiver[int], *, out: Sender[tuple[int, ...]], step: Step) -> None:
            await super().run(items, out=out, step=step)
            assert not working, f"step {step.index} went on beside phase0 of {working}"

    graph = phases(2.0, 1.0, 1.0).replace(phase0=Working(lambda _: 2.0), phase1=FailLater(1.0), collect=Alone(seconds))

    async def main() -> None:
        async with graph.open(range(1000), lookahead=2) as run:
            assert await run.step() == (0, 1)
            with pytest.raises(Boom, match="step 1"):
                await run.step()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main)


def test_no_step_begins_while_those_behind_one_that_has_failed_end_slowly() -> None:
    """Step 2 fails at 7 s, step 3 ends at 12 s, and step 0, which waits for none, at 10 s, when step 4 would begin."""

    @dataclass(eq=False)
    class Slow(Phase):
        async def run(self, items: Receiver[int], *, out: Sender[int], step: Step) -> None:
            try:
                await super().run(items, out=out, step=step)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(5.0 if step.index == 3 else 0.0)

    @dataclass(eq=False)
    class FirstOfAll(Syncing):
        async def run(self, items: Receiver[int], *, out: Sender[tuple[int, ...]], step: Step) -> None:
            if step.index:
                await super().run(items, out=out, step=step)
            else:
                received = tuple([item async for item in items])
                await anyio.sleep(self.seconds)
                await out.send(received)

    graph = phases(2.0, 1.0).replace(
        phase0=Slow(lambda _: 2.0), phase1=FailLater(1.0, index=2), collect=FirstOfAll(7.0)
    )

    async def main() -> None:
        async with graph.open(range(1000), lookahead=3) as run:
            assert [await run.step(), await run.step()] == [(0, 1), (2, 3)]
            with pytest.raises(Boom, match="step 2"):
                await run.step()
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main)
    assert [step for step, _ in graph.stage("phase0", Phase).begun] == [0, 1, 2, 3]


@virtually
async def test_no_step_begins_behind_one_that_has_failed() -> None:
    """Step 2 fails while step 0 is alive, so that step 1 has none to wait for."""
    graph = phases(2.0, 1.0).replace(phase1=FailLater(1.0, index=2), collect=Syncing(9.0))
    async with graph.open(range(1000), lookahead=2) as run:
        assert [await run.step(), await run.step()] == [(0, 1), (2, 3)]
        with pytest.raises(Boom, match="step 2"):
            await run.step()
    assert len(asyncio.all_tasks()) == 1
    assert [step for step, _ in graph.stage("phase0", Phase).begun] == [0, 1, 2]


@dataclass(eq=False)
class FailLater:
    """Fails in one step."""

    seconds: float
    index: int = 1

    async def run(self, items: Receiver[int], *, out: Sender[int], step: Step) -> None:
        received = [item async for item in items]
        await anyio.sleep(self.seconds)
        if step.index == self.index:
            raise Boom(f"step {self.index}")
        for item in received:
            await out.send(item)


def test_a_stage_can_wait_for_the_step_before() -> None:
    @dataclass(eq=False)
    class AfterUpdate(Phase):
        async def run(self, items: Receiver[int], *, out: Sender[int], step: Step) -> None:
            await step.previous("phase2")
            await super().run(items, out=out, step=step)

    graph = phases(1.0, 1.0, 5.0).replace(phase1=AfterUpdate(lambda _: 1.0))
    assert run_virtual(ends_of, graph, 2, 3) == [7.0, 13.0, 19.0]


def test_waiting_for_a_stage_that_is_not_there_is_refused() -> None:
    @dataclass(eq=False)
    class Lost(Phase):
        async def run(self, items: Receiver[int], *, out: Sender[int], step: Step) -> None:
            await step.later("nowhere")

    with pytest.raises(GraphError, match="waits for 'nowhere' of another step, but the stages are 'take'"):
        run_virtual(ends_of, phases(1.0).replace(phase0=Lost(lambda _: 1.0)), 0)


@pytest.mark.parametrize("lookahead", [-1, 1.0, True])
def test_a_lookahead_is_a_whole_number(lookahead: int) -> None:
    with pytest.raises(GraphError, match="lookahead must be"):
        line().open([], lookahead=lookahead)


def test_a_step_can_be_failed_while_another_fails() -> None:
    async def main() -> None:
        graph = line().replace(take=TakeOrFail(), relay=Fail(1.0))
        async with graph.open(range(99), lookahead=1) as run:
            await run.step()

    with pytest.raises(Boom, match="bad item 0") as caught:
        run_virtual(main)
    assert "nothing for step 1" in str(caught.value.__notes__)
