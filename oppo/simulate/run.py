"""One run of one schedule: the real graph of stages, from prompts to updates, with models of cost; its statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final, TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray

from oppo.admission import Admission, Continuous, Overcommit, Restarting, Synchronous, TailAdaptive
from oppo.admission.chunking import ChunkSize, Fixed, WholeRollout
from oppo.algorithms.ppo import ppo
from oppo.events import Batch, Finish, FloatArray, Prompt, StepReport
from oppo.graph import Graph
from oppo.models import Capabilities, Passes, Trained
from oppo.observe import Observer, SpanListener, silent
from oppo.simulate.costs import STAGES, Reader, ScorerName, System, Workload
from oppo.simulate.engine import Device, run_virtual
from oppo.simulate.models import FakeCritic, FakePlace, FakeScorer, FakeTrainer, PlacedCritic, PlacedScorer
from oppo.simulate.policy import FakePolicy
from oppo.stages import Generate, Update
from oppo.stages.hold import held

LAST = 3  # the last steps do not count: they admit only what can still be trained, so they are shorter


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
class Restarts:
    waste: float  # discarded tokens for each trained token
    swing: float  # standard deviation of the batches' mean lengths, over their mean

    @classmethod
    def of(cls, steps: Sequence[StepReport], trained: Sequence[BatchFacts]) -> Restarts:
        discarded = sum(report.metrics.get("deferral/discarded_tokens", 0.0) for report in steps)
        means = np.array([each.lengths.mean() for each in trained])
        return cls(float(discarded / sum(each.lengths.sum() for each in trained)), float(means.std() / means.mean()))


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    # Without the first and last steps of the run.
    seconds: float  # mean of a step, until the next could begin
    tokens: float  # trained in a step, mean
    staleness: float  # mean versions between a rollout's first token and its update
    longest_staleness: int
    token_staleness: float  # mean over sampled tokens
    extra: float  # mean of the controller's choices
    predicted: float  # mean predicted seconds of a step over the mean measured ones; NaN without predictions
    spread: float  # root mean square of the predictions' relative errors
    extras: tuple[int, ...]  # the choices, step by step
    idle: float  # share of the time in which a replica of the actor decodes nothing, mean over replicas
    peak_tokens: float  # most tokens of rollouts that were decoded at once, prompts included
    # of a step's time, what the busiest device did in it: the parts of a decode step, `scoring`, `training`; shares,
    # the largest first
    parts: Mapping[str, float] = field(default_factory=dict)
    restarts: Restarts | None = None  # only of controllers that restart rollouts

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens


MakeAdmission = Callable[[], Admission]
MakeChunks = Callable[[], ChunkSize]

# The largest `max_deferrals` that the adaptive schedule reckons with; nothing is deferred so often
FORESEEN: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    name: str
    about: str
    admission: MakeAdmission  # makes a new policy of admission
    chunk: int | None = None  # tokens that travel at once; `None`: whole responses
    held: bool = False  # scoring waits until decoding has ended
    lookahead: int = 0  # number of steps that begin before the current one has ended
    in_flight: bool = False  # the actor gets new weights between two decode steps, instead of at the cut
    # the keys of `[step]` with which `oppo train` runs it; empty: it has none
    step: Mapping[str, object] = field(default_factory=dict)

    def chunks(self, grain: int = 1) -> ChunkSize:
        return WholeRollout() if self.chunk is None else Fixed(max(1, self.chunk // grain))


def ladder(
    batch: int,
    *,
    overcommit: int,
    chunk: int,
    max_deferrals: int = 2,
    staleness_price: float = 1.0,
    kv_on_sync: str = "recompute",
) -> Mapping[str, Schedule]:
    """The schedules by name, each with one overlap more than one before it."""
    foreseen = min(max_deferrals, FORESEEN)
    live = max(1, batch // 2)
    deferred = f"{overcommit} stragglers deferred to the next step"
    waiting = partial(Synchronous, batch)
    deferring = partial(Overcommit, batch, overcommit, max_deferrals)
    adaptive = partial(TailAdaptive, batch, price=staleness_price, max_deferrals=foreseen)
    refilling = partial(Continuous, batch, live, max_deferrals)
    keys: Mapping[MakeAdmission, Mapping[str, object]] = {
        waiting: {"admission": "overcommit", "overcommit": 0},
        deferring: {"admission": "overcommit", "overcommit": overcommit},
        adaptive: {
            "admission": "adaptive",
            "overcommit": batch // 4,
            "max_deferrals": foreseen,
            "staleness_price": staleness_price,
        },
        refilling: {"admission": "continuous", "overcommit": live},
    }
    serial = Schedule(name="serial", about="decode, then score, then train", admission=waiting, held=True)
    rungs: Sequence[tuple[str, str, MakeAdmission, int, bool]] = (
        ("rollout", "each response is scored when it ends", waiting, 0, False),
        ("chunk", "responses are scored while they are written", waiting, 0, False),
        ("fixed", f"chunk, {deferred}", deferring, 0, False),
        ("adaptive", "chunk, as many deferred as pay", adaptive, 0, False),
        ("lookahead 1", "chunk, decodes during training", waiting, 1, False),
        ("lookahead 1, fixed", f"both, {deferred}", deferring, 1, False),
        ("lookahead 2, fixed", "the same, two steps ahead", deferring, 2, False),
        ("in flight", "the same, weights adopted while tokens are written", deferring, 2, True),
        ("continuous", f"the same, {live} decoded at a time: each that ends is replaced at once", refilling, 2, True),
    )
    found = {"serial": serial}
    for name, about, admission, lookahead, in_flight in rungs:
        size = None if name == "rollout" else chunk
        shared = {"batch": batch, "max_deferrals": max_deferrals, "chunk": size or "whole", "kv_on_sync": kv_on_sync}
        step = {**shared, "lookahead": lookahead, "weight_sync": "in-flight" if in_flight else "cut", **keys[admission]}
        found[name] = Schedule(
            name=name,
            about=about,
            admission=admission,
            chunk=size,
            lookahead=lookahead,
            in_flight=in_flight,
            step=step,
        )
    return found


T = TypeVar("T")

# The track of the spans of each scorer's model, as in `oppo train`
TRACKS: Final[Mapping[ScorerName, str]] = MappingProxyType(
    {"reference": "reference", "reward": "reward model", "critic": "critic", "teacher": "teacher"}
)

GRAINS = 1024  # the longest response has about this many fake tokens at most, each of which stands for several


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
class CostTrainer(FakeTrainer):
    facts: list[BatchFacts] = field(default_factory=list)

    async def update(self, batch: Batch) -> Trained:
        trained = await super().update(batch)
        self.facts.append(BatchFacts.of(batch, self.version - 1))
        self.batches.clear()
        return trained


@dataclass(eq=False)
class SimulatedRun:
    system: System
    workload: Workload
    schedule: Schedule
    steps: int = 120
    skipped: int = 20  # first steps that do not count; at least one
    seed: int = 0  # draws the lengths
    grain: int = 0  # tokens for which a fake token stands; 0: as many as keep the longest response short
    observers: Sequence[Observer] = ()
    listener: SpanListener = silent  # called with the span of each call of a scorer
    drain_after: Collection[int] = ()  # indexes of steps that end before any later one begins, whatever the lookahead

    def __post_init__(self) -> None:
        workload = self.workload
        self.grain = self.grain or max(1, round(workload.cap / GRAINS))
        units = (self.steps + self.schedule.lookahead + 1) * workload.batch
        tokens = workload.lengths(units, workload.samples, self.seed)
        self._lengths = np.maximum(1, np.round(tokens / self.grain)).astype(np.int64)
        self._noise = np.random.default_rng(self.seed + 999).standard_normal(self.steps + 1) * 0.1
        self._longest = Longest()
        self._places: dict[str, FakePlace] = {}
        self._devices: dict[str, Device] = {}
        self.admission = self.schedule.admission()
        self.policy = self._policy()
        self.trainer = self._trainer()

    def graph(self) -> Graph[StepReport]:
        critic = FakeCritic()
        critic.value = _zeros
        reward = self._scorer("reward", FakeScorer(lambda event, read, version: self._score()))
        graph = ppo(
            policy=self.policy,
            reference=self._scorer("reference", FakeScorer(_zeros)),
            reward=reward,
            critic=self._scorer("critic", critic),
            teacher=self._scorer("teacher", FakeScorer(_zeros)) if "teacher" in self.system.readers else None,
            trainer=self.trainer,
            admission=self.admission,
            chunks=self.schedule.chunks(self.grain),
        )
        graph = graph.replace(generate=replace(graph.stage("generate", Generate), samples=self.workload.samples))
        if self.schedule.in_flight:
            graph = graph.replace(update=replace(graph.stage("update", Update), after=()))
        late = [stage for name, stage in STAGES.items() if self.schedule.held or not self._reader(name).streams]
        waiting = [stage for stage in late if stage in graph.nodes]
        return held(graph, waiting) if waiting else graph

    def run(self) -> ScheduleOutcome:
        return run_virtual(self._run)

    async def _run(self) -> ScheduleOutcome:
        reports: list[StepReport] = []
        ends: list[float] = []
        busy: list[float] = []
        done: list[Mapping[str, Mapping[str, float]]] = []
        prompt = np.zeros(max(1, self.workload.prompt // self.grain), np.int32)
        prompts = [Prompt(n, n, prompt, group=n) for n in range(len(self._lengths))]
        ahead = self.schedule.lookahead
        async with self.graph().open(prompts, observers=[self._longest, *self.observers], lookahead=ahead) as run:
            async for report in run.steps(self.steps, drain_after=self.drain_after.__contains__):
                reports.append(report)
                ends.append(anyio.current_time())
                busy.append(sum(lane.busy for lane in self.policy.lanes))
                done.append({name: self._done(device) for name, device in self._devices.items()})
        first, last, lanes = self.skipped, self.steps - LAST - ahead, self.policy.lanes
        steps, trained = reports[first:last], self.trainer.facts[first:last]
        elapsed = ends[last - 1] - ends[first - 1]
        seconds = np.diff(ends)[first - 1 : last - 1]
        staleness = np.concatenate([each.staleness for each in trained])
        predicted = np.array([report.metrics.get("deferral/predicted_seconds", math.nan) for report in steps])
        extras = tuple(int(report.metrics.get("deferral/overcommit", 0)) for report in reports)
        return ScheduleOutcome(
            seconds=float(seconds.mean()),
            tokens=self.grain * float(np.mean([each.lengths.sum() for each in trained])),
            staleness=float(staleness.mean()),
            longest_staleness=int(staleness.max()),
            token_staleness=float(np.mean([each.token_staleness for each in trained])),
            extra=float(np.mean(extras[first:last])),
            predicted=float(predicted.mean() / seconds.mean()),
            spread=float(np.sqrt(np.mean((predicted / seconds - 1) ** 2))),
            extras=extras,
            # a decode step may end after the step
            idle=max(0.0, 1 - (busy[last - 1] - busy[first - 1]) / len(lanes) / elapsed),
            peak_tokens=sum(self.grain * lane.peak_tokens + self.workload.prompt * lane.peak_rows for lane in lanes),
            parts=_busiest(done[first - 1], done[last - 1], elapsed),
            restarts=Restarts.of(steps, trained) if isinstance(self.admission, Restarting) else None,
        )

    def _done(self, device: Device) -> Mapping[str, float]:
        done, lanes, grain = dict(device.done()), self.policy.lanes, self.grain
        parts = {name: done.pop(kind) for kind, name in (("score", "scoring"), ("train", "training")) if kind in done}
        if "decode" not in done:
            return parts
        for lane in lanes:
            lane.settle()
        decoding = self.system.decoder.parts(
            done["decode"],
            steps=grain * sum(lane.steps for lane in lanes),
            rows=grain * sum(lane.places for lane in lanes),
            pauses=sum(lane.pauses for lane in lanes),
        )
        return {**parts, **{name: seconds / len(lanes) for name, seconds in decoding.items()}}

    def _policy(self) -> FakePolicy:
        decoder, grain, prompt = self.system.decoder, self.grain, self.workload.prompt

        def seconds(rows: int, tokens: int) -> float:
            return grain * decoder.seconds(rows, grain * tokens + rows * (prompt + grain / 2))

        return FakePolicy(
            lambda prompt_: int(self._lengths[prompt_.admission, prompt_.sample]),
            seconds,
            reading=partial(self._reading, decoder.prefill),
            ending=decoder.ending,
            kv_on_sync="recompute" if decoder.recomputes else "keep",
            cap=max(1, self.workload.cap // grain),
            replicas=decoder.replicas,
            static=decoder.static and self.schedule.held,
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

    def _scorer(self, name: ScorerName, fake: FakeScorer[T]) -> PlacedScorer[T]:
        reader = self._reader(name)
        fake.device = self._device(reader.device)
        if reader.streams and not (self.schedule.held and reader.padded):
            fake.per_token, fake.per_call = partial(self._reading, reader.passes), reader.call
            fake.answering = lambda finished: reader.answer * len(finished)
        else:
            fake.answering = partial(self._whole, reader)
        place = "scorers" if self.schedule.held else reader.place
        made = self._places.setdefault(place, FakePlace(self.listener))
        kind: type[PlacedScorer[T]] = PlacedCritic if isinstance(fake, FakeCritic) else PlacedScorer
        return kind(fake, made, TRACKS[name])

    def _reader(self, name: ScorerName) -> Reader:
        return self.system.readers.get(name, Reader(place=name, device=name))

    def _reading(self, passes: Passes, start: int, stop: int) -> float:
        # Positions of the prompt are below 0.
        prompt = self.workload.prompt
        return passes.reading(0 if start < 0 else prompt + self.grain * start, prompt + self.grain * stop)

    def _whole(self, reader: Reader, finished: Sequence[Finish]) -> float:
        lengths = [len(event.response) for event in finished]
        if reader.padded:
            lengths = [self._longest.tokens] * len(finished)
        return reader.call + reader.passes.whole(self._rows(lengths)) + reader.answer * len(finished)

    def _rows(self, lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        # Prompts included, float64 [n].
        return self.workload.prompt + self.grain * np.asarray(lengths, np.float64)

    def _device(self, name: str) -> Device:
        return self._devices.setdefault(name, Device(self.system.interference))

    def _score(self) -> float:
        # It rises to a plateau; the noise is of the step's mean.
        step = self.trainer.version
        return 4.1 * (1 - math.exp(-step / 100)) + float(self._noise[min(step, self.steps)])


def _busiest(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]], elapsed: float
) -> Mapping[str, float]:
    shares = [
        {name: (seconds - before[device].get(name, 0.0)) / elapsed for name, seconds in parts.items()}
        for device, parts in after.items()
    ]
    busiest = max(shares, key=lambda parts: sum(parts.values()))
    return dict(sorted(busiest.items(), key=lambda part: -part[1]))


def _zeros(event: Finish, _read: tuple[int, ...], _version: int) -> FloatArray:
    return np.zeros(len(event.response), np.float32)
