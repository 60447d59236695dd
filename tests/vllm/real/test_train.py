"""The demo's models learn on vLLM what they learn on transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import anyio
import pytest
from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.convergence.arms import CHUNK
from benchmarks.convergence.results import Plan, Results
from benchmarks.convergence.training import answers, assets_of, demo_of
from oppo.app.train import FINAL, prepare, run
from oppo.demo.run import settings_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # vLLM 0.32 and what it imports warn of themselves
]

STEPS = 10
"""Fewer than the study on transformers made: by then its worst seed had gained three quarters of the final mean."""

EXAMINED = 128


def recorded() -> tuple[Plan, float]:
    """Return the plan of the committed study, and what the streamed schedule gained on transformers in the mean."""
    results = Results.load(CHECKOUT / "benchmarks" / "convergence")
    assert results.start is not None
    scores = [outcome.answers.score.mean for cell, outcome in results.outcomes.items() if cell.arm == CHUNK.name]
    assert len(scores) >= 5
    return results.plan, fmean(scores) - results.start.score.mean


def test_three_seeds_gain_half_of_what_transformers_gains_in_the_mean(tmp_path: Path) -> None:
    study, gain = recorded()
    plan = replace(study, steps=STEPS, examined=EXAMINED)
    assets = assets_of(plan)
    before = answers(plan, assets, assets.actor).score.mean
    gains = []
    for seed in range(3):
        demo = settings_of(demo_of(plan), assets, tmp_path / f"seed-{seed}", seed, "vllm")
        settings = CHUNK.settings(demo, plan.batch)
        with prepare(settings) as session:
            anyio.run(run, session, Console(quiet=True))
        gains.append(answers(plan, assets, settings.run_directory / FINAL / "actor").score.mean - before)
    assert min(gains) >= gain / 2, f"gained {gains}, and transformers {gain} in the mean"
