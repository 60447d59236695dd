"""One step of a graph: a task for each stage and channels between them; neither outlives the step."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import anyio

from oppo.errors import GraphError, ProtocolError, blaming, errors_only, leaves, note_others, running_loop, shown
from oppo.graph.channel import Channel, ChannelStatistics, Sender, channel_table
from oppo.graph.stage import Step
from oppo.graph.topology import SOURCE, Node, Topology, in_words
from oppo.observe import Observer, Span

Want: TypeAlias = Literal["an item", "room"]


@dataclass(frozen=True, slots=True)
class Wait:
    """A stage that waits for another: for an item from it, or for room in the channel to it."""

    stage: str
    awaited: str
    want: Want


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The stages of one step at one moment; safe to take from any thread.

    Attributes:
        step: number of the step, from 1.
        running: the stages that have not returned.
        waits: a stage may wait for several others, or wait in one task while it works in another.
        channels: the counters of each, by ``source->target``.
        table: the channels as lines for people.

    Example:
        >>> waits = (Wait("advantage", "reward", "an item"),)
        >>> print(Snapshot(0, ("reward", "advantage"), waits, {}, "").message())
        advantage waits for reward; reward is at work
    """

    step: int
    running: tuple[str, ...]
    waits: tuple[Wait, ...]
    channels: Mapping[str, Mapping[str, int]]
    table: str

    @property
    def working(self) -> Sequence[str]:
        """The stages that have not returned and wait for no other."""
        waiting = {wait.stage for wait in self.waits}
        return [stage for stage in self.running if stage not in waiting]

    def doing(self, stage: str) -> str:
        """Return ``at work``, ``waits for ...``, or an empty string once the stage has returned."""
        if stage not in self.running:
            return ""
        waits = [wait for wait in self.waits if wait.stage == stage]
        if not waits:
            return "at work"
        items = [wait.awaited for wait in waits if wait.want == "an item"]
        full = [f"{wait.awaited} to make room" for wait in waits if wait.want == "room"]
        return f"waits for {', '.join([*items, *full])}"

    def message(self) -> str:
        """Return, on one line, which stages wait for which and which are at work."""
        waiting = [f"{stage} {self.doing(stage)}" for stage in self.running if stage not in self.working]
        return "; ".join([*waiting, *(f"{stage} is at work" for stage in self.working)])


class Source:
    """Takes one item from an iterable per read, never ahead; it lives as long as the run, with one reader."""

    def __init__(self, items: Iterable[object] | AsyncIterable[object]) -> None:
        try:
            self._items: Iterator[object] | AsyncIterator[object] = (
                aiter(items) if isinstance(items, AsyncIterable) else iter(items)
            )
        except TypeError as error:
            wanted = "a graph reads prompts from an iterable, async or not"
            raise GraphError(f"{wanted}; got {shown(items)}: {error}") from error
        self._taken = 0
        self._waiting = 0
        self.ended = False

    async def drain(self) -> Sequence[object]:
        if self.ended:
            return []
        self._waiting += 1
        try:
            item = await anext(self._items) if isinstance(self._items, AsyncIterator) else next(self._items)
        except (StopIteration, StopAsyncIteration):
            self.ended = True
            return []
        finally:
            self._waiting -= 1
        self._taken += 1
        return [item]

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        for item in await self.drain():
            return item
        raise StopAsyncIteration

    def drain_nowait(self) -> Sequence[object]:
        raise ProtocolError(f"{SOURCE!r} is read with `async for` or `drain()`; put a stage between it and a join")

    def watch(self, event: anyio.Event) -> None:
        """Do nothing: an iterable does not announce its items."""

    def unwatch(self, event: anyio.Event) -> None:
        pass

    def abandon(self) -> None:
        """Do nothing: the reader continues in its next step."""

    def describe(self) -> str:
        state = "ended" if self.ended else "waited for" if self._waiting else "idle"
        return f"{SOURCE:<32} {self._taken:>4} taken {state}"

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._taken, self._taken, 0, 0, 0, 0, 0, self._waiting)


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class FanOut(Generic[T]):
    """Delivers each item to every target: at once to those with room, then to the others as they have some."""

    stage: str
    targets: Sequence[Channel[T] | ResultSlot[T]]
    read: Mapping[tuple[type, ...], str]
    on_delivered: Callable[[T], None] | None = None
    known: set[type] = field(default_factory=set)  # classes that every reader reads

    def _require(self, item: T) -> None:
        for classes, reader in self.read.items():
            if not isinstance(item, classes):
                words = in_words(frozenset(classes))
                raise ProtocolError(f"{self.stage!r} sent {shown(item)}, and {reader!r} reads {words}")
        self.known.add(type(item))

    async def send(self, item: T, /) -> None:
        if type(item) not in self.known:
            self._require(item)
        full = [target for target in self.targets if not target.offer(item)]
        for target in full:
            await target.send(item)
        if self.on_delivered is not None:
            self.on_delivered(item)


