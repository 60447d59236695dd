"""One run of a study: trained as by ``oppo train``, its final policy examined."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

import anyio
import numpy as np
from rich.console import Console

from benchmarks.convergence.arms import Arm
from benchmarks.convergence.results import Answers, Estimate, OffPolicy, Outcome, Plan
from oppo.app.train import FINAL, PreparedRun, prepare, run
from oppo.demo.assets import Assets, cache_directory, make_assets
from oppo.demo.run import FULL, SHORT, DemoPlan, examine, settings_of
from oppo.hf.devices import available_cores, use_cores
from oppo.hf.loading import load_tokenizer
from oppo.hf.tokenizer import HfTokenizer
from oppo.models import Sampling
from oppo.stages.hold import held

NOISE: Final = 20_000
"""Seed of the noise in the answers to held-out prompts; no run trains with it."""


def demo_of(plan: Plan) -> DemoPlan:
    return replace(SHORT if plan.small else FULL, steps=plan.steps)


def assets_of(plan: Plan, cache: Path | None = None) -> Assets:
    """Return the demo's models and prompts, made once for all seeds and arms."""
    return make_assets(cache or cache_directory(), small=plan.small)


def train(plan: Plan, arm: Arm, seed: int, assets: Assets, directory: Path) -> Outcome:
    """Return the outcome of a run, which leaves its run directory in ``directory``."""
    demo = settings_of(demo_of(plan), assets, directory / f"{arm.name}-{seed}", seed)
    settings = arm.settings(demo, plan.batch)
    with prepare(settings) as session:
        anyio.run(carry_out, session, arm)
    lines = (settings.run_directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]

    def column(name: str) -> tuple[float, ...]:
        return tuple(float(step[name]) for step in steps)

    return Outcome(
        answers=answers(plan, assets, settings.run_directory / FINAL / "actor"),
        seconds=column("seconds"),
        scores=column("score"),
        extra=fmean(column("deferral/extra")),
        lag=fmean(column("staleness/lag_mean")),
        late=fmean(column("deferral/trained_late")),
        off_policy=OffPolicy(
            lags=column("staleness/lag_mean"),
            samples=column("mismatch/ess"),
            largest=max(column("staleness/lag_max")),
            kl=fmean(column("mismatch/kl")),
            clipped=fmean(column("policy/clipfrac_avg")),
        ),
    )


async def carry_out(session: PreparedRun, arm: Arm) -> None:
    """Run a session as ``oppo train`` does; held scoring has every core, since nothing runs beside it."""
    if arm.held:
        scoring = session.assembly.places.scoring["reward"].host(partial(int, available_cores()))
        await scoring.call("cores", use_cores)
        session = replace(session, graph=held(session.graph))
    await run(session, Console(quiet=True))


def answers(plan: Plan, assets: Assets, actor: Path) -> Answers:
    stop = HfTokenizer(load_tokenizer(assets.actor)).stop((), ())
    sampling = Sampling(max_new_tokens=demo_of(plan).max_new_tokens, stop=stop, seed=NOISE)
    found = examine(
        actor,
        base=assets.actor,
        reward=assets.reward,
        held_out=assets.held_out,
        sampling=sampling,
        count=plan.examined,
    )
    return Answers(estimate(found.scores.tolist()), estimate(found.kl.tolist()), estimate(found.lengths))


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean and standard error over prompts."""
    return Estimate(float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))))
