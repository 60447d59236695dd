"""Measures the same steps serially, streamed, and with stragglers deferred: the speedup, and that tokens are equal.

The demo's models are scaled as in the OPPO paper: a reward model that costs several times the actor, one epoch, and the
base policy's long tail of lengths. The learning rate is almost 0, so that every round samples the same tokens.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import anyio
import torch
from rich.table import Table
from transformers import LlamaForSequenceClassification, PreTrainedModel

from oppo.atomic_files import temporary
from oppo.config.sections import ModelsSection
from oppo.config.settings import Settings
from oppo.events import Batch, StepReport
from oppo.graph import Graph
from oppo.hf.loading import load_scalar, load_tokenizer
from oppo.hf.model_files import quiet
from oppo.log import logger, routed
from oppo.observe import Observer, Role, busy, seconds
from oppo.report.charts import Excerpt, busy_machine
from oppo.report.trace import Cores, TimedStep, Timekeeper
from oppo.run.graph import admission_of, chunks_of
from oppo.run.train import PreparedRun, prepare
from oppo.stages.hold import held


@dataclass(frozen=True, slots=True)
class Effort:
    batch: int  # responses a step
    extra: int  # most stragglers that the last schedule defers
    steps: int  # of each schedule in a round, which ends with nothing deferred
    rounds: int  # in each, every schedule makes the same steps
    deeper: int  # factor by which the reward model is deeper than the demo's


@dataclass(frozen=True, slots=True)
class TimedRound:
    tokens: int
    steps: Sequence[TimedStep]
    others: float = 0.0  # share of the cores that processes beside this program took

    @property
    def seconds(self) -> float:
        return self.steps[-1].end - self.steps[0].start

    @property
    def pace(self) -> float:
        return self.seconds / self.tokens

    @property
    def idle(self) -> float:
        # The cores have two halves: one decodes, the other scores, both update.
        acting, scoring = self._busy("decode", "update"), self._busy("score", "update")
        return 1 - (acting + scoring) / (2 * self.seconds)

    def _busy(self, *roles: Role) -> float:
        return seconds(busy((span for step in self.steps for span in step.spans), *roles))


@dataclass(frozen=True, slots=True)
class Standing:
    schedule: str
    seconds: float
    speedup: float
    idle: float

    @classmethod
    def of(cls, schedule: str, rounds: Sequence[TimedRound], serial: Sequence[TimedRound]) -> Standing:
        own, base = median_round(rounds), median_round(serial)
        return cls(schedule, seconds=own.seconds / len(own.steps), speedup=base.pace / own.pace, idle=own.idle)


def median_round(rounds: Sequence[TimedRound]) -> TimedRound:
    # Of two in the middle the faster one
    return sorted(rounds, key=lambda each: each.pace)[(len(rounds) - 1) // 2]


@dataclass(frozen=True, slots=True)
class Gains:
    effort: Effort
    standings: Sequence[Standing]
    others: float = 0.0  # the largest of the rounds

    @classmethod
    def of(cls, effort: Effort, rounds: Mapping[str, Sequence[TimedRound]]) -> Gains:
        serial = next(iter(rounds.values()))
        others = max(each.others for made in rounds.values() for each in made)
        return cls(effort, [Standing.of(name, made, serial) for name, made in rounds.items()], others)

    def table(self) -> Table:
        effort = self.effort
        rounds = "One round" if effort.rounds == 1 else f"The median of {effort.rounds} interleaved rounds of each"
        busy = busy_machine(self.others)
        shown = Table(
            title=f"What overlap gains: the same {effort.steps} steps of {effort.batch} responses in each schedule",
            caption=f"{rounds}. The models made above, but the reward model {effort.deeper} times as deep, the critic "
            "on the actor's trunk, one epoch a step. In every schedule half of the cores decode and half score, and "
            "the update has all. Idle: the share of time in which such a half has nothing to do, the mean of both."
            + (f" Not an idle machine: in a round, {busy}." if busy else ""),
            title_justify="left",
            caption_justify="left",
        )
        shown.add_column("schedule")
        for name in ("seconds a step", "times as fast", "idle"):
            shown.add_column(name, justify="right")
        for each in self.standings:
            shown.add_row(each.schedule, f"{each.seconds:.2f}", f"{each.speedup:.2f}", f"{each.idle:.0%}")
        return shown

    def facts(self) -> dict[str, object]:
        return {
            "schedules": [asdict(each) for each in self.standings],
            "measured": asdict(self.effort),
            "cores_taken_by_others": self.others,
        }


LEARNING_RATE: Final = 1e-9


def schedules(effort: Effort) -> Mapping[str, Mapping[str, object]]:
    # What each sets in `[step]`; the one of whole responses is serial
    alike = {"batch": effort.batch, "admission": "overcommit"}
    return {
        "serial: decode, score, update": {**alike, "chunk": "whole", "overcommit": 0},
        "streamed: score while decoding": {**alike, "overcommit": 0},
        f"streamed, up to {effort.extra} stragglers deferred": {**alike, "overcommit": effort.extra},
    }


def measure(settings: Settings, effort: Effort) -> dict[str, list[TimedRound]]:
    with temporary("demo") as folder:
        source = Path(settings.reward_models[0])
        with quiet():
            deepened(load_scalar(source), effort.deeper).save_pretrained(folder)
            load_tokenizer(source).save_pretrained(folder)
        changes: Mapping[str, Mapping[str, object] | Sequence[object]] = {
            "models": {"shared_trunk": True, "critic": ""},
            "rewards": [{"source": str(folder)}],
            "trainer": {
                "epochs": 1,
                "minibatches": 1,
                "learning_rate": LEARNING_RATE,
                "critic_learning_rate": LEARNING_RATE,
            },
        }
        variants = {name: settings.changed({**changes, "step": step}) for name, step in schedules(effort).items()}
        with starting(settings.models):
            session = prepare(next(iter(variants.values())), dry_run=True)
        with session:
            return anyio.run(make_rounds, session, variants, effort)


async def make_rounds(
    session: PreparedRun, variants: Mapping[str, Settings], effort: Effort
) -> dict[str, list[TimedRound]]:
    # One event loop makes them all, as an engine knows no other.
    beginning = session.prompts.state_dict()
    rounds: dict[str, list[TimedRound]] = {name: [] for name in variants}
    for number in range(effort.rounds + 1):
        steps = effort.steps if number else 1  # the first round is slower, and not counted
        logger.info(f"round {number} of {effort.rounds}, every schedule in turn" if number else "warming up")
        for name, chosen in variants.items() if number % 2 else reversed([*variants.items()]):
            session.prompts.load_state_dict(beginning)
            chunks = chunks_of(chosen.step, chosen.sampling.max_new_tokens)
            roles = replace(session.assembly.roles, admission=admission_of(chosen.step), chunks=chunks)
            graph = chosen.algorithm.graph(roles)
            made = await make_round(session, held(graph) if chosen.step.chunk == "whole" else graph, steps)
            if number:
                rounds[name].append(made)
    return rounds


def starting(models: ModelsSection) -> AbstractContextManager[None]:
    return routed() if models.engine == "transformers" else nullcontext()


async def make_round(session: PreparedRun, graph: Graph[StepReport], steps: int) -> TimedRound:
    keeper, cores = Timekeeper(kept=steps), Cores()
    session.assembly.listen(keeper.model_span)
    tokens = await make_steps(session, graph, steps, keeper)
    cores.measure()
    return TimedRound(tokens, tuple(keeper.steps), cores.others)


async def make_steps(session: PreparedRun, graph: Graph[StepReport], steps: int, observer: Observer) -> int:
    async with graph.open(session.prompts, observers=[observer]) as run:
        return sum([int(report.metrics["response_length/tokens"]) async for report in run.steps(steps)])


@torch.no_grad()
def deepened(model: PreTrainedModel, times: int) -> PreTrainedModel:
    # The attention and the feed-forward network of a new block put out zeros, which the residual adds.
    if not isinstance(model, LlamaForSequenceClassification):
        raise TypeError(f"only a Llama with a scalar head can be deepened, not a {type(model).__name__}")
    blocks = model.model.layers
    for index in range(len(blocks), times * len(blocks)):
        block = copy.deepcopy(blocks[-1])
        block.self_attn.layer_idx = index
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
        blocks.append(block)
    model.config.num_hidden_layers = len(blocks)
    return model


def excerpt(name: str, rounds: Sequence[TimedRound]) -> Excerpt:
    which = "one round" if len(rounds) == 1 else f"the median of {len(rounds)} rounds"
    shown = median_round(rounds)
    return Excerpt(f"{name} ({which})", shown.steps, shown.others)


STEPS = 2  # the tokens of the second step depend on the weights after the first

BATCH = 8


@dataclass(frozen=True, slots=True)
class Digests:
    serial: str
    streamed: str

    @property
    def identical(self) -> bool:
        return self.serial == self.streamed


def compare_schedules(settings: Settings) -> Digests:
    changes: Mapping[str, Mapping[str, object]] = {
        "models": {"engine": "transformers"},
        "algorithm": {"is_correction": "none"},  # of tokens that another engine would have made
        "run": {"deterministic": True, "steps": STEPS, "scorers": "thread", "name": f"{settings.run.name}-exactness"},
        "step": {"batch": BATCH, "overcommit": 0, "admission": "overcommit"},
    }
    exact = settings.changed(changes)
    serial, streamed = Tokens(), Tokens()
    for tokens in (serial, streamed):
        with prepare(exact) as session:
            graph = held(session.graph) if tokens is serial else session.graph
            anyio.run(make_steps, session, graph, STEPS, tokens)
    return Digests(serial.digest.hexdigest(), streamed.digest.hexdigest())


class Tokens(Observer):
    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        del step, stage, at
        if isinstance(item, Batch):
            self.digest.update(repr(item.rollouts).encode())
            self.digest.update(item.tokens.tobytes())
