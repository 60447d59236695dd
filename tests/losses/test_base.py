"""Losses other than the built-in ones, in the same trainer: against plain code on whole rows, however they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import oppo.hf.head
from oppo.errors import ConfigError
from oppo.events import Batch
from oppo.hf.train.packing import units
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.losses import (
    ClippedLoss,
    Input,
    Inputs,
    Loss,
    LossValue,
    PairwiseLoss,
    PPOLoss,
    SequenceLoss,
    Unit,
    entropies,
    masked_mean,
    means,
)
from oppo.placement import Thread
from oppo.returns import ImportanceCorrection
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.train.test_trainer import SAMPLING, backward, critic_of, rollouts
from tests.kit.known import known

LOW, HIGH = 0.05, 0.2
KL = 0.3
GROUPS = (4, 7, 4, 9, 7, 9)


@dataclass(frozen=True)
class Clipped:
    """A surrogate that is clipped later above than below, as DAPO's (Yu et al. 2025, arXiv 2503.14476, section 3.1)."""

    unit: Unit = "token"
    reads: frozenset[Input] = frozenset({"logprobs", "behaviour", "advantages"})
    measures: frozenset[Input] = frozenset()

    def __call__(self, inputs: Inputs) -> LossValue:
        advantages, ratio = inputs["advantages"], (inputs["logprobs"] - inputs["behaviour"]).exp()
        plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - LOW, 1 + HIGH)
        loss = masked_mean(torch.maximum(plain, clipped), inputs.mask, inputs.whole.tokens)
        return LossValue(loss, {"loss/policy_avg": loss}, clipped=inputs.mask & (clipped > plain))

    def metrics(self, minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return means(minibatches)


class Read(NamedTuple):
    """What the oracle knows of one row: its trained tokens only; and what is compared with one another."""

    logprobs: Tensor
    behaviour: Tensor
    reference: Tensor
    advantages: Tensor
    score: float
    group: int


def clipped_by_token(rows: Sequence[Read]) -> Tensor:
    each = []
    for row in rows:
        for token, advantage in enumerate(row.advantages):
            ratio = (row.logprobs[token] - row.behaviour[token]).exp()
            each.append(-torch.min(advantage * ratio, advantage * ratio.clamp(1 - LOW, 1 + HIGH)))
    return torch.stack(each).mean()


def clipped_by_sequence(rows: Sequence[Read]) -> Tensor:
    each = []
    for row in rows:
        ratio, advantage = (row.logprobs - row.behaviour).mean().exp(), row.advantages.mean()
        each.append(-torch.min(advantage * ratio, advantage * ratio.clamp(1 - LOW, 1 + HIGH)))
    return torch.stack(each).mean()


def averaged(rows: Sequence[Read], *, constant: float | None) -> Tensor:
    """GRPO, a mean over responses of the means of their tokens; Dr. GRPO, of the sums divided by a constant."""
    each = []
    for row in rows:
        total = torch.zeros(())
        for token, advantage in enumerate(row.advantages):
            ratio = (row.logprobs[token] - row.behaviour[token]).exp()
            total -= torch.min(advantage * ratio, advantage * ratio.clamp(1 - LOW, 1 + HIGH))
            away = row.reference[token] - row.logprobs[token]
            total += KL * (away.exp() - 1 - away)
        each.append(total / (constant or len(row.advantages)))
    return torch.stack(each).mean()


def pairs(rows: Sequence[Read]) -> Tensor:
    each = []
    for group in {row.group for row in rows}:
        worse, better = sorted((row for row in rows if row.group == group), key=lambda row: row.score)
        margin = (better.logprobs - better.reference).sum() - (worse.logprobs - worse.reference).sum()
        each.append((1 + (-0.1 * margin).exp()).log())
    return torch.stack(each).mean()


Compared: TypeAlias = Clipped | ClippedLoss | PairwiseLoss

ORACLES: Mapping[Compared, Callable[[Sequence[Read]], Tensor]] = {
    Clipped(): clipped_by_token,
    ClippedLoss(clip=LOW, clip_high=HIGH): clipped_by_token,
    SequenceLoss(clip=LOW, clip_high=HIGH): clipped_by_sequence,
    ClippedLoss(clip=LOW, clip_high=HIGH, kl=KL, kl_estimator="k3", aggregation="responses"): partial(
        averaged, constant=None
    ),
    ClippedLoss(clip=LOW, clip_high=HIGH, kl=KL, kl_estimator="k3", aggregation="constant"): partial(
        averaged, constant=SAMPLING.max_new_tokens
    ),
    PairwiseLoss(): pairs,
}
BY_SEQUENCE = ImportanceCorrection(weight="truncated", level="sequence", cap=1.05)
EVERY: Sequence[Compared] = (
    *ORACLES,
    ClippedLoss(entropy_coefficient=0.1, kl=0.1, correction=BY_SEQUENCE),
    PPOLoss(
        entropy_coefficient=0.1, kl=0.1, correction=ImportanceCorrection(weight="truncated", ratio_base="proximal")
    ),
)


def named(loss: Compared) -> str:
    weight = loss.correction.weight if isinstance(loss, ClippedLoss) else "none"
    aggregation = f"-{loss.aggregation}" if isinstance(loss, ClippedLoss) else ""
    return type(loss).__name__ + aggregation + (f"-{weight}" if weight != "none" else "")


@pytest.fixture
def thread() -> Iterator[Thread]:
    with Thread("train", setup=lambda: torch.set_num_threads(1)) as thread:
        yield thread


@cache
@tiny.apart
def batch() -> Batch:
    """Return three pairs of responses, tool tokens among theirs, of weights that have changed since."""
    made, random = rollouts(tiny.causal(seed=1), tiny.scalar(seed=2), given=True), np.random.default_rng(3)
    columns = ((made.logprobs, 0.2), (known(made.reference), 0.5), (known(made.proximal), 0.1))
    for column, width in columns:
        column[:] += random.normal(0, width, len(column)).astype(np.float32)
    made.sampled[made.offsets[:-1]] = True
    responses = tuple(
        replace(response, prompt=replace(response.prompt, group=group))
        for response, group in zip(made.responses, GROUPS, strict=True)
    )
    scores = random.standard_normal(len(made)).astype(np.float32)
    return replace(made, responses=responses, scores=scores)


def trainer_on(
    loss: Loss, thread: Thread, *, epochs: int = 4, minibatches: int = 1, micro_batch_tokens: int = 4096
) -> HfTrainer:
    critic = tiny.scalar(seed=2) if "values" in loss.reads else None
    chosen = TrainerSettings(
        learning_rate=1e-3, epochs=epochs, minibatches=minibatches, micro_batch_tokens=micro_batch_tokens
    )
    return HfTrainer(tiny.causal(seed=1), critic, sampling=SAMPLING, place=thread, settings=chosen, loss=loss)


def gradients(trainer: HfTrainer, groups: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return the gradient of a batch that is one minibatch, read in ``groups`` of rows."""
    trainer.core.optimisation.clear()
    backward(trainer, batch(), groups)
    return {
        name: p.grad.clone() for name, p in trainer.core.optimisation.models.named_parameters() if p.grad is not None
    }


def close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.isfinite().all()
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@tiny.apart
def by_oracle(loss: Compared) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradient of the batch by plain code, each row read on its own and none of them padded."""
    actor, made = tiny.causal(seed=1).train(mode=False), batch()
    rows = []
    for response, span, score in zip(made.responses, made.rows(), made.scores, strict=True):
        ids = torch.tensor(np.concatenate((response.prompt.tokens, response.tokens)), dtype=torch.long)[None]
        said = actor(ids).logits[0, len(response.prompt.tokens) - 1 : -1].log_softmax(-1)
        chosen = said.gather(-1, ids[0, len(response.prompt.tokens) :, None])[:, 0]
        mask = made.sampled[span]
        columns = (made.logprobs, known(made.reference), known(made.advantages))
        behaviour, reference, advantages = (torch.tensor(each[span][mask]) for each in columns)
        logprobs = chosen[torch.tensor(mask)]
        rows.append(Read(logprobs, behaviour, reference, advantages, float(score), response.prompt.group))
    found = ORACLES[loss](rows)
    found.backward()
    return found.item(), {f"actor.{name}": p.grad for name, p in actor.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", ORACLES, ids=named)
def test_a_loss_of_ones_own_has_the_gradient_that_plain_code_finds(loss: Compared, thread: Thread) -> None:
    whole = [row for unit in units(batch(), loss.unit) for row in unit]
    ours, (_, theirs) = gradients(trainer_on(loss, thread), [whole]), by_oracle(loss)
    assert max(float(gradient.abs().max()) for gradient in theirs.values()) > 1e-3
    close(ours, theirs)


@pytest.mark.parametrize("loss", [loss for loss in ORACLES if not getattr(loss, "kl", 0)], ids=named)
async def test_a_loss_of_ones_own_trains_and_tells_what_it_measures(loss: Compared, thread: Thread) -> None:
    found, _ = by_oracle(loss)
    trainer = trainer_on(loss, thread, epochs=1, micro_batch_tokens=30)
    before = weights_digest(trainer.core.actor)
    metrics = (await trainer.update(batch())).metrics
    assert metrics["train/micro_batches"] > 1
    (name,) = (name for name in metrics if name.startswith("loss/"))  # without a KL, which is told apart
    assert metrics[name] == pytest.approx(found, rel=1e-4)
    assert metrics["mismatch/kl_current"] > 0
    assert ("policy/clipfrac_staleness_0" in metrics) == (not isinstance(loss, PairwiseLoss))
    assert weights_digest(trainer.core.actor) != before
    assert all(parameter.isfinite().all() for parameter in trainer.core.actor.parameters())


@cache
def trainer_and_whole(loss: Compared) -> tuple[HfTrainer, dict[str, Tensor]]:
    """Return a trainer, and the gradient of the batch in one forward pass."""
    with Thread("unused") as thread:
        trainer = trainer_on(loss, thread)
    return trainer, gradients(trainer, [[row for unit in units(batch(), loss.unit) for row in unit]])


@pytest.mark.parametrize("loss", EVERY, ids=named)
@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_how_units_are_grouped_changes_the_gradient_by_rounding_only(loss: Compared, data: st.DataObject) -> None:
    order = data.draw(st.permutations(units(batch(), loss.unit)))
    cuts = data.draw(st.sets(st.integers(1, len(order) - 1)))
    parts = [order[first:last] for first, last in pairwise([0, *sorted(cuts), len(order)])]
    trainer, whole = trainer_and_whole(loss)
    close(gradients(trainer, [[row for unit in part for row in unit] for part in parts]), whole)


async def test_a_minibatch_holds_whole_groups_of_a_loss_over_groups(thread: Thread) -> None:
    trainer = trainer_on(PairwiseLoss(), thread, epochs=4, minibatches=3, micro_batch_tokens=1)
    metrics = (await trainer.update(batch())).metrics
    assert metrics["train/minibatches"] == metrics["train/micro_batches"] == 12


@pytest.mark.parametrize(("measures", "computed"), [(frozenset[Input](), 0), (frozenset[Input]({"entropies"}), 6)])
async def test_only_what_a_loss_reads_is_computed(
    thread: Thread, monkeypatch: pytest.MonkeyPatch, measures: frozenset[Input], computed: int
) -> None:
    calls = []

    def counted(logits: Tensor, temperature: float, support: None) -> Tensor:
        calls.append(logits.requires_grad)
        return entropies(logits, temperature, support)

    monkeypatch.setattr(oppo.hf.head, "entropies", counted)
    await trainer_on(Clipped(measures=measures), thread, epochs=1, micro_batch_tokens=1).update(batch())
    assert calls == [False] * computed


@dataclass(frozen=True)
class OfValues(Clipped):
    """It learns from values, and counts on that what it only measures takes no gradient back."""

    reads: frozenset[Input] = frozenset({"values", "returns"})
    measures: frozenset[Input] = frozenset({"logprobs"})

    def __call__(self, inputs: Inputs) -> LossValue:
        each = (inputs["values"] - inputs["returns"]).square() + inputs["logprobs"]
        return LossValue(masked_mean(each, inputs.mask, inputs.whole.tokens))


async def test_through_what_a_loss_only_measures_nothing_is_learnt(thread: Thread) -> None:
    trainer = trainer_on(OfValues(), thread, epochs=1)
    before = weights_digest(trainer.core.actor), weights_digest(critic_of(trainer))
    metrics = (await trainer.update(batch())).metrics
    assert weights_digest(trainer.core.actor) == before[0]
    assert weights_digest(critic_of(trainer)) != before[1]
    assert metrics["train/critic_grad_norm"] > metrics["train/grad_norm"] == 0


@pytest.mark.parametrize("wrong", [0.5, "0.5", None])
def test_what_is_no_tensor_is_named_with_what_is_expected(wrong: Tensor) -> None:
    with pytest.raises(ConfigError, match=r"the loss.*tensor"):
        LossValue(wrong)
    with pytest.raises(ConfigError, match=r"loss/mine.*tensor"):
        LossValue(torch.zeros(()), {"loss/mine": wrong})
    with pytest.raises(ConfigError, match=r"measured.*tensors by name"):
        LossValue(torch.zeros(()), wrong)  # type: ignore[arg-type] # what a caller without types may give


class Unsummed(Clipped):
    """It leaves a number for each token."""

    def __call__(self, inputs: Inputs) -> LossValue:
        return LossValue(inputs["logprobs"] / inputs.whole.tokens)


class Bare(Clipped):
    """It returns the number alone."""

    def __call__(self, inputs: Inputs) -> LossValue:
        return inputs["logprobs"].mean()  # type: ignore[return-value] # wrong on purpose


class Detached(Clipped):
    """Its loss has no gradient."""

    def __call__(self, inputs: Inputs) -> LossValue:
        return LossValue(inputs["logprobs"].detach().sum())


class Unmeasured(Clipped):
    """It makes no metrics."""

    def metrics(self, minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return None  # type: ignore[return-value] # wrong on purpose


@dataclass(frozen=True)
class Naming(Clipped):
    """It gives its metric a name of choice."""

    name: str = "own/score"

    def metrics(self, minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {self.name: 1.0}


class Sly(Clipped):
    """It reads what it does not declare."""

    def __call__(self, inputs: Inputs) -> LossValue:
        return LossValue(inputs["reference"].sum())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (Unsummed(), r"the loss of a micro-batch must be one number, but has the shape \(\d+,\)"),
        (Bare(), r"Bare.* must return oppo\.losses\.LossValue\(.*\), not Tensor"),
        (Sly(), r"a loss reads 'reference' and was given .*: name it in its `reads`"),
        (Detached(), r"the loss Detached.* returned a number without gradient.* compute it from logprobs, entropies"),
        (Unmeasured(), r"metrics\(\) of the loss Unmeasured.* must return numbers by name, not None \(NoneType\)"),
        *(
            (Naming(name=name), rf"'{name}' in metrics\(\) of the loss Naming.* would replace a metric of the run")
            for name in ("score", "seconds", "objective/kl", "train/grad_norm", "queue/a/peak")
        ),
    ],
)
async def test_what_a_loss_gives_is_a_number_with_a_gradient_and_metrics_by_name(
    loss: Loss, words: str, thread: Thread
) -> None:
    with pytest.raises(ConfigError, match=words):
        await trainer_on(loss, thread, epochs=1).update(batch())


@pytest.mark.parametrize("name", ["own/score", "loss/policy_avg", "policy/ratio_avg"])
async def test_a_loss_names_what_is_its_own_or_a_loss_s(name: str, thread: Thread) -> None:
    assert (await trainer_on(Naming(name=name), thread, epochs=1).update(batch())).metrics[name] == 1.0


class Unbound:
    """It lacks its unit."""

    reads = measures = frozenset[Input]()

    def __call__(self, inputs: Inputs) -> LossValue:
        raise NotImplementedError

    def metrics(self, minibatches: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        raise NotImplementedError


async def test_a_loss_is_refused_the_batch_that_lacks_what_it_reads(thread: Thread) -> None:
    trainer = trainer_on(PairwiseLoss(), thread)
    with pytest.raises(ConfigError, match=r"PairwiseLoss\(.* reads reference log-probs, and the batch has none: give"):
        await trainer.update(replace(batch(), reference=None))
    assert (trainer.version, trainer.progress) == (0, 0)


async def test_a_batch_whose_advantages_were_not_estimated_is_trained_by_a_loss_that_reads_none(thread: Thread) -> None:
    gathered = replace(batch(), rewards=None, advantages=None, returns=None)
    clipped = trainer_on(ClippedLoss(), thread)
    with pytest.raises(ConfigError, match=r"ClippedLoss\(.* reads advantages, and the batch has none: give"):
        await clipped.update(gathered)
    assert (clipped.version, clipped.progress) == (0, 0)
    assert (await trainer_on(PairwiseLoss(), thread).update(gathered)).metrics["loss/policy_avg"] > 0


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Clipped(reads=frozenset({"logprob"})), r"reads logprob: expected some of logprobs, entropies"),  # type: ignore[arg-type] # wrong on purpose
        (Clipped, r"expected the protocol oppo\.losses\.Loss, an object .* got <class"),
        (ClippedLoss, r"for example PPOLoss\(\); got <class"),
        (Clipped(reads=["logprobs"]), r"whose reads and measures are sets of names"),  # type: ignore[arg-type] # wrong on purpose
        (Clipped(measures=frozenset({"value"})), r"measures value: expected some of logprobs, entropies"),  # type: ignore[arg-type] # wrong on purpose
        (Unbound(), r"an object with unit, metrics and __call__"),
        (Clipped(unit="prompt"), "must be one of token, row, group, not 'prompt'"),  # type: ignore[arg-type] # wrong on purpose
        (Clipped(reads=frozenset({"logprobs", "returns"})), "reads returns, and there is no critic: give the trainer"),
    ],
)
def test_a_loss_that_cannot_be_served_is_refused_at_once(loss: Loss, message: str, thread: Thread) -> None:
    with pytest.raises(ConfigError, match=message):
        HfTrainer(tiny.causal(), sampling=SAMPLING, place=thread, loss=loss)
