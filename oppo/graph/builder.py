"""Declaring a graph: streams are typed handles, so that the type checker reports a wrong wire first."""

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
    """Collects stages and their wires, and builds a :class:`Graph` of them.

    A handle must exist before it is used, so a declaration has no cycles. :meth:`build` reports all other faults at
    once.

    Args:
        name: of the graph, shown in errors and task names.
        capacity: default bound of a channel, in items.
        merge: merges two items of a full channel; called for every edge, so it returns ``None`` for unknown items.
        key: items of equal key keep their order; see :class:`oppo.graph.Channel`.

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
        """The items given to :meth:`Graph.open`; one stage reads them, at its own pace."""
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
            capacity: bound of each channel it reads, in items; ``None`` for the builder's.
            named: further inputs by the keywords of ``run``, ``None`` for one that is not connected; :meth:`build`
                checks their types.
        """
        inputs = tuple(self._name_of(stream) for stream in streams)
        by_name = {keyword: self._name_of(stream) for keyword, stream in named.items() if stream is not None}
        self._nodes.append(Node(name, stage, inputs, self._capacity if capacity is None else capacity, by_name))
        return Stream(name, self)

    def build(self, result: Stream[O]) -> Graph[O]:
        """Return the graph whose result is the item that ``result`` carries: at most one a step.

        Raises:
            GraphError: the wiring is wrong; one line for each fault.
        """
        topology = Topology(self.name, tuple(self._nodes), self._name_of(result), self._merge, self._key)
        topology.require_sound()
        return Graph(topology)

    def _name_of(self, stream: object) -> str:
        """Return the name of the node behind ``stream``; the name of no node if it belongs to another builder."""
        if not isinstance(stream, Stream):
            return repr(stream)
        return stream.name if stream.builder is self else f"{stream.builder.name}.{stream.name}"
