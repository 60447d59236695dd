"""The steps of a run that are alive: without lookahead the current one, else also the next ones, which run beside it.

::

    lookahead = 1      step 0   generate | score update
                       step 1            | generate     | score update
                       step 2                           | generate ...

A stage runs the steps one at a time and in order. Step ``k + 1 + lookahead`` begins when step ``k`` has ended and its
result was observed; where steps begin does not depend on how fast they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, TypeAlias, TypeVar

import anyio
from anyio.abc import TaskGroup

from oppo.errors import as_itself, note_others
from oppo.graph.executor import Execution, notify_span
from oppo.graph.snapshot import Snapshot
from oppo.graph.source import Source
from oppo.graph.step import UNKNOWN, Gauge, Step, StepRuntime, WorkLog
from oppo.graph.step_link import StepLink
from oppo.graph.topology import Topology
from oppo.observe import Observer, Span

O = TypeVar("O")  # noqa: E741 - O for output, as in the stage protocols

DrainAfter: TypeAlias = Callable[[int], bool]
"""``f(index)``: whether the next step begins only when step ``index`` has ended."""


def never(index: int) -> bool:
    """Never drain the pipeline."""
    del index
    return False


class StepRun(Generic[O]):
    """A step that is alive.

    Attributes:
        results: of the step, one item or none, once it is over.
        error: what ended it instead.
        scope: cancels it, and not who waits for it.
    """

    def __init__(self, step: Step, link: StepLink, execution: Execution[O]) -> None:
        self.step = step
        self.link = link
        self.execution = execution
        self.results: Sequence[O] = ()
        self.error: Exception | None = None
        self.scope = anyio.CancelScope()

    async def run(self) -> None:
        """Run the step; keep its error."""
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

    def require_success(self) -> None:
        """Raise its error, if it has one."""
        if self.error is not None:
            raise self.error


class Pipeline(Generic[O]):
    """Begins steps and ends them in order.

    Args:
        lookahead: number of steps that begin before the current one has ended.
        gauges: which the stages may read.

    Attributes:
        gauges: by metric; those that are added are read from the next step on.
    """

    def __init__(self, topology: Topology, source: Source, lookahead: int, gauges: Mapping[str, Gauge]) -> None:
        self._topology = topology
        self._source = source
        self._lookahead = lookahead
        self.gauges = dict(gauges)
        self._work: list[Span] = []
        self._alive: deque[StepRun[O]] = deque()
        self._tasks: TaskGroup | None = None
        self._draining = False

    @property
    def alive(self) -> Sequence[int]:
        """The indexes of the steps that have begun and not ended, in order."""
        return [each.step.index for each in self._alive]

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Run steps beside the body; when it ends, those that are still alive are cancelled.

        Raises:
            Exception: the error of a step that failed in the background, if the body has none of its own.
        """
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
        for each in self._alive:
            each.require_success()

    def _errors(self) -> list[Exception]:
        return [each.error for each in self._alive if each.error is not None]

    async def advance(
        self, index: int, remaining: int, observers: Sequence[Observer], drain_after: DrainAfter
    ) -> StepRun[O]:
        """Begin as many steps as are due, and end the oldest.

        Args:
            index: of the oldest step.
            remaining: number of steps that the caller will run, this one included.

        Raises:
            Exception: the error of the step; all later ones are then cancelled.
        """
        self._fill(index, remaining, observers, drain_after)
        oldest = self._alive[0]
        try:
            await (oldest.run() if self._tasks is None else oldest.link.over.wait())
            oldest.require_success()
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

    def _fill(self, index: int, remaining: int, observers: Sequence[Observer], drain_after: DrainAfter) -> None:
        alive, most = self._alive, min(self._lookahead + 1, remaining)
        failed = any(each.link.failed for each in alive)
        while len(alive) < most and not (alive and (self._draining or failed)):
            left = remaining if remaining == UNKNOWN else remaining - len(alive)
            link = StepLink(list(self._topology.by_name), alive[-1].link if alive else None, self._lookahead)
            log = WorkLog(self._work, partial(notify_span, observers))
            runtime = StepRuntime(link=link, work=log, gauges=self.gauges)
            step = Step(index + len(alive), left, anyio.current_time(), ahead=len(alive), runtime=runtime)
            begun = StepRun[O](step, link, Execution(self._topology, step, self._source, observers))
            alive.append(begun)
            if self._tasks is not None:
                self._tasks.start_soon(self._run, begun, name=f"step {step.index} of {self._topology.name}")
            if drain_after(step.index):
                self._draining = True
        if self._draining or len(alive) == remaining:
            alive[-1].link.followed.set()

    async def _run(self, begun: StepRun[O]) -> None:
        """Run a step; when it has failed those behind it are cancelled, since nothing will come of them."""
        await begun.run()
        if begun.error is not None:
            for each in self._alive:
                if each.step.index > begun.step.index:
                    each.scope.cancel()

    def drain(self) -> None:
        """Begin no step until all that are alive have ended."""
        if self._alive:
            self._draining = True
            self._alive[-1].link.followed.set()

    def snapshots(self) -> list[Snapshot]:
        """Return which stage waits for which, in each step that is alive; from any thread."""
        return [each.execution.snapshot() for each in tuple(self._alive)]
