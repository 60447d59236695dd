"""``python -m benchmarks.peer.time_to_score``: seconds until a held-out score, by TRL's GRPO and by GRPO and PPO here.

All are contestants of the ladder on :data:`REVIEWS`, one after another and for each seed in another order. They keep
the weights of every second step; neither that nor scoring them counts. ``results/time-to-score.json`` is written after
each run, and a study that was ended goes on with what is missing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import numpy as np

from benchmarks import CHECKOUT
from benchmarks.convergence.comparison import Interval, reached
from benchmarks.convergence.runs import cells
from benchmarks.harness import command, cores_here, markdown, on_this_machine, placed
from benchmarks.ladder.contestant import Contestant
from benchmarks.ladder.directory import Facts, statistics, write_spec
from benchmarks.ladder.workloads import WORKLOADS, BenchWorkload, Lengths, chosen
from benchmarks.peer.reviews import judged
from benchmarks.peer.sweep import PEERS, SWEEP, Sweep, choose, command_line
from oppo import FunctionReward, Sampling, Thread, read_prompts
from oppo.demo.assets import cache_directory, make_assets
from oppo.errors import ConfigError
from oppo.evaluation import Answering, examine
from oppo.hf import HfPolicy
from oppo.hf.devices import use_cores
from oppo.hf.loading import load_causal, load_tokenizer
from oppo.hf.tokenizer import HfTokenizer
from oppo.log import logger

T = TypeVar("T")

RESULTS: Final = Path(__file__).parents[1] / "results"
BEGIN: Final = "<!-- python -m benchmarks.peer.time_to_score -->\n"
TRL: Final = "trl"
MODES: Final = {
    TRL: ("GRPO by TRL", ""),
    "serial": ("GRPO, serial", "serial"),
    "chunk": ("GRPO, streamed", "chunk"),
    "deferred": ("GRPO, streamed and deferred", "fixed"),
    "ppo": ("PPO, streamed", "chunk"),
}  # with the mode of the ladder
CAP: Final = 256
REVIEWS: Final = replace(
    WORKLOADS["grpo"],
    name="reviews",
    about="reviews of the demo's language by GRPO, four to each of sixteen prompts; the reward is their utility",
    reward="reviews",
    lengths=Lengths(median=25, sigma=1.0, cap=CAP),
    batch=64,
    extra=16,
    learning_rate=5e-4,
    kl=0.02,
    seed=0,
)
EVERY: Final = 2  # updates between two scores
HELD_OUT: Final = 128  # prompts whose responses are scored
KEPT: Final = ("seconds", "tokens", "deferred", "decode", "score", "update", "exposed")
# Of Student's t with 1, 2, ... degrees of freedom: the 97.5% quantile
QUANTILES: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
MARKS: Final = (0.25, 0.5, 0.75, 1.0)  # of the tokens that all runs have: where learning is compared


def student(values: Sequence[float]) -> Interval:
    """Return the mean of a value or more with its 95% interval by Student's t; of one that is everything."""
    mean, count = fmean(values), len(values)
    half = QUANTILES[count - 2] * stdev(values) / math.sqrt(count) if count > 1 else math.inf
    return Interval(mean, mean - half, mean + half)


def ratio(pairs: Iterable[tuple[float, float]]) -> Interval:
    """Return the geometric mean of the ratios of pairs, those with an infinite number left out."""
    logs = [math.log(ours / theirs) for ours, theirs in pairs if math.isfinite(ours + theirs)]
    found = student(logs) if logs else Interval(math.nan, -math.inf, math.inf)
    return Interval(*map(math.exp, (found.mean, found.low, found.high)))


def shown(found: Interval) -> str:
    return "-" if math.isnan(found.mean) else f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"


@dataclass(frozen=True, slots=True)
class Learned:
    """A run: what each step took, and held-out scores by the updates before them, from 0 on."""

    taken: Sequence[Mapping[str, float]]
    scores: Mapping[int, float]

    @classmethod
    def read(cls, run: Mapping[str, Any]) -> Learned:
        return cls(run["taken"], {int(done): score for done, score in run["scores"].items()})

    def passing(self, threshold: float) -> float:
        """Return the updates, and parts of one, after which the score first is ``threshold``; infinite without."""
        marks = reached(np.array([[*self.scores.values()]]), threshold)[0]
        return float(np.interp(marks, range(len(self.scores)), [*self.scores])) if math.isfinite(marks) else math.inf

    def spent(self, updates: float, of: str = "seconds") -> float:
        """Return the seconds, or tokens, until so many updates had been made."""
        sums = list(accumulate((each[of] for each in self.taken), initial=0.0))
        return float(np.interp(updates, range(len(sums)), sums)) if math.isfinite(updates) else math.inf

    def at(self, tokens: float) -> float:
        """Return the score after so many tokens."""
        return float(np.interp(tokens, [self.spent(done, "tokens") for done in self.scores], [*self.scores.values()]))

    def share(self, of: str) -> float:
        return sum(each[of] for each in self.taken) / self.spent(len(self.taken))


