"""The trainer on tiny real models: against TRL's update, and what it promises of any update."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from oppo.errors import CheckpointError, ConfigError, ModelRefused
from oppo.events import Batch, BoolArray, FloatArray, IntArray, Prompt, Response
from oppo.hf.kv.attention import cheapest_groups
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ValueModel
from oppo.hf.train.packing import MicroBatch, pack
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.losses import ClippedLoss, Input, LossValue, PPOLoss, Whole
from oppo.models import Sampling, Weights
from oppo.placement import Place, Thread
from oppo.returns import ImportanceCorrection, gae, kl_estimate, shaped_rewards, whiten
from oppo.testing import check_trainer
from oppo.training import TrainerSettings
from tests.golden import fixed
from tests.hf import tiny
from tests.kit.known import known

GOLDEN = Path(__file__).parents[2] / "golden"
SAMPLING = Sampling(max_new_tokens=16, stop=(2,))
LENGTHS = ((3, 5), (9, 1), (1, 12), (6, 7), (4, 4), (12, 16))  # tokens of each row's prompt and response


def batch_of(
    prompts: Sequence[IntArray],
    responses: Sequence[IntArray],
    logprobs: Sequence[FloatArray],
    *,
    scores: Sequence[float],
    values: Sequence[FloatArray],
    estimates: Sequence[tuple[FloatArray, FloatArray]],
    sampled: Sequence[BoolArray] | None = None,
) -> Batch:
    masks = sampled or [np.ones(len(tokens), np.bool_) for tokens in responses]
    rows = tuple(
        Response(Prompt(10 + k, k, prompts[k]), tokens, logprobs[k], np.zeros(len(tokens), np.int32), masks[k])
        for k, tokens in enumerate(responses)
    )
    tokens, mask = np.concatenate(responses), np.concatenate(masks)
    return Batch(
        responses=rows,
        reasons=tuple("length" for _ in rows),
        scores=np.array(scores, np.float32),
        offsets=np.cumsum([0, *map(len, rows)]),
        logprobs=np.concatenate(logprobs),
        proximal=np.concatenate(logprobs),
        reference=np.concatenate(logprobs),
        values=np.concatenate(values),
        rewards=np.zeros(len(tokens), np.float32),
        advantages=whiten(np.concatenate([advantage for advantage, _ in estimates]), mask),
        returns=np.concatenate([returns for _, returns in estimates]),
        tokens=tokens,
        versions=np.zeros(len(tokens), np.int32),
        sampled=mask,
    )


@tiny.apart
@torch.no_grad()
def one_row(
    actor: PreTrainedModel, critic: PreTrainedModel, prompt: IntArray, tokens: IntArray
) -> tuple[FloatArray, FloatArray]:
    ids = torch.tensor(np.concatenate((prompt, tokens)), dtype=torch.long)[None]
    window = slice(len(prompt) - 1, -1)
    logits = actor(ids).logits[0, window].log_softmax(-1)
    hidden = critic.base_model(ids).last_hidden_state
    chosen = logits.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
    return chosen.numpy(), critic.get_submodule("score")(hidden)[0, window, 0].numpy()


def rollouts(actor: PreTrainedModel, critic: PreTrainedModel, *, shift: float = 0.0, given: bool = False) -> Batch:
    """Return a ragged batch; behaviour log-probs are the actor's own, plus ``shift``."""
    actor.train(mode=False)
    critic.train(mode=False)
    random = np.random.default_rng(5)
    prompts = [random.integers(3, tiny.VOCABULARY, length).astype(np.int32) for length, _ in LENGTHS]
    responses = [random.integers(3, tiny.VOCABULARY, length).astype(np.int32) for _, length in LENGTHS]
    responses[0][-1] = 2
    read = [one_row(actor, critic, p, r) for p, r in zip(prompts, responses, strict=True)]
    rewards = [random.standard_normal(len(r)).astype(np.float32) for r in responses]
    masks = [random.random(len(r)) < 0.6 if given else np.ones(len(r), np.bool_) for r in responses]
    return batch_of(
        prompts,
        responses,
        [logprobs + np.float32(shift) for logprobs, _ in read],
        scores=[0.0] * len(LENGTHS),
        values=[values for _, values in read],
        estimates=[gae(reward, values, 1.0, 0.95) for reward, (_, values) in zip(rewards, read, strict=True)],
        sampled=masks,
    )


