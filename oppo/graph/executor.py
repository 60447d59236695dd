"""One step of a graph: a task for each stage, channels between them, and nothing left of either when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import anyio

from oppo.errors import ProtocolError, leaves, not_cancelled_from_within, note_others, running_loop
from oppo.graph.channel import Channel, Sender, channel_table
from oppo.graph.fanout import FanOut, Target
from oppo.graph.snapshot import Snapshot, Wait
from oppo.graph.source import Source
from oppo.graph.stage import Step
from oppo.graph.topology import SOURCE, Node, Topology
from oppo.observe import Observer, Span

T = TypeVar("T")


@runtime_checkable
class ReportsDeadlocks(Protocol):
    """An event loop that notices when no task can ever go on, and says so."""

    def on_deadlock(self, describe: Callable[[], str]) -> Callable[[], None]:
        """Have ``describe()`` become part of the error; returns what takes it back."""


class Result(Generic[T]):
    """Takes the one item a step results in."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._items: list[T] = []

    def offer(self, item: T, /) -> bool:
        """Keep ``item``; there is always room.

        Raises:
            ProtocolError: there is one already.
        """
        if self._items:
            raise ProtocolError(f"{self._stage!r} sent a second result; a step results in exactly one item")
        self._items.append(item)
        return True

    async def send(self, item: T, /) -> None:
        """Keep ``item``.

        Raises:
            ProtocolError: there is one already.
        """
        self.offer(item)

    def items(self) -> Sequence[T]:
        """Return the result, or nothing."""
        return self._items


class Execution(Generic[T]):
    """One execution of every stage.

    Args:
        source: what :data:`SOURCE` stands for; outlives the step.
    """

    def __init__(self, topology: Topology, step: Step, source: Source, observers: Sequence[Observer]) -> None:
        self._topology = topology
        self._step = step
        self._source = source
        self._observers = observers
        self._result = Result[T](topology.result)
        self._failures: list[BaseException] = []
        self._running: list[str] = []
        self._returned: set[str] = set()
        self._channels: dict[tuple[str, str], Channel[Any]] = {
            (name, node.name): Channel(f"{name}->{node.name}", node.capacity, topology.merge, topology.key)
            for node in topology.nodes
            for name in node.reads
            if name != SOURCE
        }

    async def run(self) -> Sequence[T]:
        """Run every stage once and return the result, if there is one.

        Raises:
            Exception: whatever a stage raised, as itself, with notes that say where.
        """
        try:
            with self._deadlocks_described():
                await self._run_stages()
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
        return self._result.items()

    async def _run_stages(self) -> None:
        async with anyio.create_task_group() as stages:
            for node in self._topology.nodes:
                stages.start_soon(self._drive, node, name=f"{self._topology.name}.{node.name}")

    async def _drive(self, node: Node) -> None:
        start = anyio.current_time()
        inputs = [self._reader(name, node) for name in node.inputs]
        named = {keyword: self._reader(name, node) for keyword, name in node.named.items()}
        keywords = {**named, **({"step": self._step.of(node.name)} if self._topology.ports[node.name].stepped else {})}
        self._running.append(node.name)
        try:
            with not_cancelled_from_within():
                await node.stage.run(*inputs, out=self._outlet(node), **keywords)
            self._returned.add(node.name)
            for channel in (*inputs, *named.values()):
                channel.abandon()
            span = Span(node.name, "run", start, anyio.current_time(), {"step": self._step.index})
            tell(self._observers, lambda observer: observer.on_span(span))
        except Exception as error:
            for leaf in leaves(error):
                leaf.add_note(f"in stage {node.name!r} of graph {self._topology.name!r}, step {self._step.index}")
                self._failures.append(leaf)
            raise
        finally:
            self._running.remove(node.name)
        # Only a stage that has done its work ends its output: a reader must never take what a failed one had sent
        # until then for everything.
        for reader in self._topology.readers(node.name):
            self._channels[node.name, reader.name].close()

    def _reader(self, name: str, node: Node) -> Channel[Any] | Source:
        return self._source if name == SOURCE else self._channels[name, node.name]

    def _outlet(self, node: Node) -> Sender[Any]:
        targets: list[Target[Any]] = [
            self._channels[node.name, reader.name] for reader in self._topology.readers(node.name)
        ]
        if node.name == self._topology.result:
            targets.append(self._result)
        if not self._observers:
            return targets[0] if len(targets) == 1 else FanOut(targets)
        return FanOut(targets, told=lambda item: self._tell_item(node.name, item))

    def _tell_item(self, stage: str, item: object) -> None:
        at = anyio.current_time()
        tell(self._observers, lambda observer: observer.on_item(self._step.index, stage, item, at))

    def _require_returned(self) -> None:
        """Raise if a stage neither returned nor failed: an end that was cancelled from within is none.

        Raises:
            ProtocolError: a stage cancelled its own task.
        """
        gone = [node.name for node in self._topology.nodes if node.name not in self._returned]
        if gone:
            raise ProtocolError(
                f"stage {gone[0]!r} of graph {self._topology.name!r}, step {self._step.index}, cancelled itself or "
                "another stage: a stage returns when its inputs have ended, or raises an error"
            )

    @contextmanager
    def _deadlocks_described(self) -> Iterator[None]:
        loop = running_loop()
        withdraw = loop.on_deadlock(self._stuck) if isinstance(loop, ReportsDeadlocks) else None
        try:
            yield
        finally:
            if withdraw is not None:
                withdraw()

    def _stuck(self) -> str:
        """Return the channel table, and who waits for whom."""
        return f"{self.describe()}\n{self.snapshot().sentence()}"

    def describe(self) -> str:
        """Return the channel table of this step."""
        title = f"graph {self._topology.name!r}, step {self._step.index}"
        return "\n".join([title, self._source.describe(), channel_table(self._channels.values())])

    def snapshot(self) -> Snapshot:
        """Return who waits for whom now; it only reads, so that any thread may ask."""
        return Snapshot(
            step=self._step.index,
            running=tuple(self._running),
            waits=tuple(self._waits()),
            channels=self.statistics(),
            table=self.describe(),
        )

    def _waits(self) -> Iterator[Wait]:
        for (source, target), channel in self._channels.items():
            now = channel.statistics()
            # A join goes on watching what has been closed, but nothing more comes from there.
            if now.waiting_receivers and not now.queued and not channel.closed:
                yield Wait(target, source, "an item")
            if now.waiting_senders:
                yield Wait(source, target, "room")
        if self._source.statistics().waiting_receivers:
            yield from (Wait(node.name, SOURCE, "an item") for node in self._topology.readers(SOURCE))

    @property
    def sent(self) -> bool:
        """Whether any stage has sent anything."""
        return bool(self._result.items()) or any(channel.statistics().sent for channel in self._channels.values())

    def statistics(self) -> Mapping[str, Mapping[str, int]]:
        """Return each channel's counters under ``source->target``."""
        return {channel.name: asdict(channel.statistics()) for channel in self._channels.values()}


def tell(observers: Sequence[Observer], say: Callable[[Observer], None]) -> None:
    """Tell every observer something; one that raises is named in a note."""
    for observer in observers:
        try:
            say(observer)
        except Exception as error:
            error.add_note(f"raised by the observer {type(observer).__name__}, which must not raise")
            raise