Runs: TypeAlias = Mapping[str, Mapping[int, Learned]]  # by mode and seed


def runs_of(results: Mapping[str, Any]) -> Runs:
    """Return the runs of each mode that was run, by seed."""
    found = {mode: {run["seed"]: Learned.read(run) for run in results["runs"] if run["mode"] == mode} for mode in MODES}
    return {mode: runs for mode, runs in found.items() if runs}


def paired(ours: Mapping[int, T], others: Mapping[int, T]) -> list[tuple[T, T]]:
    """Return what both have of the same seed."""
    return [(ours[seed], others[seed]) for seed in sorted(ours.keys() & others.keys())]


def times(runs: Runs, threshold: float) -> str:
    seconds = {
        mode: {seed: each.spent(each.passing(threshold)) for seed, each in found.items()}
        for mode, found in runs.items()
    }
    rates = {
        mode: {seed: each.spent(count := len(each.taken)) / each.spent(count, "tokens") for seed, each in found.items()}
        for mode, found in runs.items()
    }
    rows = []
    for mode, by_seed in runs.items():
        never, found = sum(map(math.isinf, seconds[mode].values())), by_seed.values()
        rows.append(
            [
                MODES[mode][0],
                str(len(found)),
                f"{np.median([*seconds[mode].values()]):.1f}" + (f" ({never} never)" if never else ""),
                *(
                    "1" if mode == TRL else shown(ratio(paired(took[mode], took.get(TRL, {}))))
                    for took in (seconds, rates)
                ),
                f"{np.median([each.passing(threshold) for each in found]):.1f}",
                f"{fmean(each.spent(len(each.taken)) / len(each.taken) for each in found):.2f}",
                f"{fmean(each.spent(len(each.taken), 'tokens') / len(each.taken) for each in found):.0f}",
                " / ".join(f"{fmean(each.share(of) for each in found):.2f}" for of in ("decode", "score", "update")),
            ]
        )
    head = ["contestant", "seeds", f"s to {threshold}", "of TRL's time (95%)", "that of a token (95%)"]
    return markdown([*head, "updates", "s a step", "tokens a step", "decode / score / update"], rows)


def curves(runs: Runs) -> str:
    """Return the scores of both serial contestants by tokens, and their difference, paired by seed."""
    if not (pairs := paired(runs.get("serial", {}), runs.get(TRL, {}))):
        return ""
    most = min(each.spent(len(each.taken), "tokens") for pair in pairs for each in pair)
    rows = []
    for part in MARKS:
        here, there = ([each.at(part * most) for each in found] for found in zip(*pairs, strict=True))
        apart = student([a - b for a, b in zip(here, there, strict=True)])
        rows.append([f"{part * most:,.0f}", f"{fmean(there):+.2f}", f"{fmean(here):+.2f}", shown(apart)])
    return markdown(["tokens sampled", "TRL", "serial", "serial less TRL (95%)"], rows)


def content(results: Mapping[str, Any]) -> str:
    runs, machine = runs_of(results), results["machine"]
    told = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, a load of {machine['load']:.0f} beside it."
    )
    return f"\n{told}\n\n{times(runs, results['threshold'])}\n\n{curves(runs)}\n"


def directory(folder: Path, assets: Path, workload: BenchWorkload) -> Path:
    """Make a workload of the demo's prompts, in the order of the seed, and of its models."""
    tokenizer = HfTokenizer(load_tokenizer(assets / "actor"))
    prompts = read_prompts(assets / "prompts.jsonl", tokenizer)
    order = np.random.default_rng(workload.seed).permutation(len(prompts))
    rows = [
        {"tokens": prompts[n].tokens.tolist(), "length": 0, "topic": prompts[n].columns["topic"]}
        for n in order.tolist()
    ]
    folder.mkdir(parents=True)
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    write_spec(folder, workload, Facts(statistics([0], workload.lengths.cap), {}))
    for role in ("actor", "critic"):
        (folder / role).symlink_to(assets / role)
    return folder


