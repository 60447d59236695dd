"""One step of a graph: a task for each stage and channels between them; neither outlives the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import anyio

from oppo.errors import ProtocolError, blaming, errors_only, leaves, note_others, running_loop
from oppo.graph.channel import Channel, Sender, channel_table
from oppo.graph.snapshot import Snapshot, Wait
from oppo.graph.source import Source
from oppo.graph.step import Step
from oppo.graph.topology import SOURCE, Node, Topology
from oppo.observe import Observer, Span

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


@runtime_checkable
class ReportsDeadlocks(Protocol):
    """An event loop that detects deadlocks: no task can ever go on."""

    def on_deadlock(self, describe: Callable[[], str]) -> Callable[[], None]:
        """Add ``describe()`` to the error of a deadlock; return the function that undoes this."""


class Target(Protocol[T_contra]):
    """An outlet that takes items one by one, for example a channel."""

    def offer(self, item: T_contra, /) -> bool:
        """Take ``item`` if that needs neither waiting nor merging; return whether it was taken."""

    async def send(self, item: T_contra, /) -> None:
        """Take ``item``, waiting for room."""


class FanOut(Generic[T]):
    """Delivers each item to every target: at once to those with room, then to the others as they have some.

    Args:
        on_delivered: called with each item once all targets have it.
        require: called with each item first; raises if no target can read it.
    """

    def __init__(
        self,
        targets: Sequence[Target[T]],
        on_delivered: Callable[[T], None] | None = None,
        require: Callable[[T], None] | None = None,
    ) -> None:
        self._targets = targets
        self._on_delivered = on_delivered
        self._require = require

    async def send(self, item: T, /) -> None:
        """Deliver ``item`` to every target; see :meth:`oppo.Sender.send` for what a cancellation leaves."""
        if self._require is not None:
            self._require(item)
        for target in [target for target in self._targets if not target.offer(item)]:
            await target.send(item)
        if self._on_delivered is not None:
            self._on_delivered(item)


class ResultSlot(Generic[T]):
    """Takes the one item a step results in; a second one raises ``ProtocolError``."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self.items: list[T] = []

    def offer(self, item: T, /) -> bool:
        """Keep ``item``; there is always room."""
        if self.items:
            raise ProtocolError(f"{self._stage!r} sent a second result; a step results in exactly one item")
        self.items.append(item)
        return True

    async def send(self, item: T, /) -> None:
        """Keep ``item``."""
        self.offer(item)


