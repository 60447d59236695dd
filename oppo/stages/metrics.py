"""The metrics of a step: the records of its stages, stretches of its decode phases, the observation, the lengths."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from oppo.admission import Observation, Scoring, Stretch
from oppo.declared import require_metrics
from oppo.errors import ProtocolError
from oppo.events import Batch, StepReport
from oppo.graph import Step
from oppo.models import Passes
from oppo.observe import Interval, Span, occupation, seconds, union
from oppo.stages.ledger import InFlightRollout

MOST: Final = 8
"""The most stretches of a phase: enough to fit the cost of a decode step apart from the cost of its rows."""


@dataclass(frozen=True, slots=True)
class Grown:
    prompt: int  # tokens of its prompt, and tool tokens of its response at the beginning
    start: int  # sampled tokens of its response at the beginning
    stop: int  # and at the end
    ended: float  # loop time of its last chunk, in seconds; NaN if it did not end
    joined: int = 0  # decode steps of the phase before it was decoded

    @property
    def last(self) -> int:
        # It gained one in each while it was live.
        return self.joined + self.gain

    @property
    def gain(self) -> int:
        return self.stop - self.start

    @property
    def has_ended(self) -> bool:
        return not math.isnan(self.ended)

    @property
    def context(self) -> int:
        return self.prompt + self.start

    @property
    def read(self) -> tuple[int, int]:
        """The positions that the model had to read: not the last token, nor tokens read before it was deferred."""
        return (self.context - 1 if self.start else 0, self.context + self.gain - 1) if self.gain else (0, 0)


def stretches(rollouts: Sequence[Grown], begin: float, end: float) -> tuple[Stretch, ...]:
    """Return the stretches of a phase: each ends with a decode step in which a rollout ended, or with the phase."""
    steps = max((each.last for each in rollouts if each.stop > each.start), default=0)
    if not steps:
        return ()
    borders = [(0, begin)]
    for each in sorted(rollouts, key=lambda each: (each.last, each.ended)):
        far = each.last - borders[-1][0] >= steps / MOST
        if far and each.last < steps and borders[-1][1] < each.ended < end:
            borders.append((each.last, each.ended))
    borders.append((steps, end))
    columns = ("joined", "gain", "context", "start", "last", "has_ended")
    rows = np.array([[getattr(each, name) for name in columns] for each in rollouts], np.int64)
    return tuple(_stretch(rows.T, first, last) for first, last in pairwise(borders))


def _stretch(rows: NDArray[np.int64], begun: tuple[int, float], over: tuple[int, float]) -> Stretch:
    (first, begin), (last, end) = begun, over
    joined, gain, context, start, final, has_ended = rows
    before, after = (np.clip(step - joined, 0, gain) for step in (first, last))  # tokens gained by these decode steps
    began = (first <= joined) & (joined < last)
    return Stretch(
        end - begin,
        last - first,
        int((after - before).sum()),
        int(((after - before) * context + (after * (after - 1) - before * (before - 1)) // 2).sum()),
        opened=int(context[began & (start == 0)].sum()),
        resumed=int(context[began & (start > 0)].sum()),
        ended=int(((has_ended > 0) & (first < final) & (final <= last)).sum()),
    )


ACCUMULATE: Final = "accumulate"  # the label of work on a part of a batch, before the update


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens that a step's rollouts gained, by round; fields as of :class:`oppo.admission.Observation`."""

    decode_steps: int = 0
    tokens: int = 0
    rows: int = 0
    finished: tuple[int, ...] = ()
    capped: int = 0
    deferred: tuple[int, ...] = ()
    chunk: int = 0
    grown: tuple[Grown, ...] = ()


@dataclass(frozen=True, slots=True)
class ScorerReading:
    tokens: int
    pairs: float = 0.0  # of each token and those before it in its rollout


