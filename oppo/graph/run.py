"""An open graph: its stages are entered, and steps run until the data ends or the caller stops.

The steps of a run that are alive: without lookahead the current one, else also the next ones, which run beside it.

::

    lookahead = 1      step 0   generate | score update
                       step 1            | generate     | score update
                       step 2                           | generate ...

A stage runs the steps one at a time and in order. Step ``k + 1 + lookahead`` begins when step ``k`` has ended and its
result was observed; where steps begin does not depend on how fast they are.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Final, Generic, TypeAlias, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import RunVar

from oppo.declared import require_whole
from oppo.errors import GraphError, as_itself, blaming, note_others, noted, running_loop
from oppo.graph.engine import Execution, Snapshot, Source, notify, notify_item, notify_span
from oppo.graph.stage import UNKNOWN, Gauge, Observing, Stateful, Step, StepLink, StepRuntime
from oppo.graph.topology import Node, Topology
from oppo.observe import Observer, Span

O = TypeVar("O")  # noqa: E741 - O for output, as in the stage protocols

DrainAfter: TypeAlias = Callable[[int], bool]
"""``f(index)``: whether the next step begins only when step ``index`` has ended."""


def never(index: int) -> bool:
    del index
    return False


@dataclass(eq=False)
class StepRun(Generic[O]):
    step: Step
    link: StepLink
    execution: Execution[O]
    results: Sequence[O] = ()
    error: Exception | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)  # of the step, not of tasks that wait for it

    async def run(self) -> None:
        ended = False
        try:
            with self.scope:
                self.results = await self.execution.run()
                ended = True
        except Exception as error:  # noqa: BLE001 - raised again when the steps before it have ended
            self.error = error
        finally:
            if not ended:
                self.link.fail()
            self.link.over.set()


_OPEN_STAGES: RunVar[frozenset[int]] = RunVar("oppo.graph.open_stages", frozenset())
"""Identities of the stages in open runs of the current event loop."""


class Run(Generic[O]):
    """A graph whose stages are open; made by :meth:`oppo.graph.Graph.open`.

    A stage runs its executions one at a time and in order.
    """

    def __init__(
        self,
        topology: Topology,
        source: Source,
        observers: Sequence[Observer],
        lookahead: int = 0,
        gauges: Mapping[str, Gauge] = MappingProxyType({}),
    ) -> None:
        self._topology = topology
        self._source = source
        self._observers = observers
        self._lookahead = lookahead
        self._gauges = dict(gauges)
        self._work: list[Span] = []
        self._alive: deque[StepRun[O]] = deque()
        self._tasks: TaskGroup | None = None
        self._draining = False
        self._index = 0
        self._refusal = ""  # why it makes no step now
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the prompts have run out, no stage sent anything in the last step, and no other step is alive."""
        return self._ended

    def listen(self, observer: Observer) -> None:
        """Add an observer, from the next step on."""
        self._observers = (*self._observers, observer)

    def gauge(self, name: str, gauge: Gauge) -> None:
        """Have the reports of the run hold a measurement of the process, from the next step on, under this name."""
        self._gauges = {**self._gauges, name: gauge}

    def tell(self, stage: str, item: object) -> None:
        """Tell the observers of an item that a stage has made between two steps, as one of the next step."""
        notify_item(self._observers, Step(self._index, UNKNOWN, anyio.current_time()), stage, item)

    def steps(self, count: int, *, drain_after: DrainAfter = never) -> AsyncIterator[O]:
        """Return an iterator that runs a step for each item and yields its result.

        It ends after ``count`` steps or with the prompts. A step without a result yields nothing.

        Args:
            count: of the steps, those included that are alive.
            drain_after: whether no step begins before the step with this index has ended, so that the state of the run
                can be taken then; without lookahead that is so after every step.
        """
        require_whole("count", count)
        return _Steps(self, count, drain_after)

    def drain(self) -> None:
        """Begin no step until all that are alive have ended; :attr:`alive` is then empty."""
        if self._alive:
            self._draining = True
            self._alive[-1].link.followed.set()

    @property
    def alive(self) -> Sequence[int]:
        """The indexes of the steps that have begun and not ended, in order; between steps empty without lookahead."""
        return [each.step.index for each in self._alive]

    async def step(self, *, remaining: int = UNKNOWN) -> O | None:
        """Run one step and return its result, or ``None`` without one: see :attr:`ended`.

        Args:
            remaining: how many steps the caller will run, this one included; passed on to the stages. By default they
                work ahead without a known end, and closing the run discards their work.

        Raises:
            GraphError: a step is running, has failed or was cancelled, or the run is closed.
            ProtocolError: the graph yielded a second result, or a stage broke another rule.
            Exception: an error of a stage, as itself, with notes that name stage and step.
        """
        results = await self.advance(remaining)
        return results[0] if results else None

    async def advance(self, remaining: int, drain_after: DrainAfter = never) -> Sequence[O]:
        """Run one step and return its result, one item or none; raises as :meth:`step` does."""
        self._require_ready(f"run step {self._index + 1}")
        self._refusal = "a step is running"
        try:
            ended = await self._oldest_ended(remaining, drain_after)
            self._note(ended)
        except BaseException:
            self._refusal = f"step {self._index + 1} did not come to its end, so the state of its stages is unknown"
            raise
        self._refusal = ""
        self._index += 1
        return ended.results

    @asynccontextmanager
    async def stepping(self) -> AsyncIterator[None]:
        # Steps run beside the body; when it ends, those that are still alive are cancelled.
        if not self._lookahead:
            yield
            return
        with as_itself():
            async with anyio.create_task_group() as self._tasks:
                try:
                    yield
                except Exception as error:
                    note_others(error, self._errors())
                    raise
                finally:
                    self._tasks.cancel_scope.cancel()
        for failure in self._errors():
            raise failure

    def _errors(self) -> list[Exception]:
        return [each.error for each in self._alive if each.error is not None]

    async def _oldest_ended(self, remaining: int, drain_after: DrainAfter) -> StepRun[O]:
        # Begins as many steps as are due; ``remaining`` are left with the oldest.
        self._fill(remaining, drain_after)
        oldest = self._alive[0]
        try:
            await (oldest.run() if self._tasks is None else oldest.link.over.wait())
            if oldest.error is not None:
                raise oldest.error  # noqa: TRY301 - those behind it are cancelled
        except BaseException:
            for each in self._alive:
                each.scope.cancel()
            raise
        finally:
            self._alive.popleft()
        oldest.link.end()
        since = self._alive[0].step.started if self._alive else anyio.current_time()
        self._work[:] = [span for span in self._work if span.end > since]
        if not self._alive:
            self._draining = False
        elif self._source.ended and not oldest.execution.sent:
            self.drain()
        return oldest

    def _fill(self, remaining: int, drain_after: DrainAfter) -> None:
        alive, most = self._alive, min(self._lookahead + 1, remaining)
        failed = any(each.link.failed for each in alive)
        while len(alive) < most and not (alive and (self._draining or failed)):
            left = remaining if remaining == UNKNOWN else remaining - len(alive)
            link = StepLink(list(self._topology.by_name), alive[-1].link if alive else None, self._lookahead)
            listener = partial(notify_span, self._observers)
            runtime = StepRuntime(link=link, work=self._work, listener=listener, gauges=self._gauges)
            step = Step(self._index + len(alive), left, anyio.current_time(), ahead=len(alive), runtime=runtime)
            begun = StepRun[O](step, link, Execution(self._topology, step, self._source, self._observers))
            alive.append(begun)
            if self._tasks is not None:
                self._tasks.start_soon(self._run, begun, name=f"step {step.index} of {self._topology.name}")
            if drain_after(step.index):
                self._draining = True
        if self._draining or len(alive) == remaining:
            alive[-1].link.followed.set()

    async def _run(self, begun: StepRun[O]) -> None:
        # Those behind a failed step are cancelled, since nothing will come of them.
        await begun.run()
        if begun.error is not None:
            for each in self._alive:
                if each.step.index > begun.step.index:
                    each.scope.cancel()

    def _note(self, ended: StepRun[O]) -> None:
        self._ended = self._source.ended and not ended.execution.sent and not self.alive
        for result in ended.results:
            self._observe(ended.step, result)
        if self._observers:
            self._notify(ended.step, ended.results, ended.execution)

    def _observe(self, step: Step, result: O) -> None:
        for node in self._topology.nodes:
            if isinstance(node.stage, Observing):
                where = f"observe() of stage {node.name!r} of graph {self._topology.name!r}, step {step.number}"
                with noted(f"in {where}"), blaming(f"{type(node.stage).__name__}.observe()"):
                    observation = node.stage.observe(result, step.of(node.name))
                if observation is not None:
                    notify_item(self._observers, step, node.name, observation)

    def _notify(self, step: Step, results: Sequence[O], execution: Execution[O]) -> None:
        end = anyio.current_time()
        notify_span(self._observers, Span("step", str(step.number), step.started, end, step.index, kind="step"))
        if results:
            channels = execution.statistics()
            notify(self._observers, lambda observer: observer.on_step(step.index, results[0], channels))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run: the number of completed steps, and each stage's state between steps.

        Raises:
            GraphError: a step is running, has failed or was cancelled, or the run is closed.
        """
        self._require_ready("give its state")
        if self.alive:
            raise GraphError(
                f"graph {self._topology.name!r} cannot give its state: steps {list(self.alive)} have begun; drain the "
                "run first, with drain() or steps(..., drain_after=...)"
            )
        return {"steps": self._index, "stages": {name: stage.state_dict() for name, stage in self._stateful()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another run of this graph.

        Raises:
            GraphError: this run has made a step, or the state belongs to a graph with other stages.
        """
        self._require_ready("take a state")
        if self._index:
            raise GraphError(
                f"graph {self._topology.name!r} has made {self._index} steps: load a state before the first"
            )
        stages, states = dict(self._stateful()), state["stages"]
        if stages.keys() != states.keys():
            raise GraphError(
                f"the state belongs to a graph whose stages {sorted(states)} keep state between steps; in "
                f"{self._topology.name!r} these are {sorted(stages)}"
            )
        if type(steps := state["steps"]) is not int or steps < 0:
            raise GraphError(f"the state of a graph's run is one after some number of steps, not after {steps!r}")
        for name, stage in stages.items():
            stage.load_state_dict(states[name])
        self._index = steps

    def _stateful(self) -> list[tuple[str, Stateful]]:
        return [(node.name, node.stage) for node in self._topology.nodes if isinstance(node.stage, Stateful)]

    def _require_ready(self, what: str) -> None:
        if self._refusal:
            raise GraphError(f"graph {self._topology.name!r} cannot {what}: {self._refusal}")

    def snapshots(self) -> Sequence[Snapshot]:
        """Return which stage waits for which in each step that is alive, the oldest first; from any thread."""
        return [each.execution.snapshot() for each in tuple(self._alive)]

    def close(self) -> None:
        self._refusal = "its run is closed"


