"""The simulator beside results of ``make bench``: what it compares, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from benchmarks.harness import Spread
from benchmarks.ladder.workloads import BALANCED, MODES, PAPER, BenchWorkload
from benchmarks.simulate.__main__ import main
from benchmarks.simulate.check import (
    SCORE_ON_TWO,
    TRAIN_ON_TWO,
    WITHIN,
    LadderResult,
    Ratio,
    adapted,
    check,
    cores_of,
    schedule_of,
    system_of,
    wrong_order,
)
from oppo.admission import Observation
from oppo.errors import DataError
from oppo.events import StepReport
from oppo.models import Passes
from oppo.observe import Observer, Span
from oppo.report.records import work_of
from oppo.simulate.profile import Lognormal, System, Workload
from tests.kit.graph_run import LAST, GraphRun
from tests.simulate.systems import machine

STEPS, ROUNDS, WARM_UP = 4, 3, 4


class Kept(Observer):
    """Keeps of each step what a result of ``make bench`` has of it."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.spans: list[Span] = []
        self.before = 0.0

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
        before, self.before = self.before, anyio.current_time()
        self.records.append(
            {
                "seconds": self.before - before,
                "tokens": int(result.metrics["response_length/tokens"]),
                "samples": len(result.trained),
                "update": result.metrics["timing_s/update"],
                "weight_sync": result.metrics["timing_s/weight_sync"],
                "observed": self.seen.as_json(),
                "work": work_of(spans),
            }
        )


def truth(mode: str, bench: BenchWorkload) -> System:
    found = machine(cores_of("split", MODES[mode], apart=MODES[mode].trains_apart(bench)).contention)
    updater = found.updater
    passes = Passes(token=bench.epochs * updater.passes.token)
    readers = {name: each for name, each in found.readers.items() if bench.reward == "model" or name != "reward"}
    return replace(found, readers=readers, updater=replace(updater, passes=passes, fixed=bench.epochs * updater.fixed))


def measured(mode: str, bench: BenchWorkload) -> list[dict[str, Any]]:
    chosen, kept = MODES[mode], Kept()
    steps = WARM_UP + ROUNDS * STEPS
    GraphRun(
        truth(mode, bench),
        Workload(batch=bench.batch, lengths=Lognormal(median=(24, 24), sigma=1.5, cap=768), cap=768, prompt=28),
        schedule_of(chosen, bench),
        steps + LAST + chosen.lookahead,
        WARM_UP,
        seed=3,
        observers=[kept],
        listener=kept.on_work,
        drain_after=range(WARM_UP - 1, steps, STEPS),
    ).run()
    return kept.records[WARM_UP:steps]


def write(path: Path, bench: BenchWorkload, *modes: str) -> Path:
    records = {
        mode: [steps[k : k + STEPS] for k in range(0, len(steps), STEPS)]
        for mode in modes
        for steps in [measured(mode, bench)]
    }
    written = {
        "workload": bench.name,
        "layout": "split",
        "plan": {"warm_up": WARM_UP},
        "recipe": asdict(bench),
        "records": records,
    }
    path.write_text(json.dumps(written))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("results") / "paper.json"
    return write(path, PAPER, "serial", "rollout", "chunk", "fixed", "lookahead")


def test_a_result_is_checked_on_every_mode_from_one_of_them(file: Path, tmp_path: Path) -> None:
    assert main(["check", str(file), "--json", str(tmp_path / "checked.json")]) == 0
    written = json.loads((tmp_path / "checked.json").read_text())
    assert written["on"] == "chunk"
    (checked,) = written["results"]
    assert checked["right"] is True
    assert [ratio["mode"] for ratio in checked["ratios"]] == ["rollout", "chunk", "fixed", "lookahead"]
    assert all(abs(ratio["error"]) < 0.05 for ratio in checked["ratios"])


def test_updates_apart_are_checked_from_a_mode_that_makes_them_beside_the_actor(file: Path, tmp_path: Path) -> None:
    balanced = write(tmp_path / "balanced.json", BALANCED, "serial", "chunk", "lookahead", "lookahead+adaptive")
    (paper,), (apart,) = LadderResult.read(file), LadderResult.read(balanced)
    (checked,) = check([replace(paper, rounds={"chunk": paper.rounds["chunk"]}), apart], "chunk")
    assert [ratio.mode for ratio in checked.ratios] == ["chunk", "lookahead", "lookahead+adaptive"]
    assert all(abs(ratio.error) < 0.05 for ratio in checked.ratios), checked.ratios
    assert checked.right