@dataclass(frozen=True, slots=True)
class ScorerAnswer:
    start: float  # loop time at its beginning, in seconds
    at: float  # and at its end
    rollouts: int


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What a stage of training measured in a step; no evaluation reports it, though its stages record it too."""

    values: Mapping[str, float]

    def __post_init__(self) -> None:
        require_metrics("the metrics of a step", self.values, error=ProtocolError)


@dataclass(frozen=True, slots=True)
class Averaged:
    """Measurements by metric, which is their mean over the step; recorded by any stage.

    A metric whose name ends with ``/min`` or ``/max`` is the least or the most of them.
    """

    values: Mapping[str, Sequence[float]]


def step_metrics(step: Step) -> dict[str, float]:
    metrics = {name: value for _, each in step.recorded(StepMetrics) for name, value in each.values.items()}
    averaged: dict[str, list[float]] = {}
    for _, each in step.recorded(Averaged):
        for name, values in each.values.items():
            averaged.setdefault(name, []).extend(values)
    return metrics | {name: _together(name, values) for name, values in averaged.items() if values}


def _together(name: str, values: Sequence[float]) -> float:
    kind = name.rpartition("/")[2]
    return {"min": min, "max": max}[kind](values) if kind in {"min", "max"} else math.fsum(values) / len(values)


class DecodeMeter:
    """Measures the progress of rollouts in flight; complete ones count only as part of an incomplete unit."""

    def __init__(self, rollouts: Iterable[InFlightRollout], chunk: int = 0) -> None:
        self._chunk = chunk
        self._units: list[list[InFlightRollout]] = []
        self._starts: dict[int, tuple[int, int]] = {}  # tokens sampled and tool tokens, by rollout
        self._joined: dict[int, int] = {}
        self._unended: list[InFlightRollout] = []
        self._made = 0
        self.add(rollouts)
        self._rows = sum(each.reason is None for unit in self._units for each in unit)

    def add(self, rollouts: Iterable[InFlightRollout]) -> None:
        # They have joined after as many decode steps as are noted by now.
        ordered = sorted(rollouts, key=lambda each: each.prompt.rollout)
        units = [list(unit) for _, unit in groupby(ordered, key=lambda each: each.prompt.admission)]
        units = [unit for unit in units if any(each.reason is None for each in unit)]
        self._units += units
        self._starts |= {each.prompt.rollout: (each.sampled, each.tool_tokens) for unit in units for each in unit}
        self._joined |= {each.prompt.rollout: self._made for unit in units for each in unit}
        self._unended += [each for unit in units for each in unit if each.reason is None]

    def note_end(self, rollout: InFlightRollout) -> None:
        self._made = max(self._made, self._joined[rollout.prompt.rollout] + self._gain(rollout))

    def _gain(self, each: InFlightRollout) -> int:
        return each.sampled - self._starts[each.prompt.rollout][0]

    def decoded(self) -> Decoded:
        for unit in self._units:
            for each in unit:
                self.note_end(each)
        longest = [
            (max(unit, key=lambda each: each.sampled), all(each.reason is not None for each in unit))
            for unit in self._units
        ]
        return Decoded(
            decode_steps=self._made,
            tokens=sum(self._gain(each) for unit in self._units for each in unit),
            rows=self._rows,
            finished=tuple(rollout.sampled for rollout, complete in longest if complete),
            capped=sum(rollout.reason == "length" for rollout, complete in longest if complete),
            deferred=tuple(rollout.sampled for rollout, complete in longest if not complete),
            chunk=self._chunk,
            grown=tuple(map(self._grown, self._unended)),
        )

    def _grown(self, each: InFlightRollout) -> Grown:
        start, tool_tokens = self._starts[each.prompt.rollout]
        prompt, joined = len(each.prompt.tokens) + tool_tokens, self._joined[each.prompt.rollout]
        return Grown(prompt, start, each.sampled, each.ended, joined)


def observation(report: StepReport, step: Step) -> Observation:
    # A scorer's calls after its last answer do not count, since the step does not wait for them.
    work = [span for _, span in step.recorded(Span)]
    decoding = [span for span in work if span.role == "decode"]
    calls = [span for span in work if span.role == "score"]
    rounds = [each for _, each in step.recorded(Decoded)] or [Decoded()]
    answered = {stage: answer.at for stage, answer in step.recorded(ScorerAnswer)}
    begin = min((span.start for span in decoding or calls), default=0.0)
    cut = max((span.end for span in decoding), default=begin)
    waited = max([cut, *answered.values()])
    rest = max(0.0, report.seconds - (waited - begin))
    if step.lookahead:
        rest = math.fsum(span.end - span.start for span in work if span.role == "update")
    ending = math.inf if step.lookahead else waited  # parts that are accumulated later belong to the rest
    accumulated = [min(span.end, ending) - span.start for span in work if span.label == ACCUMULATE]
    return Observation(
        step=report.index,
        seconds=report.seconds,
        decode_seconds=math.fsum(span.end - span.start for span in decoding),
        decode_steps=sum(each.decode_steps for each in rounds),
        tokens=sum(each.tokens for each in rounds),
        rows=rounds[0].rows,
        finished=tuple(length for each in rounds for length in each.finished),
        capped=sum(each.capped for each in rounds),
        deferred=rounds[-1].deferred,
        stretches=tuple(
            found
            for each, span in zip(rounds, decoding, strict=False)  # a step whose rollouts were complete decodes nothing
            for found in stretches(each.grown, span.start, span.end)
        ),
        scoring=tuple(_scoring(stage, step, cut, last) for stage, last in sorted(answered.items())),
        rest_seconds=rest,
        accumulate_seconds=math.fsum(max(0.0, seconds) for seconds in accumulated),
        score=report.score,
        lookahead=step.lookahead,
        chunk=rounds[0].chunk,
    )


def _scoring(stage: str, step: Step, cut: float, last: float) -> Scoring:
    calls = [span for _, span in step.recorded(Span) if span.track == stage and span.role == "score"]
    waited = [call for call in calls if call.end <= last]
    readings = [reading for name, reading in step.recorded(ScorerReading) if name == stage]
    answers = [answer for name, answer in step.recorded(ScorerAnswer) if name == stage]
    return Scoring(
        stage,
        before=sum(max(0.0, min(call.end, cut) - call.start) for call in waited),
        after=sum(max(0.0, call.end - max(call.start, cut)) for call in waited),
        spare=sum(call.end - call.start for call in calls if call.end > last),
        calls=len(readings),
        tokens=sum(reading.tokens for reading in readings),
        answered=sum(answer.rollouts for answer in answers),
        answering=sum(answer.at - answer.start for answer in answers),
    )


def run_metrics(step: Step, seconds: float, tokens: float | None) -> Mapping[str, float]:
    """Return the metrics of a step by the time of its report.

    Scoring of this step is hidden by decoding and training of any step that is alive beside it. The ``seconds`` are of
    the step, the ``tokens`` of the trained responses.
    """
    metrics: dict[str, float] = {"timing_s/step": seconds}
    if tokens is not None and seconds > 0:
        metrics["throughput/tokens_per_s"] = tokens / seconds
    own = [span for _, span in step.recorded(Span)]
    busy = occupation(own, beside=step.work)
    if own:
        metrics |= {
            "timing_s/decode": busy.decode,
            "timing_s/score": busy.score,
            "timing_s/score_exposed": busy.exposed,
        }
    if math.isfinite(busy.hidden):
        metrics["overlap/hidden_fraction"] = busy.hidden
    for channel, counters in step.channels().items():
        metrics |= {f"queue/{channel}/{name}": counters[name] for name in ("peak", "merged")}
    return metrics | {name: gauge() for name, gauge in step.gauges.items()}


def utilisation(step: Step, batch: Batch, ideal: Mapping[str, Passes]) -> Mapping[str, float]:
    """Return ``perf/mfu/*``, in the step of the stage that trained: the seconds that tokens need over those they took.

    They need those at the peak of the devices, by stage in ``ideal``, and none for padding or for being read again.
    """
    trained = zip(batch.responses, batch.sampled_rows(), strict=True)
    rows = np.array([len(each.prompt.tokens) + len(each) - 1 for each, sampled in trained if len(sampled)], float)
    least, busy = defaultdict[str, float](float), defaultdict[str, list[Interval]](list)
    for stage, passes in ideal.items():
        work = [span for name, span in step.recorded(Span) if name == stage and span.label != "weight_sync"]
        kind = "update" if stage == step.stage else next((str(span.role) for span in work), "")
        busy[kind] += [(span.start, span.end) for span in work]
        decoded = [each.read for name, found in step.recorded(Decoded) if name == stage for each in found.grown]
        read = [each for name, each in step.recorded(ScorerReading) if name == stage]
        least[kind] += sum(passes.reading(*each) for each in decoded)
        least[kind] += sum(passes.token * each.tokens + passes.pair * each.pairs for each in read)
        least[kind] += passes.whole(rows) if stage == step.stage else 0.0
    took = {kind: seconds(union(intervals)) for kind, intervals in busy.items()}
    return {f"perf/mfu/{kind}": least[kind] / took[kind] for kind in took if took[kind] > 0}


WINDOW = 16  # steps over which lengths are compared: long beside the age of any rollout, short beside a run


@dataclass(slots=True)
class LengthBias:
    _steps: deque[list[int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _complete: deque[int] = field(default_factory=deque)
    _waiting: dict[int, int] = field(default_factory=dict)

    def after(self, batch: Batch) -> float | None:
        lengths = dict(zip(batch.rollouts, map(len, batch.responses), strict=True))
        self._steps.append(list(lengths.values()))
        self._waiting |= lengths
        oldest = min((event.rollout for event in batch.deferred), default=None)
        for rollout in sorted(self._waiting):
            if oldest is None or rollout < oldest:
                self._complete.append(self._waiting.pop(rollout))
        trained = [length for step in self._steps for length in step]
        while len(self._complete) > len(trained):
            self._complete.popleft()
        if not self._complete:
            return None
        return (sum(trained) / len(trained)) / (sum(self._complete) / len(self._complete))

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "steps": [list(step) for step in self._steps],
            "complete": list(self._complete),
            "waiting": [[rollout, length] for rollout, length in self._waiting.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = deque(([int(length) for length in step] for step in state["steps"]), maxlen=WINDOW)
        self._complete = deque(int(length) for length in state["complete"])
        self._waiting = {int(rollout): int(length) for rollout, length in state["waiting"]}
