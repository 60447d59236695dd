"""Schedules beside each other: what is recommended, and how it is shown."""

from __future__ import annotations

import io
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from oppo.config.load import load_settings, resolve
from oppo.run.graph import admission_of
from oppo.run.simulation import own_schedule, refusal
from oppo.simulate.calibrate import LAYOUTS
from oppo.simulate.schedule import ScheduleOutcome, SimulatedRun, ladder
from oppo.simulate.study import Interval, Standing, Study, advice, as_json, legend, ranged, snippet, study, table
from tests.simulate.systems import WORKLOAD, machine

OUTCOME = ScheduleOutcome(
    seconds=2.0, tokens=100.0, staleness=0.0, longest_staleness=0, token_staleness=0.0, extra=0.0,
    predicted=float("nan"), spread=float("nan"), extras=(0, 0, 0, 0), idle=0.25, peak_tokens=1500.0,
)  # fmt: skip
SCHEDULES = ladder(8, overcommit=2, chunk=16)


def standing(name: str, staleness: float, *speeds: float) -> Standing:
    outcome = replace(OUTCOME, staleness=staleness, longest_staleness=round(staleness))
    return Standing(SCHEDULES[name], [outcome for _ in speeds], speeds)


def made(*others: Standing, **refused: str) -> Study:
    base = standing("chunk", 0.0, 1.0, 1.0)
    known = {each.schedule.name: each for each in (base, *others)}
    return Study(known, "chunk", cache=1e6, seeds=(0, 1, 2), refused=refused)


FIXED = standing("fixed", 0.1, 1.33, 1.35, 1.37)


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ((), "chunk"),
        ((FIXED,), "fixed"),
        ((standing("fixed", 0.1, 1.02, 1.4, 1.1),), "chunk"),
        ((FIXED, standing("adaptive", 0.05, 1.33, 1.34, 1.35)), "adaptive"),
        ((FIXED, standing("lookahead 1", 1.0, 1.8, 1.85, 1.9)), "lookahead 1"),
        ((FIXED, standing("lookahead 2, fixed", 2.1, 2.8, 2.85, 2.9)), "fixed"),
        ((standing("fixed", 0.1, 0.8, 0.85, 0.9),), "chunk"),
        ((FIXED, standing("adaptive", 0.05, 1.04, 2.0, 1.5)), "fixed"),
    ],
    ids=[
        "nothing else",
        "faster",
        "not in all of its interval",
        "as fast with less staleness",
        "faster with staleness",
        "too much staleness",
        "slower",
        "faster in the mean, not in all of its interval",
    ],
)
def test_the_least_stale_of_the_fastest_is_recommended_or_to_leave_it_as_it_is(
    others: tuple[Standing, ...], chosen: str
) -> None:
    found = made(*others)
    assert found.recommended(1.0) == chosen
    said = advice(found, 1.0)
    assert said.startswith("leave it as it is: no schedule" if chosen == "chunk" else f"choose {chosen!r}")
    assert json.loads(as_json(found, 1.0))["recommended"] == chosen


def test_what_is_faster_and_left_out_is_named_with_the_reason() -> None:
    faster = (
        standing("in flight", 2.5, 2.56, 2.58, 2.6),
        standing("adaptive", 0.5, 1.36, 1.37, 1.38),
        standing("rollout", 0, 3, 3, 3),
    )
    found = made(FIXED, *faster, rollout="models.engine = 'x' cannot do it")
    said = advice(found, 1.0)
    assert said.startswith("choose 'fixed'")
    assert "1.35 (1.30 - 1.40) times as fast as 'chunk', at a mean staleness of 0.10" in said
    assert (
        "'in flight', 2.58 (2.53 - 2.63) times as fast: its mean staleness of 2.50 updates is above --staleness 1\n"
        in (said)
    )
    assert "'adaptive', 1.37 (1.35 - 1.39) times as fast: less than 3% faster than 'fixed', and staler\n" in said
    assert "'rollout', 3.00 times as fast: models.engine = 'x' cannot do it\n" in said
    assert "not simulated: streamed updates" in said
    assert json.loads(as_json(found, 1.0))["left_out"].keys() == {"in flight", "adaptive", "rollout"}
    assert advice(found, 3.0).startswith("choose 'in flight'")
    assert "left out" in advice(made(faster[0]), 1.0), "beside a baseline that stays too"


@pytest.mark.parametrize(("count", "quantile"), [(3, 4.303), (4, 3.182), (6, 2.571), (12, 2.201), (96, 1.985)])
def test_an_interval_is_that_of_students_distribution(count: int, quantile: float) -> None:
    values = [1.0 + 0.1 * (n % 3) for n in range(count)]
    found = Interval.of(values)
    half = quantile * statistics.stdev(values) / count**0.5
    assert found.mean == pytest.approx(statistics.mean(values))
    assert found.high - found.mean == pytest.approx(half, rel=0.04)
    assert found.mean - found.low == pytest.approx(half, rel=0.04)
    assert Interval.of([2.0]) == Interval(2.0, 2.0, 2.0)


@pytest.mark.parametrize("name", [name for name, each in SCHEDULES.items() if each.step])
def test_the_settings_of_each_schedule_are_ones_that_training_takes(name: str, tmp_path: Path) -> None:
    found = made(standing(name, 0.5, 2.0, 2.0)) if name != "chunk" else made()
    pasted = snippet(SCHEDULES[name])
    assert name == "chunk" or advice(found, 1.0).endswith(pasted)
    own = '[models]\npolicy = "actor"\n[[rewards]]\nsource = "reward"\n[data]\nprompts = "prompts.jsonl"\n'
    (tmp_path / "config.toml").write_text(own + pasted + "\n")
    settings, schedule = load_settings(tmp_path / "config.toml"), SCHEDULES[name]
    assert type(admission_of(settings.step)) is type(schedule.admission())
    taken = own_schedule(settings.step, 300, tmp_path / "config.toml")
    assert (taken.chunk, taken.lookahead, taken.in_flight) == (schedule.chunk, schedule.lookahead, schedule.in_flight)
    assert type(taken.admission()) is type(admission_of(settings.step))