def trainer_of(
    actor: PreTrainedModel, critic: PreTrainedModel | None, place: Place, options: Mapping[str, object]
) -> HfTrainer:
    kind = ClippedLoss if critic is None else PPOLoss
    names = {each.name for each in fields(TrainerSettings)}
    settings = {name: value for name, value in options.items() if name in names}
    loss = {name: value for name, value in options.items() if name not in names}
    return HfTrainer(
        actor,
        critic,
        sampling=SAMPLING,
        place=place,
        settings=TrainerSettings(**{"learning_rate": 1e-3, "epochs": 1} | settings),  # type: ignore[arg-type] # by keyword
        loss=kind(**loss),  # type: ignore[arg-type] # by keyword
    )


def make(thread: Thread, *, name: str = "llama", **options: object) -> HfTrainer:
    return trainer_of(tiny.causal(name, seed=1), tiny.scalar(name, seed=2), thread, options)


def backward(trainer: HfTrainer, batch: Batch, groups: Iterable[Sequence[int]]) -> None:
    """Add the gradients of a batch that is one minibatch, read in ``groups`` of rows."""
    asked, whole = (
        trainer.core.loss.reads | trainer.core.loss.measures,
        Whole.of(batch, range(len(batch)), SAMPLING.max_new_tokens),
    )
    for group in groups:
        part = pack(batch, group, torch.device("cpu"), asked)
        tiny.apart(lambda part: trainer.core.backward(part, trainer.core.outputs(part), whole))(part)


def critic_of(trainer: HfTrainer) -> PreTrainedModel:
    assert trainer.core.critic is not None
    return trainer.core.critic


def digest(trainer: HfTrainer) -> str:
    return weights_digest(trainer.core.actor) + weights_digest(critic_of(trainer))


async def test_an_update_equals_trls(thread: Thread) -> None:
    golden = json.loads((GOLDEN / "ppo.json").read_text(encoding="utf-8"))["update"]
    setting, rows = fixed.Setting(), range(len(fixed.PROMPT))
    column = {name: np.asarray(golden[name], np.float32) for name in ("logprobs", "ref_logprobs", "values", "scores")}
    kl = [kl_estimate(column["logprobs"][r], column["ref_logprobs"][r]) for r in rows]
    rewards = [shaped_rewards(float(column["scores"][r]), kl[r], setting.kl) for r in rows]
    batch = batch_of(
        fixed.prompts(),
        fixed.responses(),
        list(column["logprobs"]),
        scores=golden["scores"],
        values=list(column["values"]),
        estimates=[gae(rewards[r], column["values"][r], setting.gamma, setting.lam) for r in rows],
    )
    trainer = HfTrainer(
        fixed.causal(1),
        fixed.scalar(2),
        sampling=Sampling(temperature=setting.temperature, stop=(fixed.EOS,)),
        place=thread,
        settings=TrainerSettings(
            learning_rate=setting.learning_rate,
            epochs=setting.epochs,
            eps=setting.eps,
            max_grad_norm=math.inf,
            micro_batch_tokens=40,
        ),
        loss=PPOLoss(clip=setting.clip, value_clip=setting.value_clip, value_coefficient=setting.value_coefficient),
    )
    metrics = (await trainer.update(batch)).metrics
    theirs = {name: value for name, value in golden["metrics"].items() if not name.startswith("objective/")}
    assert {name: metrics[name] for name in theirs} == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    norms = np.mean(golden["grad_norms"], axis=0)
    assert [metrics["train/grad_norm"], metrics["train/critic_grad_norm"]] == pytest.approx(norms, rel=1e-4)
    weights = load_file(GOLDEN / "ppo_trained.safetensors")
    ours = {f"actor.{name}": tensor for name, tensor in trainer.core.actor.state_dict().items()}
    ours |= {f"critic.{name}": tensor for name, tensor in critic_of(trainer).state_dict().items()}
    assert ours.keys() == weights.keys()
    for name, tensor in weights.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=1e-4, atol=1e-5, err_msg=name)