@dataclass(eq=False)
class _Steps(Generic[O]):
    run: Run[O]
    remaining: int
    drain_after: DrainAfter

    def __aiter__(self) -> AsyncIterator[O]:
        return self

    async def __anext__(self) -> O:
        while self.remaining > 0:
            results = await self.run.advance(self.remaining, self.drain_after)
            self.remaining = 0 if self.run.ended else self.remaining - 1
            for result in results:
                return result
        raise StopAsyncIteration


COLLECTION: Final = 10_000
"""Net allocations, of objects that may be in cycles, after which Python looks for garbage while a run is open.

Tasks and tokens live for a step. With Python's 700, full collections visit each of them several times and free nothing.
"""


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    before, *older = gc.get_threshold()
    if not 0 < before < COLLECTION:  # switched off, or seldom already
        yield
        return
    gc.set_threshold(COLLECTION, *older)
    try:
        yield
    finally:
        gc.set_threshold(before, *older)


@asynccontextmanager
async def opened(run: Run[O], topology: Topology) -> AsyncIterator[Run[O]]:
    running_loop()
    with _occupied(topology), _collecting_seldom(), anyio.CancelScope() as scope:
        # Stages may hold cancel scopes, and scopes must nest: the one that shields their exit is entered first.
        async with AsyncExitStack() as stack:
            try:
                for node in topology.nodes:
                    if isinstance(node.stage, AbstractAsyncContextManager):
                        await stack.enter_async_context(_Doorway(node, node.stage, topology.name))
                async with run.stepping():
                    yield run
            finally:
                run.close()
                scope.shield = True


