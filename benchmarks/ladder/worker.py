"""A contestant of ours: a process that runs one mode of one workload on requests from standard input.

====================  =============================================================================
written, once loaded  ``{"ready": {"versions": {...}, "threads": {...}}}``
read                  ``{"run": n}``
written               ``{"steps": [{"seconds": ..., "tokens": ..., "samples": ..., ...}, ...], "peak_rss_mb": ...}``
end of input          ends the process
====================  =============================================================================

Between requests it waits for a line without CPU time. All other output goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import anyio
import anyio.to_thread
import numpy as np

from benchmarks.harness import cores_here, versions
from benchmarks.ladder.contestant import StepRecord
from benchmarks.ladder.directory import open_files, workload_in
from benchmarks.ladder.pipeline import ENGINES, WORK, Pipeline, Progress, Seats, pipeline, seats
from benchmarks.ladder.workloads import MODES, BenchWorkload
from benchmarks.peer.service import peak_rss_mb
from oppo import observe
from oppo.admission import Observation
from oppo.admission.bottleneck import PREFIX
from oppo.errors import DataError
from oppo.events import Batch, Prompt, StepReport
from oppo.graph import Run
from oppo.graph.stage import UNKNOWN
from oppo.observe import Observer, Span, occupation, seconds, union
from oppo.report.records import work_of


@dataclass(eq=False)
class Watch(Observer):
    """Keeps the spans, the batch and the observation of each step that is not over."""

    workload: BenchWorkload
    keep: Path | None = None  # the folder of the weights after each request, by steps made
    spans: dict[int | None, list[Span]] = field(default_factory=lambda: defaultdict(list))
    batches: dict[int, Batch] = field(default_factory=dict)
    seen: dict[int, Observation] = field(default_factory=dict)
    done: int = 0  # steps that are over

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        del stage, at
        if isinstance(item, Batch):
            self.batches[step] = item
        elif isinstance(item, Observation):
            self.seen[step] = item

    def on_span(self, span: Span) -> None:
        """Ignore the stages; :meth:`on_work` receives the models' spans."""

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        pass

    def on_work(self, span: Span) -> None:
        """Keep a model's span of a phase; called in the models' threads."""
        phase = WORK.get((span.track, span.label))
        if phase is not None:
            self.spans[span.step].append(replace(span, role=phase))

    def record(self, report: StepReport, took: float, decode_steps: int, decoded: int) -> StepRecord:
        self.done += 1
        spans = self.spans.pop(report.index, [])
        batch, seen = self.batches.pop(report.index, None), self.seen.pop(report.index, None)
        if batch is None or not len(batch):
            raise DataError("a step trained nothing, so there is nothing to measure")
        lengths = np.diff(batch.offsets)
        wanted = np.array([response.prompt.columns["length"] for response in batch.responses])
        worked = {span.track for span in spans}
        tracks = dict.fromkeys(track for track, _ in WORK if track in worked)
        busy = {track: seconds(union([(s.start, s.end) for s in spans if s.track == track])) for track in tracks}
        total = occupation(spans)
        return StepRecord(
            seconds=took,
            tokens=int(lengths.sum()),
            samples=len(batch),
            capped=int((lengths >= self.workload.lengths.cap).sum()),
            as_announced=float(np.mean(lengths == wanted)),
            deferred=len(report.deferred),
            decode=total.decode,
            score=total.score,
            update=total.update,
            exposed=total.exposed,
            busy=busy,
            decode_steps=decode_steps,
            decoded=decoded,
            bottleneck={name: value for name, value in report.metrics.items() if name.startswith(PREFIX)},
            weight_sync=report.metrics["timing_s/weight_sync"],
            observed={} if seen is None else seen.as_json(),
            work=work_of(spans),
        )


async def serve(
    work: Pipeline, watch: Watch, prompts: Iterator[Prompt], ready: Mapping[str, object], answers: TextIO
) -> None:
    async with work.graph.open(prompts, observers=[watch], lookahead=work.lookahead) as run:
        say(answers, {"ready": ready})
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            steps = await timed_steps(run, work.acting.progress, watch, json.loads(line)["run"])
            if watch.keep is not None:
                work.actor.save_pretrained(watch.keep / f"{watch.done}")
            say(answers, {"steps": [step.as_json() for step in steps], "peak_rss_mb": peak_rss_mb()})


async def timed_steps(
    run: Run[StepReport], progress: Callable[[], Progress], watch: Watch, count: int
) -> list[StepRecord]:
    """Run some steps and return their records: no step is in flight before and afterwards.

    A step's seconds are those since the one before it ended. So filling and emptying the pipeline of steps in flight is
    part of the sum, though not where decode steps and tokens of several steps are told apart.
    """
    records: list[StepRecord] = []
    before, start = progress(), observe.now()
    last = watch.done + count - 1
    while watch.done <= last:
        (report,) = await run.advance(UNKNOWN, lambda step: step == last) or (None,)
        if report is None:
            raise DataError("the prompts have ended")
        after, now = progress(), observe.now()
        decode_steps, decoded = after.decode_steps - before.decode_steps, after.tokens - before.tokens
        records.append(watch.record(report, now - start, decode_steps, decoded))
        before, start = after, now
    return records


def say(answers: TextIO, answer: Mapping[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def answers_only() -> TextIO:
    """Return standard output for answers, and redirect all other output to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def ready_line(places: Seats) -> dict[str, object]:
    made_with = {"python": platform.python_version(), **versions("torch", "transformers")}
    return {"versions": made_with, "threads": places.table()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder.worker")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--layout", choices=("split", "shared"), required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scorers", choices=("thread", "process"), default="process")
    parser.add_argument("--engine", choices=ENGINES, default="transformers")
    parser.add_argument("--keep", type=Path)
    chosen = parser.parse_args(arguments)
    workload, mode = workload_in(chosen.directory), MODES[chosen.mode]
    places = seats(chosen.layout, cores_here(), held=mode.held, apart=mode.trains_apart(workload))
    files, watch = open_files(chosen.directory, workload), Watch(workload, chosen.keep)
    places.actor.take()
    answers = answers_only()
    work = pipeline(
        files, mode, places, watch.on_work, device=chosen.device, scorers=chosen.scorers, engine=chosen.engine
    )
    with closing(work):
        anyio.run(serve, work, watch, files.prompts(), ready_line(places), answers)


if __name__ == "__main__":
    main()