async def test_micro_batching_does_not_change_the_gradient(thread: Thread) -> None:
    def gradients(budget: int) -> tuple[dict[str, Tensor], int]:
        trainer = make(thread, micro_batch_tokens=budget)
        batch = rollouts(trainer.core.actor, critic_of(trainer), shift=0.1, given=True)
        rows = list(range(len(batch)))
        lengths = [len(r.prompt.tokens) + len(r) - 1 for r in batch.responses]
        groups = cheapest_groups(lengths, rows, overhead=10_000, budget=budget)
        backward(trainer, batch, groups)
        return {n: p.grad for n, p in trainer.core.optimisation.models.named_parameters() if p.grad is not None}, len(
            groups
        )

    whole, one = gradients(10_000)
    alone, many = gradients(1)
    assert (one, many) == (1, len(LENGTHS))
    assert whole.keys() == alone.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, alone[name], rtol=1e-5, atol=1e-6)


async def test_tokens_that_were_not_sampled_do_not_train(thread: Thread) -> None:
    async def trained(noise: float) -> str:
        trainer = make(thread)
        batch = rollouts(trainer.core.actor, critic_of(trainer), given=True)
        for array in (batch.logprobs, known(batch.values), known(batch.advantages), known(batch.returns)):
            array[~batch.sampled] += np.float32(noise)
        trained = await trainer.update(batch)
        assert trained.metrics["train/tokens"] == batch.sampled.sum() < len(batch.tokens)
        return digest(trainer)

    assert await trained(0.0) == await trained(7.0)


async def test_a_minibatch_that_is_not_finite_is_skipped_and_its_rollouts_are_reported(thread: Thread) -> None:
    trainer = make(thread, epochs=2, minibatches=len(LENGTHS))
    batch = rollouts(trainer.core.actor, critic_of(trainer))
    known(batch.advantages)[batch.rows()[3]] = np.nan
    trained = await trainer.update(batch)
    assert trained.nonfinite == trained.skipped == (13,)
    assert trained.metrics["train/minibatches"] == 2 * (len(LENGTHS) - 1)
    assert trained.metrics["train/minibatches_skipped"] == 2
    assert all(math.isfinite(value) for value in trained.metrics.values())
    assert all(p.isfinite().all() for p in trainer.core.optimisation.models.parameters())
    trainer = make(thread, epochs=4, minibatches=3)  # where others of its minibatch are trained in another
    trained = await trainer.update(batch)
    assert trained.nonfinite == (13,)
    assert {13} < set(trained.skipped) <= set(batch.rollouts)
    assert trained.metrics["train/minibatches"] == 4 * 2
    assert trained.metrics["train/minibatches_skipped"] == 4


