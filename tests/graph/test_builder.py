"""Every wiring fault has its message, and the good graphs look as they should."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pytest

from oppo.errors import GraphError
from oppo.graph import Graph, GraphBuilder, Receiver, Sender, Stream
from oppo.graph.engine import Source
from oppo.graph.topology import Ports
from oppo.testing import run_virtual
from tests.graph.stages import Collect, Diary, Relay, Take, line

if TYPE_CHECKING:
    from decimal import Decimal

T = TypeVar("T")
Builder = GraphBuilder[int]


class Add:
    """Reads two streams."""

    async def run(self, left: Receiver[int], right: Receiver[float], *, out: Sender[float]) -> None: ...


class Count:
    """Reads words."""

    async def run(self, words: Receiver[str | bytes], *, out: Sender[int]) -> None: ...


class Any0:
    """Reads anything, any number of times."""

    async def run(self, *inputs: Receiver[Any], out: Sender[int]) -> None: ...


class Boxed(Generic[T]):
    """Says nothing nominal of its items, and names a class that is imported for type checkers only."""

    async def run(self, items: Receiver[T], *, out: Sender[Decimal]) -> None: ...


class NotAsync:
    def run(self, items: Receiver[int], *, out: Sender[int]) -> None: ...


class NoOut:
    async def run(self, items: Receiver[int]) -> None: ...


class Demanding:
    async def run(self, items: Receiver[int], *, out: Sender[int], mood: str) -> None: ...


def broken(g: Builder, taken: Stream[object], name: str, stage: object, *more: object) -> Stream[Any]:
    add: Callable[..., Stream[Any]] = g.add
    return add(name, stage, taken, *more)


def two_builders(g: Builder, taken: Stream[int]) -> Stream[Any]:
    return g.add("relay", Relay(), GraphBuilder[int]("other").add("far", Relay(), taken))


def same_name(g: Builder, taken: Stream[int]) -> Stream[Any]:
    return g.add("take", Relay(), taken)


def unread(g: Builder, taken: Stream[int]) -> Stream[Any]:
    g.add("relay", Relay(), taken)
    return g.add("collect", Collect(), taken)


def greedy(g: Builder, taken: Stream[int]) -> Stream[Any]:
    return g.add("sum", Add(), taken, g.add("again", Take(), g.prompts))


def shared_diary(g: Builder, taken: Stream[int]) -> Stream[Any]:
    diary = Diary()
    return g.add("second", diary, g.add("first", diary, taken))


FAULTS: Sequence[tuple[Callable[[Builder, Stream[int]], Stream[Any]], str]] = [
    (two_builders, "'relay' reads 'other.far', which is not in this graph: use what its g.add() returned"),
    (same_name, "2 stages are called 'take': give each its own name"),
    (unread, "no stage reads 'relay': connect it, remove it, or make it the result"),
    (greedy, "'prompts' is read by 'take' and 'again': only one stage may take from it"),
    (shared_diary, "'first' and 'second' are the same object, which keeps state: make two"),
    (lambda g, t: g.add("without", Relay(), t), "no stage may be called 'without': that name is taken"),
    (
        lambda g, t: g.add("my relay", Relay(), t),
        "'my relay' is no name for a stage: use letters, digits and underscores, as in a keyword",
    ),
    (lambda g, t: g.add("sum", Add(), t, t), "'sum' reads 'take' 2 times: once is enough"),
    (lambda g, t: broken(g, t, "sum", Add()), "'sum' is given 1 input (take), but Add.run takes 2 (left, right)"),
    (lambda g, t: broken(g, t, "count", Count()), "'count' reads bytes | str from 'take', which sends int"),
    (lambda g, t: broken(g, t, "relay", Relay), "'relay' is the class Relay, not an object of it: write Relay(...)"),
    (
        lambda g, t: broken(g, t, "relay", 7),
        "'relay' is no stage: int has no method `async def run(self, ..., *, out)`",
    ),
    (
        lambda g, t: broken(g, t, "relay", NotAsync()),
        "'relay' is no stage: NotAsync.run must be `async def` and send its items to `out`",
    ),
    (
        lambda g, t: broken(g, t, "relay", NoOut()),
        "'relay' is no stage: NoOut.run takes no keyword `out: Sender[...]` to send its items to",
    ),
    (
        lambda g, t: broken(g, t, "relay", Demanding()),
        (
            "'relay' is not given 'mood', which Demanding.run wants by name: connect it with "
            "g.add('relay', ..., mood=stream)"
        ),
    ),
    (
        lambda g, t: broken(g, t, "any", Any0(), 42),
        "'any' reads '42', which is not in this graph: use what its g.add() returned",
    ),
    (
        lambda g, t: g.prompts,
        "the result is 'prompts', which is the source: build() takes the output of a stage",
    ),
    (
        lambda g, t: GraphBuilder[int]("other").prompts,
        "the result is 'other.prompts', which is not in this graph: build() takes the output of a stage",
    ),
]


@pytest.mark.parametrize(("wire", "message"), FAULTS)
def test_each_fault_has_its_message(wire: Callable[[Builder, Stream[int]], Stream[Any]], message: str) -> None:
    g = GraphBuilder[int]("test")
    with pytest.raises(GraphError) as caught:
        g.build(wire(g, g.add("take", Take(), g.prompts)))
    assert f"  - {message}" in str(caught.value).splitlines()


def test_a_stage_that_reads_nothing_is_a_fault() -> None:
    g = GraphBuilder[int]("test")
    add: Callable[..., Stream[int]] = g.add
    with pytest.raises(GraphError, match="'any' reads nothing: give it at least one stream"):
        g.build(add("any", Any0()))


@pytest.mark.parametrize("capacity", [0, float("nan")])
def test_a_channel_holds_at_least_one_item(capacity: int) -> None:
    g: GraphBuilder[int] = GraphBuilder("narrow", capacity=capacity)
    with pytest.raises(GraphError, match=f"it has a capacity of {capacity}: a channel holds at least 1 item"):
        g.build(g.add("relay", Relay(), g.prompts))


def test_a_graph_without_stages_is_a_fault() -> None:
    g = GraphBuilder[int]("test")
    with pytest.raises(GraphError, match="it has no stage"):
        g.build(g.prompts)


def test_all_faults_are_said_at_once() -> None:
    g = GraphBuilder[int]("test")
    taken = g.add("take", Take(), g.prompts)
    g.add("a b", Relay(), taken)
    with pytest.raises(GraphError) as caught:
        g.build(broken(g, taken, "count", Count()))
    title, *faults = str(caught.value).splitlines()
    assert title == "graph 'test' cannot be built:"
    assert len(faults) == 3


def test_what_annotations_do_not_say_is_not_held_against_them() -> None:
    assert Ports.of(Boxed[int]()).reads == (None,)
    assert Ports.of(Boxed[int]()).sends is None
    g = GraphBuilder[int]("test")
    boxed = g.add("boxed", Boxed[int](), g.prompts)
    broken(g, boxed, "count", Count())
    assert g.build(g.add("any", Any0(), boxed, Stream("count", g))).nodes.keys() == {"boxed", "count", "any"}


def test_a_subclass_may_be_read_as_its_class() -> None:
    class Flag(Relay):
        async def run(self, items: Receiver[int], *, out: Sender[bool]) -> None: ...

    g = GraphBuilder[int]("test")
    g.build(g.add("relay", Relay(), g.add("flag", Flag(), g.prompts)))


def test_replace_swaps_a_stage_and_leaves_the_graph_as_it_was() -> None:
    graph, slow = line(), Relay(2.0)
    other = graph.replace(relay=slow)
    assert other.nodes["relay"].stage is slow
    assert graph.nodes["relay"].stage is not slow
    assert other.nodes["relay"].inputs == ("take",)


def test_replace_wants_the_same_ports() -> None:
    with pytest.raises(GraphError, match=r"'relay' is given 1 input \(take\), but Add.run takes 2"):
        line().replace(relay=Add())
    with pytest.raises(GraphError, match=r"'relay' reads bytes | str from 'take', which sends int"):
        line().replace(relay=Count())
    with pytest.raises(GraphError, match="'rely' cannot be replaced: the stages are 'take', 'relay', 'collect'"):
        line().replace(rely=Relay())


def test_rebuild_removes_rewires_and_drops_what_nobody_needs() -> None:
    graph = line().rebuild(collect=(Collect(), "take"))
    assert list(graph.nodes) == ["take", "collect"]
    graph = graph.rebuild(collect=(Collect(), "late"), late=(Relay(), "take"))
    assert list(graph.nodes) == ["take", "late", "collect"]
    assert list(graph.rebuild(without=["late"], collect=(Collect(), "take")).nodes) == ["take", "collect"]


def test_rebuild_says_what_is_wrong() -> None:
    with pytest.raises(GraphError, match="'collect' reads 'relay', which is not in this graph"):
        line().rebuild(without=["relay"])
    with pytest.raises(GraphError, match="'rely' cannot be removed"):
        line().rebuild(without=["rely"])
    with pytest.raises(GraphError, match="no stage reads 'extra'"):
        line().rebuild(extra=(Relay(), "take"))
    with pytest.raises(GraphError, match="is a cycle: no stage may wait for itself"):
        line().rebuild(relay=(Any0(), "take", "late"), late=(Relay(), "relay"))
    with pytest.raises(GraphError, match=r"'relay' is rebuilt from its stage and its inputs, .*; got Relay\("):
        line().rebuild(relay=Relay())  # type: ignore[arg-type] # wrong on purpose


def test_what_is_no_iterable_holds_no_prompts() -> None:
    with pytest.raises(GraphError, match=r"prompts from an iterable, async or not; got None \(NoneType\)"):
        line().open(None)  # type: ignore[arg-type] # wrong on purpose


def test_a_sequence_by_its_items_alone_holds_prompts() -> None:
    class Rows:
        def __getitem__(self, at: int) -> str:
            return "ab"[at]

    source = Source(Rows())  # type: ignore[arg-type] # but iter() takes it
    assert [run_virtual(source.drain) for _ in range(3)] == [["a"], ["b"], []]


def test_a_graph_shows_who_waits_for_whom() -> None:
    assert line().table().splitlines() == [
        "stage    class    reads    read by",
        "take     Take     prompts  relay",
        "relay    Relay    take     collect",
        "collect  Collect  relay    result",
    ]


def test_a_graph_is_drawn_for_mermaid() -> None:
    assert line().mermaid().splitlines() == [
        "flowchart LR",
        "    prompts([prompts])",
        '    take["take<br/>Take"]',
        '    relay["relay<br/>Relay"]',
        '    collect["collect<br/>Collect"]',
        "    prompts --> take",
        "    take --> relay",
        "    relay --> collect",
        "    collect --> result([result])",
    ]


def test_the_example_of_the_builder_runs() -> None:
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(GraphBuilder, globs={"GraphBuilder": GraphBuilder})
    assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0

    async def main() -> int | None:
        graph: Graph[int] = example.globs["graph"]
        async with graph.open([1, 2, 3]) as run:
            return await run.step()

    assert run_virtual(main) == 12
