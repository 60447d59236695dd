"""Declaring a graph: streams are typed handles, so that the type checker reports a wrong wire first."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast, overload

from oppo.declared import require_whole
from oppo.errors import GraphError, shown
from oppo.graph.channel import Key, Merge
from oppo.graph.engine import Source
from oppo.graph.run import Run, opened
from oppo.graph.stage import AnyStage, Gauge, Stage1, Stage2, Stage3
from oppo.graph.topology import SOURCE, Node, Topology
from oppo.observe import Observer

O = TypeVar("O")  # noqa: E741 - O for output, as in the stage protocols
P = TypeVar("P")
S = TypeVar("S")


@dataclass(frozen=True)
class Graph(Generic[O]):
    """Stages wired to one another, one of which sends the result of a step; made by :class:`GraphBuilder`."""

    topology: Topology

    @property
    def name(self) -> str:
        return self.topology.name

    @property
    def nodes(self) -> Mapping[str, Node]:
        """Its nodes by name, each after the nodes it reads."""
        return MappingProxyType({name: self.topology.by_name[name] for name in self.topology.order()})

    def stage(self, name: str, kind: type[S]) -> S:
        """Return the stage of that name, for example to make a variant for :meth:`replace`."""
        node = self.topology.by_name.get(name)
        if node is None:
            raise GraphError(self._unknown("given", name))
        if not isinstance(node.stage, kind):
            raise GraphError(f"stage {name!r} is {type(node.stage).__name__}, not {kind.__name__}")
        return node.stage

    def mermaid(self) -> str:
        lines = ["flowchart LR", f"    {SOURCE}([{SOURCE}])"]
        lines += [f'    {node.name}["{node.name}<br/>{type(node.stage).__name__}"]' for node in self.topology.nodes]
        lines += [f"    {name} --> {node.name}" for node in self.topology.nodes for name in node.reads]
        lines += [f"    {self.topology.result} --> result([result])"]
        return "\n".join(lines)

    def table(self) -> str:
        """Return a line for each stage: its class, inputs and readers."""
        rows = [("stage", "class", "reads", "read by")]
        for node in self.topology.nodes:
            kind = type(node.stage).__name__
            reads = [*node.inputs, *(f"{keyword}={name}" for keyword, name in node.named.items())]
            readers = [reader.name for reader in self.topology.readers(node.name)]
            readers += ["result"] * (node.name == self.topology.result)
            rows.append((node.name, kind, ", ".join(reads), ", ".join(readers)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def replace(self, **stages: AnyStage) -> Graph[O]:
        """Return this graph with other stages under the same names."""
        changed = replace(
            self.topology,
            nodes=tuple(replace(node, stage=stages.get(node.name, node.stage)) for node in self.topology.nodes),
        )
        changed.require_sound([self._unknown("replaced", name) for name in stages if name not in self.topology.by_name])
        return Graph(changed)

    def rebuild(
        self, *, without: Iterable[str] = (), **nodes: tuple[AnyStage, *tuple[str | Mapping[str, str], ...]]
    ) -> Graph[O]:
        """Return this graph with some nodes removed and others added or rewired.

        Nodes that the result no longer depends on are dropped too.

        Args:
            without: names of nodes to remove.
            nodes: ``name=(stage, "input", ...)``, a new node or a replacement; inputs by name as
                ``{"keyword": "input"}``.

        Raises:
            GraphError: a name is unknown, no node reads an added one, or the wiring is wrong.
        """
        removed = frozenset(without)
        old = self.topology.by_name
        for name, node in nodes.items():
            if not isinstance(node, tuple | list):
                raise GraphError(
                    f'{name!r} is rebuilt from its stage and its inputs, (stage, "input", ...); got {shown(node)}'
                )
        faults = [self._unknown("removed", name) for name in sorted(removed) if name not in old]
        kept = [node for node in self.topology.nodes if node.name not in removed and node.name not in nodes]
        added = [
            Node(
                name,
                stage,
                tuple(wire for wire in inputs if isinstance(wire, str)),
                {keyword: wire[keyword] for wire in inputs if not isinstance(wire, str) for keyword in wire},
            )
            for name, (stage, *inputs) in nodes.items()
        ]
        changed = replace(self.topology, nodes=(*kept, *added))
        needed = changed.needed() | nodes.keys()
        pruned = replace(changed, nodes=tuple(node for node in changed.nodes if node.name in needed))
        pruned.require_sound(faults)
        return Graph(pruned)

    def then(self, name: str, stage: Stage1[O, P]) -> Graph[P]:
        """Return this graph with one more stage, which reads its result and sends the result of the new one."""
        last = self.topology.by_name[self.topology.result]
        node = Node(name, cast("AnyStage", stage), (last.name,))
        longer = replace(self.topology, nodes=(*self.topology.nodes, node), result=name)
        longer.require_sound()
        return Graph[P](longer)

    def open(
        self,
        prompts: Iterable[object] | AsyncIterable[object],
        *,
        observers: Sequence[Observer] = (),
        lookahead: int = 0,
        gauges: Mapping[str, Gauge] = MappingProxyType({}),
    ) -> AbstractAsyncContextManager[Run[O]]:
        """Open the stages for as long as the context lasts, and run steps within it.

        Meanwhile Python looks for cyclic garbage less often, unless :func:`gc.set_threshold` asked for that before.

        Args:
            prompts: the graph's input; items are taken one by one as the reading stage asks, never ahead, and the
                iterable is not closed. :class:`oppo.Generate` reads :class:`oppo.Prompt`, each with an ``admission``
                number unique in the run, later epochs included (:class:`oppo.PromptStream` numbers them); it raises
                ``DataError`` for a number that is in flight.
            observers: notified of spans, items and steps.
            lookahead: number of steps that begin before an earlier one has ended. Each stage still runs the steps one
                at a time and in order, so step ``k + 1`` enters a stage when step ``k`` has left it.
            gauges: by metric: measurements of the process, which :class:`oppo.Update` reads for each step's report.

        Raises:
            GraphError: ``lookahead`` is not a whole number, or a stage is in another open run.
        """
        require_whole("lookahead", lookahead, 0, error=GraphError)
        return opened(Run[O](self.topology, Source(prompts), tuple(observers), lookahead, gauges), self.topology)

    def _unknown(self, what: str, name: str) -> str:
        return f"{name!r} cannot be {what}: the stages are {', '.join(map(repr, self.topology.by_name))}"


T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


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
        capacity: bound of each channel, in items.
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
    def add(self, name: str, stage: Stage1[A, O], a: Stream[A], /, **named: Stream[Any] | None) -> Stream[O]: ...
    @overload
    def add(
        self, name: str, stage: Stage2[A, B, O], a: Stream[A], b: Stream[B], /, **named: Stream[Any] | None
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
        **named: Stream[Any] | None,
    ) -> Stream[O]: ...
    @overload
    def add(
        self,
        name: str,
        stage: AnyStage,
        a: Stream[Any],
        b: Stream[Any],
        c: Stream[Any],
        d: Stream[Any],
        /,
        *more: Stream[Any],
        **named: Stream[Any] | None,
    ) -> Stream[Any]: ...
    def add(self, name: str, stage: AnyStage, /, *streams: Stream[Any], **named: Stream[Any] | None) -> Stream[Any]:
        """Add ``stage`` under ``name``, reading ``streams``, and return the handle of its output.

        Args:
            name: an identifier, unique in the graph.
            stage: any object with ``async def run(self, *inputs: Receiver[...], out: Sender[...])``.
            streams: one for each input of ``run``, in order.
            named: further inputs by the keywords of ``run``, ``None`` for one that is not connected; :meth:`build`
                checks their types.
        """
        inputs = tuple(self._name_of(stream) for stream in streams)
        by_name = {keyword: self._name_of(stream) for keyword, stream in named.items() if stream is not None}
        self._nodes.append(Node(name, stage, inputs, by_name))
        return Stream(name, self)

    def build(self, result: Stream[O]) -> Graph[O]:
        """Return the graph whose result is the item that ``result`` carries: at most one a step.

        Raises:
            GraphError: the wiring is wrong; one line for each fault.
        """
        nodes, result_name = tuple(self._nodes), self._name_of(result)
        topology = Topology(self.name, nodes, result_name, self._capacity, self._merge, self._key)
        topology.require_sound()
        return Graph(topology)

    def _name_of(self, stream: object) -> str:
        # The name of no node, if the stream belongs to another builder.
        if not isinstance(stream, Stream):
            return repr(stream)
        return stream.name if stream.builder is self else f"{stream.builder.name}.{stream.name}"