def test_another_layout_and_another_reward_are_what_they_are_stated_to_be(file: Path) -> None:
    (split,) = LadderResult.read(file)
    shared = replace(split, layout="shared")
    ruled = replace(shared, workload=replace(PAPER, reward="rule", epochs=4))
    found = system_of(split, "chunk")
    there, alone = adapted(found, split, shared, "chunk"), adapted(found, split, ruled, "chunk")
    assert there.readers["reward"].call == pytest.approx(found.readers["reward"].call), "one thread in both"
    held = adapted(found, split, shared, "serial").readers["reward"].call
    assert held == pytest.approx(there.readers["reward"].call / SCORE_ON_TWO), "as many threads as cores"
    assert there.updater.passes.token == pytest.approx(found.updater.passes.token / TRAIN_ON_TWO)
    assert there.interference == cores_of("shared", MODES["chunk"], apart=False).contention
    assert alone.readers.keys() == {"reference", "critic"}
    assert alone.updater.passes.token == pytest.approx(4 * there.updater.passes.token)


MEASURED = ("paper-split", "paper-shared", "rule-reward-split", "rule-reward-shared")


@pytest.mark.deep
def test_the_measured_ladder_is_predicted_from_one_of_its_modes() -> None:
    """Of 23 ratios on two cores, 18 are within a tenth, and the order is right wherever ranges are disjoint."""
    folder = Path(__file__).parents[2] / "benchmarks" / "results" / "amd-epyc-2-cores"
    files = [folder / f"{name}.json" for name in MEASURED]
    checked = list(check([each for file in files for each in LadderResult.read(file)], "chunk"))
    checked += check(LadderResult.read(folder / "balanced-split.json"), "chunk")
    ratios = [ratio for each in checked for ratio in each.ratios]
    assert len(ratios) == 23
    assert sum(abs(ratio.error) <= WITHIN for ratio in ratios) >= 18
    assert not any(each.wrong_order for each in checked)


def ratio(mode: str, low: float, high: float, simulated: float) -> Ratio:
    return Ratio(mode, Spread((low + high) / 2, low, high), simulated)


def test_an_order_is_wrong_only_where_measured_ranges_are_disjoint() -> None:
    chunk, fixed, near = ratio("chunk", 1.2, 1.3, 1.5), ratio("fixed", 1.4, 1.6, 1.45), ratio("near", 1.25, 1.5, 1.1)
    assert wrong_order([fixed, chunk]) == [("chunk", "fixed")]
    assert wrong_order([replace(chunk, simulated=1.2), fixed]) == []
    assert wrong_order([chunk, near]) == []
    assert fixed.error == pytest.approx(1.45 / 1.5 - 1)


def test_what_cannot_be_compared_is_refused_by_name(file: Path, tmp_path: Path) -> None:
    (whole,) = LadderResult.read(file)
    first = replace(whole, rounds={mode: whole.rounds[mode] for mode in ("serial", "chunk")})
    other, alone = replace(first, models={}), replace(first, rounds={"chunk": first.rounds["chunk"]})
    assert [each.workload for each in check([first, other, alone], "chunk")] == ["paper"], "the same models, two modes"
    bare = [[(replace(step, reading={}), took) for step, took in steps] for steps in first.rounds["chunk"]]
    unread = replace(first, rounds={**first.rounds, "chunk": bare})
    for results, on in (([first], "adaptive"), ([unread], "chunk")):
        with pytest.raises(DataError, match=f"'{on}'"):
            list(check(results, on))
    older = tmp_path / "older.json"
    older.write_text(json.dumps({"workload": "paper", "layout": "split"}))
    with pytest.raises(DataError, match="records"):
        LadderResult.read(older)
    older.write_text(json.dumps({"workload": "grpo", "layout": "split", "records": {"serial": []}}))
    with pytest.raises(DataError, match="GRPO"):
        LadderResult.read(older)
