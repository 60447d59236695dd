"""A graph that can be run: a frozen value, from which others are made by naming what differs."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Generic, TypeVar

from oppo.errors import GraphError
from oppo.graph.run import Run, opened
from oppo.graph.source import Source
from oppo.graph.stage import AnyStage
from oppo.graph.topology import Node, Topology
from oppo.observe import Observer

O = TypeVar("O")  # noqa: E741 - O for output, as in the stage protocols

S = TypeVar("S")


@dataclass(frozen=True)
class Graph(Generic[O]):
    """Stages wired to one another, of which one gives the result of a step; made by :class:`GraphBuilder`."""

    topology: Topology

    @property
    def name(self) -> str:
        """The graph's name."""
        return self.topology.name

    @property
    def nodes(self) -> Mapping[str, Node]:
        """Its nodes under their names, each after what it reads."""
        return MappingProxyType({name: self.topology.by_name[name] for name in self.topology.order()})

    def stage(self, name: str, kind: type[S]) -> S:
        """Return the stage of that name, to make another from it for :meth:`replace`.

        Raises:
            GraphError: there is no such stage, or it is not of that kind.
        """
        node = self.topology.by_name.get(name)
        if node is None:
            raise GraphError(self._unknown("given", name))
        if not isinstance(node.stage, kind):
            raise GraphError(f"stage {name!r} is {type(node.stage).__name__}, not {kind.__name__}")
        return node.stage

    def mermaid(self) -> str:
        """Return the graph as a Mermaid flowchart."""
        return self.topology.mermaid()

    def table(self) -> str:
        """Return who waits for whom: a line for each stage with its class, inputs, readers and capacity."""
        return self.topology.table()

    def replace(self, **stages: AnyStage) -> Graph[O]:
        """Return this graph with other stages at the same places.

        Raises:
            GraphError: a name is unknown, or a stage has other inputs or another output than its place asks for.
        """
        changed = replace(
            self.topology,
            nodes=tuple(replace(node, stage=stages.get(node.name, node.stage)) for node in self.topology.nodes),
        )
        changed.require_sound([self._unknown("replaced", name) for name in stages if name not in self.topology.by_name])
        return Graph(changed)

    def rebuild(
        self, *, without: Iterable[str] = (), **nodes: tuple[AnyStage, *tuple[str | Mapping[str, str], ...]]
    ) -> Graph[O]:
        """Return this graph with some nodes removed and others added or wired anew.

        Whatever the result no longer depends on is dropped with them.

        Args:
            without: names of nodes to remove.
            nodes: ``name=(stage, "input", ...)``, a new node or another one in place of the old; inputs by name as
                ``{"keyword": "input"}``.

        Raises:
            GraphError: a name is unknown, an added node is used by nobody, or the wiring is wrong.
        """
        removed = frozenset(without)
        old = self.topology.by_name
        faults = [self._unknown("removed", name) for name in sorted(removed) if name not in old]
        kept = [node for node in self.topology.nodes if node.name not in removed and node.name not in nodes]
        default = self.topology.nodes[0].capacity
        made = [
            Node(
                name,
                stage,
                tuple(each for each in inputs if isinstance(each, str)),
                old[name].capacity if name in old else default,
                {keyword: each[keyword] for each in inputs if not isinstance(each, str) for keyword in each},
            )
            for name, (stage, *inputs) in nodes.items()
        ]
        changed = replace(self.topology, nodes=(*kept, *made))
        needed = changed.needed() | nodes.keys()
        pruned = replace(changed, nodes=tuple(node for node in changed.nodes if node.name in needed))
        pruned.require_sound(faults)
        return Graph(pruned)

    def open(
        self,
        prompts: Iterable[object] | AsyncIterable[object],
        *,
        observers: Sequence[Observer] = (),
        lookahead: int = 0,
    ) -> AbstractAsyncContextManager[Run[O]]:
        """Open the stages for as long as the context lasts, and run steps within it.

        Args:
            prompts: what the graph reads; taken one by one when the reading stage asks, never ahead, and not closed.
                Of a pipeline that begins with :class:`oppo.Generate`: :class:`oppo.Prompt`, each with an ``admission``
                number that no other prompt of the run has, in later epochs neither (:class:`oppo.PromptStream` numbers
                them). A prompt whose number is in flight is refused with a ``DataError``.
            observers: told what happens.
            lookahead: how many steps may begin before an earlier one has ended; only 0 so far.

        Raises:
            GraphError: ``lookahead`` is not 0, or a stage is in another open run.
        """
        if lookahead != 0:
            raise GraphError(
                f"lookahead={lookahead} is planned, not built: so far a step begins when the last has ended"
            )
        return opened(Run[O](self.topology, Source(prompts), tuple(observers)), self.topology)

    def _unknown(self, what: str, name: str) -> str:
        return f"{name!r} cannot be {what}: the stages are {', '.join(map(repr, self.topology.by_name))}"