async def test_an_environment_that_accumulates_gradients_changes_no_bit(
    thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def trained() -> str:
        trainer = make(thread, minibatches=2)
        await trainer.update(rollouts(trainer.core.actor, critic_of(trainer)))
        return digest(trainer)

    plain = await trained()
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert await trained() == plain


@pytest.mark.parametrize("state", ["num_steps", "sync_gradients"])
async def test_an_update_that_accelerate_would_scale_or_skip_is_refused(thread: Thread, state: str) -> None:
    trainer = make(thread)
    batch = rollouts(trainer.core.actor, critic_of(trainer))
    await trainer.update(batch)
    before = digest(trainer)
    other = Accelerator(gradient_accumulation_steps=4 if state == "num_steps" else 1)
    other.sync_gradients = state == "num_steps"
    try:
        with pytest.raises(
            ConfigError, match=r"accelerate accumulates gradients over \d steps.*: expected 1, and each"
        ):
            await trainer.update(batch)
    finally:
        other.gradient_accumulation_steps, other.sync_gradients = 1, True
    assert (digest(trainer), trainer.version) == (before, 1)
    await trainer.update(batch)
    assert trainer.version == 2


async def test_an_update_of_which_nothing_is_finite_changes_no_bit_but_counts(thread: Thread) -> None:
    trainer = make(thread)
    batch = rollouts(trainer.core.actor, critic_of(trainer))
    known(batch.returns)[:] = np.inf
    before = digest(trainer)
    trained = await trainer.update(batch)
    assert trained.nonfinite == batch.rollouts
    assert (digest(trainer), trainer.version) == (before, 1)
    assert "loss/policy_avg" not in trained.metrics


async def test_an_update_that_failed_half_way_leaves_no_gradient_for_the_next(
    thread: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def trained(*, failing: bool) -> str:
        trainer = make(thread, micro_batch_tokens=20)
        batch = rollouts(trainer.core.actor, critic_of(trainer))
        if failing:
            backward, parts = trainer.core.backward, iter(range(9))

            def half_an_update(
                part: MicroBatch, outputs: Mapping[Input, Tensor], whole: Whole, balance: Tensor | None
            ) -> LossValue:
                if next(parts) == 2:
                    raise MemoryError("out of memory")
                return backward(part, outputs, whole, balance)

            with monkeypatch.context() as patch:
                patch.setattr(trainer.core, "backward", half_an_update)
                with pytest.raises(MemoryError):
                    await trainer.update(batch)
        await trainer.update(batch)
        return digest(trainer)

    assert await trained(failing=True) == await trained(failing=False)


async def test_an_empty_batch_trains_nothing_but_counts(thread: Thread) -> None:
    trainer = make(thread)
    before = digest(trainer)
    trained = await trainer.update(batch_of_nothing())
    assert (trained.nonfinite, trainer.version, digest(trainer)) == ((), 1, before)
    assert trained.metrics["episode"] == trained.metrics["train/tokens"] == 0


def batch_of_nothing() -> Batch:
    ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    ends = np.zeros(1, np.int64)
    return Batch(
        (), (), floats, ends, ints, ints, np.zeros(0, np.bool_), floats, floats, floats, floats, floats, floats, floats
    )


async def test_the_metrics_of_an_update_are_trls_and_the_work_done(thread: Thread) -> None:
    trainer = make(thread, epochs=2, minibatches=2, micro_batch_tokens=40)
    batch = rollouts(trainer.core.actor, critic_of(trainer))
    metrics = (await trainer.update(batch)).metrics
    assert set(metrics) == {
        "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg", "loss/value_avg",
        "policy/kl_avg", "val/clipfrac_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens", "lr", "episode",
        "train/grad_norm", "train/critic_grad_norm", "train/minibatches", "train/micro_batches",
        "train/padding", "train/tokens", "policy/clipfrac_staleness_0", "mismatch/kl", "mismatch/kl_current",
        "mismatch/ess", "mismatch/weight", "mismatch/masked", "train/minibatches_skipped",
    }  # fmt: skip
    assert metrics["train/minibatches"] == 4
    assert metrics["train/micro_batches"] > 4
    assert metrics["train/padding"] == 0
    assert metrics["val/num_eos_tokens"] == 1
    assert metrics["episode"] == len(LENGTHS)
    assert metrics["lr"] == 1e-3


async def test_the_first_updates_train_the_critic_only(thread: Thread) -> None:
    trainer = make(thread, critic_warmup=1, entropy_coefficient=0.1, kl=0.1, weight_decay=0.01)
    batch = rollouts(trainer.core.actor, critic_of(trainer))
    actor, critic = weights_digest(trainer.core.actor), weights_digest(critic_of(trainer))
    trained = await trainer.update(batch)
    assert weights_digest(trainer.core.actor) == actor
    assert weights_digest(critic_of(trainer)) != critic
    assert trained.metrics["train/grad_norm"] == 0
    assert trained.metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    await trainer.update(batch)
    assert weights_digest(trainer.core.actor) != actor


async def gradient(thread: Thread, *, moved: float = 0.0, **settings: object) -> dict[str, Tensor]:
    """Return the actor's gradient on one batch whose reference log-probs are ``moved`` from the actor's own."""
    trainer = make(thread, name="llama", **settings)
    batch = rollouts(trainer.core.actor, critic_of(trainer))
    known(batch.reference)[:] += np.float32(moved)
    backward(trainer, batch, [range(len(batch))])
    return {name: p.grad for name, p in trainer.core.actor.named_parameters() if p.grad is not None}


async def test_the_entropy_bonus_adds_the_gradient_of_the_mean_entropy(thread: Thread) -> None:
    plain, with_bonus = await gradient(thread), await gradient(thread, entropy_coefficient=0.5)
    trainer = make(thread)
    batch = rollouts(trainer.core.actor, critic_of(trainer))
    entropies = []
    for row in batch.responses:
        ids = torch.tensor(np.concatenate((row.prompt.tokens, row.tokens)), dtype=torch.long)[None]
        logprobs = tiny.apart(trainer.core.actor)(ids).logits[0, len(row.prompt.tokens) - 1 : -1].log_softmax(-1)
        entropies.append(-(logprobs.exp() * logprobs).sum(-1))
    torch.cat(entropies).mean().backward()
    for name, parameter in trainer.core.actor.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(with_bonus[name] - plain[name], -0.5 * parameter.grad, rtol=1e-4, atol=1e-6)


async def test_recomputing_layers_does_not_change_the_gradient(thread: Thread) -> None:
    plain, recomputed = await gradient(thread), await gradient(thread, gradient_checkpointing=1)
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(tensor, recomputed[name]) for name, tensor in plain.items())


async def test_the_learning_rates_follow_the_schedule_by_version(thread: Thread) -> None:
    trainer = make(thread, schedule="linear", warmup_steps=1, total_steps=3, critic_learning_rate=4e-3)
    batch = rollouts(trainer.core.actor, critic_of(trainer))
    rates = []
    for _ in range(3):
        rates.append((await trainer.update(batch)).metrics["lr"])
        assert {group["lr"] / group["peak"] for group in trainer.core.optimisation.optimizer.param_groups} == {
            rates[-1] / 1e-3
        }
    assert rates == [0.0, 1e-3, 5e-4]
    assert {group["peak"] for group in trainer.core.optimisation.optimizer.param_groups} == {1e-3, 4e-3}


class Served:
    """A model that remembers what it was given, or refuses it."""

    def __init__(self, load: Callable[[Weights], None] = lambda weights: None) -> None:
        self.version = 0
        self.weights = Weights(0)
        self._load = load

    async def load(self, weights: Weights) -> None:
        self._load(weights)
        self.version, self.weights = weights.version, weights


async def test_synced_weights_are_the_models_own_memory(thread: Thread) -> None:
    trainer = make(thread)
    await trainer.update(rollouts(trainer.core.actor, critic_of(trainer)))
    policy, critic = Served(), Served()
    await trainer.sync_weights(policy, critic)
    assert policy.version == critic.version == 1
    for given, model in ((policy.weights.actor, trainer.core.actor), (critic.weights.critic, critic_of(trainer))):
        own = model.state_dict()
        assert given.keys() == own.keys()
        for name, tensor in given.items():
            assert isinstance(tensor, Tensor)
            assert tensor.data_ptr() == own[name].data_ptr()


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "copied"])
async def test_served_models_follow_the_trainer_in_shared_or_in_own_memory(thread: Thread, *, shared: bool) -> None:
    trainer = make(thread)
    actor, critic = trainer.core.actor, critic_of(trainer)
    if not shared:
        actor, critic = copy.deepcopy(actor), copy.deepcopy(critic)
    policy = HfPolicy(actor, sampling=SAMPLING, place=thread)
    values = ValueModel(critic, place=thread)

    async def made() -> HfTrainer:
        return trainer

    await check_trainer(made, rollouts(trainer.core.actor, critic_of(trainer)), (policy, values))
    assert weights_digest(actor) == weights_digest(trainer.core.actor)
    assert weights_digest(critic) == weights_digest(critic_of(trainer))
    assert (actor is trainer.core.actor) == shared


