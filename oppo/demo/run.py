"""``oppo demo``: makes a small language model, trains it with PPO as ``oppo train`` does, and examines it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import anyio
import numpy as np
from rich.console import Console
from rich.text import Text

from oppo import observe
from oppo.config.load import resolve
from oppo.config.sections import Engine
from oppo.config.settings import Settings
from oppo.demo.assets import Assets, cache_directory, make_assets
from oppo.demo.schedules import Digests, Effort, Gains, compare_schedules, excerpt as excerpt_of, measure, starting
from oppo.errors import counted
from oppo.evaluation import Comparison, Evaluated, compare
from oppo.log import routed
from oppo.observe import Observer
from oppo.redact import excerpt, harmless
from oppo.report.charts import busy_machine
from oppo.report.metrics import Figures
from oppo.report.page import write_report
from oppo.report.records import EVALUATIONS, JOURNAL, SUMMARY, Record, read, require_unused
from oppo.report.run_reader import note_times, recorded
from oppo.report.trace import Cores
from oppo.run.train import FINAL, prepare, run
from oppo.vllm.arguments import check_installed


class HeldOut(Observer):
    def __init__(self) -> None:
        self.found: list[Evaluated] = []

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        del step, stage, at
        if isinstance(item, Evaluated):
            self.found = [*self.found[:1], item]

    def comparison(self) -> Comparison:
        scores = ({each.group: each.score for each in found.answers} for found in self.found)
        before, after = scores
        both = sorted(before.keys() & after.keys())
        return compare(*(np.array([found[key] for key in both], np.float32) for found in (before, after)))


LENGTH_HACK = 2.0  # responses this many times as long as before suggest that the policy exploits their length


@dataclass(frozen=True, slots=True)
class Findings:
    scores: Comparison  # on held-out prompts, before and after
    summary: Figures  # of the run
    deferred_fraction: float  # fraction of the finished rollouts that were deferred to a later step
    deferral_steps: Mapping[int, int]  # rollouts deferred, by the number of steps
    digests: Digests  # of a serial and of a streamed run in deterministic mode
    directory: Path
    actor: Path  # directory of the trained policy
    assets: Path  # directory of the models and prompts that the demo made
    seconds: float
    others: float = 0.0  # share of the cores that other processes took meanwhile

    def facts(self) -> dict[str, object]:
        return {
            "eval/score": {
                **self.summary["eval/score"],
                "gain": self.scores.gain,
                "gain_ci95": self.scores.half_width,
                "spread_first": self.scores.spread,
            },
            "deferred_fraction": self.deferred_fraction,
            "deferral_steps": self.deferral_steps,
            "digests": asdict(self.digests),
            "tokens_identical_to_serial": self.digests.identical,
            "actor": str(self.actor),
        }

    def lines(self) -> list[str]:
        scores = self.scores
        before, after = (self.summary["eval/response_length"][when] for when in ("first", "last"))
        ratio, kl = after / before, self.summary["objective/kl"]["last"]
        hack = f"; length hack: {ratio:.1f} times as long" if ratio > LENGTH_HACK else ""
        same = "the same" if self.digests.identical else "OTHER"
        found = {
            "held-out": f"score {scores.before:+.2f} before, {scores.after:+.2f} after: gain "
            f"{scores.gain:+.2f} +- {scores.half_width:.2f} (95%, over prompts of one run), "
            f"{scores.gain / scores.spread:.1f} standard deviations of the base policy's scores",
            "KL": f"{kl:.1f} nats a response from the base policy, in the last steps",
            "length": f"{before:.0f} tokens before, {after:.0f} after, on held-out prompts{hack}",
            "overlap": self._overlap(),
            "deferral": self._deferral(),
            "exactness": f"a serial and a streamed run, in deterministic mode, made {same} tokens: "
            f"{self.digests.serial[:12]} and {self.digests.streamed[:12]}",
            "inputs": f"policy (actor), reward model (reward) and prompts.jsonl are in {self.assets}",
            "outputs": f"{self.directory}/report.html, {self.actor}",
            "again": f"oppo train {self.directory}/config.toml --set run.name=again",
            "time": "; ".join(filter(None, (f"{self.seconds:.0f} s", busy_machine(self.others)))),
        }
        return [f"{name:<10} {finding}" for name, finding in found.items()]

    def _overlap(self) -> str:
        hidden = self.summary.get("overlap/hidden_fraction")
        if hidden is None:
            return "scoring took hardly any time: there was nothing to hide"
        return f"{hidden['mean']:.0%} of the scoring was hidden behind decoding and training"

    def _deferral(self) -> str:
        if not self.deferral_steps:
            return "nothing was deferred: no number of extra rollouts promised to save more time than it costs"
        ages = ", ".join(f"{count} by {counted(age, 'step')}" for age, count in self.deferral_steps.items())
        return f"{self.deferred_fraction:.1%} of the rollouts were deferred: {ages}"


def deferrals(run: Path) -> tuple[float, dict[int, int]]:
    records = list(read(run / JOURNAL))
    ages = {record["rollout"]: cast("int", record["age"]) for record in records if record["event"] == "deferred"}
    finished = {record["rollout"] for record in records if record["event"] == "finished"}
    return len(ages) / max(1, len(finished)), dict(sorted(Counter(ages.values()).items()))


SHOWN = 3  # held-out prompts whose responses are shown
LONGEST = 200  # characters of each

UNMEASURED = "The short demo does not measure what overlap gains: its models are too small. `make demo` does."

SECONDS_BETWEEN_LINES = 3.0


@dataclass(frozen=True, slots=True)
class DemoPlan:
    small: bool  # make tiny models
    steps: int
    max_new_tokens: int
    learning_rate: float  # the actor's; the critic's is two and a half times as high
    examined: int  # held-out prompts
    effort: Effort | None  # to measure the speedup by overlap; `None` for tiny models, whose seconds mean little


FULL = DemoPlan(
    small=False,
    steps=14,
    max_new_tokens=256,
    learning_rate=2.5e-4,
    examined=128,
    effort=Effort(batch=12, extra=3, steps=4, rounds=3, deeper=4),
)
SHORT = DemoPlan(
    small=True,
    steps=20,
    max_new_tokens=64,
    learning_rate=1e-3,
    examined=64,
    effort=None,
)


@routed()  # the narrator prints the messages
def demo(
    directory: Path,
    *,
    short: bool = False,
    seed: int = 0,
    engine: Engine = "transformers",
    cache: Path | None = None,
) -> Path:
    if engine == "vllm":
        check_installed()
    plan = SHORT if short else FULL
    target = unused(directory)
    require_unused(target)
    console = Console()
    narrator = Narrator(console)
    assets = make_assets(cache or cache_directory(), seed=seed, small=plan.small, progress=narrator.progress)
    introduce(console, assets)
    settings = settings_of(plan, assets, target, seed, engine)
    held_out = HeldOut()
    evaluation = {"prompts": str(assets.directory / "held_out.jsonl"), "count": plan.examined, "every": plan.steps // 2}
    evaluated = settings.changed({"eval": evaluation})
    with routed(narrator.say), starting(settings.models), prepare(evaluated) as session:
        anyio.run(run, session, console, [held_out])
    narrator.say("running two steps serially and streamed, in deterministic mode, on transformers")
    digests = compare_schedules(settings)
    gains = None if plan.effort is None else compare_seconds(settings, plan.effort, narrator)
    deferred_fraction, deferral_steps = deferrals(settings.run_directory)
    file = settings.run_directory / SUMMARY
    summary = json.loads(file.read_text(encoding="utf-8"))
    findings = Findings(
        scores=held_out.comparison(),
        summary=summary,
        deferred_fraction=deferred_fraction,
        deferral_steps=deferral_steps,
        digests=digests,
        directory=settings.run_directory,
        actor=settings.run_directory / FINAL / "actor",
        assets=assets.directory,
        seconds=narrator.seconds,
        others=narrator.others(),
    )
    facts = {**summary, **findings.facts(), **({} if gains is None else gains.facts())}
    file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    show_samples(console, list(read(settings.run_directory / EVALUATIONS)))
    console.out("", *findings.lines(), "", sep="\n", highlight=False)
    console.print(UNMEASURED if gains is None else gains.table(), highlight=False)
    return settings.run_directory


def compare_seconds(settings: Settings, effort: Effort, narrator: Narrator) -> Gains:
    with routed(narrator.say):
        rounds = measure(settings, effort)
    note_times(settings.run_directory, [excerpt_of(name, made) for name, made in rounds.items()])
    write_report([recorded(settings.run_directory, over=True)])
    return Gains.of(effort, rounds)


def settings_of(plan: DemoPlan, assets: Assets, target: Path, seed: int, engine: Engine = "transformers") -> Settings:
    return resolve(
        {
            "run": {"name": target.name, "directory": str(target.parent), "steps": plan.steps, "seed": seed},
            "models": {
                "policy": str(assets.directory / "actor"),
                "critic": str(assets.directory / "critic"),
                "engine": engine,
            },
            "rewards": [{"source": str(assets.directory / "reward")}],
            "data": {"prompts": str(assets.directory / "prompts.jsonl")},
            "sampling": {"max_new_tokens": plan.max_new_tokens},
            "step": {"admission": "adaptive", "chunk": 16},
            "trainer": {
                "learning_rate": plan.learning_rate,
                "critic_learning_rate": 2.5 * plan.learning_rate,
                "epochs": 2,
                "minibatches": 2,
                "micro_batch_tokens": 1024,
            },
        },
        Path.cwd(),
    )


def unused(directory: Path) -> Path:
    number = 1
    while os.path.lexists(directory / f"demo-{number}"):
        number += 1
    return (directory / f"demo-{number}").absolute()


class Narrator:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = observe.now()
        self._quiet_until = 0.0
        self._part = ""
        self._cores = Cores()

    def others(self) -> float:
        self._cores.measure()
        return self._cores.others

    @property
    def seconds(self) -> float:
        return observe.now() - self._began

    def say(self, words: str) -> None:
        self._console.out(f"{self.seconds:4.0f} s  {words}", highlight=False)

    def progress(self, words: str, done: float) -> None:
        part = words.partition(",")[0]
        if part != self._part or self.seconds >= self._quiet_until:
            self._part = part
            self.say(f"{done:4.0%}  {words}")
            self._quiet_until = self.seconds + SECONDS_BETWEEN_LINES


def introduce(console: Console, assets: Assets) -> None:
    facts = assets.facts
    console.out(
        f"base policy: {facts.parameters['actor']:,} parameters, vocabulary {facts.vocabulary}\n"
        f"language: reviews of {facts.language_tokens['p50']:.0f} tokens in the median, "
        f"{facts.language_tokens['p99']:.0f} at the 99th percentile; the length cap cuts off {facts.capped:.0%} of the "
        f"policy's responses\nreward model: orders {facts.pair_accuracy:.0%} of held-out preference pairs as labelled\n"
        f"both are kept in {assets.directory}",
        highlight=False,
    )


def show_samples(console: Console, evaluations: Sequence[Record]) -> None:
    first, last = (cast("list[Record]", evaluations[place]["samples"]) for place in (0, -1))
    for before, after in zip(first[:SHOWN], last[:SHOWN], strict=True):
        console.print(Text(f"\n{harmless(str(before['prompt']))}", style="bold"))
        for name, answer in (("before", before), ("after", after)):
            console.print(
                Text(f"  {name} {answer['score']:+.2f} {harmless(excerpt(str(answer['completion']).strip(), LONGEST))}")
            )
