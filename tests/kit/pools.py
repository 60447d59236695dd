"""Engines that die: fakes of a pool's members, with a fate each, and whole PPO graphs of such pools."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import anyio
import numpy as np

from oppo.errors import ModelLost, as_itself
from oppo.evaluation import Evaluate, Evaluation
from oppo.events import Chunk, IntArray, Prompt, Response, StepReport, ToolTokens
from oppo.graph import Graph
from oppo.models import Cut, Decoding, Policy, Sampling, Weights
from oppo.placement import PolicyPool
from oppo.stages import Generate, Update
from oppo.testing import FakePolicy, FakeScorer, FaultyPolicy, Recorder, Script, fake_scalar, prompts, run_virtual
from oppo.testing.fake_policy import FakeDecode
from oppo.turns import Environment
from tests.kit.pipelines import Pipeline

How: TypeAlias = Literal["raises", "falls silent", "hangs"]

TIMEOUT = 5.0

GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class Fate:
    """How an engine ends.

    Attributes:
        at: virtual time of its death, in seconds.
        how: ``raises``: its decoding raises, and so does all else. ``falls silent``: its decoding says nothing, its
            reads raise. ``hangs``: it makes no token any more, and whatever it is asked never returns.
        keeps: whether what it has handed over can be read afterwards.
        loads: seconds that each load takes; a negative one raises.
        returns: seconds until it can be started again.
        after: responses that it ends at most: it dies when it has told the cut of the last.
    """

    at: float = math.inf
    how: How = "raises"
    keeps: bool = True
    loads: tuple[float, ...] = ()
    returns: float = 0.5
    after: int = 1_000_000


@dataclass(eq=False)
class Mortal(FakePolicy):
    """A fake engine with a fate."""

    fate: Fate = field(default_factory=Fate)
    seats: list[FakeDecode] = field(default_factory=list)
    loaded: int = 0
    ended: int = 0
    dead: bool = False
    killed: anyio.Event = field(default_factory=anyio.Event)

    @property
    def progress(self) -> int:
        return self.tokens

    async def require_alive(self) -> None:
        if self.dead or anyio.current_time() >= self.fate.at:
            self.dead = True
            if self.fate.how == "hangs":
                await anyio.sleep_forever()
            raise ModelLost("this engine has died, as its fate was")

    def with_sampling(self, sampling: Sampling) -> Mortal:
        return self  # its tokens are the same

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FakeDecode]:
        await self.require_alive()
        opened = await super().open(rollouts)
        self.seats += opened
        return opened

    def _decode(self, response: Response) -> FakeDecode:
        length = min(self.cap, self.length(response.prompt))
        return MortalDecode(self, response.prompt, length, len(response), response.versions.tolist())

    async def load(self, weights: Weights) -> None:
        await self.require_alive()
        seconds = self.fate.loads[self.loaded] if self.loaded < len(self.fate.loads) else 0.0
        self.loaded += 1
        if seconds < 0:
            raise RuntimeError("these weights did not arrive, as its fate was")
        await anyio.sleep(seconds)
        await self.require_alive()
        await super().load(weights)

    @asynccontextmanager
    async def _decoding(self, live: list[FakeDecode], cut: Cut) -> AsyncIterator[Decoding]:
        await self.require_alive()
        with as_itself():
            async with super()._decoding(live, cut) as decoding, anyio.create_task_group() as tasks:
                tasks.start_soon(self._die)
                yield decoding
                tasks.cancel_scope.cancel()
        if self.dead:
            await self.require_alive()

    def _end(self, ended: list[FakeDecode]) -> None:
        self.ended += len(ended)
        super()._end(ended)
        if self.ended >= self.fate.after:
            self.dead = True
            self.defer([*self._live, *self._waiting])

    def kill(self) -> None:
        self.dead = True
        self.killed.set()

    async def _die(self) -> None:
        with anyio.CancelScope(deadline=self.fate.at):
            await self.killed.wait()
        self.dead = True
        if self.fate.how == "hangs":
            for lane in {decode.lane for decode in self._live if decode.lane is not None}:
                lane.pause(1e5)
        else:
            self.defer([*self._live, *self._waiting])
            if self.fate.how == "raises":
                raise ModelLost("this engine has died while it decoded, as its fate was")


class MortalDecode(FakeDecode):
    """A decode of an engine that may be dead."""

    policy: Mortal

    async def read(self, limit: int) -> Chunk | ToolTokens:
        piece = await super().read(limit)
        if self.policy.dead and self.policy.fate.how != "hangs" and not (self.policy.fate.keeps and len(piece.tokens)):
            raise ModelLost("this engine has died, so it cannot be read, as its fate was")
        return piece

    async def turn(self) -> IntArray | None:
        turn = await super().turn()
        if turn is None and self.policy.dead:
            raise ModelLost("this engine has died, so no turn of it ends, as its fate was")
        return turn

    async def aclose(self) -> None:
        await super().aclose()
        await self.policy.require_alive()


@dataclass
class PooledPipeline(Pipeline):
    """A PPO graph of fakes on a pool of mortal engines.

    Attributes:
        fates: of the members.
        later: of the members that are started again, one after the other; those after them do not die.
        kills: times at which so many of the engines that are alive are killed, the newest first.
        timeout: of the pool.
        evaluated: whether held-out prompts are answered after each step.
        script: of faults of ``member 0``, ``member 1`` and so on, until they are lost.
        environment: answers turns.
        started: how many members were started again.
    """

    fates: Sequence[Fate] = (Fate(), Fate())
    later: Sequence[Fate] = ()
    kills: Sequence[tuple[float, int]] = ()
    timeout: float = TIMEOUT
    evaluated: bool = False
    script: Script = ()
    environment: Environment | None = None
    engines: list[Mortal] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)
    started: int = 0
    error: BaseException | None = None
    tasks_left: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        members: list[Policy] = [self.engine(fate) for fate in self.fates]
        if self.script:
            members = [FaultyPolicy(f"member {k}", member, self.script) for k, member in enumerate(members)]
        self.pool = PolicyPool(members, start=self.start, timeout=self.timeout)
        s, admission = self.setting, self.generate.admission
        self.generate = Generate(self.pool, admission, s.chunks, s.samples, environment=self.environment)

    def turns(self, prompt: Prompt) -> Sequence[int]:
        return ()

    def engine(self, fate: Fate) -> Mortal:
        s = self.setting
        can = replace(s.capabilities, reports_progress=True)
        engine = Mortal(s.length, 0.01, s.pace, kept=s.kept, capabilities=can, turns=self.turns, fate=fate)
        self.engines.append(engine)
        return engine

    async def start(self, index: int) -> Policy:
        await anyio.sleep(self.fates[index].returns)
        self.started += 1
        return self.engine(self.later[self.started - 1] if self.started <= len(self.later) else Fate())

    def graph(self) -> Graph[StepReport]:
        graph = super().graph()
        if not self.evaluated:
            return graph
        held_out = [Prompt(i, i, np.array([7 + i, 3], np.int32)) for i in range(3)]
        greedy = self.pool.with_sampling(GREEDY)
        evaluation = Evaluation(prompts=held_out, reward=FakeScorer(fake_scalar), greedy=greedy)
        graph = graph.replace(update=replace(graph.stage("update", Update), held=["evaluate"]))
        return graph.then("evaluate", Evaluate(evaluation, lambda index: True))

    async def _kill(self) -> None:
        for at, number in sorted(self.kills):
            await anyio.sleep_until(at)
            for engine in [each for each in reversed(self.engines) if not each.dead][:number]:
                engine.kill()

    async def run(self) -> None:
        try:
            with as_itself():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._kill)
                    await self._run()
                    tasks.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - what ends the run is looked at
            self.error = error
        self.tasks_left = len(asyncio.all_tasks()) - 1

    async def _run(self) -> None:
        observers, ahead = [self.tap, self.recorder], self.setting.lookahead
        async with self.graph().open(prompts(self.setting.prompts), observers=observers, lookahead=ahead) as run:
            async for report in run.steps(self.setting.steps):
                self.reports.append(report)

    def play(self) -> PooledPipeline:
        run_virtual(self.run)
        return self