class ResultSlot(Generic[T]):
    def __init__(self, stage: str) -> None:
        self._stage = stage
        self.items: list[T] = []

    def offer(self, item: T, /) -> bool:
        if self.items:
            raise ProtocolError(f"{self._stage!r} sent a second result; a step results in exactly one item")
        self.items.append(item)
        return True

    async def send(self, item: T, /) -> None:
        self.offer(item)


class Execution(Generic[T]):
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
            (name, node.name): Channel(f"{name}->{node.name}", topology.capacity, topology.merge, topology.key)
            for node in topology.nodes
            for name in node.reads
            if name != SOURCE
        }
        for channel in self._channels.values():
            channel.awaits_reader = step.ahead > 0

    async def run(self) -> Sequence[T]:
        # A stage's error is raised as itself, with a note.
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
        # A stage that neither returned nor failed has cancelled its own task.
        if gone := [node.name for node in self._topology.nodes if node.name not in self._returned]:
            raise ProtocolError(
                f"stage {gone[0]!r} of graph {self._topology.name!r}, step {self._step.number}, cancelled itself or "
                "another stage: a stage returns when its inputs have ended, or raises an error"
            )
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
            step.runtime.link.returned[node.name].set()

    def _reader(self, name: str, node: Node) -> Channel[Any] | Source:
        return self._source if name == SOURCE else self._channels[name, node.name]

    def _outlet(self, node: Node) -> Sender[Any]:
        targets: list[Channel[Any] | ResultSlot[Any]] = [
            self._channels[node.name, reader.name] for reader in self._topology.readers(node.name)
        ]
        if node.name == self._topology.result:
            targets.append(self._result)
        read = self._topology.read(node.name)
        if not self._observers:
            return targets[0] if len(targets) == 1 and not read else FanOut(node.name, targets, read)
        return FanOut(node.name, targets, read, lambda item: notify_item(self._observers, self._step, node.name, item))

    def _notify(self, stage: str, item: object) -> None:
        notify_item(self._observers, self._step, stage, item)

    @contextmanager
    def _deadlocks_described(self) -> Iterator[None]:
        report: Callable[[Callable[[], str]], Callable[[], None]] | None = getattr(running_loop(), "on_deadlock", None)
        undo = None if report is None else report(self._deadlock)  # virtual time notices that no task can go on
        try:
            yield
        finally:
            if undo is not None:
                undo()

    def _deadlock(self) -> str:
        return f"{self.describe()}\n{self.snapshot().message()}"

    def describe(self) -> str:
        title = f"graph {self._topology.name!r}, step {self._step.number}"
        return "\n".join([title, self._source.describe(), channel_table(self._channels.values())])

    def snapshot(self) -> Snapshot:
        # It only reads, so any thread may call it.
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
        return bool(self._result.items) or any(channel.statistics().sent for channel in self._channels.values())

    def statistics(self) -> Mapping[str, Mapping[str, int]]:
        return {channel.name: asdict(channel.statistics()) for channel in self._channels.values()}


def notify_item(observers: Sequence[Observer], step: Step, stage: str, item: object) -> None:
    at = anyio.current_time()
    notify(observers, lambda observer: observer.on_item(step.index, stage, item, at))


def notify_span(observers: Sequence[Observer], span: Span) -> None:
    notify(observers, lambda observer: observer.on_span(span))


def notify(observers: Sequence[Observer], call: Callable[[Observer], None]) -> None:
    for observer in observers:
        try:
            call(observer)
        except BaseException:  # inside of the handler, since an item has many observers, and errors are rare
            with blaming(f"the observer {type(observer).__name__}, which must not raise,"):
                raise