class _Doorway(AbstractAsyncContextManager[None]):
    """Opens and closes a stage; its errors name the stage and never hide the error that ended the run."""

    def __init__(self, node: Node, stage: AbstractAsyncContextManager[object, bool | None], graph: str) -> None:
        self._stage = stage
        self._name = f"stage {node.name!r} of graph {graph!r}"

    async def __aenter__(self) -> None:
        try:
            await self._stage.__aenter__()
        except Exception as error:
            error.add_note(f"while opening {self._name}")
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        try:
            return await self._stage.__aexit__(kind, error, tb)
        except Exception as later:
            if later is error:
                return False
            if isinstance(error, Exception):
                error.add_note(f"and then, while closing {self._name}, {type(later).__name__}: {later}")
                return False
            later.add_note(f"while closing {self._name}")
            raise


@contextmanager
def _occupied(topology: Topology) -> Iterator[None]:
    stages = {id(node.stage): node.name for node in topology.nodes}
    occupied = _OPEN_STAGES.get()
    for stage, name in stages.items():
        if stage in occupied:
            raise GraphError(f"stage {name!r} of graph {topology.name!r} is in another open run: close that first")
    _OPEN_STAGES.set(occupied | stages.keys())
    try:
        yield
    finally:
        _OPEN_STAGES.set(_OPEN_STAGES.get() - stages.keys())
