"""The shape of a graph: its nodes, the inputs and outputs read from their signatures, their faults and their order."""

from __future__ import annotations

import inspect
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, TypeAlias, is_typeddict

from oppo.errors import GraphError
from oppo.graph.channel import Key, Merge, Receiver, Sender
from oppo.graph.stage import AnyStage, Demanding, Observing, Stateful

KEYWORDS: Final = ("out", "step")  # parameters of `run` that the executor passes, not the graph
_UNIONS: Final = (typing.Union, types.UnionType)
_BY_NAME: Final = inspect.Parameter.KEYWORD_ONLY
_BY_POSITION: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)

Classes: TypeAlias = frozenset[type] | None
"""The nominal classes an item may have; ``None`` for an annotation that names none."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The inputs and the output of a stage's ``run``."""

    names: tuple[str, ...]  # of the positional inputs
    reads: tuple[Classes, ...]  # the classes each of them may carry
    variadic: bool  # whether `run` takes any number of inputs (`*inputs`), all like the last of `reads`
    named: Mapping[str, Classes]  # the classes each input by keyword may carry
    required: frozenset[str]
    stepped: bool
    sends: Classes

    @classmethod
    def of(cls, stage: object) -> Ports:
        """Return the ports of ``stage``; a ``GraphError`` continues a message that begins with its name."""
        if isinstance(stage, type):
            raise GraphError(f"is the class {stage.__name__}, not an object of it: write {stage.__name__}(...)")
        run = getattr(stage, "run", None)
        kind = type(stage).__name__
        if not callable(run):
            raise GraphError(f"is no stage: {kind} has no method `async def run(self, ..., *, out)`")
        if not inspect.iscoroutinefunction(run):
            raise GraphError(f"is no stage: {kind}.run must be `async def` and send its items to `out`")
        parameters = inspect.signature(run).parameters
        if "out" not in parameters or parameters["out"].kind is inspect.Parameter.POSITIONAL_ONLY:
            raise GraphError(f"is no stage: {kind}.run takes no keyword `out: Sender[...]` to send its items to")
        inputs = [each for each in parameters.values() if each.name not in KEYWORDS and each.kind in _BY_POSITION]
        named = [each for each in parameters.values() if each.name not in KEYWORDS and each.kind is _BY_NAME]
        return cls(
            names=tuple(parameter.name for parameter in inputs),
            reads=tuple(_carried(run, parameter.annotation, Receiver) for parameter in inputs),
            variadic=any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in inputs),
            named={parameter.name: _carried(run, parameter.annotation, Receiver) for parameter in named},
            required=frozenset(each.name for each in named if each.default is inspect.Parameter.empty),
            stepped="step" in parameters,
            sends=_carried(run, parameters["out"].annotation, Sender),
        )

    def carried(self, position: int) -> Classes:
        return self.reads[min(position, len(self.reads) - 1)]

    def accepts(self, count: int) -> bool:
        return count >= len(self.names) - 1 if self.variadic else count == len(self.names)