async def test_saved_models_load_with_the_same_bits(thread: Thread, tmp_path: Path) -> None:
    trainer = make(thread)
    await trainer.update(rollouts(trainer.core.actor, critic_of(trainer)))
    await trainer.save(tmp_path)
    actor = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert weights_digest(actor) == weights_digest(trainer.core.actor)
    assert weights_digest(critic) == weights_digest(critic_of(trainer))
    assert (tmp_path / "actor" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("actor", "critic", "refusal"),
    [
        (tiny.causal, partial(tiny.scalar, labels=2), "gives 2 numbers for a sequence, but a score is one"),
        (tiny.causal, tiny.causal, "has no score layer"),
        (lambda: tiny.causal().requires_grad_(False), tiny.scalar, "no parameter of the actor requires a gradient"),
    ],
)
def test_models_that_cannot_be_trained_together_are_refused(
    actor: Callable[[], PreTrainedModel], critic: Callable[[], PreTrainedModel], refusal: str, thread: Thread
) -> None:
    with pytest.raises(ModelRefused, match=refusal):
        HfTrainer(actor(), critic(), sampling=SAMPLING, place=thread)


def actor_alone(thread: Thread, critic: PreTrainedModel | None = None, **settings: object) -> tuple[HfTrainer, Batch]:
    actor = tiny.causal(seed=1)
    trainer = trainer_of(actor, critic, thread, {"epochs": 2, "minibatches": 2} | settings)
    return trainer, rollouts(actor, tiny.scalar(seed=2), given=True)


