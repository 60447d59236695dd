"""The studies of convergence: their statistics, that they go on where they were stopped, and what the page shows."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import anyio
import numpy as np
import pytest

from benchmarks.convergence.__main__ import HERE, PAGE, make
from benchmarks.convergence.results import Answers, Cell, Estimate, Outcome, Plan, Results
from benchmarks.convergence.runs import cells, complete
from benchmarks.convergence.studies import LOOKAHEAD, SCHEDULES, STUDIES, Study, figure
from benchmarks.harness import command, cores_here, placed
from oppo.config.sections import StepSection
from oppo.config.settings import Settings
from oppo.demo.assets import Assets, Facts
from oppo.demo.run import FULL, settings_of
from oppo.errors import ConfigError
from oppo.log import routed
from oppo.testing import run_virtual

START = Answers(Estimate(0.1, 0.05), Estimate(0.0, 0.0), Estimate(34.0, 2.0))
PLAN = Plan(steps=3, batch=8, examined=16)
ARMS = SCHEDULES.arms


def outcome(score: float) -> Outcome:
    return Outcome(
        answers=Answers(Estimate(score, 0.02), Estimate(6.0, 0.2), Estimate(30.0, 1.0)),
        seconds=(1.0, 2.0, 1.5),
        scores=(0.1, score / 2, score),
        extra=2.0,
        lag=0.25,
        late=0.2,
    )


class StoppedError(Exception):
    """The study was stopped."""


class Runs:
    """Runs that take a second each in virtual time, and one that fails after half of it."""

    def __init__(self, fails: Cell | None = None) -> None:
        self.fails = fails
        self.now: set[Cell] = set()
        self.most = 0
        self.made: list[Cell] = []
        self.cancelled: list[Cell] = []

    async def start(self, _plan: Plan) -> Answers:
        return START

    async def outcome(self, _plan: Plan, cell: Cell) -> Outcome:
        self.now.add(cell)
        self.made.append(cell)
        self.most = max(self.most, len(self.now))
        try:
            await anyio.sleep(0.5 if cell == self.fails else 1.0)
            if cell == self.fails:
                raise StoppedError
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(cell)
            raise
        finally:
            self.now.remove(cell)
        return outcome(1.0 + cell.seed)


def test_so_many_runs_are_made_at_a_time_and_each_is_saved(tmp_path: Path) -> None:
    runs, told, file = Runs(), list[str](), tmp_path / "results.json"
    found = Results(tuple(ARMS), replace(PLAN, jobs=3))

    def tell(line: str) -> None:
        told.append(line)
        assert len(Results.load(file, ARMS).outcomes) == len(told), "told before it was saved"

    async def make() -> float:
        with routed(tell):
            await complete(found, file, 2, start=runs.start, outcome=runs.outcome)
        return anyio.current_time()

    assert run_virtual(make) == pytest.approx(4)
    assert runs.most == 3
    assert set(found.outcomes) == set(cells(tuple(ARMS), 2))
    assert Results.load(file, ARMS) == found
    for other in (replace(found.plan, steps=4), replace(found.plan, jobs=2)):
        with pytest.raises(ConfigError, match="--out"):
            Results.go_on(file, ARMS, other)


def test_a_run_that_fails_ends_the_others_and_what_was_done_is_kept(tmp_path: Path) -> None:
    first, second, third, *_ = cells(tuple(ARMS), 1)
    runs, file = Runs(fails=third), tmp_path / "results.json"
    found = Results(tuple(ARMS), replace(PLAN, jobs=2))

    async def make() -> None:
        await complete(found, file, 1, start=runs.start, outcome=runs.outcome)

    with pytest.raises(StoppedError):
        run_virtual(make)
    assert set(Results.load(file, ARMS).outcomes) == {first, second}
    assert len(runs.cancelled) == 1
    assert not runs.now
    runs.fails, found = None, Results.go_on(file, tuple(ARMS), found.plan)
    runs.made.clear()
    run_virtual(make)
    assert set(runs.made) == set(cells(tuple(ARMS), 1)) - {first, second}, "what was stopped goes on where it was"
    assert found.whole() == [0]


def demo() -> Settings:
    facts = Facts({}, 0, 0, {}, 0)
    return settings_of(FULL, Assets(Path("/made"), facts), Path("/runs/demo-1"), seed=3)


def vars_of(step: StepSection, without: set[str]) -> dict[str, object]:
    return {key: value for key, value in asdict(step).items() if key not in without}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_arms_differ_from_the_demo_in_their_schedule_only(study: Study) -> None:
    ours = demo()
    schedule = {"batch", "overcommit", "max_deferrals", "admission", "chunk", "lookahead", "weight_sync"}
    for name, arm in study.arms.items():
        settings = arm.settings(ours, batch=32)
        assert name == arm.name
        if study is LOOKAHEAD:
            assert (settings.step.lookahead, settings.step.overcommit) == (int(name[1]), 0), "nothing is deferred"
        assert (settings.run.steps, settings.run.seed, settings.run.deterministic) == (FULL.steps, 3, False)
        assert vars_of(settings.step, schedule) == vars_of(ours.step, schedule)
        base = {"ratio_base": "proximal"} if name.endswith("-tis") else {}
        weights = {"is_correction": "truncated"} if "-tis" in name else {}
        tables = {**ours.tables(), "step": {}, "run": {}}
        tables["algorithm"] = {**tables["algorithm"], **base, **weights}
        assert {**settings.tables(), "step": {}, "run": {}} == tables


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_the_page_and_its_figure_show_what_was_measured(study: Study) -> None:
    page, measured = PAGE.read_text(encoding="utf-8"), Results.load(HERE / study.file, study.arms)
    again = f"run: python -m benchmarks.convergence --study {study.name} --page"
    assert placed(page, study.begin, study.shown(measured)) == page, again
    assert (PAGE.parent / study.picture).read_text(encoding="utf-8") == figure(study, measured), again
    assert f"]({study.picture})" in page


@pytest.mark.deep
@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_arm_trains_and_is_examined(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPPO_CACHE", str(tmp_path / "cache"))
    common = ["--steps", "10", "--batch", "8", "--examined", "16", "--small", "--jobs", str(min(2, len(cores_here())))]
    command(make, ["--study", study.name, "--seeds", "1", "--out", str(tmp_path), *common])
    found = Results.load(tmp_path / study.file, study.arms)
    by_arm = {arm: done for arm in study.arms for done in found.of(arm)}
    assert set(by_arm) == set(study.arms)
    for arm, done in by_arm.items():
        assert len(done.seconds) == len(done.scores) == 10
        assert done.answers.score.error > 0
        assert done.lag == pytest.approx(np.mean(done.known_off_policy.lags))
        if study is SCHEDULES:
            assert (done.late > 0, done.lag > 0) == (arm in {"fixed", "stale"},) * 2 or arm == "adaptive"
        else:
            steps = [min(int(arm[1]), k) for k in range(10)]
            lags = done.known_off_policy.lags
            assert max(lags) <= max(steps) if arm.endswith("-flight") else lags == pytest.approx(steps)
            assert (min(done.known_off_policy.samples) < 0.9999) == (arm != "n0")
    if study is SCHEDULES:
        assert by_arm["serial"].scores == pytest.approx(by_arm["chunk"].scores, abs=0.2), "they differ in rounding"