def test_what_the_settings_of_a_run_refuse_is_not_recommended() -> None:
    settings = resolve(
        {
            "models": {"policy": "actor"},
            "rewards": [{"source": "reward"}],
            "data": {"prompts": "p.jsonl"},
            "run": {"deterministic": True},
        },
        Path("/nowhere"),
    )
    why = {name: refusal(settings.document(), each) for name, each in SCHEDULES.items()}
    assert {name for name, said in why.items() if said} == {"serial", "adaptive", "in flight", "continuous"}
    assert "run.deterministic" in why["in flight"]


def test_a_table_has_a_line_for_each_schedule_and_says_what_each_does() -> None:
    found = made(FIXED)
    console = Console(width=100, file=io.StringIO())
    with console.capture() as printed:
        console.print(table(found))
    lines = printed.get().splitlines()
    assert any(line.startswith("chunk *") and "1.5" in line and "25%" in line for line in lines)
    assert "Bound by" not in legend(found), "nothing is known of what bounds it"
    bound = replace(FIXED, outcomes=[replace(OUTCOME, parts={"launching kernels": 0.4})])
    assert "bound by launching kernels 40%" in legend(made(bound))
    assert "Bound by launching kernels: a decode step waits for each layer's kernels" in legend(made(bound))
    assert any(line.startswith("fixed") and "1.35 (1.30 - 1.40)" in line for line in lines)
    said = legend(found)
    assert "chunk, 2 stragglers deferred to the next step" in said
    assert "relative to 'chunk' (*)" in said


def test_a_controller_that_has_not_settled_is_marked_with_what_it_chose() -> None:
    moving = replace(FIXED, outcomes=[replace(OUTCOME, extras=(0, 4, 8, 16)), replace(OUTCOME, extras=(0, 4, 10, 20))])
    steady = replace(FIXED, outcomes=[replace(OUTCOME, extras=(0, 40, 40, 48))])
    assert "deferred to the next step (not settled: 9, then 18 in the last two quarters of a run" in legend(
        made(moving)
    )
    assert "settled" not in legend(made(steady))
    cells = [list(table(made(each)).columns[0].cells) for each in (moving, steady)]
    assert cells == [["chunk *", "fixed (not settled)"], ["chunk *", "fixed"]]
    facts = json.loads(as_json(made(moving), 1.0))["schedules"]
    assert {name: each["settled"] for name, each in facts.items()} == {"chunk": True, "fixed": False}


def test_a_controller_that_adapts_settles_on_the_lengths_of_the_first_steps_before_it_counts() -> None:
    system, schedules = machine(LAYOUTS["shared"]), ladder(WORKLOAD.batch, overcommit=3, chunk=32)
    adaptive, fixed = (
        SimulatedRun(system, WORKLOAD, schedules[name], 6, 3, settling=10) for name in ("adaptive", "fixed")
    )
    assert (len(adaptive.run().extras), len(fixed.run().extras)) == (16, 6)

    def admitted(run: SimulatedRun, steps: int) -> dict[int, int]:
        rows = (row for step in run.ended[:steps] for row in step.trained)
        return {row.prompt.admission: row.length for row in rows}

    lengths, own = admitted(adaptive, 16), admitted(fixed, 6)
    assert all(lengths[number + 10 * WORKLOAD.batch] == length for number, length in own.items() if number < 80)
    assert [lengths[number] for number in range(48)] == [lengths[number + 48] for number in range(48)]


def test_ranges_are_left_out_where_there_is_one_value() -> None:
    assert [ranged(Interval.of(values)) for values in ([0.5], [2.0, 2.0, 2.0], [1.9, 2.0, 2.1])] == [
        "0.50",
        "2.00",
        "2.00 (1.76 - 2.24)",
    ]


def test_schedules_meet_the_same_prompts_and_speeds_are_paired_by_seed(messages: list[str]) -> None:
    names = ("serial", "chunk", "fixed", "lookahead 1")
    schedules = {name: each for name, each in ladder(WORKLOAD.batch, overcommit=3, chunk=32).items() if name in names}
    found = study(machine(LAYOUTS["split"]), WORKLOAD, schedules, baseline="serial", steps=8, seeds=2)
    assert messages[0] == "simulating 4 schedules: 8 steps, 2 of at most 2 seeds"
    assert list(found.standings) == list(names)
    speeds = {name: each.speed for name, each in found.standings.items()}
    assert speeds["serial"] == Interval(1.0, 1.0, 1.0)
    assert 1.0 < speeds["chunk"].low <= speeds["chunk"].high
    assert speeds["fixed"].mean > speeds["chunk"].mean
    staleness = {name: (each.staleness, each.longest_staleness) for name, each in found.standings.items()}
    assert staleness["chunk"] == (0.0, 0)
    assert staleness["lookahead 1"] == (1.0, 1)
    assert staleness["fixed"][0] == pytest.approx(3 / 16, rel=0.2)
    idle = {name: each.idle for name, each in found.standings.items()}
    assert idle["lookahead 1"] < idle["chunk"] < idle["serial"]
    assert all(each.peak_tokens > 16 * 20 for each in found.standings.values())
