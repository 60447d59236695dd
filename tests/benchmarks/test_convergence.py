"""The study of convergence: its statistics, that it goes on where it was stopped, and what it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from benchmarks.convergence.__main__ import HERE, PAGE
from benchmarks.convergence.arms import ADAPTIVE, ARMS, SERIAL, STALE
from benchmarks.convergence.comparison import LEAST, bootstrap, difference, harm
from benchmarks.convergence.figure import figure
from benchmarks.convergence.page import BEGIN, END, findings, placed, section, table
from benchmarks.convergence.results import FILE, Answers, Cell, Estimate, Outcome, Plan, Results
from benchmarks.convergence.study import cells, study
from oppo.app.sections import StepSection
from oppo.app.settings import Settings
from oppo.demo.assets import Assets, Facts
from oppo.demo.run import FULL, settings_of
from oppo.errors import ConfigError

START = Answers(Estimate(0.1, 0.05), Estimate(0.0, 0.0), Estimate(34.0, 2.0))
PLAN = Plan(steps=3, batch=8, examined=16)


def outcome(score: float, kl: float = 6.0) -> Outcome:
    return Outcome(
        answers=Answers(Estimate(score, 0.02), Estimate(kl, 0.2), Estimate(30.0, 1.0)),
        seconds=(1.0, 2.0, 1.5),
        scores=(0.1, score / 2, score),
        extra=2.0,
        lag=0.25,
        late=0.2,
    )


def results(seeds: int, shift: Mapping[str, Callable[[int], float]]) -> Results:
    """Return a study in which serial gains 1.0, and some arms end with another score."""
    outcomes = {
        cell: outcome(1.1 + (shift[cell.arm](cell.seed) if cell.arm in shift else 0.0)) for cell in cells(seeds)
    }
    return Results(PLAN, {"cpu": "a processor", "cores": 2}, START, outcomes)


def test_the_interval_of_two_values_is_bounded_by_them() -> None:
    found = bootstrap([0.0, 1.0])
    assert (found.low, found.mean, found.high) == (0.0, 0.5, 1.0)


def test_the_interval_of_many_values_is_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(3).normal(2.0, 0.5, 400)
    found = bootstrap(values)
    half = 1.645 * float(values.std()) / 20
    assert found.mean == pytest.approx(float(values.mean()))
    assert (found.mean - found.low, found.high - found.mean) == pytest.approx((half, half), rel=0.05)


def test_intervals_are_the_same_twice() -> None:
    assert bootstrap([0.3, 0.1, 0.8, 0.2]) == bootstrap([0.3, 0.1, 0.8, 0.2])


def test_pairs_remove_what_seeds_have_in_common() -> None:
    made = results(8, {arm: lambda seed: 0.3 * seed for arm in ARMS})
    made.outcomes |= {
        Cell(seed, ADAPTIVE.name): outcome(made.outcomes[Cell(seed, SERIAL.name)].answers.score.mean + 0.01)
        for seed in range(8)
    }
    found = difference(made, ADAPTIVE.name, "score")
    assert found.gain == pytest.approx(1.0 + 0.3 * 3.5)
    assert (found.relative.low, found.relative.high) == pytest.approx((0.01 / found.gain,) * 2)


@pytest.mark.parametrize(
    ("shift", "seeds", "conclusion"),
    [
        (lambda seed: 0.04 * (-1) ** seed, 8, "holds"),
        (lambda _seed: -0.2, 8, "does not hold"),
        (lambda seed: 0.5 * (-1) ** seed, 8, "does not hold"),
        (lambda _seed: 0.0, LEAST - 1, "is undecided"),
        (lambda _seed: 0.0, LEAST, "holds"),
    ],
    ids=["near", "lower", "scattered", "few", "enough"],
)
def test_it_holds_where_all_of_the_interval_is_within_ten_percent(
    shift: Callable[[int], float], seeds: int, conclusion: str
) -> None:
    made = results(seeds, {ADAPTIVE.name: shift})
    assert difference(made, ADAPTIVE.name, "score").conclusion == conclusion
    assert f"**{conclusion}**" in findings(made).splitlines()[0]


def test_what_gains_nothing_decides_nothing() -> None:
    made = results(8, {arm: lambda _seed: -1.1 for arm in ARMS})
    assert difference(made, ADAPTIVE.name, "score").holds is None


def test_harm_is_a_score_that_is_lower_beyond_chance() -> None:
    assert harm(results(8, {STALE.name: lambda seed: -0.3 + 0.05 * seed}), STALE.name) is True
    assert harm(results(8, {STALE.name: lambda seed: 0.3 * (-1) ** seed}), STALE.name) is False
    assert harm(results(LEAST - 1, {STALE.name: lambda _seed: -0.3}), STALE.name) is None
    assert "shows no harm" in findings(results(8, {}))


def test_the_noise_of_examining_falls_with_the_seeds() -> None:
    few, many = (difference(results(seeds, {}), ADAPTIVE.name, "score").noise for seeds in (5, 20))
    assert few == pytest.approx(0.02 * 2**0.5 / 5**0.5)
    assert many == pytest.approx(few / 2)


class StoppedError(Exception):
    """The study was stopped."""


def test_a_study_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    asked: list[Cell] = []
    started: list[Plan] = []

    def start(plan: Plan) -> Answers:
        started.append(plan)
        return START

    def run(plan: Plan, cell: Cell) -> Outcome:
        assert plan == PLAN
        if len(asked) == 7:
            raise StoppedError
        asked.append(cell)
        return outcome(1.0 + cell.seed)

    def go_on(seeds: int) -> Results:
        found = Results.go_on(tmp_path, PLAN)
        study(found, tmp_path, seeds, start=start, outcome=run, tell=lambda _line: None)
        return found

    with pytest.raises(StoppedError):
        go_on(2)
    assert len(Results.load(tmp_path).outcomes) == 7
    assert Results.load(tmp_path).whole() == [0]
    first, asked[:] = list(asked), []
    assert go_on(2).whole() == [0, 1]
    assert [*first, *asked] == list(cells(2))
    assert started == [PLAN]
    asked.clear()
    go_on(1)
    assert not asked, "everything is there"


def test_arms_take_turns_within_a_seed_and_none_is_always_first() -> None:
    every = list(cells(5))
    for seed in range(5):
        assert {cell.arm for cell in every[5 * seed : 5 * seed + 5]} == set(ARMS)
    assert {every[5 * seed].arm for seed in range(5)} == set(ARMS)


def test_the_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = results(2, {ADAPTIVE.name: lambda seed: 0.1 * seed})
    saved.save(tmp_path)
    assert Results.load(tmp_path) == saved
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_studies_of_two_plans_are_not_put_together(tmp_path: Path) -> None:
    results(1, {}).save(tmp_path)
    with pytest.raises(ConfigError, match="choose another --out"):
        Results.go_on(tmp_path, Plan(steps=4, batch=8, examined=16))


def demo() -> Settings:
    facts = Facts(0, {}, 0, 0, 0, 0, {}, {}, 0, {})
    return settings_of(FULL, Assets(Path("/made"), facts), Path("/runs/demo-1"), seed=3)


def vars_of(step: StepSection, without: set[str]) -> dict[str, object]:
    return {key: value for key, value in asdict(step).items() if key not in without}


def test_arms_differ_from_the_demo_in_their_schedule_only() -> None:
    ours = demo()
    for arm in ARMS.values():
        settings = arm.settings(ours, batch=32)
        assert settings.model_copy(update={"step": ours.step, "run": ours.run}) == ours
        assert (settings.run.steps, settings.run.seed, settings.run.exact) == (FULL.steps, 3, False)
        schedule = {"batch", "extra", "max_deferrals", "admission", "chunk"}
        assert vars_of(settings.step, schedule) == vars_of(ours.step, schedule)
    chosen = {name: arm.settings(ours, batch=32).step for name, arm in ARMS.items()}
    assert {name: step.extra for name, step in chosen.items()} == {
        "serial": 0, "chunk": 0, "fixed": 8, "adaptive": None, "stale": 32,
    }  # fmt: skip
    assert chosen["stale"].max_deferrals == 8
    assert chosen["adaptive"] == ours.step, "the adaptive arm is the demo itself"


def test_the_table_has_a_row_for_every_arm() -> None:
    rows = table(results(8, {ADAPTIVE.name: lambda _seed: -0.2})).splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2:]] == list(ARMS)
    assert "| 0.90 | -20.0% (-20.0% to -20.0%) |" in rows[2 + list(ARMS).index("adaptive")]
    assert "| 4.5 | 0.25 | 20% |" in rows[2]


def test_the_figure_has_both_panels_with_a_line_and_a_band_for_every_arm() -> None:
    drawn = ET.fromstring(figure(results(3, {STALE.name: lambda seed: -0.1 * seed})))
    said = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"steps", "seconds", *ARMS} <= set(said)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}path"))) == 2 * 2 * len(ARMS)


def test_the_section_is_put_between_its_markers_and_takes_the_place_of_an_older_one() -> None:
    page = f"# oppo\n\n{BEGIN}{END}\n\nmore\n"
    made = results(8, {})
    once = placed(page, section(made))
    assert once == f"# oppo\n\n{BEGIN}{section(made)}{END}\n\nmore\n"
    assert placed(placed(page, "old\n"), section(made)) == once
    with pytest.raises(ValueError, match="no place"):
        placed("# oppo\n", section(made))


def test_the_page_shows_what_was_measured_and_nothing_where_nothing_was() -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = section(Results.load(HERE)) if (HERE / FILE).exists() else ""
    assert placed(page, found) == page, "run: python -m benchmarks.convergence --page"


@pytest.mark.deep
def test_every_arm_trains_and_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.convergence import one

    monkeypatch.setenv("OPPO_CACHE", str(tmp_path / "cache"))
    plan = Plan(steps=5, batch=8, examined=16, small=True)
    found = Results.go_on(tmp_path, plan)
    study(found, tmp_path, 1, start=one.start, outcome=one.outcome, tell=lambda _line: None)
    assert Results.load(tmp_path) == found
    for arm, (done,) in ((arm, found.of(arm)) for arm in ARMS):
        assert len(done.seconds) == len(done.scores) == plan.steps
        assert done.answers.score.error > 0
        assert (done.late > 0, done.lag > 0) == (arm in {"fixed", "stale"},) * 2 or arm == "adaptive"
    (serial,), (chunk,) = found.of("serial"), found.of("chunk")
    assert serial.scores == pytest.approx(chunk.scores, abs=0.2), "they differ in rounding"
    assert "is not judged" in findings(found)