class Execution(Generic[T]):
    """One execution of every stage.

    Args:
        source: the graph's input; outlives the step.
    """

    def __init__(self, topology: Topology, step: Step, source: Source, observers: Sequence[Observer]) -> None:
        self._topology = topology
        self._step = step
        step.runtime.channels, step.runtime.notify = self.statistics, self._notify
        self._source = source
        self._observers = observers
        self._result = ResultSlot[T](topology.result)
        self._failures: list[BaseException] = []
        self._running: list[str] = []
        self._returned: set[str] = set()
        self._channels: dict[tuple[str, str], Channel[Any]] = {
            (name, node.name): Channel(f"{name}->{node.name}", node.capacity, topology.merge, topology.key)
            for node in topology.nodes
            for name in node.reads
            if name != SOURCE
        }
        for channel in self._channels.values():
            channel.awaits_reader = step.ahead > 0

    async def run(self) -> Sequence[T]:
        """Run every stage once and return the result, if any; raise a stage's error as itself, with a note."""
        try:
            with self._deadlocks_described():
                async with anyio.create_task_group() as stages:
                    for node in self._topology.nodes:
                        stages.start_soon(self._drive, node, name=f"{self._topology.name}.{node.name}")
        except BaseExceptionGroup:
            if not self._failures:
                raise
        finally:
            for channel in self._channels.values():
                channel.close()
        if self._failures:
            first, *others = self._failures
            note_others(first, others)
            raise first
        self._require_returned()
        return self._result.items

    async def _drive(self, node: Node) -> None:
        step = self._step.of(node.name)
        await step.previous(node.name)
        for name in node.reads:
            if name != SOURCE:
                self._channels[name, node.name].awaits_reader = False
        start = anyio.current_time()
        inputs = [self._reader(name, node) for name in node.inputs]
        named = {keyword: self._reader(name, node) for keyword, name in node.named.items()}
        keywords = {**named, **({"step": step} if self._topology.ports[node.name].stepped else {})}
        self._running.append(node.name)
        try:
            with errors_only():
                await node.stage.run(*inputs, out=self._outlet(node), **keywords)
            self._returned.add(node.name)
            for channel in (*inputs, *named.values()):
                channel.abandon()
            end = anyio.current_time()
            notify_span(self._observers, Span(node.name, "run", start, end, self._step.index, kind="execution"))
        except Exception as error:
            for leaf in leaves(error):
                leaf.add_note(f"in stage {node.name!r} of graph {self._topology.name!r}, step {self._step.number}")
                self._failures.append(leaf)
            raise
        finally:
            self._running.remove(node.name)
        # Only a stage that has returned ends its output: its readers must not take a failed stage's items for all.
        for reader in self._topology.readers(node.name):
            self._channels[node.name, reader.name].close()
        if step.runtime.link is not None:
            step.runtime.link.note_return(node.name)

    def _reader(self, name: str, node: Node) -> Channel[Any] | Source:
        return self._source if name == SOURCE else self._channels[name, node.name]

    def _outlet(self, node: Node) -> Sender[Any]:
        targets: list[Target[Any]] = [
            self._channels[node.name, reader.name] for reader in self._topology.readers(node.name)
        ]
        if node.name == self._topology.result:
            targets.append(self._result)
        require = self._topology.requirement(node.name)
        if not self._observers:
            return targets[0] if len(targets) == 1 and require is None else FanOut(targets, None, require)
        return FanOut(targets, lambda item: notify_item(self._observers, self._step, node.name, item), require)

    def _notify(self, stage: str, item: object) -> None:
        notify_item(self._observers, self._step, stage, item)

    def _require_returned(self) -> None:
        """Raise ``ProtocolError`` if a stage neither returned nor failed: it cancelled its own task."""
        gone = [node.name for node in self._topology.nodes if node.name not in self._returned]
        if gone:
            raise ProtocolError(
                f"stage {gone[0]!r} of graph {self._topology.name!r}, step {self._step.number}, cancelled itself or "
                "another stage: a stage returns when its inputs have ended, or raises an error"
            )

    @contextmanager
    def _deadlocks_described(self) -> Iterator[None]:
        loop = running_loop()
        undo = loop.on_deadlock(self._deadlock) if isinstance(loop, ReportsDeadlocks) else None
        try:
            yield
        finally:
            if undo is not None:
                undo()

    def _deadlock(self) -> str:
        return f"{self.describe()}\n{self.snapshot().sentence()}"

    def describe(self) -> str:
        """Return the channel table of this step."""
        title = f"graph {self._topology.name!r}, step {self._step.number}"
        return "\n".join([title, self._source.describe(), channel_table(self._channels.values())])

    def snapshot(self) -> Snapshot:
        """Return which stage waits for which; it only reads, so any thread may call it."""
        return Snapshot(
            step=self._step.number,
            running=tuple(self._running),
            waits=tuple(self._waits()),
            channels=self.statistics(),
            table=self.describe(),
        )

    def _waits(self) -> Iterator[Wait]:
        for (source, target), channel in self._channels.items():
            now = channel.statistics()
            # A join also watches closed channels, which have no more items to wait for.
            if now.waiting_receivers and not now.queued and not channel.closed:
                yield Wait(target, source, "an item")
            if now.waiting_senders:
                yield Wait(source, target, "room")
        if self._source.statistics().waiting_receivers:
            yield from (Wait(node.name, SOURCE, "an item") for node in self._topology.readers(SOURCE))

    @property
    def sent(self) -> bool:
        """Whether any stage has sent anything."""
        return bool(self._result.items) or any(channel.statistics().sent for channel in self._channels.values())

    def statistics(self) -> Mapping[str, Mapping[str, int]]:
        """Return each channel's counters under ``source->target``."""
        return {channel.name: asdict(channel.statistics()) for channel in self._channels.values()}


def notify_item(observers: Sequence[Observer], step: Step, stage: str, item: object) -> None:
    """Notify every observer of an item that a stage has sent now."""
    at = anyio.current_time()
    notify(observers, lambda observer: observer.on_item(step.index, stage, item, at))


def notify_span(observers: Sequence[Observer], span: Span) -> None:
    """Notify every observer of a span that has ended."""
    notify(observers, lambda observer: observer.on_span(span))


def notify(observers: Sequence[Observer], call: Callable[[Observer], None]) -> None:
    """Call every observer; a note names one that raises."""
    for observer in observers:
        try:
            call(observer)
        except BaseException:  # inside of the handler, since an item has many observers, and errors are rare
            with blaming(f"the observer {type(observer).__name__}, which must not raise,"):
                raise
