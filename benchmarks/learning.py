"""``python -m benchmarks.learning``: what is learned where the weights that sample are 0 to 2 updates old, or deferred.

Four tasks, each on tiny models and in seconds: a reward model's taste, sums of two digits, and a calculator that has
to be asked, at once or late. Runs of a seed share prompts, noise and initial weights, so lags are compared in pairs.
Writes ``results/learning.json`` and the table of ``results/learning.md``.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import anyio
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from benchmarks.convergence.comparison import TARGET, Interval, bootstrap
from benchmarks.harness import command, keep, kl_of, markdown, on_this_machine, placed, turns
from oppo import FunctionReward, Overcommit, Prompt, Sampling, StepReport, TrainerSettings, grpo
from oppo.environments import FunctionEnvironment, TextTurn
from oppo.errors import ConfigError
from oppo.evaluation import Answering, examine
from oppo.events import Drop
from oppo.hf import DeviceThread, HfPolicy, HfTrainer, ReferenceLogprobs, RewardModel
from oppo.hf.devices import use_cores
from oppo.hf.serve.scorers import ProximalLogprobs
from oppo.log import logger
from oppo.losses import ClippedLoss
from oppo.models import Scorer
from oppo.placement import Place
from oppo.returns import ImportanceCorrection

RESULTS: Final = Path(__file__).parent / "results"
BEGIN: Final = "<!-- python -m benchmarks.learning -->\n"
CHARACTERS: Final = "_.=+0123456789abcdefghijklmnopqr"
END, CALL = CHARACTERS.index("."), CHARACTERS.index("=")
LIKED: Final = "abcdef"  # what the reward model likes: the share of these letters in a response

BATCH, SAMPLES, CAP = 8, 4, 12
HELD_OUT: Final = 96


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens)


def result(prompt: str) -> str:
    return f"{sum(int(digit) for digit in prompt.split('+')):02}"


async def calculator(turn: TextTurn) -> str | None:
    return result(str(turn.prompt)) if turn.text.endswith("=") and turn.number == 0 else None


def late(seed: int) -> Callable[[TextTurn], object]:
    """Return a calculator whose answers take milliseconds, and a few of them a hundred times as long."""
    dice = np.random.default_rng((seed, 2))

    async def slow(turn: TextTurn) -> str | None:
        await anyio.sleep(min(0.5, float(dice.lognormal(np.log(0.005), 1.5))))
        return await calculator(turn)

    return slow


def right(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return 1 for each completion that has the result and nothing else that is a digit."""
    digits = ["".join(each for each in completion if each.isdigit()) for completion in completions]
    return [float(result(prompt) == said) for prompt, said in zip(prompts, digits, strict=True)]


def checked() -> Scorer[float | Drop]:
    return FunctionReward(right, decode)


def config() -> LlamaConfig:
    made = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    made.num_labels = 1
    return made


