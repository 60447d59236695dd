"""Calibration: what a run says of its steps is enough to tell what other schedules would take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from oppo.admission import Observation, Scoring, Stretch
from oppo.errors import ConfigError, DataError
from oppo.simulate.calibrate import LAYOUTS, MeasuredStep, RunRecord, calibrated, fitted
from oppo.simulate.profile import System
from oppo.simulate.schedule import SimulatedRun, ladder
from tests.simulate.systems import WORKLOAD, machine, recorded

SCHEDULES = ladder(WORKLOAD.batch, overcommit=3, chunk=32)


def seconds(system: System, name: str) -> float:
    return SimulatedRun(system, WORKLOAD, SCHEDULES[name], 15, 4, seed=1).run().seconds


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("on", ["chunk", "fixed", pytest.param("serial", marks=pytest.mark.deep)])
def test_one_run_tells_what_every_schedule_takes(layout: str, on: str, tmp_path: Path) -> None:
    """Within 5%: in split and in shared, from a run of another schedule and of other lengths."""
    truth = machine(LAYOUTS[layout])
    record = RunRecord.read(recorded(truth, SCHEDULES[on], tmp_path))
    found = calibrated(record.steps, prompt=record.prompt, contention=LAYOUTS[layout])
    for name in ("serial", "rollout", "chunk", "fixed", "lookahead 1"):
        assert seconds(found, name) == pytest.approx(seconds(truth, name), rel=0.05)


def test_costs_that_differ_are_told_apart(tmp_path: Path) -> None:
    truth = machine(LAYOUTS["split"])
    record = RunRecord.read(recorded(truth, SCHEDULES["chunk"], tmp_path))
    found = calibrated(record.steps, prompt=record.prompt, contention=LAYOUTS["split"])
    assert found.decoder.step == pytest.approx(truth.decoder.step, rel=0.05)
    assert found.decoder.row == pytest.approx(truth.decoder.row, rel=0.1)
    assert found.decoder.ending == pytest.approx(truth.decoder.ending, rel=0.25)
    assert found.decoder.prefill.token == pytest.approx(truth.decoder.prefill.token, rel=0.05)
    assert found.updater.passes.token == pytest.approx(truth.updater.passes.token, rel=0.02)
    for name, reader in truth.readers.items():
        assert found.readers[name].passes.token == pytest.approx(reader.passes.token, rel=0.05)
        assert found.readers[name].call == pytest.approx(reader.call, rel=0.1)


def test_a_record_says_what_was_trained(tmp_path: Path) -> None:
    record = RunRecord.read(recorded(machine(LAYOUTS["split"]), SCHEDULES["chunk"], tmp_path, steps=8))
    assert record.prompt == 20
    assert len(record.steps) == 8
    assert all(step.trained == 16 for step in record.steps)
    drawn = WORKLOAD.lengths(9 * 16, 1, 7)[: 8 * 16, 0]
    assert sorted(group[0] for group in record.lengths.groups) == sorted(drawn.tolist())
    assert record.cap == drawn.max()


def test_a_run_that_is_not_there_or_not_at_its_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no run in .*nowhere: expected the file"):
        RunRecord.read(tmp_path / "nowhere")
    unfinished = recorded(machine(LAYOUTS["split"]), SCHEDULES["chunk"], tmp_path, steps=8, finished=False)
    with pytest.raises(ConfigError, match=r"has not finished, .* go on with `oppo resume"):
        RunRecord.read(unfinished)


def test_a_run_without_a_record_of_its_rollouts_is_refused(tmp_path: Path) -> None:
    directory = recorded(machine(LAYOUTS["split"]), SCHEDULES["chunk"], tmp_path, steps=8)
    (directory / "journal.jsonl").write_text("")
    with pytest.raises(DataError, match="says nothing of the run's steps or rollouts"):
        RunRecord.read(directory)


def step_of(number: int, stretches: tuple[Stretch, ...]) -> MeasuredStep:
    seen = Observation(number, seconds=3.0, decode_seconds=1.0, stretches=stretches)
    return MeasuredStep(seen, trained=4, tokens=40, update=1.0, weight_sync=0.5)


def test_too_few_steps_are_no_calibration() -> None:
    steps = [step_of(number, (Stretch(1.0, 10, 40, 400),)) for number in range(3)] + [step_of(3, ())]
    with pytest.raises(DataError, match="3 of 4 steps say what their decode steps were; a calibration needs 4"):
        calibrated(steps, prompt=5, contention=LAYOUTS["split"])


def test_a_scorer_without_a_place_takes_as_long_as_its_calls() -> None:
    def step(number: int) -> MeasuredStep:
        scoring = Scoring("reward", 0.0, 2.0 + number, calls=2 + number, tokens=0, answered=4, answering=1.0)
        plain = step_of(number, (Stretch(1.0, 10, 40, 400),))
        return replace(plain, seen=replace(plain.seen, scoring=(scoring,)))

    reader = calibrated([step(n) for n in range(6)], prompt=5, contention=LAYOUTS["split"]).readers["reward"]
    assert (reader.answer, reader.passes.token) == (0.25, 0.0)
    assert reader.call == pytest.approx(0.8, abs=0.1), "seconds - 1 over calls, which are 2 to 7"


costs = st.lists(st.floats(0.0, 5.0), min_size=1, max_size=4)


@given(costs, st.integers(0, 99))
@example([2.0, 0.001953125], 0)
def test_costs_come_out_of_exact_measurements(truth: list[float], seed: int) -> None:
    work = np.random.default_rng(seed).uniform(0.1, 9.0, (60, len(truth)))
    found = fitted(work.tolist(), (work @ truth).tolist())
    assert work @ found == pytest.approx(work @ truth, rel=0.02, abs=1e-6 + 0.01 * float(np.mean(work @ truth)))
    assert min(found) >= 0


def test_a_disturbed_measurement_hardly_counts() -> None:
    work = [[1.0, float(n)] for n in range(1, 31)]
    took = [2.0 + 0.5 * n for n in range(1, 31)]
    disturbed = [*took[:10], 60.0, *took[11:]]
    assert fitted(work, disturbed) == pytest.approx(fitted(work, took), rel=0.05)


def test_nothing_measured_costs_nothing() -> None:
    assert fitted([[1.0, 2.0]], [0.0]) == [0.0, 0.0]
    assert fitted([], []) == []
