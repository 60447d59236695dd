"""Random graphs under random schedules: nothing is lost, doubled or reordered, and nothing is left behind.

Items are stretches of numbers in lanes. A stage passes each on to its readers with its own name added to the lane, so
that every path through the graph is a lane of its own, and every reader can check that each lane arrives without a gap.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import pytest
from hypothesis import given, settings, strategies as st

from oppo.graph import AnyStage, Graph, GraphBuilder, Receiver, Sender
from oppo.testing.virtual_time import run_virtual
from tests.graph.stages import Boom

Lane = tuple[str, ...]

pytestmark = pytest.mark.schedules

SCHEDULES = 3 * settings().max_examples
"""The engine is what everything stands on: it gets more than the share of one property."""


@dataclass(frozen=True)
class Stretch:
    """Numbers ``start .. stop`` of one lane."""

    lane: Lane
    start: int
    stop: int


def merge(queued: Stretch, new: Stretch) -> Stretch | None:
    joined = queued.lane == new.lane and queued.stop == new.start
    return Stretch(new.lane, queued.start, new.stop) if joined else None


def lane_of(item: Stretch) -> Lane:
    return item.lane


@dataclass
class Place:
    """How one stage behaves."""

    inputs: tuple[int, ...]
    pace: float
    drains: bool
    capacity: int


@dataclass
class Plan:
    """A graph, a schedule, and what goes wrong in it."""

    places: list[Place]
    lanes: int
    per_step: int
    capacity: int
    source_pace: float
    fails: tuple[int, int] | None
    cancelled_at: float | None

    @property
    def sinks(self) -> list[int]:
        read = {number for place in self.places for number in place.inputs}
        return [number for number in range(len(self.places)) if number not in read]

    def paths(self, number: int) -> list[Lane]:
        """Return how often, and by which way, place ``number`` gets each item."""
        if number < 0:
            return [()]
        return [(*path, f"s{number}") for source in self.places[number].inputs for path in self.paths(source)]


@dataclass(eq=False)
class First:
    """Takes ``count`` numbers in each step and deals them to the lanes."""

    plan: Plan

    async def run(self, numbers: Receiver[int], *, out: Sender[Stretch]) -> None:
        for _ in range(self.plan.per_step):
            async for number in numbers:
                await anyio.sleep(self.plan.source_pace)
                position, lane = divmod(number, self.plan.lanes)
                await out.send(Stretch((f"l{lane}",), position, position + 1))
                break


@dataclass(eq=False)
class Pass:
    """Reads every input in a task of its own and passes everything on, checking that no lane has a gap."""

    name: str
    place: Place
    fails_at: int | None = None
    reached: Counter[Lane] = field(default_factory=Counter)
    passed: int = 0

    async def run(self, *inputs: Receiver[Stretch], out: Sender[Stretch]) -> None:
        async with anyio.create_task_group() as tasks:
            for receiver in inputs:
                tasks.start_soon(self.read, receiver, out)

    async def read(self, receiver: Receiver[Stretch], out: Sender[Stretch]) -> None:
        if not self.place.drains:
            async for item in receiver:
                await self.take(item, out)
        else:
            while items := await receiver.drain():
                for item in items:
                    await self.take(item, out)

    async def take(self, item: Stretch, out: Sender[Stretch]) -> None:
        assert item.start == self.reached[item.lane], "lost, doubled or reordered"
        self.reached[item.lane] = item.stop
        self.passed += 1
        if self.passed == self.fails_at:
            raise Boom(self.name)
        await anyio.sleep(self.place.pace)
        await out.send(Stretch((*item.lane, self.name), item.start, item.stop))


@dataclass(eq=False)
class Last:
    """Results in how far each lane has come."""

    reached: Counter[Lane] = field(default_factory=Counter)

    async def run(self, *inputs: Receiver[Stretch], out: Sender[Mapping[Lane, int]]) -> None:
        async with anyio.create_task_group() as tasks:
            for receiver in inputs:
                tasks.start_soon(self.read, receiver)
        await out.send(dict(self.reached))

    async def read(self, receiver: Receiver[Stretch]) -> None:
        async for item in receiver:
            assert item.start == self.reached[item.lane], "lost, doubled or reordered"
            self.reached[item.lane] = item.stop


def graph_of(plan: Plan) -> Graph[Mapping[Lane, int]]:
    g = GraphBuilder[int]("random", capacity=plan.capacity, merge=merge, key=lane_of)
    first = g.add("first", First(plan), g.prompts)
    nodes: dict[str, tuple[AnyStage, *tuple[str, ...]]] = {}
    for number, place in enumerate(plan.places):
        fails_at = plan.fails[1] if plan.fails and plan.fails[0] == number else None
        inputs = ["first" if source < 0 else f"s{source}" for source in place.inputs]
        nodes[f"s{number}"] = (Pass(f"s{number}", place, fails_at), *inputs)
    nodes["last"] = (Last(), *(f"s{number}" for number in plan.sinks))
    return g.build(g.add("last", Last(), first)).rebuild(without=(), **nodes)


PACE = st.sampled_from((0.0, 0.0, 0.1, 0.3, 1.0, 2.0))
CAPACITY = st.sampled_from((1, 2, 5))


@st.composite
def plans(draw: st.DrawFn, *, fails: bool = False, cancelled: bool = False) -> Plan:
    count = draw(st.integers(1, 5))
    places = [
        Place(
            inputs=tuple(sorted(draw(st.sets(st.integers(-1, number - 1), min_size=1, max_size=2)))),
            pace=draw(PACE),
            drains=draw(st.booleans()),
            capacity=draw(CAPACITY),
        )
        for number in range(count)
    ]
    return Plan(
        places=places,
        lanes=draw(st.integers(1, 3)),
        per_step=draw(st.integers(0, 12)),
        capacity=draw(CAPACITY),
        source_pace=draw(PACE),
        fails=(draw(st.integers(0, count - 1)), draw(st.integers(1, 12))) if fails else None,
        cancelled_at=draw(st.floats(0, 40)) if cancelled else None,
    )


STEPS = 2


async def played(plan: Plan) -> list[Mapping[Lane, int]]:
    me = asyncio.current_task()
    results: list[Mapping[Lane, int]] = []
    try:
        with anyio.CancelScope(deadline=float("inf") if plan.cancelled_at is None else plan.cancelled_at):
            async with graph_of(plan).open(range(1_000)) as run:
                results += [result async for result in run.steps(STEPS)]
    finally:
        assert asyncio.all_tasks() == {me}
    return results


def expected(plan: Plan, steps: int) -> Mapping[Lane, int]:
    count = Counter((f"l{number % plan.lanes}",) for number in range(steps * plan.per_step))
    return {(*lane, *path): n for lane, n in count.items() for sink in plan.sinks for path in plan.paths(sink)}


def check_results(plan: Plan, results: list[Mapping[Lane, int]]) -> None:
    assert results == [expected(plan, step + 1) for step in range(len(results))]


@settings(max_examples=SCHEDULES)
@given(plans())
def test_nothing_is_lost_doubled_or_reordered(plan: Plan) -> None:
    results = run_virtual(played, plan)
    check_results(plan, results)
    assert len(results) == STEPS


@settings(max_examples=3 * SCHEDULES)
@given(plans(fails=True) | plans(cancelled=True) | plans(fails=True, cancelled=True))
def test_an_error_surfaces_as_itself_and_like_a_cancellation_at_any_time_leaves_nothing(plan: Plan) -> None:
    try:
        results = run_virtual(played, plan)
    except Boom as boom:
        error = boom
    else:
        check_results(plan, results)
        return
    assert plan.fails is not None
    name = f"s{plan.fails[0]}"
    assert error.args == (name,)
    (note,) = error.__notes__
    assert note.startswith(f"in stage {name!r} of graph 'random', step ")