@pytest.mark.parametrize("settings", [{}, {"entropy_coefficient": 0.1, "kl": 0.1, "max_grad_norm": 1e-2}])
async def test_the_actor_learns_to_the_bit_what_it_learns_beside_a_critic(
    thread: Thread, settings: dict[str, object]
) -> None:
    async def learnt(critic: PreTrainedModel | None) -> tuple[str, dict[str, float]]:
        trainer, batch = actor_alone(thread, critic, **settings)
        await trainer.update(batch)
        metrics = dict((await trainer.update(batch)).metrics)
        return weights_digest(trainer.core.actor), metrics

    alone, beside = await learnt(None), await learnt(tiny.scalar(seed=2))
    assert alone[0] == beside[0] != weights_digest(tiny.causal(seed=1))
    assert beside[1].keys() - alone[1].keys() == {"loss/value_avg", "val/clipfrac_avg", "train/critic_grad_norm"}
    assert alone[1] == {name: beside[1][name] for name in alone[1]}


async def test_it_goes_on_where_it_was_and_refuses_what_was_written_beside_a_critic(
    thread: Thread, tmp_path: Path
) -> None:
    first, batch = actor_alone(thread)
    await first.update(batch)
    await first.write(tmp_path)
    second, _ = actor_alone(thread)
    await second.restore(tmp_path)
    for trainer in (first, second):
        await trainer.update(batch)
    assert weights_digest(first.core.actor) == weights_digest(second.core.actor)
    with_critic, _ = actor_alone(thread, tiny.scalar(seed=2))
    with pytest.raises(CheckpointError, match="written of other models"):
        await with_critic.restore(tmp_path)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("critic_warmup", 1), ("critic_learning_rate", 1e-4)],
)
def test_a_setting_that_is_about_a_critic_is_refused(thread: Thread, setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{setting} = {value} is about a critic, and there is none"):
        actor_alone(thread, None, **{setting: value})


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
            {"correction": ImportanceCorrection(weight="truncated")},
            r"ClippedLoss\(.* reads proximal log-probs, and the batch has none: give the recipe proximal=",
        ),
        (
            {"correction": ImportanceCorrection(ratio_base="proximal")},
            r"ClippedLoss\(.* give the recipe proximal=",
        ),
    ],
)
async def test_what_the_loss_asks_for_and_the_recipe_does_not_give_is_refused_and_nothing_stands_for_it(
    thread: Thread, settings: dict[str, object], message: str
) -> None:
    trainer, batch = actor_alone(thread, None, **settings)
    before = weights_digest(trainer.core.actor)
    with pytest.raises(ConfigError, match=message):
        await trainer.update(replace(batch, reference=None, proximal=None))
    assert (trainer.version, weights_digest(trainer.core.actor)) == (0, before)
