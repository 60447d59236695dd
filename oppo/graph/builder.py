"""Declaring a graph: typed handles for streams, so that a wrong wire is an error of the type checker first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

from oppo.graph.channel import Key, Merge
from oppo.graph.graph import Graph
from oppo.graph.stage import AnyStage, Stage1, Stage2, Stage3, Stage4
from oppo.graph.topology import SOURCE, Node, Topology

T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
O = TypeVar("O")  # noqa: E741 - O for output, as in the stage protocols
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Stream(Generic[T_co]):
    """The output of a stage while a graph is being declared; made by :class:`GraphBuilder` only."""

    name: str
    builder: GraphBuilder[Any] = field(repr=False)


class GraphBuilder(Generic[S]):
    """Collects stages and their wires, and makes a :class:`Graph` of them.

    A handle must exist before it is used, so what is declared has no circles. What else can be wrong is said by
    :meth:`build`, all of it at once.

    Args:
        name: of the graph, shown in errors and task names.
        capacity: bound of a channel where :meth:`add` names none, in items.
        merge: makes one item of two where a channel is full; asked for every edge, so it answers ``None`` for items
            it does not know.
        key: tells which items keep their order among themselves; see :class:`oppo.graph.Channel`.

    Example:
        >>> from oppo.graph import Receiver, Sender
        >>> class Double:
        ...     async def run(self, numbers: Receiver[int], *, out: Sender[int]) -> None:
        ...         async for number in numbers:
        ...             await out.send(2 * number)
        >>> class Sum:
        ...     async def run(self, numbers: Receiver[int], *, out: Sender[int]) -> None:
        ...         await out.send(sum([number async for number in numbers]))
        >>> g = GraphBuilder[int]("example")
        >>> doubled = g.add("double", Double(), g.prompts)
        >>> graph = g.build(g.add("sum", Sum(), doubled))
    """

    def __init__(self, name: str, *, capacity: int = 16, merge: Merge | None = None, key: Key | None = None) -> None:
        self.name = name
        self._capacity = capacity
        self._merge = merge
        self._key = key
        self._nodes: list[Node] = []

    @property
    def prompts(self) -> Stream[S]:
        """What :meth:`Graph.open` is given; one stage takes from it, at its own pace."""
        return Stream(SOURCE, self)

    @overload
    def add(
        self,
        name: str,
        stage: Stage1[A, O],
        a: Stream[A],
        /,
        *,
        capacity: int | None = None,
        **named: Stream[Any] | None,
    ) -> Stream[O]: ...
    @overload
    def add(
        self,
        name: str,
        stage: Stage2[A, B, O],
        a: Stream[A],
        b: Stream[B],
        /,
        *,
        capacity: int | None = None,
        **named: Stream[Any] | None,
    ) -> Stream[O]: ...
    @overload
    def add(
        self,
        name: str,
        stage: Stage3[A, B, C, O],
        a: Stream[A],
        b: Stream[B],
        c: Stream[C],
        /,
        *,
        capacity: int | None = None,
        **named: Stream[Any] | None,
    ) -> Stream[O]: ...
    @overload
    def add(
        self,
        name: str,
        stage: Stage4[A, B, C, D, O],
        a: Stream[A],
        b: Stream[B],
        c: Stream[C],
        d: Stream[D],
        /,
        *,
        capacity: int | None = None,
        **named: Stream[Any] | None,
    ) -> Stream[O]: ...
    def add(
        self,
        name: str,
        stage: AnyStage,
        /,
        *streams: Stream[Any],
        capacity: int | None = None,
        **named: Stream[Any] | None,
    ) -> Stream[Any]:
        """Add ``stage`` under ``name``, reading ``streams``, and return the handle of its output.

        Args:
            name: an identifier, unique in the graph.
            stage: any object with ``async def run(self, *inputs: Receiver[...], out: Sender[...])``.
            streams: one for each input of ``run``, in order.
            capacity: bound of each channel it reads, in items; the builder's where ``None``.
            named: further inputs, by the keywords of ``run`` that take them, or ``None`` where one is not connected;
                what they carry is checked by :meth:`build`.
        """
        inputs = tuple(self._name_of(stream) for stream in streams)
        besides = {keyword: self._name_of(stream) for keyword, stream in named.items() if stream is not None}
        self._nodes.append(Node(name, stage, inputs, self._capacity if capacity is None else capacity, besides))
        return Stream(name, self)

    def build(self, result: Stream[O]) -> Graph[O]:
        """Return the graph whose steps result in what ``result`` carries: exactly one item a step.

        Raises:
            GraphError: the wiring is wrong; one line for each fault.
        """
        topology = Topology(self.name, tuple(self._nodes), self._name_of(result), self._merge, self._key)
        topology.require_sound()
        return Graph(topology)

    def _name_of(self, stream: object) -> str:
        """Return the name of ``stream`` as this graph knows it: no node's, where it is of another builder."""
        if not isinstance(stream, Stream):
            return repr(stream)
        return stream.name if stream.builder is self else f"{stream.builder.name}.{stream.name}"
