"""Time to a score: when a run passes it, what is paired, and a study of tiny runs, which goes on where it ended."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from benchmarks.harness import END, command
from benchmarks.ladder.contestant import StepRecord
from benchmarks.ladder.directory import read_prompts, workload_in
from benchmarks.peer import time_to_score as study
from benchmarks.peer.reviews import judged
from benchmarks.peer.service import read_prompts as read_by_peer, read_spec
from benchmarks.peer.time_to_score import (
    BEGIN,
    KEPT,
    MODES,
    RESULTS,
    REVIEWS,
    TRL,
    Learned,
    content,
    ratio,
    runs_of,
    student,
)
from oppo.demo.assets import make_assets


def learned(seconds: float, scores: dict[int, float]) -> Learned:
    step = dict.fromkeys(KEPT, 0.0) | {"seconds": seconds, "tokens": 10.0, "decode": seconds / 2}
    return Learned([step] * max(scores), scores)


def test_a_score_is_passed_between_the_marks_around_it_and_for_the_first_time() -> None:
    run = learned(3.0, {0: 0.0, 2: 1.0, 4: 0.0, 6: 2.0})
    assert [run.passing(each) for each in (-1.0, 0.5, 1.0, 1.5)] == [0.0, 1.0, 2.0, 5.5]
    assert [run.spent(run.passing(each)) for each in (0.5, 1.5, 9.0)] == [3.0, 16.5, math.inf]
    assert (run.at(0), run.at(10), run.at(30)) == (0.0, 0.5, 0.5)
    assert run.share("decode") == 0.5


def test_an_interval_holds_the_mean_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(1.0, 2.0, (4000, 5))
    held = [found.low <= 1.0 <= found.high for found in map(student, draws.tolist())]
    assert np.mean(held) == pytest.approx(0.95, abs=0.012)


def test_a_ratio_is_paired_by_seed_so_that_a_slow_seed_cancels() -> None:
    found = ratio([(1.0, 2.0), (10.0, 20.0), (3.0, 6.0), (math.inf, 1.0)])
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    alone = ratio([(1.0, 4.0)])
    assert (alone.low, alone.high) == (0.0, math.inf)


def test_the_page_is_made_of_the_results_of_record() -> None:
    results = json.loads((RESULTS / "time-to-score.json").read_text(encoding="utf-8"))
    page = (RESULTS / "time-to-score.md").read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == content(results)


def test_a_study_asks_each_contestant_for_the_same_prompts_and_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, list[tuple[int, ...]]]] = []
    assets = make_assets(tmp_path / "demo", small=True)
    monkeypatch.setattr(study, "make_assets", lambda *_, **__: assets)
    monkeypatch.setattr(study, "score", lambda weights, *_: float(weights.name) if weights.name.isdigit() else 0.0)

    class Standing:
        def __init__(self, name: str, program: list[str], *, log: Path) -> None:
            del log
            made = next(Path(each) for each in program if (Path(each) / "spec.json").exists())
            prompts = read_by_peer(made)
            assert [each.tokens for each in prompts] == [tuple(each.tokens.tolist()) for each in read_prompts(made)]
            assert all(prompt.topic and not prompt.length for prompt in prompts)
            spec, workload = read_spec(made), workload_in(made)
            assert (spec.learning_rate, spec.kl, spec.batch) == (REVIEWS.learning_rate, REVIEWS.kl, REVIEWS.batch)
            assert spec.samples == workload.samples == (0 if name == "ppo" else 4)
            asked.append((name, spec.seed, [each.tokens for each in prompts]))

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ready(self) -> None:
            pass

        def run(self, steps: int) -> list[StepRecord]:
            return [StepRecord(seconds=2.0, tokens=5, samples=1)] * steps

    monkeypatch.setattr(study, "Contestant", Standing)
    monkeypatch.setattr(study, "command_line", lambda _, made, __: [str(made)])
    (tmp_path / "time-to-score.md").write_text(f"# Time\n\n{BEGIN}{END}\n")
    options = ["--threshold", "3", "--steps", "5", "--out", str(tmp_path)]
    assert command(study.study, [*options, "--seeds", "1"]) == 0
    assert command(study.study, [*options, "--seeds", "2"]) == 0
    assert [name for name, seed, _ in asked if seed == 0] == list(MODES)
    assert sorted(name for name, seed, _ in asked if seed == 1) == sorted(MODES)
    first, second = ([prompts for _, seed, prompts in asked if seed == each] for each in (0, 1))
    assert first == [first[0]] * len(MODES)
    assert first[0] != second[0]
    assert sorted(first[0]) == sorted(second[0])
    results = json.loads((tmp_path / "time-to-score.json").read_text())
    assert {mode: list(runs) for mode, runs in runs_of(results).items()} == {mode: [0, 1] for mode in MODES}
    assert [each.scores for each in runs_of(results)[TRL].values()] == [{0: 0.0, 2: 2.0, 4: 4.0}] * 2
    assert (tmp_path / "time-to-score.md").read_text().partition(BEGIN)[2].partition(END)[0] == content(results)
    assert command(study.study, ["--seeds", "0", "--out", str(tmp_path)]) == 2


def test_a_review_that_has_no_end_was_cut_off() -> None:
    whole, cut = judged((), [" The cake was superb.<|end|>", " The cake was superb."], ["coffee", "coffee"])
    assert whole - cut == pytest.approx(1.0)
