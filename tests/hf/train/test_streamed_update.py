"""Updates in parts: the gradient of rows that are known early, the rest at the end, and what makes an update whole."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from transformers import PreTrainedModel

from oppo.errors import ConfigError
from oppo.events import Batch
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.losses import ClippedLoss, Divided, Loss, PairwiseLoss, SequenceLoss
from oppo.models import Trained
from oppo.placement import Place, Ranks, Thread
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.train.test_ranks import SAMPLING
from tests.hf.train.test_trainer import rollouts
from tests.kit.responses import rows_of

Column: TypeAlias = NDArray[np.float32]
SETTINGS = TrainerSettings(learning_rate=1e-3, epochs=1, micro_batch_tokens=60)
LOSSES: dict[str, Loss] = {
    "tokens": ClippedLoss(kl=0.05),
    "responses": ClippedLoss(kl=0.05, kl_estimator="k3", aggregation="responses"),
    "constant": ClippedLoss(aggregation="constant"),
    "an entropy bonus": ClippedLoss(entropy_coefficient=0.01),
    "a teacher": ClippedLoss(distill=1.0, distill_beta=0.5),
    "sequences": SequenceLoss(),
    "pairs": PairwiseLoss(),
}


@pytest.fixture(scope="module")
def batch() -> Batch:
    made = tiny.apart(rollouts)(tiny.causal(seed=1), tiny.scalar(seed=3))
    made = rows_of(made, range(len(made) - len(made) % 2))
    responses = tuple(
        replace(response, prompt=replace(response.prompt, group=row // 2))
        for row, response in enumerate(made.responses)
    )
    noise = np.random.default_rng(3).normal(size=len(made)).astype(np.float32)
    reference = (made.logprobs - 0.1).astype(np.float32)
    ids = np.tile(np.arange(3, dtype=np.int32), (len(reference), 1))
    made = replace(made, teacher_ids=ids, teacher_top=top(reference))
    return replace(made, responses=responses, scores=noise, reference=reference, values=None, returns=None)


def top(reference: Column) -> Column:
    """Return log-probs of three ids and of all others that differ from token to token."""
    share = 0.1 + 0.2 / (1.0 + np.arange(len(reference), dtype=np.float32))
    return np.log(np.stack([share, share, share, 1 - 3 * share], 1))


def joined(batch: Batch) -> Batch:
    """Return the batch with its last row as a further conversation of the agent of the first one."""
    *others, last = batch.responses
    first = others[0].prompt
    prompt = replace(last.prompt, rollout=first.rollout + 2**32, branch=1, group=first.group)
    return replace(batch, responses=(*others, replace(last, prompt=prompt)))


def groups_of(batch: Batch) -> list[Batch]:
    return [rows_of(batch, (first, first + 1)) for first in range(0, len(batch), 2)]


def trainer_of(place: Place, loss: Loss, given: TrainerSettings = SETTINGS, *, shard: bool = True) -> HfTrainer:
    actor: PreTrainedModel = tiny.causal(seed=1)
    return HfTrainer(actor, sampling=SAMPLING, place=place, settings=given, loss=loss, shard=shard)


def weights(actor: PreTrainedModel) -> torch.Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in actor.parameters()])


def require_close(ours: HfTrainer, theirs: HfTrainer) -> None:
    moved = (weights(theirs.core.actor) - weights(tiny.causal(seed=1))).norm()
    assert (weights(ours.core.actor) - weights(theirs.core.actor)).norm() < 1e-2 * moved


def require_equal_metrics(ours: Trained, theirs: Trained) -> None:
    assert ours.skipped == theirs.skipped
    left_out = {"train/micro_batches", "train/padding"}
    assert {name: value for name, value in ours.metrics.items() if name not in left_out} == {
        name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in theirs.metrics.items() if name not in left_out
    }


@pytest.mark.parametrize("kind", LOSSES)
async def test_parts_and_the_rest_are_the_batch_but_for_rounding(kind: str, thread: Thread, batch: Batch) -> None:
    streamed, usual = (trainer_of(thread, LOSSES[kind]) for _ in range(2))
    assert streamed.capabilities.accumulates
    for _ in range(3):
        first, second, *_ = groups_of(batch)
        await streamed.accumulate(second)
        await streamed.accumulate(first)
        require_equal_metrics(await streamed.commit(batch), await usual.update(batch))
    assert streamed.version == 3
    require_close(streamed, usual)


@settings(max_examples=20)
@given(data=st.data())
def test_neither_order_nor_number_of_the_parts_matters(data: st.DataObject, thread: Thread, batch: Batch) -> None:
    groups = groups_of(batch)
    early = data.draw(st.permutations(range(len(groups))))[: data.draw(st.integers(0, len(groups)))]

    async def compare() -> None:
        streamed, usual = (trainer_of(thread, LOSSES["responses"]) for _ in range(2))
        for number in early:
            await streamed.accumulate(groups[number])
        require_equal_metrics(await streamed.commit(batch), await usual.update(batch))
        require_close(streamed, usual)

    anyio.run(compare)


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: replace(batch, advantages=batch.advantages + np.float32(0.5)),
        lambda batch: rows_of(batch, range(2, len(batch))),
        lambda batch: replace(batch, scores=batch.scores[::-1].copy()),
        lambda batch: replace(batch, reference=None),
        lambda batch: replace(batch, teacher_top=batch.teacher_top[::-1].copy()),
        joined,
    ],
    ids=["other advantages", "a row dropped", "other scores", "no reference", "another teacher", "a further row"],
)
async def test_what_is_not_of_the_batch_is_discarded_and_the_update_is_whole(
    change: object, thread: Thread, batch: Batch
) -> None:
    assert callable(change)
    streamed, usual = (trainer_of(thread, LOSSES["constant"]) for _ in range(2))
    await streamed.accumulate(groups_of(batch)[0])
    changed: Batch = change(batch)
    ours, theirs = await streamed.commit(changed), await usual.update(changed)
    assert ours.metrics == theirs.metrics
    assert weights_digest(streamed.core.actor) == weights_digest(usual.core.actor), "to the last bit"


async def test_an_update_discards_what_was_accumulated(thread: Thread, batch: Batch) -> None:
    streamed, usual = (trainer_of(thread, LOSSES["tokens"]) for _ in range(2))
    await streamed.accumulate(groups_of(batch)[0])
    for trainer in (streamed, usual):
        await trainer.update(batch)
        await trainer.commit(batch)
    assert weights_digest(streamed.core.actor) == weights_digest(usual.core.actor)


@pytest.mark.parametrize("at", ["in a part", "in the rest"])
async def test_a_number_that_is_not_finite_skips_the_batch_as_in_an_update(
    at: str, thread: Thread, batch: Batch
) -> None:
    advantages = np.array(batch.advantages)
    advantages[0 if at == "in a part" else -1] = np.nan
    broken = replace(batch, advantages=advantages)
    streamed, usual = (trainer_of(thread, LOSSES["tokens"]) for _ in range(2))
    await streamed.accumulate(groups_of(broken)[0])
    ours, theirs = await streamed.commit(broken), await usual.update(broken)
    assert ours.skipped == theirs.skipped == batch.rollouts
    for trainer in (streamed, usual):
        await trainer.update(batch)
    assert weights_digest(streamed.core.actor) == weights_digest(usual.core.actor)


async def test_a_part_of_older_weights_is_discarded(thread: Thread, batch: Batch) -> None:
    streamed, usual = (trainer_of(thread, LOSSES["tokens"]) for _ in range(2))
    first, second, *_ = groups_of(batch)
    await streamed.accumulate(first)
    await streamed.update(batch)
    await streamed.accumulate(second)
    await streamed.commit(batch)
    for _ in range(2):
        await usual.update(batch)
    require_close(streamed, usual)


@pytest.mark.parametrize("shard", [True, False], ids=["sharded", "whole"])
async def test_ranks_share_every_part(shard: bool, ranks: Ranks, thread: Thread, batch: Batch) -> None:
    streamed, usual = trainer_of(ranks, LOSSES["responses"], shard=shard), trainer_of(thread, LOSSES["responses"])
    for _ in range(2):
        for part in groups_of(batch)[:-1]:
            await streamed.accumulate(part)
        require_equal_metrics(await streamed.commit(batch), await usual.update(batch))
    require_close(streamed, usual)


@pytest.mark.parametrize(
    ("given", "loss", "words"),
    [
        (replace(SETTINGS, epochs=2), ClippedLoss(), r"2 epoch\(s\) and 1 minibatch\(es\)"),
        (replace(SETTINGS, minibatches=2), ClippedLoss(), r"1 epoch\(s\) and 2 minibatch\(es\)"),
        (SETTINGS, ClippedLoss(entropy_coefficient=0.1, aggregation="responses"), "ClippedLoss does not name one size"),
    ],
)
async def test_what_is_no_sum_is_refused(
    given: TrainerSettings, loss: Loss, words: str, thread: Thread, batch: Batch
) -> None:
    with pytest.raises(ConfigError, match=words):
        await trainer_of(thread, loss, given).accumulate(groups_of(batch)[0])


def masked(batch: Batch, *rows: int) -> Batch:
    sampled = batch.sampled.copy()
    for row in rows:
        sampled[batch.rows()[row]] = False
    return replace(batch, sampled=sampled)


@pytest.mark.parametrize("kind", LOSSES)
async def test_a_response_out_of_the_loss_mask_trains_nothing(kind: str, thread: Thread, batch: Batch) -> None:
    """Of a loss over groups its pair does not either, and counts as one of equal scores does."""
    left_out, usual, streamed = (trainer_of(thread, LOSSES[kind]) for _ in range(3))
    assert streamed.capabilities.accumulates
    given, without = (
        masked(batch, 0),
        rows_of(batch, [row for row in range(len(batch)) if row >= 1 + (kind == "pairs")]),
    )
    trained, theirs = await left_out.update(given), await usual.update(without)
    assert (trained.skipped, trained.nonfinite) == ((), ())
    if kind == "pairs":
        pairs = len(batch) // 2
        assert trained.metrics["loss/policy_avg"] == pytest.approx(
            theirs.metrics["loss/policy_avg"] * (pairs - 1) / pairs, rel=1e-4
        )
        return
    require_close(left_out, usual)
    assert trained.metrics["loss/policy_avg"] == pytest.approx(theirs.metrics["loss/policy_avg"], rel=1e-4)
    loss = LOSSES[kind]
    if isinstance(loss, Divided) and loss.divisor:
        for part in groups_of(given)[:2]:
            await streamed.accumulate(part)
        require_equal_metrics(await streamed.commit(given), trained)


async def test_a_batch_out_of_the_loss_mask_makes_no_step(thread: Thread, batch: Batch) -> None:
    trainer = trainer_of(thread, LOSSES["tokens"])
    trained = await trainer.update(masked(batch, *range(len(batch))))
    assert (trained.nonfinite, trainer.version) == ((), 1)
    assert (weights(trainer.core.actor) == weights(tiny.causal(seed=1))).all()


async def test_every_stop_id_that_was_sampled_is_counted(thread: Thread, batch: Batch) -> None:
    sampled = batch.sampled.copy()
    sampled[::3] = False
    sampled[1::3] = True
    stop = tuple({int(batch.tokens[1]), int(batch.tokens[3]), int(batch.tokens[4])})
    ends = replace(SAMPLING, stop=stop)
    trainer = HfTrainer(tiny.causal(seed=1), sampling=ends, place=thread, settings=SETTINGS, loss=ClippedLoss())
    metrics = (await trainer.update(replace(batch, sampled=sampled))).metrics
    assert metrics["val/num_eos_tokens"] == sum(
        int(token) in stop for token, counts in zip(batch.tokens, sampled, strict=True) if counts
    )
    assert metrics["val/num_eos_tokens"] >= 2
