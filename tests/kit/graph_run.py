"""The graph of training in virtual time, with models of cost: what `oppo.simulate.schedule` is compared with."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final, TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray

from oppo.admission.chunking import Fixed, WholeRollout
from oppo.algorithms.ppo import ppo
from oppo.events import Batch, Finish, FloatArray, Prompt, StepReport
from oppo.graph import Graph
from oppo.models import Capabilities, Passes, Trained
from oppo.observe import Observer, SpanListener, silent
from oppo.simulate.profile import STAGES, Reader, ScorerName, System, Workload
from oppo.simulate.schedule import Schedule
from oppo.stages import Generate, Update
from oppo.stages.hold import held
from oppo.testing import run_virtual
from tests.kit.devices import Device, DevicePolicy, DeviceScorer, DeviceTrainer
from tests.kit.places import FakePlace, PlacedCritic, PlacedScorer

LAST: Final = 3  # the last steps do not count: they admit only what can still be trained, so they are shorter


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Lengths (tokens) and staleness (versions) of a batch; ``token_staleness``: mean over its sampled tokens."""

    lengths: NDArray[np.int64]
    staleness: NDArray[np.int64]
    token_staleness: float

    @classmethod
    def of(cls, batch: Batch, version: int) -> BatchFacts:
        first = np.array([int(response.versions[0]) for response in batch.responses], np.int64)
        staleness = float(np.mean(version - batch.versions[batch.sampled])) if batch.sampled.any() else 0.0
        return cls(np.diff(batch.offsets), version - first, staleness)


@dataclass(frozen=True, slots=True)
class Ran:
    """As of :class:`oppo.simulate.schedule.ScheduleOutcome`; ``discarded``: tokens."""

    seconds: float
    tokens: float
    staleness: float
    longest_staleness: int
    token_staleness: float
    extras: tuple[int, ...]
    discarded: float


T = TypeVar("T")

# The track of the spans of each scorer's model, as in `oppo train`
TRACKS: Final[Mapping[ScorerName, str]] = MappingProxyType(
    {"reference": "reference", "reward": "reward model", "critic": "critic", "teacher": "teacher"}
)


class Longest(Observer):
    def __init__(self) -> None:
        self.tokens = 0
        self._step = -1

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        del stage, at
        if isinstance(item, Finish):
            self.tokens = max(self.tokens if step == self._step else 0, len(item.response))
            self._step = step


@dataclass(eq=False)
class CostTrainer(DeviceTrainer):
    facts: list[BatchFacts] = field(default_factory=list)

    async def update(self, batch: Batch) -> Trained:
        trained = await super().update(batch)
        self.facts.append(BatchFacts.of(batch, self.version - 1))
        self.batches.clear()
        return trained


