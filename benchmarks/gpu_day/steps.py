"""Whole steps on one device: every schedule in this process, over the same models, in turn; and TRL's GRPO beside two.

A card does not hold the models of several contestants. So all schedules share the models and the trainer, which trains
copies of actor and critic in every schedule; each has a policy, scorers and rollouts of its own. Before anything is
loaded, the memory of a step is counted as ``oppo doctor`` counts it, and micro-batches are as large as fit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, TypeAlias

import anyio
import torch

from benchmarks.gpu_day.parts import SAMPLING, Day, Found
from benchmarks.harness import turns
from benchmarks.ladder.contestant import Entry, StepRecord
from benchmarks.ladder.directory import Files, cache_directory, counting, drawn, files_of
from benchmarks.ladder.measures import Rounds, per_token, speedup
from benchmarks.ladder.pipeline import Progress, algorithm_of, graph_of, load, sampling_of, settings_of, trainer_of
from benchmarks.ladder.rounds import entries
from benchmarks.ladder.worker import Watch, timed_steps
from benchmarks.ladder.workloads import MODES, SERIAL, BenchWorkload, Plan
from benchmarks.peer.sweep import PEERS, Cell, command_line
from oppo import observe
from oppo.errors import ConfigError
from oppo.events import StepReport
from oppo.graph import Run
from oppo.hf.devices import DeviceThread, free, use_cores
from oppo.hf.memory import Load, ServedPolicy, Trained, longest_batch, served_critic, served_reference
from oppo.hf.meta_device import planned_on
from oppo.hf.serve.decoder import Counters
from oppo.hf.serve.policy import PREFILL_TOKENS, HfPolicy
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.trainer import HfTrainer
from oppo.losses import ClippedLoss
from oppo.placement import Ranks
from oppo.training import TrainerSettings

SCHEDULES: Final = ("serial", "chunk", "fixed", "adaptive", "lookahead")


@dataclass(frozen=True, slots=True)
class Steps:
    """Which schedules of a workload take turns, and how many steps: ``each`` in every round, after some to warm up."""

    workload: str
    modes: Sequence[str]
    rounds: int
    each: int
    warm_up: int
    adapting: int = 8  # steps to warm up where the controller learns from them

    def before(self, mode: str) -> int:
        return self.adapting if mode == "adaptive" else self.warm_up

    def of(self, mode: str) -> int:
        return self.before(mode) + self.rounds * self.each

    @property
    def deferring(self) -> bool:
        return not {"serial", "chunk"}.issuperset(self.modes)

    def on(self, day: Day) -> Steps:
        return replace(self, rounds=2, each=1, warm_up=1, adapting=1) if day.tries else self


LADDER: Final = Steps("gpu", SCHEDULES, 4, 2, 2)
RULE: Final = Steps("gpu-rule", ("serial", "fixed", "adaptive"), 2, 1, 1)
SMALL: Final = Steps("gpu-small", ("serial", "chunk", "fixed"), 2, 1, 1)
FULL: Final = Steps("gpu-full", ("serial", "chunk"), 1, 1, 0)
PEER: Final = (Steps("gpu-grpo-rule", ("serial", "fixed"), 2, 1, 1), Steps("gpu-grpo", ("serial", "fixed"), 1, 1, 1))


MICRO_BATCHES: Final = (16_384, 8192, 4096, 2048)  # tokens


def fitted(workload: BenchWorkload, deferring: bool, device: torch.device, room: float) -> tuple[BenchWorkload, int]:
    """Return the workload with the largest micro-batches that fit, and the bytes of its models with them.

    They are counted as ``oppo doctor`` counts them, all rollouts at their longest.

    Raises:
        ConfigError: not even the smallest fit.
    """
    rollouts = workload.batch + workload.extra * deferring
    load = Load(rollouts, workload.prompt_tokens[1], workload.lengths.cap, workload.chunk)
    sampling, loss = sampling_of(workload), algorithm_of(workload).loss()
    actor, (reward, critic) = partial(counting, workload), (partial(drawn, workload, role, "meta") for role in _SCALAR)

    def trained() -> ActorCritic:
        return ActorCritic(actor(), critic() if "critic" in workload.roles else None)

    with planned_on(device):
        needs = {
            "policy": ServedPolicy(actor).under(load, sampling, prefill_tokens=PREFILL_TOKENS),
            "reference": served_reference(actor).under(load),
        }
        if workload.reward == "model":
            needs["reward"] = served_critic(reward).under(load)
        if "critic" in workload.roles:
            needs["critic"] = served_critic(critic).under(load)
        for tokens in MICRO_BATCHES:
            chosen = replace(workload, micro_batch_tokens=tokens)
            needs["trainer"] = Trained(trained).under(load, sampling, settings_of(chosen), loss)
            total = sum(each.total for each in needs.values())
            if total <= room:
                return chosen, total
    each = ", ".join(f"{name} {need.total / 1e9:.1f} GB" for name, need in needs.items())
    raise ConfigError(
        f"{device} has {room / 1e9:.1f} GB free, and a step of {workload.name} needs {total / 1e9:.1f} GB with "
        f"micro-batches of {tokens} tokens ({each}): take a larger GPU"
    )


_SCALAR: Final = ("reward", "critic")

# Runs so many steps of a schedule
Climb: TypeAlias = Callable[[int], Awaitable[list[StepRecord]]]


@asynccontextmanager
async def climbing(files: Files, modes: Sequence[str], device: torch.device) -> AsyncIterator[dict[str, Climb]]:
    """Yield, by schedule, what runs steps of it; one at a time."""
    workload, models = files.workload, load(files, str(device))
    place = partial(DeviceThread, device=device, setup=partial(use_cores, 1) if device.type == "cpu" else None)
    async with AsyncExitStack() as stack:
        acting, scoring, training = places = [
            stack.enter_context(closing(each))
            for each in (place("actor", first=True), place("scorers"), place("trainer", lends=device.type != "cpu"))
        ]
        trainer = trainer_of(workload, models, training, apart=True)
        climbs: dict[str, Climb] = {}
        for name in modes:
            policy, watch = HfPolicy(models.actor, sampling=sampling_of(workload), place=acting), Watch(workload)
            graph = graph_of(workload, MODES[name], models, policy=policy, trainer=trainer, scoring=scoring)
            opened = graph.open(files.prompts(), observers=[watch], lookahead=MODES[name].lookahead)
            climbs[name] = partial(_climb, await stack.enter_async_context(opened), policy.counters, watch, places)
        yield climbs


async def _climb(
    run: Run[StepReport], counters: Counters, watch: Watch, places: Sequence[DeviceThread], steps: int
) -> list[StepRecord]:
    for place in places:
        place.listener = watch.on_work
    return await timed_steps(run, lambda: Progress(counters.decode_steps, counters.tokens), watch, steps)


def ladder(steps: Steps, day: Day) -> Found:
    return anyio.run(_ladder, steps.on(day), day)


async def _ladder(steps: Steps, day: Day) -> Found:
    workload, needed = fitted(day.workload(steps.workload), steps.deferring, day.device, free(day.device))
    found: dict[str, object] = {"micro-batch, tokens": workload.micro_batch_tokens, "peak bytes, predicted": needed}
    day.say(found)
    peaks: dict[str, float] = {}
    files = files_of(workload, cache_directory())
    async with climbing(files, steps.modes, day.device) as climbs:
        records: dict[str, list[list[StepRecord]]] = {mode: [] for mode in steps.modes}
        for number, mode in turns(steps.modes, steps.rounds):
            wanted = steps.each if number else steps.before(mode)
            with day.peak(peaks):
                taken = await climbs[mode](wanted) if wanted else []
            if number:
                records[mode].append(taken)
            if number and len({len(rounds) for rounds in records.values()}) == 1:
                found |= {**peaks, **figures(records), "rounds": number}
                day.say(found)
    return found


def figures(records: Mapping[str, Rounds]) -> dict[str, object]:
    """Return the speed of each contestant, over the first one's, and the serial mode's phases."""
    found: dict[str, object] = {}
    first = next(iter(records))
    for name, rounds in records.items():
        steps = [step for each in rounds for step in each]
        found[f"{name}, s a step"] = median(step.seconds for step in steps)
        found[f"{name}, tokens a second"] = 1 / per_token(steps)
        if name == SERIAL.name:
            phases = ("decode", "score", "update")
            found |= {f"{name}, s of {phase}": median(getattr(each, phase) for each in steps) for phase in phases}
        if name != first:
            ratio = speedup(rounds, records[first])
            found |= {f"{name} / {first}": ratio.median, f"{name} / {first}, range": [ratio.low, ratio.high]}
    return found


def full(day: Day) -> Found:
    """Compare the memory of steps whose responses are all at the cap with what is counted beforehand."""
    found = ladder(FULL, day)
    return {name: value for name, value in found.items() if "/" not in name}


PASSES_TRIED: Final = (8, 4)  # that TRL's batch is cut into: of the faster one are the results


def peer(day: Day) -> Found:
    """Compare with TRL's GRPO: the same prompts, responses and optimizer steps, on the same device."""
    found: dict[str, object] = {}
    for steps in PEER:
        with TemporaryDirectory() as logs:
            anyio.run(_peer, steps.on(day), day, found, Path(logs))
    return found


