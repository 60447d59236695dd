"""The trainer in a process, and with weights of its own: the run of a thread that trains what is served."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oppo.errors import ModelError, ModelLost
from oppo.events import Prompt, StepReport
from oppo.graph import Graph
from oppo.hf.lora import add_lora, share_base
from oppo.hf.train.actor_critic import ActorCritic, value_model_on
from oppo.hf.train.trainer import HfTrainer
from oppo.losses import ClippedLoss, PPOLoss
from oppo.models import Sampling
from oppo.placement import Hosting, Place, Process, Thread
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.child import ONE, Pausing, deadly_update
from tests.hf.stories import graph_of
from tests.hf.train.test_trainer import rollouts

SAMPLING = Sampling(max_new_tokens=16, temperature=0.9, stop=tuple(range(3, 9)), seed=3)
SETTINGS = TrainerSettings(learning_rate=1e-3, epochs=1, minibatches=2, micro_batch_tokens=64)


@dataclass(frozen=True)
class Models:
    """What is served; the critic is absent from GRPO."""

    actor: PreTrainedModel
    reference: PreTrainedModel
    critic: PreTrainedModel | None = None


def plain() -> Models:
    return Models(tiny.causal(seed=1), tiny.causal(seed=1), tiny.scalar(seed=3))


def without_critic() -> Models:
    return replace(plain(), critic=None)


def adapters() -> Models:
    actor = tiny.causal(seed=1)
    reference = share_base(actor)
    add_lora(actor, 4, 8)
    return Models(actor, reference, tiny.scalar(seed=3))


def one_trunk() -> Models:
    actor = tiny.causal(seed=1)
    return Models(actor, tiny.causal(seed=1), value_model_on(actor))


KINDS = {"ppo": plain, "grpo": without_critic, "lora": adapters, "trunk": one_trunk}
MARKED = [pytest.param(kind, marks=[pytest.mark.adapters] * (kind == "lora")) for kind in KINDS]


def run_of(models: Models, trainer: HfTrainer, acting: Hosting, scoring: Place) -> Graph[StepReport]:
    return graph_of(
        models.actor,
        models.critic,
        trainer=trainer,
        acting=acting,
        scoring=scoring,
        sampling=SAMPLING,
        reference=models.reference,
    )


def trainer_of(models: Models, place: Place, *, share: bool = True) -> HfTrainer:
    trained = ActorCritic(models.actor, models.critic)
    if not share:
        trained = trained.copied()
    return HfTrainer(trained.actor, trained.critic, sampling=SAMPLING, place=place, settings=SETTINGS)


async def steps(graph: Graph[StepReport], count: int) -> None:
    prompts = [Prompt(n, n, np.arange(10 + n, 13 + n + n % 5, dtype=np.int32), group=n) for n in range(20)]
    async with graph.open(prompts) as run:
        async for _ in run.steps(count):
            pass


async def test_columns_of_the_data_stay_where_they_are(process: Process) -> None:
    models = tiny.apart(plain)()
    batch = rollouts(models.actor, tiny.scalar(seed=3))
    first, *others = batch.responses
    odd = replace(first, prompt=replace(first.prompt, columns={"judge": lambda: "cannot be pickled"}))
    told = await trainer_of(models, process).update(replace(batch, responses=(odd, *others)))
    assert told.metrics["train/tokens"] == batch.sampled.sum()


def test_a_loss_that_cannot_go_to_another_process_is_refused_at_once(process: Process) -> None:
    class Local(ClippedLoss):
        """Not importable by name."""

    with pytest.raises(ModelError, match=r"this cannot go to another process: .*Local.*importable by name"):
        HfTrainer(tiny.causal(), sampling=SAMPLING, place=process, loss=Local())


async def test_progress_is_seen_while_an_update_goes_on_elsewhere(process: Process, tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    for pipe in (begun, go_on):
        os.mkfifo(pipe)
    models = tiny.apart(plain)()
    batch = rollouts(models.actor, tiny.scalar(seed=3))
    loss = Pausing(**vars(PPOLoss()), begun=begun, go_on=go_on)
    settings = TrainerSettings(epochs=2, micro_batch_tokens=1)
    trainer = HfTrainer(models.actor, models.critic, sampling=SAMPLING, place=process, settings=settings, loss=loss)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.update, batch)
            await anyio.to_thread.run_sync(begun.read_text)
            assert (process.at_work, trainer.progress, trainer.version) == ("models: update", 0, 0)
            await anyio.to_thread.run_sync(go_on.write_text, "go on")
    assert (trainer.progress, trainer.version) == (2 * len(batch), 1)


async def test_a_run_whose_trainer_is_killed_in_an_update_says_how_to_go_on(thread: Thread, tmp_path: Path) -> None:
    models = tiny.apart(plain)()
    with Process("trainer", setup=partial(deadly_update, tmp_path, 2)) as process, anyio.fail_after(60):
        trainer = trainer_of(models, process)
        with pytest.raises(ModelLost, match=r"was killed by SIGKILL .* while it did 'update' for 'trainer'") as lost:
            await steps(run_of(models, trainer, thread, thread), 2)
        assert any("go on from there (oppo resume)" in note for note in lost.value.__notes__)
        assert (tmp_path / "died").exists()
        assert (trainer.version, trainer.progress) == (0, 1)
        with pytest.raises(ModelLost, match="while it did 'save'"):
            await trainer.save(tmp_path)


async def test_a_trainer_that_was_killed_between_two_updates_is_not_begun_again(tmp_path: Path) -> None:
    models = tiny.apart(plain)()
    batch = rollouts(models.actor, tiny.scalar(seed=3))
    with Process("trainer", setup=ONE) as process, anyio.fail_after(60):
        trainer = trainer_of(models, process)
        await trainer.update(batch)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ModelLost, match=r"the process of 'trainer' \(pid \d+\) was killed by SIGKILL"):
            await trainer.update(batch)
        assert (trainer.version, trainer.has_learned) == (1, True)


def test_weights_of_16_bits_are_not_copied_where_nothing_is_trained(process: Process) -> None:
    actor = tiny.causal(dtype=torch.bfloat16)
    trainer = HfTrainer(actor, sampling=SAMPLING, place=process)
    anyio.run(trainer.update, rollouts(tiny.causal(), tiny.scalar()))
    assert "optimisation" not in vars(trainer.core)