@dataclass(eq=False)
class GraphRun:
    system: System
    workload: Workload
    schedule: Schedule
    steps: int = 120
    skipped: int = 20  # first steps that do not count; at least one
    seed: int = 0  # draws the lengths
    observers: Sequence[Observer] = ()
    listener: SpanListener = silent  # called with the span of each call of a scorer
    drain_after: Collection[int] = ()  # indexes of steps that end before any later one begins, whatever the lookahead

    def __post_init__(self) -> None:
        workload = self.workload
        units = (self.steps + self.schedule.lookahead + 1) * workload.batch
        tokens = workload.lengths(units, workload.samples, self.seed)
        self._lengths = np.maximum(1, tokens)
        self._noise = np.random.default_rng(self.seed + 999).standard_normal(self.steps + 1) * 0.1
        self._longest = Longest()
        self._places: dict[str, FakePlace] = {}
        self._devices: dict[str, Device] = {}
        self.admission = self.schedule.admission()
        self.policy = self._policy()
        self.trainer = self._trainer()

    def graph(self) -> Graph[StepReport]:
        reward = self._scorer("reward", DeviceScorer(lambda event, read, version: self._score()))
        graph = ppo(
            policy=self.policy,
            reference=self._scorer("reference", DeviceScorer(_zeros)),
            reward=reward,
            critic=self._scorer("critic", DeviceScorer(_zeros)),
            teacher=self._scorer("teacher", DeviceScorer(_zeros)) if "teacher" in self.system.readers else None,
            trainer=self.trainer,
            admission=self.admission,
            chunks=WholeRollout() if self.schedule.chunk is None else Fixed(self.schedule.chunk),
        )
        graph = graph.replace(generate=replace(graph.stage("generate", Generate), samples=self.workload.samples))
        if self.schedule.in_flight:
            graph = graph.replace(update=replace(graph.stage("update", Update), after=()))
        late = [stage for name, stage in STAGES.items() if self.schedule.held or not self._reader(name).streams]
        waiting = [stage for stage in late if stage in graph.nodes]
        return held(graph, waiting) if waiting else graph

    def run(self) -> Ran:
        return run_virtual(self._run)

    async def _run(self) -> Ran:
        reports: list[StepReport] = []
        ends: list[float] = []
        prompt = np.zeros(max(1, self.workload.prompt), np.int32)
        prompts = [Prompt(n, n, prompt, group=n) for n in range(len(self._lengths))]
        ahead = self.schedule.lookahead
        async with self.graph().open(prompts, observers=[self._longest, *self.observers], lookahead=ahead) as run:
            async for report in run.steps(self.steps, drain_after=self.drain_after.__contains__):
                reports.append(report)
                ends.append(anyio.current_time())
        first, last = self.skipped, self.steps - LAST - ahead
        trained = self.trainer.facts[first:last]
        return Ran(
            seconds=float(np.diff(ends)[first - 1 : last - 1].mean()),
            tokens=float(np.mean([each.lengths.sum() for each in trained])),
            staleness=float(np.concatenate([each.staleness for each in trained]).mean()),
            longest_staleness=int(np.concatenate([each.staleness for each in trained]).max()),
            token_staleness=float(np.mean([each.token_staleness for each in trained])),
            extras=tuple(int(report.metrics.get("deferral/overcommit", 0)) for report in reports),
            discarded=sum(report.metrics.get("deferral/discarded_tokens", 0.0) for report in reports[first:last]),
        )

    def _policy(self) -> DevicePolicy:
        decoder, prompt = self.system.decoder, self.workload.prompt

        def seconds(rows: int, tokens: int) -> float:
            return decoder.seconds(rows, tokens + rows * (prompt + 0.5))

        return DevicePolicy(
            lambda prompt_: int(self._lengths[prompt_.admission, prompt_.sample]),
            seconds,
            reading=partial(self._reading, decoder.prefill),
            ending=decoder.ending,
            kv_on_sync="recompute" if decoder.recomputes else "keep",
            cap=self.workload.cap,
            replicas=decoder.replicas,
            device=self._device(decoder.device),
            capabilities=Capabilities(adds_while_decoding=True, loads_while_decoding="between decode steps"),
        )

    def _trainer(self) -> CostTrainer:
        updater = self.system.updater
        return CostTrainer(
            lambda batch: updater.seconds(self._rows(np.diff(batch.offsets))),
            syncing=updater.weight_sync,
            device=self._device(updater.device),
        )

    def _scorer(self, name: ScorerName, fake: DeviceScorer[T]) -> PlacedScorer[T]:
        reader = self._reader(name)
        fake.device = self._device(reader.device)
        if reader.streams and not (self.schedule.held and reader.padded):
            fake.per_token, fake.per_call = partial(self._reading, reader.passes), reader.call
            fake.answering = lambda finished: reader.answer * len(finished)
        else:
            fake.answering = partial(self._whole, reader)
        place = "scorers" if self.schedule.held else reader.place
        made = self._places.setdefault(place, FakePlace(self.listener))
        kind: type[PlacedScorer[T]] = PlacedCritic if name == "critic" else PlacedScorer
        return kind(fake, made, TRACKS[name])

    def _reader(self, name: ScorerName) -> Reader:
        return self.system.readers.get(name, Reader(place=name, device=name))

    def _reading(self, passes: Passes, start: int, stop: int) -> float:
        # Positions of the prompt are below 0.
        prompt = self.workload.prompt
        return passes.reading(0 if start < 0 else prompt + start, prompt + stop)

    def _whole(self, reader: Reader, finished: Sequence[Finish]) -> float:
        lengths = [len(event.response) for event in finished]
        if reader.padded:
            lengths = [self._longest.tokens] * len(finished)
        return reader.call + reader.passes.whole(self._rows(lengths)) + reader.answer * len(finished)

    def _rows(self, lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        # Prompts included, float64 [n].
        return self.workload.prompt + np.asarray(lengths, np.float64)

    def _device(self, name: str) -> Device:
        return self._devices.setdefault(name, Device(self.system.interference))

    def _score(self) -> float:
        # It rises to a plateau; the noise is of the step's mean.
        step = self.trainer.version
        return 4.1 * (1 - math.exp(-step / 100)) + float(self._noise[min(step, self.steps)])


def _zeros(event: Finish, _read: tuple[int, ...], _version: int) -> FloatArray:
    return np.zeros(len(event.response), np.float32)