async def _peer(steps: Steps, day: Day, found: dict[str, object], logs: Path) -> None:
    about = "rule" if steps.workload.endswith("rule") else "model"
    workload = replace(day.workload(steps.workload), micro_batch_tokens=4096)
    files = files_of(workload, cache_directory())
    # With a reward model on both sides a card of 80 GB has no room for larger passes.
    tried = PASSES_TRIED if about == "rule" or free(day.device) > 100e9 else PASSES_TRIED[:1]
    with ExitStack() as stack:
        theirs = {}
        for passes in tried:
            cell = Cell(workload.batch, passes, 1, ("--device", str(day.device)))
            command = command_line(PEERS["trl-grpo"], files.directory, cell)
            theirs[passes] = stack.enter_context(Entry(f"TRL {passes}", tuple(command)).start(logs))
        for each in theirs.values():
            each.ready()
        took = {passes: each.run(1)[0].seconds for passes, each in theirs.items()}
        best = min(took, key=took.__getitem__)
        for passes in theirs.keys() - {best}:
            theirs[passes].close()
        found[f"{about}: TRL, passes"] = best
        async with climbing(files, steps.modes, day.device) as climbs:
            for climb in climbs.values() if steps.warm_up else ():
                await climb(steps.warm_up)
            records: dict[str, list[list[StepRecord]]] = {"TRL": [], **{mode: [] for mode in steps.modes}}
            for number, name in turns([*records], steps.rounds):
                if number:
                    taken = theirs[best].run(steps.each) if name == "TRL" else await climbs[name](steps.each)
                    records[name].append(taken)
                    if len({len(rounds) for rounds in records.values()}) == 1:
                        found |= {f"{about}: {key}": value for key, value in figures(records).items()}
                        day.say(found)


