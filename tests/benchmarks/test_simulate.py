"""The simulator beside results of ``make bench``: what it compares, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ladder.measures import Spread
from benchmarks.ladder.modes import MODES
from benchmarks.ladder.workloads import PAPER, Layout
from benchmarks.simulate.__main__ import main
from benchmarks.simulate.check import CORES, WARM_UP, Ratio, Result, adapted, check, system_of, wrong_order
from oppo.admission import Observation
from oppo.chunking import Fixed
from oppo.errors import DataError
from oppo.events import StepReport
from oppo.observe import Observer, Span
from oppo.report.work import work_of
from oppo.simulate.calibrate import LAYOUTS
from oppo.simulate.course import Course
from oppo.simulate.lengths import Lognormal
from oppo.simulate.outcome import LAST
from oppo.simulate.schedules import Schedule
from oppo.simulate.system import Workload
from tests.simulate.systems import machine

STEPS = 12


class Kept(Observer):
    """Keeps of each step what a result of ``make bench`` has of it."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.spans: list[Span] = []

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        if isinstance(item, Observation):
            self.seen = item

    def on_span(self, span: Span) -> None:
        pass

    def on_work(self, span: Span) -> None:
        self.spans.append(span)

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        assert isinstance(result, StepReport)
        spans, self.spans = self.spans, []
        self.records.append(
            {
                "seconds": result.seconds,
                "tokens": int(result.metrics["response_length/tokens"]),
                "samples": len(result.trained),
                "update": result.metrics["timing_s/update"],
                "publish": result.metrics["timing_s/publish"],
                "observed": self.seen.as_json(),
                "work": work_of(spans),
            }
        )


def measured(mode: str, layout: Layout) -> list[dict[str, Any]]:
    """Return the records of a mode on a virtual machine of which nobody knows the costs."""
    chosen, kept = MODES[mode], Kept()
    chunks = chosen.chunks(PAPER)
    schedule = Schedule(
        name=mode,
        about="",
        admission=partial(chosen.admission, PAPER),
        chunk=chunks.tokens if isinstance(chunks, Fixed) else None,
        held=chosen.held,
    )
    lengths = Lognormal(median=(24, 24), sigma=1.5, cap=768)
    workload = Workload(batch=PAPER.batch, lengths=lengths, cap=768, prompt=28)
    steps = WARM_UP + STEPS + LAST
    system = machine(LAYOUTS[layout])
    Course(system, workload, schedule, steps, WARM_UP, 3, 1, observers=[kept], listener=kept.on_work).run()
    return kept.records[WARM_UP:-LAST]


def result(layout: Layout, *modes: str) -> dict[str, Any]:
    """Return the content of a file of results."""
    records = {
        mode: [steps[k : k + 4] for k in range(0, STEPS, 4)] for mode in modes for steps in [measured(mode, layout)]
    }
    return {
        "workload": "paper",
        "layout": layout,
        "recipe": json.loads(json.dumps(asdict(PAPER))),
        "records": records,
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "paper.json"
    path.write_text(json.dumps(result("split", "serial", "rollout", "chunk", "fixed")))
    return path


def test_a_result_is_checked_on_every_mode_from_one_of_them(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(file), "--json", str(tmp_path / "checked.json")]) == 0
    written = json.loads((tmp_path / "checked.json").read_text())
    assert written["on"] == "chunk"
    (checked,) = written["results"]
    assert checked["right"] is True
    assert [ratio["mode"] for ratio in checked["ratios"]] == ["rollout", "chunk", "fixed"]
    assert all(abs(ratio["error"]) < 0.05 for ratio in checked["ratios"])
    printed = capsys.readouterr().out
    assert sum("paper, split" in line and "right" in line for line in printed.splitlines()) == 3


def test_only_results_of_the_same_models_are_checked_and_without_a_baseline_none(file: Path) -> None:
    (first,) = Result.read(file)
    other = replace(first, models={})
    bare = replace(first, rounds={"chunk": first.rounds["chunk"]})
    assert [each.workload for each in check([first, other, bare], "chunk")] == ["paper"]
    with pytest.raises(DataError, match="has no mode 'adaptive' to calibrate on; it has serial, rollout, chunk, fixed"):
        list(check([first], "adaptive"))


def test_another_layout_and_another_reward_are_what_they_are_stated_to_be(file: Path) -> None:
    (split,) = Result.read(file)
    shared = replace(split, layout="shared")
    ruled = replace(shared, workload=replace(PAPER, reward="rule", epochs=4))
    found = system_of(split, "chunk")
    there, alone = adapted(found, split, shared), adapted(found, split, ruled)
    assert there.readers["reward"].call == pytest.approx(found.readers["reward"].call / CORES["shared"].score)
    assert there.updater.passes.token == pytest.approx(found.updater.passes.token / CORES["shared"].train)
    assert there.interference is LAYOUTS["shared"]
    assert alone.readers.keys() == {"reference", "critic"}
    assert alone.updater.passes.token == pytest.approx(4 * there.updater.passes.token)


def test_a_file_without_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "older.json"
    path.write_text(json.dumps({"workload": "paper", "layout": "split"}))
    assert main(["check", str(path)]) == 2
    assert "lacks the records of steps of a workload" in capsys.readouterr().err


def ratio(mode: str, low: float, high: float, simulated: float) -> Ratio:
    return Ratio(mode, Spread((low + high) / 2, low, high), simulated)


def test_an_order_is_wrong_only_where_measured_ranges_are_disjoint() -> None:
    chunk, fixed, near = ratio("chunk", 1.2, 1.3, 1.5), ratio("fixed", 1.4, 1.6, 1.45), ratio("near", 1.25, 1.5, 1.1)
    assert wrong_order([fixed, chunk]) == [("chunk", "fixed")]
    assert wrong_order([replace(chunk, simulated=1.2), fixed]) == []
    assert wrong_order([chunk, near]) == []
    assert fixed.error == pytest.approx(1.45 / 1.5 - 1)