@cache
def score(weights: Path, assets: Path) -> float:
    """Return the mean utility of a response to each held-out prompt; all weights have the same noise."""
    tokenizer = HfTokenizer(load_tokenizer(assets / "actor"))
    sampling = Sampling(max_new_tokens=CAP, stop=tokenizer.stop((), ()), seed=1)
    with Thread("examination", setup=partial(use_cores, 1)) as thread:
        policy = HfPolicy(load_causal(weights), sampling=sampling, place=thread)
        prompts = read_prompts(assets / "held_out.jsonl", tokenizer)[:HELD_OUT]
        reward = FunctionReward(judged, tokenizer.decode_whole)
        found = anyio.run(examine, policy, reward, prompts, Answering(batch=HELD_OUT)).rollouts
    return fmean(each.score for each in found)


def learned(mode: str, workload: BenchWorkload, assets: Path, threshold: float, steps: int) -> dict[str, object]:
    """Return the run of a contestant with its scores: what :meth:`Learned.read` reads."""
    with TemporaryDirectory() as name:
        made, keep = directory(Path(name) / "workload", assets, workload), Path(name) / "kept"
        program = [sys.executable, "-m", "benchmarks.ladder.worker", str(made), "--layout", "shared"]
        program += ["--mode", MODES[mode][1]]
        if mode == TRL:
            cell = choose(Sweep.read(CHECKOUT / SWEEP), made, len(cores_here())).cell
            program = command_line(PEERS["trl-grpo"], made, cell)
        with Contestant(mode, [*program, "--keep", str(keep)], log=Path(name) / "log") as running:
            running.ready()
            taken, scores = list[dict[str, object]](), {0: score(assets / "actor", assets)}
            while len(taken) < steps and [*scores.values()][-1] < threshold:
                taken += [step.as_json() for step in running.run(min(EVERY, steps - len(taken)))]
                scores[len(taken)] = score(keep / str(len(taken)), assets)
    return {"taken": [{key: step[key] for key in KEPT} for step in taken], "scores": scores}


def study(
    *,
    seeds: int = 5,
    modes: str = ",".join(MODES),
    threshold: float = -0.5,
    steps: int = 16,
    sweep_at: Path | None = None,
    out: Path = RESULTS,
) -> None:
    """Run what is missing of all contestants, and write results and tables.

    Args:
        seeds: of each contestant.
        modes: the contestants, with commas between them.
        threshold: the held-out score to reach.
        steps: of each run at most.
        sweep_at: only make this folder, a workload for benchmarks.peer.sweep.
        out: the folder of time-to-score.json and time-to-score.md.

    Raises:
        ConfigError: there is no seed, or no time-to-score.md in the folder.
    """
    file, page = out / "time-to-score.json", out / "time-to-score.md"
    if not 1 <= seeds <= len(QUANTILES) + 1 or not page.exists():
        raise ConfigError(f"expected --seeds of 1 to {len(QUANTILES) + 1} and a page {page}, got {seeds} seeds")
    assets = make_assets(cache_directory()).directory
    if sweep_at is not None:
        directory(sweep_at, assets, REVIEWS)
        return
    results: dict[str, Any] = {"threshold": threshold, "runs": []}
    if file.exists():
        results = json.loads(file.read_text(encoding="utf-8"))
    if results["threshold"] != threshold:
        raise ConfigError(f"{file} holds runs until {results['threshold']}: name another --out for {threshold}")
    runs: list[dict[str, Any]] = results["runs"]
    results |= on_this_machine({})
    known = {(run["mode"], run["seed"]) for run in runs}
    for cell in cells(chosen("contestant", modes, MODES, list(MODES)), seeds):
        if (cell.arm, cell.seed) in known:
            continue
        workload = replace(REVIEWS, seed=cell.seed, samples=0 if cell.arm == "ppo" else REVIEWS.samples)
        runs.append({"mode": cell.arm, "seed": cell.seed, **learned(cell.arm, workload, assets, threshold, steps)})
        file.write_text(json.dumps(results) + "\n", encoding="utf-8")
        found = Learned.read(runs[-1])
        logger.info(
            f"seed {cell.seed}, {cell.arm}: {found.spent(found.passing(threshold)):.1f} s to {threshold}, scores "
            f"{', '.join(f'{each:+.2f}' for each in found.scores.values())}"
        )
    page.write_text(placed(page.read_text(encoding="utf-8"), BEGIN, content(results)), encoding="utf-8")
    print(content(results))


if __name__ == "__main__":
    sys.exit(command(study))