def vllm(day: Day) -> Found:
    """Run steps whose policy is vLLM's, which has run on no GPU: the serial schedule, and streamed."""
    files = files_of(day.workload("gpu-rule"), cache_directory())
    plan = Plan(1, 1, 1, "thread", str(day.device), "vllm")
    records: dict[str, Rounds] = {}
    with TemporaryDirectory() as logs:
        for entry in entries(files, ("serial", "chunk"), "shared", plan):
            with entry.start(Path(logs)) as contestant:
                contestant.ready()
                contestant.run(plan.warm_up)
                records[entry.name] = [contestant.run(plan.steps)]
    return figures(records)


def nccl(day: Day) -> Found:
    """Make updates in two ranks on two GPUs, which have run on none, and in one; on a CPU by gloo."""
    if not day.tries and torch.cuda.device_count() < 2:
        raise ConfigError(f"two ranks need two GPUs, and here is {torch.cuda.device_count()}")
    return {name: value for ranks in (1, 2) for name, value in anyio.run(_updates, ranks, day).items()}


async def _updates(ranks: int, day: Day) -> dict[str, float]:
    sizes = day.sizes
    batch = longest_batch(sizes.trained, Load(sizes.trained, 16, sizes.read - 16, sizes.chunk), critic=False)
    with closing(Ranks("trainer", ranks)) as place:
        trainer = HfTrainer(
            day.model("actor", torch.device("cpu")),
            sampling=SAMPLING,
            place=place,
            settings=TrainerSettings(epochs=1),
            loss=ClippedLoss(),
            devices=[] if day.tries else [torch.device("cuda", rank) for rank in range(ranks)],
        )
        await trainer.update(batch)
        began = observe.now()
        trained = await trainer.update(batch)
        seconds = observe.now() - began
    return {f"{ranks} rank(s), s": seconds, f"{ranks} rank(s), KL": trained.metrics["policy/approxkl_avg"]}
