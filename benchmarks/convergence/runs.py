"""The runs of a study, some at a time, each in a process of its own, and each outcome saved at once.

``python -m benchmarks.convergence.runs REQUEST ANSWER`` is one run, trained as by ``oppo train``, its final policy
examined, with JSON in and out. The request is ``{"plan": {...}, "study": ..., "arm": ..., "seed": ...}``; without an
arm the base policy is examined.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final, cast

import anyio
import numpy as np
from pydantic import TypeAdapter
from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.convergence.results import Answers, Cell, Estimate, OffPolicy, Outcome, Plan, Results
from benchmarks.convergence.studies import STUDIES, Arm
from benchmarks.harness import cores_here, kl_of
from oppo.data import read_prompts
from oppo.demo.assets import Assets, cache_directory, make_assets
from oppo.demo.run import FULL, SHORT, DemoPlan, settings_of
from oppo.errors import as_itself
from oppo.evaluation import Answering, examine
from oppo.hf.devices import available_cores, use_cores
from oppo.hf.loading import load_causal, load_scalar, load_tokenizer
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ReferenceLogprobs, RewardModel
from oppo.hf.tokenizer import HfTokenizer
from oppo.log import logger
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.report.metrics import metrics_of
from oppo.run.train import FINAL, PreparedRun, prepare, run
from oppo.stages.hold import held

NOISE: Final = 20_000  # seed of the noise in the answers to held-out prompts; no run trains with it


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
    steps = metrics_of(settings.run_directory)

    def column(name: str) -> tuple[float, ...]:
        return tuple(cast("float", step[name]) for step in steps)

    return Outcome(
        answers=answers(plan, assets, settings.run_directory / FINAL / "actor"),
        seconds=column("seconds"),
        scores=column("score"),
        extra=fmean(column("deferral/overcommit")),
        lag=fmean(column("staleness/mean")),
        late=fmean(column("deferral/trained_late")),
        off_policy=OffPolicy(
            lags=column("staleness/mean"),
            samples=column("mismatch/ess"),
            largest=max(column("staleness/max")),
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
    """Return how the policy answers held-out prompts, with the KL from the base policy."""
    tokenizer = HfTokenizer(load_tokenizer(assets.directory / "actor"))
    sampling = Sampling(max_new_tokens=demo_of(plan).max_new_tokens, stop=tokenizer.stop((), ()), seed=NOISE)
    prompts = read_prompts(assets.directory / "held_out.jsonl", tokenizer)[: plan.examined]
    with Thread("examination", setup=lambda: use_cores(available_cores())) as thread:
        policy = HfPolicy(load_causal(actor), sampling=sampling, place=thread)
        reference = ReferenceLogprobs(load_causal(assets.directory / "actor"), sampling=sampling, place=thread)
        reward = RewardModel(load_scalar(assets.directory / "reward"), place=thread)
        how = Answering(batch=plan.examined)
        found = anyio.run(partial(examine, policy, reward, prompts, how, reference=reference)).rollouts
    lengths = [len(each.finish.response) for each in found]
    return Answers(estimate([each.score for each in found]), estimate([*map(kl_of, found)]), estimate(lengths))


def estimate(values: Sequence[float]) -> Estimate:
    return Estimate(float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))))


def cells(arms: Sequence[str], seeds: int) -> Iterator[Cell]:
    """Yield all runs: the arms of a seed in a row, for fair seconds, and each seed beginning with another."""
    names = list(arms)
    for seed in range(seeds):
        first = seed % len(names)
        yield from (Cell(seed, name) for name in names[first:] + names[:first])


async def complete(
    results: Results,
    file: Path,
    seeds: int,
    *,
    start: Callable[[Plan], Awaitable[Answers]],
    outcome: Callable[[Plan, Cell], Awaitable[Outcome]],
) -> None:
    """Add the missing runs of ``seeds`` seeds to the results, ``plan.jobs`` at a time; each is saved when it has ended.

    The first run that fails ends the others.
    """
    if results.start is None:
        results.start = await start(results.plan)
        results.save(file)
    missing = [cell for cell in cells(results.arms, seeds) if cell not in results.outcomes]
    numbered = iter(enumerate(missing, 1))

    async def work() -> None:
        for number, cell in numbered:
            results.outcomes[cell] = found = await outcome(results.plan, cell)
            results.save(file)
            logger.info(f"{number}/{len(missing)}  {line(cell, found)}")

    with as_itself():
        async with anyio.create_task_group() as tasks:
            for _ in range(results.plan.jobs):
                tasks.start_soon(work)


def line(cell: Cell, found: Outcome) -> str:
    answers = found.answers
    return (
        f"seed {cell.seed}  {cell.arm:<8}  {sum(found.seconds):5.1f} s  "
        f"score {answers.score.mean:+.3f}  kl {answers.kl.mean:.2f}  lag {found.lag:.2f}  extra {found.extra:.1f}"
    )


async def outcome(study: str, plan: Plan, cell: Cell) -> Outcome:
    """Return the outcome of a run in a process of its own, which ends if it is cancelled."""
    request = {"study": study, "arm": cell.arm, "seed": cell.seed}
    return TypeAdapter(Outcome).validate_python(await _answer(plan, request))


async def start(plan: Plan) -> Answers:
    return TypeAdapter(Answers).validate_python(await _answer(plan, {}))


async def _answer(plan: Plan, request: Mapping[str, object]) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = anyio.Path(folder) / "answer.json"
        asked = json.dumps({"plan": asdict(plan), **request})
        command = [sys.executable, "-m", "benchmarks.convergence.runs", asked, str(answer)]
        await anyio.run_process(command, stdout=None, stderr=None, cwd=CHECKOUT, env=_environment(plan.jobs))
        content: Mapping[str, Any] = json.loads(await answer.read_text(encoding="utf-8"))
        return content


def _environment(jobs: int) -> dict[str, str]:
    share = {} if jobs == 1 else {"OMP_NUM_THREADS": str(max(1, len(cores_here()) // jobs))}
    return {**os.environ, **share}


def main(request: str, answer: str) -> None:
    cell = json.loads(request)
    plan = Plan(**cell["plan"])
    assets = assets_of(plan)
    if "arm" in cell:
        with tempfile.TemporaryDirectory() as runs:
            arm = STUDIES[cell["study"]].arms[cell["arm"]]
            done: Outcome | Answers = train(plan, arm, cell["seed"], assets, Path(runs))
    else:
        done = answers(plan, assets, assets.directory / "actor")
    Path(answer).write_text(json.dumps(asdict(done)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
