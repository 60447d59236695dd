"""Measures the same steps serially, streamed, and streamed with stragglers carried over, in turn.

The demo's models are scaled as in the OPPO paper: a reward model that costs several times the actor, one epoch, and the
base policy's long tail of lengths. The learning rate is almost 0, so that every round samples the same tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import anyio
import torch
from transformers import LlamaForSequenceClassification, PreTrainedModel

from oppo.app.compose import roles_of
from oppo.app.train import PreparedRun, prepare
from oppo.config.settings import Settings
from oppo.demo.gains import Effort, TimedRound, median_round
from oppo.hf.loading import load_scalar, load_tokenizer
from oppo.hf.model_files import quiet
from oppo.observe import silent
from oppo.report.charts import Excerpt
from oppo.report.trace import Timekeeper
from oppo.stages.hold import held

LEARNING_RATE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class DemoSchedule:
    """One schedule.

    Attributes:
        serial: scoring waits until decoding has ended.
        step: its changes to ``[step]``.
    """

    name: str
    serial: bool
    step: Mapping[str, object]


def schedules(effort: Effort) -> list[DemoSchedule]:
    """Return the schedules, the serial one first."""
    return [
        DemoSchedule("serial: decode, score, update", serial=True, step={"chunk": "whole", "extra": 0}),
        DemoSchedule("streamed: score while decoding", serial=False, step={"extra": 0}),
        DemoSchedule(f"streamed, up to {effort.extra} stragglers carried", serial=False, step={"extra": effort.extra}),
    ]


def measure(settings: Settings, effort: Effort, tell: Callable[[str], None]) -> dict[str, list[TimedRound]]:
    """Return the rounds of each schedule, by name; ``tell`` receives a sentence about each round; writes nothing.

    Raises:
        OppoError: a model cannot be used.
    """
    with TemporaryDirectory(prefix="oppo-demo-") as folder:
        write_deeper(Path(settings.models.reward_models[0]), Path(folder), effort.deeper)
        variants = [(schedule, varied(settings, schedule, effort, Path(folder))) for schedule in schedules(effort)]
        with prepare(variants[0][1], starting(settings, tell), dry_run=True) as session:
            return anyio.run(make_rounds, session, variants, effort, tell)


async def make_rounds(
    session: PreparedRun, variants: Sequence[tuple[DemoSchedule, Settings]], effort: Effort, tell: Callable[[str], None]
) -> dict[str, list[TimedRound]]:
    """Return the rounds of each schedule; one event loop makes them all, as an engine knows no other."""
    beginning = session.prompts.state_dict()
    rounds: dict[str, list[TimedRound]] = {schedule.name: [] for schedule, _ in variants}
    for number in range(effort.rounds + 1):
        steps = effort.steps if number else 1  # the first round is slower, and not counted
        tell(f"round {number} of {effort.rounds}, every schedule in turn" if number else "warming up")
        for schedule, chosen in variants if number % 2 else reversed(variants):
            session.prompts.load_state_dict(beginning)
            made = await make_round(session, schedule, chosen, steps)
            if number:
                rounds[schedule.name].append(made)
    return rounds


def starting(settings: Settings, tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return what to tell while models are loaded: nothing, unless an engine starts, which takes many seconds."""
    return silent if settings.models.engine == "transformers" else tell


def varied(settings: Settings, schedule: DemoSchedule, effort: Effort, reward: Path) -> Settings:
    """Return the settings of a schedule."""
    return settings.changed(
        {
            "models": {"reward": str(reward), "shared_trunk": True, "critic": ""},
            "step": {"batch": effort.batch, "admission": "overcommit", **schedule.step},
            "trainer": {
                "epochs": 1,
                "minibatches": 1,
                "learning_rate": LEARNING_RATE,
                "critic_learning_rate": LEARNING_RATE,
            },
        }
    )


async def make_round(session: PreparedRun, schedule: DemoSchedule, settings: Settings, steps: int) -> TimedRound:
    """Return a round of one schedule; it begins and ends with nothing carried over."""
    graph = settings.algorithm.graph(roles_of(settings, session.assembly))
    keeper = Timekeeper(kept=steps)
    session.assembly.listen(keeper.model_span)
    tokens = 0
    async with (held(graph) if schedule.serial else graph).open(session.prompts, observers=[keeper]) as run:
        async for report in run.steps(steps):
            tokens += int(report.metrics["response_length/tokens"])
    return TimedRound(tokens, tuple(keeper.steps))


def write_deeper(source: Path, target: Path, times: int) -> None:
    """Write the reward model in ``source``, ``times`` as deep, and its tokenizer to ``target``."""
    with quiet():
        deepened(load_scalar(source), times).save_pretrained(target)
        load_tokenizer(source).save_pretrained(target)


@torch.no_grad()
def deepened(model: PreTrainedModel, times: int) -> PreTrainedModel:
    """Return the model with ``times`` its layers; each new one costs as much as the last and changes nothing.

    The attention and the feed-forward network of a new block put out zeros, which the residual adds.

    Raises:
        TypeError: the model is no Llama with one label.
    """
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
    """Return the median round of a schedule, which is the one in the table."""
    which = "one round" if len(rounds) == 1 else f"the median of {len(rounds)} rounds"
    return Excerpt(f"{name} ({which})", median_round(rounds).steps)
