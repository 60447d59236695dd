"""One run of one schedule: the ledger and the admission of training decide, the work is simulated in bulk."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from oppo.admission import (
    Admission,
    Continuous,
    Observation,
    Overcommit,
    ReportsMetrics,
    Scoring,
    Synchronous,
    TailAdaptive,
)
from oppo.admission.overcommit import RISE, AdaptiveOvercommit
from oppo.events import Prompt
from oppo.graph.stage import UNKNOWN
from oppo.simulate.profile import STAGES, Reader, ScorerName, System, Workload
from oppo.simulate.work import Backlog, Clock, Device, Job, Lane, Place, Row, Scorer
from oppo.stages.ledger import Ledger, Unit

BLOCKS: Final = 3  # parts of a run whose means tell how far chance goes


@dataclass(frozen=True, slots=True)
class Restarts:
    waste: float  # discarded tokens for each trained token
    swing: float  # standard deviation of the batches' mean lengths, over their mean


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    # Without the first steps of the run.
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
    blocks: tuple[float, ...] = ()  # seconds for each trained token, in each of `BLOCKS` parts
    restarts: Restarts | None = None  # only of controllers that restart rollouts

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens

    @property
    def deferred(self) -> tuple[float, float]:
        """The controller's choices in the last quarter but one of the run, and in the last; means."""
        *_, before, last = np.array_split(self.extras, 4)
        return float(before.mean()), float(last.mean())

    @property
    def settled(self) -> bool:
        before, last = self.deferred
        return abs(last - before) <= max(RISE, max(before, last) / 4)


MakeAdmission = Callable[[], Admission]

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


def ladder(
    batch: int,
    *,
    overcommit: int,
    chunk: int,
    max_deferrals: int = 2,
    staleness_price: float = 1.0,
    kv_on_sync: str = "recompute",
) -> Mapping[str, Schedule]:
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


_FOLLOWING: Final[Sequence[ScorerName]] = ("critic",)  # scorers whose weights follow the trainer's


@dataclass(slots=True, eq=False)
class _Step:
    index: int
    ahead: int  # steps that were alive when it began
    started: float
    backlogs: Mapping[ScorerName, Backlog]
    begun: float = math.nan  # when it decoded
    cut: float = math.nan
    updating: float = math.nan
    updated: float = math.nan
    syncing: float = math.nan
    synced: float = math.nan
    seconds: float = 0.0
    steps: int = 0  # decode steps
    had: dict[Row, int] = field(default_factory=dict)  # tokens of each row that is decoded, when it joined
    after: dict[Row, int] = field(default_factory=dict)  # decode steps before it
    trained: list[Row] = field(default_factory=list)
    seen: Observation = field(default_factory=lambda: Observation(0))  # its decoding from the cut, all from its end
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the controller
    discarded: int = 0  # tokens
    staleness: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # of trained rows, in updates
    token_staleness: float = 0.0
    lane_seconds: float = 0.0  # in which replicas have decoded by its end
    work: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # seconds by device and part by its end
    ended: float = math.nan

    @property
    def generated(self) -> bool:
        return not math.isnan(self.cut)

    @property
    def scored(self) -> bool:
        return self.generated and all(each.answered == len(self.trained) for each in self.backlogs.values())

    @property
    def tokens(self) -> int:
        return sum(row.length for row in self.trained)


