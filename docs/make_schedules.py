"""Draws what each knob of a schedule does, from runs of real models: ``python -m docs.make_schedules``.

It writes ``docs/schedule-*.svg``. The models are small and have random weights, responses end at stated lengths, and
decoding has a core of its own; scoring and training share another where there are two.
"""  # noqa: INP001 - a script beside its page

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio

from benchmarks.harness import cores_here
from benchmarks.ladder.directory import Files, files_of
from benchmarks.ladder.pipeline import pipeline, seats
from benchmarks.ladder.workloads import MODES, PAPER, BenchWorkload, Mode
from oppo.admission.chunking import WholeRollout
from oppo.observe import Span
from oppo.report.charts import Excerpt, timeline
from oppo.report.trace import TimedStep, Timekeeper
from oppo.stages import Update

HERE: Final = Path(__file__).parent
STEPS, LAST, SHOWN = 8, 5, 3
"""Steps of a run, the last one shown, and how many are."""

WORKLOAD: Final = replace(
    PAPER,
    name="pictures",
    models=replace(PAPER.models, reward=replace(PAPER.models.reward, layers=6)),
    lengths=replace(PAPER.lengths, sigma=1.1, cap=256),
    batch=12,
    epochs=3,
    extra=3,
    trains_apart=True,
    shares=(),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """A run in a picture: its name, its mode, and whether weights are synced while responses are decoded."""

    name: str
    mode: Mode
    in_flight: bool = False


CHUNK: Final = replace(MODES["chunk"], chunks=lambda _: WholeRollout())

PICTURES: Final = {
    "chunk": [Shown('step.chunk = "whole"', CHUNK), Shown("step.chunk = 32", MODES["chunk"])],
    "overcommit": [Shown("step.overcommit = 0", MODES["chunk"]), Shown("step.overcommit = 3", MODES["fixed"])],
    "lookahead": [
        Shown("step.lookahead = 0", MODES["fixed"]),
        Shown("step.lookahead = 1", replace(MODES["fixed"], lookahead=1)),
    ],
    "weight-sync": [
        Shown('step.weight_sync = "cut"', replace(MODES["fixed"], lookahead=1)),
        Shown('step.weight_sync = "in-flight"', replace(MODES["fixed"], lookahead=1), in_flight=True),
    ],
}


def excerpt(files: Files, shown: Shown) -> Excerpt:
    """Return some steps of a run, from before it runs empty."""
    keeper = Timekeeper(kept=SHOWN)

    def keep(span: Span) -> None:
        keeper.model_span(span)

    places = seats("split", cores_here(), held=shown.mode.held, apart=True)
    work = pipeline(files, shown.mode, places, keep)
    graph = work.graph
    if shown.in_flight:
        graph = graph.replace(update=replace(graph.stage("update", Update), after=()))

    async def run() -> list[TimedStep]:
        shown: list[TimedStep] = []
        async with graph.open(files.prompts(), observers=[keeper], lookahead=work.lookahead) as running:
            async for report in running.steps(STEPS):
                keeper.take()
                if report.index == LAST:
                    shown = list(keeper.steps)
        return shown

    with closing(work):
        return Excerpt(shown.name, anyio.run(run))


def draw(workload: BenchWorkload, to: Path) -> None:
    """Write the pictures of a workload."""
    with tempfile.TemporaryDirectory() as cache:
        files = files_of(workload, Path(cache))
        for name, runs in PICTURES.items():
            drawn = timeline([excerpt(files, each) for each in runs])
            (to / f"schedule-{name}.svg").write_text(
                drawn.replace("<svg ", '<svg font-family="sans-serif" style="background: white" ', 1), encoding="utf-8"
            )


if __name__ == "__main__":
    draw(WORKLOAD, HERE)
