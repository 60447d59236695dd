"""The trainer without a critic: the actor learns as it does beside one, and nothing is said of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.group import grpo
from oppo.errors import CheckpointError, ConfigError
from oppo.events import Batch
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ProximalLogprobs, RewardModel
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.losses import ClippedLoss, PPOLoss
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.returns import Correction
from oppo.testing import check_trainer, prompts
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.train.test_trainer import LENGTHS, SAMPLING, Served, rollouts, trainer_of
from tests.known import known


@pytest.fixture
def thread() -> Iterator[Thread]:
    torch.set_num_threads(1)
    with Thread("train", setup=lambda: torch.set_num_threads(1)) as thread:
        yield thread


def make(thread: Thread, critic: PreTrainedModel | None = None, **settings: object) -> tuple[HfTrainer, Batch]:
    """Return a trainer of a fresh actor, and a batch to train it on."""
    actor = tiny.causal(seed=1)
    trainer = trainer_of(actor, critic, thread, {"epochs": 2, "minibatches": 2} | settings)
    return trainer, rollouts(actor, tiny.scalar(seed=2), given=True)


@pytest.mark.parametrize("settings", [{}, {"entropy_coefficient": 0.1, "kl": 0.1, "max_grad_norm": 1e-2}])
async def test_the_actor_learns_to_the_bit_what_it_learns_beside_a_critic(
    thread: Thread, settings: dict[str, object]
) -> None:
    async def learnt(critic: PreTrainedModel | None) -> tuple[str, dict[str, float]]:
        trainer, batch = make(thread, critic, **settings)
        await trainer.update(batch)
        metrics = dict((await trainer.update(batch)).metrics)
        return weights_digest(trainer.core.actor), metrics

    alone, beside = await learnt(None), await learnt(tiny.scalar(seed=2))
    assert alone[0] == beside[0] != weights_digest(tiny.causal(seed=1))
    assert beside[1].keys() - alone[1].keys() == {"loss/value_avg", "val/clipfrac_avg", "train/critic_grad_norm"}
    assert alone[1] == {name: beside[1][name] for name in alone[1]}


async def test_only_the_actor_is_synced_and_saved(thread: Thread, tmp_path: Path) -> None:
    trainer, batch = make(thread)
    await trainer.update(batch)
    served = Served()
    await trainer.sync_weights(served)
    assert (served.version, dict(served.weights.critic)) == (1, {})
    assert served.weights.actor.keys() == trainer.core.actor.state_dict().keys()
    await trainer.save(tmp_path)
    assert (tmp_path / "actor").is_dir()
    assert not (tmp_path / "critic").exists()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    assert weights_digest(saved) == weights_digest(trainer.core.actor)


async def test_it_goes_on_where_it_was_and_refuses_what_was_written_beside_a_critic(
    thread: Thread, tmp_path: Path
) -> None:
    first, batch = make(thread)
    await first.update(batch)
    await first.write(tmp_path)
    second, _ = make(thread)
    await second.restore(tmp_path)
    for trainer in (first, second):
        await trainer.update(batch)
    assert weights_digest(first.core.actor) == weights_digest(second.core.actor)
    with_critic, _ = make(thread, tiny.scalar(seed=2))
    with pytest.raises(CheckpointError, match="written of other models"):
        await with_critic.restore(tmp_path)


async def test_it_keeps_the_contract_of_a_trainer(thread: Thread) -> None:
    trainer, batch = make(thread)

    async def made() -> HfTrainer:
        return trainer

    await check_trainer(made, batch, [HfPolicy(trainer.core.actor, sampling=SAMPLING, place=thread)])


async def test_a_minibatch_that_is_not_finite_is_skipped(thread: Thread) -> None:
    trainer, batch = make(thread, minibatches=len(LENGTHS))
    known(batch.advantages)[batch.rows()[3]] = np.nan
    assert (await trainer.update(batch)).nonfinite == (13,)
    assert all(parameter.isfinite().all() for parameter in trainer.core.actor.parameters())


@pytest.mark.parametrize(
    ("setting", "value"),
    [("critic_warmup", 1), ("critic_learning_rate", 1e-4)],
)
def test_a_setting_that_is_about_a_critic_is_refused(thread: Thread, setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{setting} = {value} is about a critic, and there is none"):
        make(thread, None, **{setting: value})


def test_a_loss_of_a_critic_is_refused_without_one_and_a_critic_without_a_loss(thread: Thread) -> None:
    actor, critic = tiny.causal(), tiny.scalar()
    with pytest.raises(ConfigError, match=r"the loss PPOLoss\(.* reads old_values, returns, values, and there is no"):
        HfTrainer(actor, sampling=SAMPLING, place=thread, loss=PPOLoss())
    with pytest.raises(ConfigError, match=r"there is a critic, and the loss ClippedLoss\(.* does not read its values"):
        HfTrainer(actor, critic, sampling=SAMPLING, place=thread, loss=ClippedLoss())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kl": 0.01, "kl_estimator": "k3"},
            r"kl=0\.01.* reads reference log-probs, and the batch has none: give the recipe reference=",
        ),
        (
            {"correction": Correction(weight="truncated")},
            r"weight='truncated'.* reads proximal log-probs, and the batch has none: give the recipe proximal=",
        ),
        ({"correction": Correction(ratio_base="proximal")}, r"ratio_base='proximal'.* give the recipe proximal="),
    ],
)
async def test_what_the_loss_asks_for_and_the_recipe_does_not_give_is_refused_and_nothing_stands_for_it(
    thread: Thread, settings: dict[str, object], message: str
) -> None:
    trainer, _ = make(thread, None, **settings)
    graph = grpo(
        policy=HfPolicy(trainer.core.actor, sampling=Sampling(max_new_tokens=8, stop=(1, 2), seed=3), place=thread),
        reward=RewardModel(tiny.scalar(seed=4), place=thread),
        trainer=trainer,
        admission=Overcommit(batch=2, overcommit=0),
        samples=2,
    )

    async def one_step() -> None:
        async with graph.open(prompts(8)) as run:
            async for _ in run.steps(1):
                pass

    before = weights_digest(trainer.core.actor)
    with pytest.raises(ConfigError, match=message):
        await one_step()
    assert (trainer.version, weights_digest(trainer.core.actor)) == (0, before)


async def test_without_a_reference_nothing_is_said_of_a_kl_to_it(thread: Thread) -> None:
    trainers = [make(thread) for _ in range(2)]
    beside, alone = [
        (await trainer.update(batch if referred else replace(batch, reference=None))).metrics
        for (trainer, batch), referred in zip(trainers, (True, False), strict=True)
    ]
    assert beside.keys() - alone.keys() == {"policy/kl_avg"}


async def ran(correction: Correction | None, *, extra: int) -> tuple[str, Sequence[float]]:
    """Return the weights after a streamed run of three steps, and how far stale tokens had drifted in each."""
    sampling, actor = Sampling(max_new_tokens=30, stop=(1, 2, 3, 4), seed=3), tiny.causal(seed=1)
    settings = TrainerSettings(learning_rate=2e-3, epochs=2)
    loss = ClippedLoss(correction=correction or Correction())
    with Thread("decode", setup=lambda: torch.set_num_threads(1)) as decoding:
        graph = grpo(
            policy=HfPolicy(actor, sampling=sampling, place=decoding, deterministic=True),
            reward=RewardModel(tiny.scalar(seed=4), place=decoding, deterministic=True),
            trainer=HfTrainer(actor, sampling=sampling, place=decoding, settings=settings, loss=loss),
            admission=Overcommit(batch=2, overcommit=extra),
            samples=3,
            chunks=Fixed(7),
            proximal=ProximalLogprobs(actor, sampling=sampling, place=decoding, deterministic=True)
            if correction
            else None,
        )
        async with graph.open(prompts(40)) as run:
            reports = [report async for report in run.steps(3)]
    return weights_digest(actor), [report.metrics["mismatch/kl"] for report in reports]


async def test_stale_tokens_are_corrected_as_beside_a_critic() -> None:
    decoupled = Correction(ratio_base="proximal", weight="truncated", cap=1.0)
    plain, corrected = await ran(None, extra=0), await ran(decoupled, extra=0)
    assert plain == corrected, "where nothing is deferred, nothing is stale"
    stale, mended = await ran(None, extra=2), await ran(decoupled, extra=2)
    assert max(stale[1]) > 1e-6
    assert stale[0] != mended[0]