def adding() -> PreTrainedModel:
    torch.manual_seed(0)
    model, dice = LlamaForCausalLM(config()), np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(600):
        sums = dice.integers(10, size=(128, 2))
        told = np.where(dice.random(128) < 0.5, sums.sum(1), dice.integers(19, size=128))
        rows = [encode(f"{a}+{b}{c:02}.") for (a, b), c in zip(sums, told, strict=True)]
        ids = torch.tensor(rows)
        loss = model(input_ids=ids, labels=ids.masked_fill(torch.arange(ids.shape[1]) < 3, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def beginning(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(config())


def tasteful() -> PreTrainedModel:
    """Return a reward model that has been taught the share of the letters that are liked."""
    torch.manual_seed(0)
    model, dice, liked = LlamaForSequenceClassification(config()), np.random.default_rng(0), encode(LIKED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        ids = torch.from_numpy(dice.integers(1, len(CHARACTERS), size=(64, int(dice.integers(3, 16)))))
        share = torch.isin(ids[:, 3:] if ids.shape[1] > 3 else ids, torch.tensor(liked)).float().mean(1)
        loss = (model(input_ids=ids).logits[:, 0] - share).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@dataclass(frozen=True, slots=True)
class Arm:
    """What makes rollouts stale, and what corrects for it."""

    lag: int = 0  # updates by which the weights are older that sample a step
    overcommit: int = 0  # groups in flight beyond a batch, which are deferred
    most: int = 2  # times that a group is deferred
    correction: ImportanceCorrection = field(default_factory=ImportanceCorrection)


TRUNCATED: Final = ImportanceCorrection(ratio_base="proximal", weight="truncated")
# By name; all are compared with "0", which is strictly on-policy
LAGS: Final[Mapping[str, Arm]] = {str(lag): Arm(lag) for lag in range(3)}
DEFERRALS: Final[Mapping[str, Arm]] = {
    "0": Arm(),
    "2 of 10 groups deferred": Arm(0, 2),
    "the same, truncated weights": Arm(0, 2, 2, TRUNCATED),
    "8 of 16, up to 8 times": Arm(0, 8, 8),
    "these 8, truncated weights": Arm(0, 8, 8, TRUNCATED),
}


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    about: str
    steps: int
    learning_rate: float
    actor: Callable[[int], PreTrainedModel]  # as it begins, of a seed
    reward: Callable[[Place], Scorer[float | Drop]]  # in the place of the scorers
    tool: bool = False  # whether a calculator answers
    kl: float = 0.0  # weight of the KL to the policy as it began
    arms: Mapping[str, Arm] = field(default_factory=lambda: LAGS)
    slow: bool = False  # whether the calculator takes its time


def tasks() -> list[Task]:
    """Return the tasks; two models are taught first."""
    adder, taste = adding(), tasteful()

    return [
        Task(
            "reward model",
            "a reward model of the policy's size, taught which letters to like; the KL to the policy as it began costs",
            20,
            1e-2,
            beginning,
            lambda place: RewardModel(copy.deepcopy(taste), place=place),
            kl=0.02,
        ),
        Task(
            "arithmetic",
            "sums of two digits, half of which it was shown wrongly",
            30,
            5e-4,
            lambda _: copy.deepcopy(adder),
            lambda _: checked(),
        ),
        Task(
            "tool",
            "the same sums from random weights, with a calculator to ask",
            20,
            2e-2,
            beginning,
            lambda _: checked(),
            tool=True,
        ),
        Task(
            "slow tool",
            "the same, where an answer takes 5 ms in the median and up to 500: who waits is deferred, in mid-call too",
            20,
            2e-2,
            beginning,
            lambda _: checked(),
            tool=True,
            arms=DEFERRALS,
            slow=True,
        ),
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run: before and after on held-out prompts, and the mean score of each step with its seconds."""

    before: float
    after: float
    kl: float  # nats a response, from the policy as it began
    staleness: float  # of the tokens trained, in versions
    scores: Sequence[float]
    seconds: Sequence[float]


def prompts(seed: int, count: int, first: int = 0) -> list[Prompt]:
    dice = np.random.default_rng((seed, count))
    sums = [f"{a}+{b}" for a, b in dice.integers(10, size=(count, 2))]
    return [Prompt(n, n, np.array(encode(text), np.int32)) for n, text in enumerate(sums, first)]


def outcome(task: Task, arm: Arm, seed: int, *, steps: int = 0) -> Outcome:
    actor, steps = task.actor(seed), steps or task.steps
    first, trained = copy.deepcopy(actor), copy.deepcopy(actor)
    sampling = Sampling(max_new_tokens=CAP, stop=(END, CALL) if task.tool else (END,), seed=seed)
    environment = FunctionEnvironment(late(seed) if task.slow else calculator, decode, encode) if task.tool else None
    with ExitStack() as stack:
        acting, scoring, training = (
            stack.enter_context(DeviceThread(name, "cpu", setup=partial(use_cores, 1)))
            for name in ("actor", "scorers", "trainer")
        )
        policy = HfPolicy(actor, sampling=sampling, place=acting)
        reference = ReferenceLogprobs(first, sampling=sampling, place=scoring)
        settings = TrainerSettings(learning_rate=task.learning_rate, epochs=2, seed=seed)
        proximal = ProximalLogprobs(trained, sampling=sampling, place=scoring)
        graph = grpo(
            policy=policy,
            reward=task.reward(scoring),
            trainer=HfTrainer(
                trained,
                sampling=sampling,
                place=training,
                settings=settings,
                loss=ClippedLoss(kl=task.kl, kl_estimator="k3", correction=arm.correction),
            ),
            admission=Overcommit(BATCH, arm.overcommit, arm.most),
            samples=SAMPLES,
            reference=reference if task.kl else None,
            proximal=proximal if arm.correction.needs_proximal else None,
            environment=environment,
        )
        asked = prompts(seed, BATCH * (steps + arm.lag) + arm.overcommit)
        held_out, how = prompts(1_000 + seed, HELD_OUT, 1 << 20), Answering(batch=HELD_OUT, environment=environment)

        async def examined() -> tuple[float, float]:
            found = (await examine(policy, task.reward(scoring), held_out, how, reference=reference)).rollouts
            return fmean(each.score for each in found), fmean(map(kl_of, found))

        async def main() -> tuple[float, list[StepReport], tuple[float, float]]:
            before, _ = await examined()
            async with graph.open(asked, lookahead=arm.lag) as run:
                done = [step async for step in run.steps(steps)]
            return before, done, await examined()

        before, done, (after, kl) = anyio.run(main)
    staleness = fmean(step.metrics["staleness/mean"] for step in done)
    return Outcome(before, after, kl, staleness, [step.score for step in done], [step.seconds for step in done])


@dataclass(slots=True)
class Found:
    """Outcomes by task and arm, of the seeds in order."""

    outcomes: dict[str, dict[str, list[Outcome]]] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Mapping[str, Any]) -> Found:
        return cls(
            {
                task: {arm: [Outcome(**each) for each in found] for arm, found in arms.items()}
                for task, arms in results["outcomes"].items()
            }
        )

    def row(self, task: str, arm: str) -> list[str]:
        ours, base = self.outcomes[task][arm], self.outcomes[task]["0"]
        gain = fmean(each.after - each.before for each in base)
        target = fmean(each.before for each in base) + TARGET * gain
        against = bootstrap([a.after - b.after for a, b in zip(ours, base, strict=True)])
        taken = [reached(each, target) for each in ours]
        samples, seconds = ([each[at] for each in taken] for at in (0, 1))
        return [
            task,
            arm,
            f"{fmean(each.staleness for each in ours):.2f}",
            f"{fmean(each.before for each in ours):.2f}",
            f"{fmean(each.after for each in ours):.2f}",
            "-" if arm == "0" else percent(against.in_parts_of(gain)) if gain > 0 else "nothing gained",
            f"{fmean(each.kl for each in ours):.1f}",
            middle(samples, ".0f"),
            middle(seconds, ".1f"),
            f"{fmean(sum(each.seconds) for each in ours):.1f}",
        ]

    def table(self) -> str:
        head = ["task", "lag", "staleness", "before", "after", "against lag 0", "KL, nats"]
        head += ["samples", "seconds", "s a run"]
        return markdown(head, [self.row(task, arm) for task, arms in self.outcomes.items() for arm in arms])


def percent(interval: Interval) -> str:
    return f"{interval.mean:+.0%} ({interval.low:+.0%} to {interval.high:+.0%})"


def reached(found: Outcome, target: float) -> tuple[float, float]:
    """Return samples and seconds until the mean score of three steps first is ``target``; infinite where it is not."""
    scores = np.convolve(found.scores, np.ones(3) / 3, "valid")
    above = np.flatnonzero(scores >= target)
    if not len(above):
        return float("inf"), float("inf")
    steps = int(above[0]) + 3
    return float(steps * BATCH * SAMPLES), float(sum(found.seconds[:steps]))


def middle(values: Sequence[float], form: str) -> str:
    """Return the median, and how many values are infinite."""
    never = sum(not np.isfinite(each) for each in values)
    found = float(np.median(values))
    told = f"{found:{form}}" if np.isfinite(found) else "not reached"
    return f"{told} ({never} never)" if never and np.isfinite(found) else told


def write(results: Mapping[str, Any], folder: Path) -> None:
    keep(folder / "learning.json", results)
    page = folder / "learning.md"
    page.write_text(placed(page.read_text(encoding="utf-8"), BEGIN, content(results)), encoding="utf-8")


def content(results: Mapping[str, Any]) -> str:
    machine, found = results["machine"], Found.of(results)
    seeds = {task: len(arms["0"]) for task, arms in found.outcomes.items()}
    about = "".join(f"- {task}: {results['tasks'][task]}; {count} seeds.\n" for task, count in seeds.items())
    told = f"{machine['cpu']}, {machine['cores']} cores, a load of {machine['load']:.1f}."
    return f"\n{about}\n{told}\n\n{found.table()}\n"


def make(*, seeds: int = 8, steps: int = 0, only: str = "", out: Path = RESULTS) -> None:
    """Run all tasks, and write the results and the table.

    Args:
        seeds: of every task and lag.
        only: the task to run; the others keep their results.
        steps: of every run; 0: as many as each task needs.
        out: the folder of learning.json and learning.md.

    Raises:
        ConfigError: there is no seed, or no learning.md in the folder.
    """
    if seeds < 1 or not (out / "learning.md").exists():
        raise ConfigError(f"expected --seeds of 1 or more and a page {out / 'learning.md'}, got {seeds} seeds")
    use_cores(1)
    file, known = out / "learning.json", tasks()
    if only not in {"", *(names := [task.name for task in known])}:
        raise ConfigError(f"expected --only of {', '.join(names)}, got {only!r}")
    raw = json.loads(file.read_text(encoding="utf-8"))["outcomes"] if only else {}
    for task in known:
        if only not in {"", task.name}:
            continue
        raw[task.name] = {arm: [] for arm in task.arms}
        for seed, arm in turns(list(task.arms), seeds - 1):
            raw[task.name][arm].append(asdict(found := outcome(task, task.arms[arm], seed, steps=steps)))
            logger.info(
                f"{task.name}, seed {seed}, {arm}: {found.before:.2f} to {found.after:.2f}, KL {found.kl:.1f}, "
                f"{sum(found.seconds):.1f} s"
            )
    about = {task.name: task.about for task in known}
    write(on_this_machine({"tasks": about, "outcomes": raw}), out)
    print(Found.of({"outcomes": raw}).table())


if __name__ == "__main__":
    sys.exit(command(make))