@dataclass(eq=False)
class SimulatedRun:
    """Runs a schedule until so many steps have ended; its statistics leave out the first ``skipped``, at least one."""

    system: System
    workload: Workload
    schedule: Schedule
    steps: int = 120
    skipped: int = 20
    seed: int = 0
    grain: int = 1  # lengths are rounded to so many tokens: those that end in one decode step are one event
    drain_after: Collection[int] = ()  # indexes of steps that end before any later one begins, whatever the lookahead
    settling: int = 0  # further steps of a controller that adapts, before these, as long as the first ones

    def __post_init__(self) -> None:
        workload, decoder, grain = self.workload, self.system.decoder, self.grain
        units = (self.steps + self.schedule.lookahead + 2) * workload.batch
        drawn = workload.lengths(units, workload.samples, self.seed)
        self.admission = self.schedule.admission()
        if isinstance(self.admission, AdaptiveOvercommit):
            before = np.arange(self.settling * workload.batch) % (self.skipped * workload.batch)
            drawn = np.concatenate([drawn[before], drawn])
            self.steps, self.skipped = self.steps + self.settling, self.skipped + self.settling
        lengths = grain * np.rint(drawn / grain).astype(np.int64)
        self._lengths: list[int] = np.clip(lengths, 1, workload.cap).ravel().tolist()  # by rollout
        self._noise = np.random.default_rng(self.seed + 999).standard_normal(self.steps + 1) * 0.1
        self._ledger = Ledger(self.admission)
        self._clock = Clock()
        self._devices: dict[str, Device] = {}
        self._places: dict[str, Place] = {}
        readers, held = self.system.readers, self.schedule.held
        self._scorers = {name: self._scorer(name, reader) for name, reader in readers.items()}
        self._late = {name for name, reader in readers.items() if held or not reader.streams}  # told at the cut
        self._early = [name for name, each in self._scorers.items() if each.whole is None and name not in self._late]
        device, static = self._device(decoder.device), decoder.static and self.schedule.held
        self.lanes = [
            Lane(self._clock, device, decoder, workload.prompt, self.schedule.chunk or 0, static, self._attend)
            for _ in range(decoder.replicas)
        ]
        self.rows: dict[int, Row] = {}  # in flight
        self._taken = 0  # units
        self.alive: list[_Step] = []
        self._generating: _Step | None = None
        self._updating: _Step | None = None
        self._draining = False
        self._refills = False
        self._unheard: list[Observation] = []
        self._version = 0  # of the trainer
        self._served = 0  # of the newest weights that a lane has
        self._adopted = 0  # of all lanes
        self._last = -math.inf  # when weights were given last
        self.ended: list[_Step] = []

    def run(self) -> ScheduleOutcome:
        self._fill()
        while len(self.ended) < self.steps:
            self._clock.advance()
        return self._outcome()

    def _fill(self) -> None:
        while len(self.alive) <= self.schedule.lookahead and not (self.alive and self._draining):
            ahead = len(self.alive)
            index = len(self.ended) + ahead
            backlogs = {name: scorer.begins() for name, scorer in self._scorers.items()}
            self.alive.append(_Step(index, ahead, self._clock.now, backlogs))
            self._draining |= index in self.drain_after
        self._progress()

    def _progress(self) -> None:
        # Whatever waited for what has happened.
        for step in self.alive:
            if self._generating is None and not step.generated:
                self._generate(step)
        following = next((each for each in self.alive if math.isnan(each.updating)), None)
        if self._updating is None and following is not None and following.scored:
            self._train(following)
        training = self._updating
        if training is not None and math.isnan(training.syncing) and not math.isnan(training.updated):
            later = self.alive[self.alive.index(training) + 1 :]
            if self.schedule.in_flight or all(each.generated for each in later):
                training.syncing = self._clock.now
                self._clock.after(self.system.updater.weight_sync, partial(self._sync, training))
        if self.alive:
            oldest = self.alive[0]
            if not math.isnan(oldest.synced) and all(each.over for each in oldest.backlogs.values()):
                self._end(oldest)

    def _later(self, call: Callable[[], None]) -> None:
        self._clock.then[call] = None

    # Generation.

    def _generate(self, step: _Step) -> None:
        self._generating, step.begun = step, self._clock.now
        self._hear(step.index - step.ahead)
        wanted = self._ledger.wanted(UNKNOWN)
        if isinstance(self.admission, ReportsMetrics):
            step.metrics = dict(self.admission.metrics())
        resumed = list(self.rows.values())
        groups = self._take(wanted)
        complete = self._ledger.begin(groups)
        opened = self._open([*(unit.prompts for unit in self._ledger.restarted), *groups])
        if "critic" in self._early:
            self._tell(step, resumed, _FOLLOWING)  # it has forgotten them
        self._finish(complete, step)
        live = [row for row in self.rows.values() if row.made < row.length]
        if not live or self._ledger.is_cut():
            self._send(step, opened)
            self._cut(step)
            return
        step.seen = replace(step.seen, rows=len(live))
        units = {row.prompt.admission for row in live}
        self._join([row for row in self.rows.values() if row.prompt.admission in units], step)
        self._refills = self._ledger.refills
        self._refill(step)

    def _take(self, wanted: int) -> list[tuple[Prompt, ...]]:
        tokens, samples = np.zeros(1, np.int32), self.workload.samples
        first, self._taken = self._taken, min(self._taken + wanted, len(self._lengths) // samples)
        return [
            tuple(Prompt(n * samples + k, n, tokens, sample=k, group=n) for k in range(samples))
            for n in range(first, self._taken)
        ]

    def _open(self, groups: Iterable[tuple[Prompt, ...]]) -> list[Row]:
        unread = [0] * len(self._scorers)
        rows = [Row(each, self._lengths[each.rollout], unread.copy()) for group in groups for each in group]
        self.rows |= {row.prompt.rollout: row for row in rows}
        return rows

    def _join(self, rows: Sequence[Row], step: _Step) -> None:
        prefill, recomputes = self.system.decoder.prefill, self.system.decoder.recomputes
        for row in rows:
            step.had[row], step.after[row] = row.made, step.steps
            if row.made == row.length:  # of a unit whose other rows are decoded
                continue
            if row.home is None:
                row.home = min(self.lanes, key=lambda lane: lane.homes)
                row.home.homes += 1
            reread = row.load < 0 or (recomputes and row.load != self._adopted)
            row.load = self._adopted
            row.follow(self._served, row.made)
            row.home.join(row, prefill.reading(0, self.workload.prompt + max(row.made - 1, 0)) if reread else 0.0)
        self._send(step, [row for row in rows if row.sent < 0])
        for lane in dict.fromkeys(row.home for row in rows):
            if lane is not None:
                lane.start()

    def _refill(self, step: _Step) -> None:
        # Until the prompts do not reach.
        if self._refills:
            wanted = self._ledger.refill(UNKNOWN)
            groups = self._take(wanted)
            if groups:
                self._ledger.add(groups)
                self._join(self._open(groups), step)
            self._refills = len(groups) == wanted and self._ledger.decoding > 0

    def _attend(self, lane: Lane, ended: list[Row], grown: list[Row]) -> None:
        step = self._generating
        if step is None:
            return
        self._send(step, grown)
        if not ended:
            return
        lane.pause(self.system.decoder.ending * len(ended))
        lane.homes -= len(ended)
        self._send(step, ended)
        step.steps = max(step.steps, *(step.after[row] + row.length - step.had[row] for row in ended))
        placed = len(self._ledger.placed)
        cut = self._ledger.finished(sorted(row.prompt.rollout for row in ended))
        self._finish(self._ledger.placed[placed:], step)
        if cut:
            self._cut(step)
        else:
            self._refill(step)

    def _finish(self, units: Sequence[Unit], step: _Step) -> None:
        rows = [self.rows.pop(prompt.rollout) for unit in units for prompt in unit.prompts]
        step.trained += rows
        for name, scorer in self._scorers.items():
            if name not in self._late:
                step.backlogs[name].finished += rows
                self._later(scorer.wake)

    def _cut(self, step: _Step) -> None:
        self._generating, step.cut = None, self._clock.now
        stopped = [row for lane in self.lanes for row in lane.stop()]
        step.steps = max(step.steps, *(step.after[row] + row.made - step.had[row] for row in stopped), 0)
        self._send(step, [row for row in stopped if row.made > row.sent])
        step.seen = self._decoded(step)
        late = {prompt.rollout for unit in self._ledger.end() for prompt in unit.prompts}
        deferred = [row for rollout, row in self.rows.items() if rollout in late]
        for name, scorer in self._scorers.items():
            backlog = step.backlogs[name]
            if name in self._late:
                backlog.finished += step.trained
                backlog.unread |= {row: row.sent for row in deferred} if scorer.whole is None else {}
            if name in _FOLLOWING or self._ledger.restarts:  # it forgets them
                for row in deferred:
                    backlog.unread.pop(row, None)
                    scorer.forget(row)
            backlog.ended = True
            self._later(scorer.wake)
        if self._ledger.restarts:
            step.discarded = sum(row.made for row in deferred)
            for row in deferred:
                del self.rows[row.prompt.rollout]
                if row.home is not None and row.made < row.length:
                    row.home.homes -= 1
        self._later(self._progress)

    # Scoring.

    def _send(self, step: _Step, rows: Sequence[Row]) -> None:
        for row in rows:
            row.sent = row.home.made(row) if row.home is not None else row.made
        self._tell(step, rows, self._early)

    def _tell(self, step: _Step, rows: Sequence[Row], names: Collection[ScorerName]) -> None:
        # These scorers may read on.
        sent = {row: row.sent for row in rows}
        for name in names if rows else ():
            step.backlogs[name].unread.update(sent)
            self._later(self._scorers[name].wake)

    def _scorer(self, name: ScorerName, reader: Reader) -> Scorer:
        place = self._places.setdefault("scorers" if self.schedule.held else reader.place, Place())
        reads = reader.streams and not (self.schedule.held and reader.padded)
        return Scorer(
            list(self.system.readers).index(name),
            reader,
            self._clock,
            self._device(reader.device),
            place,
            self.workload.prompt,
            None if reads else partial(self._whole, reader),
            partial(self._later, self._progress),
        )

    def _whole(self, reader: Reader, finished: Sequence[Row]) -> float:
        rows = self._whole_rows(finished)
        return reader.call + reader.passes.whole(rows, padded=reader.padded) + reader.answer * len(finished)

    def _whole_rows(self, rows: Sequence[Row]) -> NDArray[np.float64]:
        # Prompts included, float64 [n].
        return self.workload.prompt + np.array([row.length for row in rows], np.float64)

    def _device(self, name: str) -> Device:
        return self._devices.setdefault(name, Device(self._clock, self.system.interference))

    # The update.

    def _train(self, step: _Step) -> None:
        self._updating, step.updating = step, self._clock.now
        updater = self.system.updater
        device = self._device(updater.device)

        def over() -> None:
            device.finish(job)
            step.updated = self._clock.now
            step.staleness = np.array([self._version - row.runs[0][1] for row in step.trained], np.int64)
            tokens = sum(row.version_sum for row in step.trained)
            step.token_staleness = self._version - tokens / max(1, step.tokens)
            self._version += 1
            self._later(self._progress)

        job = Job("train", over)
        device.begin(job, updater.seconds(self._whole_rows(step.trained)))

    def _sync(self, step: _Step) -> None:
        # Give the weights to the actor: now, or to each lane between two of its decode steps.
        version, missing = self._version, set(self.lanes)

        def adopt(lane: Lane) -> None:
            missing.remove(lane)
            self._served = version
            prefill = self.system.decoder.prefill
            for row, made in lane.live():
                row.follow(version, made)
                if self.system.decoder.recomputes and row.load != version:
                    lane.pause(prefill.reading(0, self.workload.prompt + max(made - 1, 0)))
                row.load = version
            if not missing:
                self._adopted, self._updating, step.synced = version, None, self._clock.now
                began = max(step.started, self._last) if step.ahead else step.started
                step.seconds, self._last = step.synced - began, step.synced
                self._later(self._progress)

        for lane in self.lanes:
            lane.between_steps(partial(adopt, lane))

    # The end.

    def _end(self, step: _Step) -> None:
        self.alive.pop(0)
        step.ended = self._clock.now
        step.lane_seconds = sum(lane.busy for lane in self.lanes)
        step.work = {name: self._done(device) for name, device in self._devices.items()}
        self.ended.append(step)
        step.seen = self._observed(step)
        self._unheard.append(step.seen)
        if not self.alive:
            self._draining = False
            self._hear(step.index + 1)
        self._fill()

    def _hear(self, observed: int) -> None:
        for each in self._unheard:
            if each.step < observed:
                self.admission.observe(each)
        self._unheard = [each for each in self._unheard if each.step >= observed]

    def _decoded(self, step: _Step) -> Observation:
        longest: dict[int, tuple[int, bool]] = {}  # of each unit, and whether it is complete
        for row in step.had:
            most, complete = longest.get(row.prompt.admission, (0, True))
            longest[row.prompt.admission] = max(most, row.made), complete and row.made == row.length
        finished = tuple(length for length, complete in longest.values() if complete)
        return replace(
            step.seen,
            step=step.index,
            decode_seconds=step.cut - step.begun,
            decode_steps=step.steps,
            tokens=sum(row.made - had for row, had in step.had.items()),
            finished=finished,
            capped=sum(length >= self.workload.cap for length in finished),
            deferred=tuple(length for length, complete in longest.values() if not complete),
            lookahead=self.schedule.lookahead,
            chunk=self.schedule.chunk or 0,
        )

    def _observed(self, step: _Step) -> Observation:
        answers = {STAGES[name]: each for name, each in step.backlogs.items() if each.answered}
        waited = max([step.cut, *(each.last for each in answers.values())])
        rest = max(0.0, step.seconds - (waited - step.begun))
        if self.schedule.lookahead:
            rest = step.updated - step.updating + step.synced - step.syncing
        return replace(
            step.seen,
            seconds=step.seconds,
            scoring=tuple(_scoring(stage, each, step.cut) for stage, each in sorted(answers.items())),
            rest_seconds=rest,
            # it rises to a plateau; the noise is of the step's mean
            score=4.1 * (1 - math.exp(-step.index / 100)) + float(self._noise[min(step.index, self.steps)]),
        )

    def _done(self, device: Device) -> Mapping[str, float]:
        done, lanes = device.done(), self.lanes
        parts = {name: done.pop(kind) for kind, name in (("score", "scoring"), ("train", "training")) if kind in done}
        if "decode" not in done:
            return parts
        decoding = self.system.decoder.parts(
            done["decode"],
            steps=sum(lane.steps for lane in lanes),
            rows=sum(lane.places for lane in lanes),
            pauses=sum(lane.pauses for lane in lanes),
        )
        return {**parts, **{name: seconds / len(lanes) for name, seconds in decoding.items()}}

    def _outcome(self) -> ScheduleOutcome:
        first, lanes = self.skipped, self.lanes
        steps, before, after = self.ended[first:], self.ended[first - 1], self.ended[-1]
        elapsed = after.ended - before.ended
        seconds = np.diff([each.ended for each in self.ended[first - 1 :]])
        staleness = np.concatenate([each.staleness for each in steps])
        predicted = np.array([each.metrics.get("deferral/predicted_seconds", math.nan) for each in steps])
        extras = tuple(int(each.metrics.get("deferral/overcommit", 0)) for each in self.ended)
        tokens = np.array([each.tokens for each in steps])
        means = np.array([each.tokens / len(each.trained) for each in steps])
        waste = float(sum(each.discarded for each in steps) / tokens.sum())
        return ScheduleOutcome(
            seconds=float(seconds.mean()),
            tokens=float(tokens.mean()),
            staleness=float(staleness.mean()),
            longest_staleness=int(staleness.max()),
            token_staleness=float(np.mean([each.token_staleness for each in steps])),
            extra=float(np.mean(extras[first:])),
            predicted=float(predicted.mean() / seconds.mean()),
            spread=float(np.sqrt(np.mean((predicted / seconds - 1) ** 2))),
            extras=extras,
            idle=max(0.0, 1 - (after.lane_seconds - before.lane_seconds) / len(lanes) / elapsed),
            peak_tokens=float(sum(lane.peak_tokens + self.workload.prompt * lane.peak_rows for lane in lanes)),
            parts=_busiest(before.work, after.work, elapsed),
            blocks=tuple(
                float(took.sum() / trained.sum())
                for took, trained in zip(np.array_split(seconds, BLOCKS), np.array_split(tokens, BLOCKS), strict=True)
                if len(took)
            ),
            restarts=Restarts(waste, float(means.std() / means.mean())) if self._ledger.restarts else None,
        )


def _scoring(stage: str, backlog: Backlog, cut: float) -> Scoring:
    waited = [call for call in backlog.calls if call[1] <= backlog.last]
    return Scoring(
        stage,
        before=sum(max(0.0, min(end, cut) - start) for start, end in waited),
        after=sum(max(0.0, end - max(start, cut)) for start, end in waited),
        spare=sum(end - start for start, end in backlog.calls if end > backlog.last),
        calls=len(backlog.calls),
        answered=backlog.answered,
    )


def _busiest(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]], elapsed: float
) -> Mapping[str, float]:
    shares = [
        {name: (seconds - before[device].get(name, 0.0)) / elapsed for name, seconds in parts.items()}
        for device, parts in after.items()
    ]
    busiest = max(shares, key=lambda parts: sum(parts.values()))
    return dict(sorted(busiest.items(), key=lambda part: -part[1]))