def _carried(run: Callable[..., object], annotation: object, port: type) -> Classes:
    holder = types.SimpleNamespace(__annotations__={"port": annotation})
    # An annotation may name an import for type checkers only, or a type parameter of the class: it stays unknown.
    try:
        resolved = typing.get_type_hints(holder, getattr(run, "__globals__", {}))["port"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return None
    options = typing.get_args(resolved) if typing.get_origin(resolved) in _UNIONS else (resolved,)
    found = [option for option in options if typing.get_origin(option) is port]
    return _classes(typing.get_args(found[0])[0]) if found else None


def _classes(annotation: object) -> Classes:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _classes(typing.get_args(annotation)[0])
    if origin in _UNIONS:
        members = [_classes(member) for member in typing.get_args(annotation)]
        known = [member for member in members if member is not None]
        return frozenset().union(*known) if len(known) == len(members) else None
    found = annotation if origin is None else origin
    if found is None:
        return frozenset((type(None),))
    nominal = isinstance(found, type) and found not in (object, Any) and not getattr(found, "_is_protocol", False)
    return frozenset((typing.cast("type", found),)) if nominal else None


def fits(sent: Classes, read: Classes) -> bool:
    """Whether every class sent can be read; true if one side is unknown."""
    if sent is None or read is None:
        return True
    return all(issubclass(one, tuple(read)) for one in sent)


def in_words(classes: Classes) -> str:
    return " | ".join(sorted(one.__name__ for one in classes or ())) or "anything"


SOURCE = "prompts"  # the name of a graph's input
RESERVED = (SOURCE, "without")  # names that no stage may have: the source, and an argument of `Graph.rebuild`


@dataclass(frozen=True, slots=True)
class Node:
    """A stage and its wires.

    Attributes:
        stage: the object whose ``run`` does the work.
        inputs: names of the nodes it reads, or :data:`SOURCE`, in the order of ``run``'s parameters.
        named: names of the nodes it reads by keyword of ``run``.
    """

    name: str
    stage: AnyStage
    inputs: tuple[str, ...]
    named: Mapping[str, str] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[str, ...]:
        return (*self.inputs, *self.named.values())


@dataclass(frozen=True)
class Topology:
    """Nodes wired by name, in the order they were added; ``result`` names the one that sends the step's result."""

    name: str
    nodes: tuple[Node, ...]
    result: str
    capacity: int = 16
    merge: Merge | None = None
    key: Key | None = None

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def ports(self) -> Mapping[str, Ports]:
        return {node.name: Ports.of(node.stage) for node in self.nodes}

    def readers(self, name: str) -> Sequence[Node]:
        return [node for node in self.nodes if name in node.reads]

    def read(self, name: str) -> Mapping[tuple[type, ...], str]:
        """Return the item classes that readers of node ``name`` are annotated to read, each with its first reader."""
        readers: dict[tuple[type, ...], str] = {}
        for reader in self.readers(name):
            port = self.ports[reader.name]
            read = [port.carried(position) for position, each in enumerate(reader.inputs) if each == name]
            read += [port.named[keyword] for keyword, each in reader.named.items() if each == name]
            for classes in read:
                if classes is not None and not any(map(_is_lenient, classes)):
                    readers.setdefault(tuple(classes), reader.name)
        return readers

    def require_sound(self, faults: Sequence[str] = ()) -> None:
        """Raise ``GraphError`` with one line for each fault, the known ``faults`` first."""
        if found := [*faults, *self._faults()]:
            title = f"graph {self.name!r} cannot be built:"
            raise GraphError("\n".join([title, *(f"  - {fault}" for fault in dict.fromkeys(found))]))

    def _faults(self) -> Sequence[str]:
        if not self.nodes:
            return ["it has no stage: add one with g.add(name, stage, g.prompts)"]
        ports: dict[str, Ports] = {}
        count = Counter(node.name for node in self.nodes)
        faults = [f"{n} stages are called {name!r}: give each its own name" for name, n in count.items() if n > 1]
        if not isinstance(self.capacity, int) or self.capacity < 1:
            faults.append(f"it has a capacity of {self.capacity}: a channel holds at least 1 item")
        for node in self.nodes:
            try:
                ports[node.name] = Ports.of(node.stage)
            except GraphError as error:
                faults.append(f"{node.name!r} {error}")
        for node in self.nodes:
            faults += self._naming(node)
            faults += self._wiring(node)
            if node.name in ports:
                faults += _typing(node, ports)
        return [*faults, *self._sharing(), *self._demands(), *self._cycles(), *self._ends()]

    def _naming(self, node: Node) -> Sequence[str]:
        if node.name in RESERVED:
            return [f"no stage may be called {node.name!r}: that name is taken"]
        if not node.name.isidentifier():
            return [f"{node.name!r} is no name for a stage: use letters, digits and underscores, as in a keyword"]
        return []

    def _wiring(self, node: Node) -> Sequence[str]:
        faults = []
        if not node.reads:
            faults.append(f"{node.name!r} reads nothing: give it at least one stream")
        for name in dict.fromkeys(node.reads):
            if name != SOURCE and name not in self.by_name:
                faults.append(
                    f"{node.name!r} reads {name!r}, which is not in this graph: use what its g.add() returned"
                )
            if node.reads.count(name) > 1:
                faults.append(f"{node.name!r} reads {name!r} {node.reads.count(name)} times: once is enough")
        return faults

    def _sharing(self) -> Sequence[str]:
        faults = []
        readers = [repr(node.name) for node in self.readers(SOURCE)]
        if len(readers) > 1:
            faults.append(f"{SOURCE!r} is read by {' and '.join(readers)}: only one stage may take from it")
        first: dict[int, str] = {}
        for node in self.nodes:
            other = first.setdefault(id(node.stage), node.name)
            if other != node.name and isinstance(node.stage, Observing | Stateful | AbstractAsyncContextManager):
                faults.append(f"{other!r} and {node.name!r} are the same object, which keeps state: make two")
        return faults

    def _demands(self) -> Sequence[str]:
        stages = [node.stage for node in self.nodes]
        return [
            f"{node.name!r} {fault}"
            for node in self.nodes
            if isinstance(node.stage, Demanding)
            for fault in node.stage.faults(stages, node.named)
        ]

    def _cycles(self) -> Sequence[str]:
        try:
            self.order()
        except CycleError as error:
            return [f"{' -> '.join(map(repr, reversed(error.args[1])))} is a cycle: no stage may wait for itself"]
        return []

    def _ends(self) -> Sequence[str]:
        faults = []
        if self.result not in self.by_name:
            what = "the source" if self.result == SOURCE else "not in this graph"
            faults.append(f"the result is {self.result!r}, which is {what}: build() takes the output of a stage")
        read = {name for node in self.nodes for name in node.reads} | {self.result}
        faults += [
            f"no stage reads {node.name!r}: connect it, remove it, or make it the result"
            for node in self.nodes
            if node.name not in read
        ]
        return faults

    def order(self) -> Sequence[str]:
        sorter = TopologicalSorter({node.name: [i for i in node.reads if i in self.by_name] for node in self.nodes})
        return list(sorter.static_order())

    def needed(self) -> frozenset[str]:
        needed: set[str] = set()
        unvisited = [self.result]
        while unvisited:
            name = unvisited.pop()
            if name in self.by_name and name not in needed:
                needed.add(name)
                unvisited += self.by_name[name].reads
        return frozenset(needed)


def _is_lenient(kind: type) -> bool:
    # A type checker accepts an int, for example, for a float.
    return kind in (int, float, complex, bool) or is_typeddict(kind)


def _typing(node: Node, ports: Mapping[str, Ports]) -> Sequence[str]:
    port = ports[node.name]
    kind = type(node.stage).__name__
    if not node.reads:
        return []
    if not port.accepts(len(node.inputs)):
        wanted = ", ".join(port.names) or "none"
        given = f"{len(node.inputs)} input{'s' * (len(node.inputs) != 1)} ({', '.join(node.inputs)})"
        return [f"{node.name!r} is given {given}, but {kind}.run takes {len(port.names)} ({wanted})"]
    by_name = ", ".join(port.named) or "none"
    faults = [
        f"{node.name!r} is given {keyword}={name!r}, but the inputs by name of {kind}.run are: {by_name}"
        for keyword, name in node.named.items()
        if keyword not in port.named
    ]
    faults += [
        f"{node.name!r} is not given {keyword!r}, which {kind}.run wants by name: connect it with "
        f"g.add({node.name!r}, ..., {keyword}=stream)"
        for keyword in sorted(port.required - node.named.keys())
    ]
    edges = [(name, port.carried(position)) for position, name in enumerate(node.inputs)]
    edges += [(name, port.named[keyword]) for keyword, name in node.named.items() if keyword in port.named]
    faults += [
        f"{node.name!r} reads {in_words(read)} from {name!r}, which sends {in_words(ports[name].sends)}"
        for name, read in edges
        if name in ports and not fits(ports[name].sends, read)
    ]
    return faults
