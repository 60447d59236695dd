"""What a stage learns of its step, what it records of it, and steps that result in nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from oppo.errors import GraphError
from oppo.graph import Graph, GraphBuilder, Receiver, Sender, Step
from oppo.testing import run_virtual
from tests.graph.stages import Collect, Relay, Take, line


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


def test_an_input_by_name_is_drawn_like_others() -> None:
    graph = summed(connected=True)
    assert "    again --> sum" in graph.mermaid()
    assert "take, more=again" in graph.table()


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
        g.build(g.add("sum", stage, taken, capacity=None, **{each: streams[name] for each, name in named.items()}))
    assert message in str(caught.value)
