"""A trainer in two ranks, sharded and whole: what it learns is what one process learns, but for rounding."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from oppo.errors import ModelError, ModelLost, ModelRefused
from oppo.events import Batch, Prompt, Response, RoutedExperts, StepReport, TokenColumns
from oppo.graph import Graph
from oppo.hf.lora import add_lora, share_base
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.train.actor_critic import ActorCritic, value_model_on
from oppo.hf.train.ranks import deal
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.losses import ClippedLoss, PPOLoss
from oppo.models import Sampling, Trained
from oppo.placement import Hosting, Place, Process, Ranks, Thread
from oppo.placement.child import Call, pack
from oppo.placement.process import Child, ChildProcess
from oppo.placement.ranks import RankedChild, listen
from oppo.testing import check_trainer
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.child import ONE, Pausing, deadly_update
from tests.hf.ranked import (
    FailsOnce,
    Talkers,
    blind,
    deadly,
    gathered_bytes,
    gradient,
    loaded,
    local_bytes,
    packing,
    parts_of_gradient,
)
from tests.hf.stories import graph_of
from tests.hf.train.test_trainer import rollouts
from tests.kit.responses import rows_of
from tests.placement.instances import gone

SAMPLING = Sampling(max_new_tokens=16, temperature=0.9, stop=tuple(range(3, 9)), seed=3)
SETTINGS = TrainerSettings(learning_rate=1e-3, epochs=1, micro_batch_tokens=40)

SEVERAL_STEPS = replace(SETTINGS, minibatches=2, epochs=2)


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


@pytest.fixture(scope="module")
def batch() -> Batch:
    found = tiny.apart(rollouts)(tiny.causal(seed=1), tiny.scalar(seed=3))
    return replace(found, responses=tuple(routed(response) for response in found.responses))


def routed(response: Response) -> Response:
    counts = np.array([len(response.prompt.tokens), *[1] * (len(response) - 1)], np.int32)
    draws = np.random.default_rng(len(response)).random((int(counts.sum()), 2, 6))
    experts = RoutedExperts(draws.argsort(-1)[..., :2].astype(np.uint8), counts)
    return replace(response, extra=TokenColumns(experts))


def trainer_of(models: Models, place: Place, *, shard: bool = True, settings: TrainerSettings = SETTINGS) -> HfTrainer:
    loss = PPOLoss() if models.critic is not None else ClippedLoss()
    return HfTrainer(
        models.actor, models.critic, sampling=SAMPLING, place=place, settings=settings, loss=loss, shard=shard
    )


def weights_of(models: Models) -> dict[str, torch.Tensor]:
    named = dict[str, PreTrainedModel | None](actor=models.actor, critic=models.critic)
    return {
        f"{model}.{name}": parameter.detach().clone()
        for model, module in named.items()
        if module is not None
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def norm(tensors: Mapping[str, torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors.values()]).norm())


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert one.keys() == other.keys()
    return {name: tensor - other[name] for name, tensor in one.items()}


async def trained(trainer: HfTrainer, batches: Sequence[Batch]) -> list[Trained]:
    return [await trainer.update(batch) for batch in batches]


def require_equal_metrics(ours: Sequence[Trained], theirs: Sequence[Trained], *, close: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.nonfinite, one.skipped) == (other.nonfinite, other.skipped)
        assert one.metrics == {
            name: pytest.approx(value, rel=100 * close, abs=10 * close) for name, value in other.metrics.items()
        }


@dataclass(frozen=True)
class Case:
    """What is trained: models, settings and a batch; ``close``: how far gradients may be apart, of their norm."""

    models: Callable[[], Models] = plain
    settings: TrainerSettings = SEVERAL_STEPS
    change: Callable[[Batch], Batch] = lambda batch: batch
    close: float = 1e-5


def unlearnable(batch: Batch) -> Batch:
    """Return the batch with an advantage that is not finite, in its first row."""
    advantages = np.array(batch.advantages)
    advantages[0] = np.nan
    return replace(batch, advantages=advantages)


def experts() -> Models:
    return Models(tiny.causal("qwen2-moe", seed=1), tiny.causal("qwen2-moe", seed=1), tiny.scalar(seed=3))


def adapted_experts() -> Models:
    models = experts()
    add_lora(models.actor, 4, 8, experts=True)
    return models


def short_floats() -> Models:
    critic = tiny.scalar(seed=3)
    nn.Module.to(critic, torch.bfloat16)
    return replace(plain(), actor=tiny.causal(seed=1, dtype=torch.bfloat16), critic=critic)


CASES = {
    **{kind: Case(models) for kind, models in KINDS.items()},
    "gradient checkpointing": Case(settings=replace(SETTINGS, gradient_checkpointing=1)),
    "a critic's warm-up": Case(settings=replace(SETTINGS, critic_warmup=1)),
    "a rank with nothing to do": Case(settings=replace(SETTINGS, micro_batch_tokens=10_000)),
    "Muon": Case(settings=replace(SETTINGS, optimizer="muon")),
    "not finite": Case(settings=replace(SETTINGS, minibatches=3), change=unlearnable),
    "experts": Case(experts),
    "a load-balancing loss": Case(experts, replace(SEVERAL_STEPS, router_aux_loss=0.1)),
    "replayed experts": Case(experts, replace(SEVERAL_STEPS, router_replay=True)),
    "adapters of experts": Case(adapted_experts),
    "bfloat16": Case(short_floats, close=0.005),
}

ADAPTED = pytest.param("adapters of experts", marks=pytest.mark.adapters)


@pytest.mark.parametrize("shard", [True, pytest.param(False, marks=pytest.mark.deep)], ids=["sharded", "whole"])
@pytest.mark.parametrize("name", [*MARKED, ADAPTED, *(name for name in CASES if name not in {*KINDS, *ADAPTED.values})])
async def test_two_ranks_learn_what_one_process_learns(
    name: str, shard: bool, ranks: Ranks, thread: Thread, batch: Batch
) -> None:
    case = CASES[name]
    one, two = tiny.apart(case.models)(), tiny.apart(case.models)()
    begun = weights_of(one)
    alone = trainer_of(one, thread, settings=case.settings)
    together = trainer_of(two, ranks, shard=shard, settings=case.settings)
    expected = await alone._hosted.call("gradient", gradient, batch)
    found = await together._hosted.call("gradient", gradient, batch)
    assert found.keys() == expected.keys()
    apart = np.sqrt(sum(float(np.square(found[name] - each).sum()) for name, each in expected.items()))
    length = np.sqrt(sum(float(np.square(each).sum()) for each in expected.values()))
    assert length > 0
    assert apart < case.close * length
    batches = [case.change(batch), batch, batch]
    ours, theirs = await trained(together, batches), await trained(alone, batches)
    assert bool(theirs[0].skipped) == (name == "not finite")
    require_equal_metrics(ours, theirs, close=case.close)
    assert together.version == alone.version == 3
    assert together.progress > 0
    moved = norm(difference(weights_of(one), begun))
    assert moved > 0
    assert norm(difference(weights_of(two), weights_of(one))) < 1000 * case.close * moved, "as the parent sees them"


async def test_gradients_in_16_bits_are_summed_over_the_ranks_in_float32(thread: Thread, batch: Batch) -> None:
    """Summed in 16 bits, each rank after the second would round the sum once more."""
    one, several = tiny.apart(short_floats)(), tiny.apart(short_floats)()
    each_alone = replace(SETTINGS, micro_batch_tokens=1)
    three = rows_of(batch, range(3))
    alone = trainer_of(one, thread, settings=each_alone)
    parts = await alone._hosted.call("gradient", parts_of_gradient, three)
    assert len(parts) == 3
    with Ranks("trainer", 3, setup=ONE) as ranks:
        together = trainer_of(several, ranks, settings=each_alone)
        found = await together._hosted.call("gradient", gradient, three)
    assert found.keys() == parts[0].keys()
    sums = {name: sum(torch.from_numpy(part[name]) for part in parts) for name in found}
    expected = torch.cat([torch.as_tensor(each).bfloat16().float().flatten() for each in sums.values()])
    summed = torch.cat([torch.from_numpy(found[name]).flatten() for name in sums])
    assert (summed == expected).double().mean() > 0.999


async def test_each_rank_holds_a_shard_of_weights_and_optimizer_states(ranks: Ranks, batch: Batch) -> None:
    for shard, most in ((True, 0.55), (False, 1.0)):
        trainer = trainer_of(tiny.apart(plain)(), ranks, shard=shard)
        await trainer.update(batch)
        weights, states, all_weights, all_states = await trainer._hosted.call("bytes", local_bytes)
        assert weights <= most * all_weights
        assert states <= most * all_states
        assert all_states >= 2 * all_weights


@pytest.mark.parametrize("shard", [True, False], ids=["sharded", "whole"])
async def test_ranks_that_load_their_models_pack_rows_as_one_that_is_given_them(
    shard: bool, ranks: Ranks, batch: Batch, tmp_path: Path
) -> None:
    """Ranks that read a batch in other micro-batches than one another would train some rows twice, and others never."""
    tiny.causal(seed=1).save_pretrained(tmp_path / "actor")
    tiny.scalar(seed=3).save_pretrained(tmp_path / "critic")
    core = ranks.host(partial(loaded, tmp_path, SAMPLING, SETTINGS, shard))
    assert await core.call("pack", packing, batch) == [1.0, 1.0]


async def test_a_checkpoint_is_gathered_one_tensor_at_a_time_and_kept_by_rank_0(ranks: Ranks, batch: Batch) -> None:
    models = tiny.apart(plain)()
    trainer = trainer_of(models, ranks)
    await trainer.update(batch)
    everything = 3 * sum(each.nbytes for each in weights_of(models).values())  # parameters and two moments
    few = 0.3 * everything  # a collective lets go of its tensors in a thread of its own, after the next ones came
    (first, kept), (other, nothing) = await trainer._hosted.call("gather", gathered_bytes)
    assert (kept >= everything, nothing) == (True, 0)
    assert other < few
    assert first < kept + few


@pytest.mark.parametrize("shard", [pytest.param(True, marks=pytest.mark.deep), False], ids=["sharded", "whole"])
@pytest.mark.parametrize("kind", MARKED)
async def test_a_checkpoint_opens_in_any_number_of_ranks(  # noqa: PLR0917 - fixtures, passed by name
    kind: str, shard: bool, ranks: Ranks, thread: Thread, batch: Batch, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    models = [tiny.apart(KINDS[kind])() for _ in range(3)]
    begun, resumed, undisturbed = (
        trainer_of(models[0], ranks, shard=shard),
        trainer_of(models[1], thread),
        trainer_of(models[2], thread),
    )
    await begun.update(batch)
    await begun.write(first)
    await resumed.restore(first)
    assert all(torch.equal(weight, weights_of(models[0])[name]) for name, weight in weights_of(models[1]).items())
    await resumed.update(batch)
    await resumed.write(second)
    await begun.restore(second)
    assert (begun.version, begun.has_learned) == (2, False)
    assert all(torch.equal(weight, weights_of(models[1])[name]) for name, weight in weights_of(models[0]).items())
    before = weights_of(models[2])
    for trainer, count in ((begun, 1), (undisturbed, 3)):
        await trained(trainer, [batch] * count)
    moved = norm(difference(weights_of(models[2]), before))
    assert norm(difference(weights_of(models[0]), weights_of(models[2]))) < 0.01 * moved


@pytest.mark.parametrize("shard", [pytest.param(True, marks=pytest.mark.deep), False], ids=["sharded", "whole"])
@settings(max_examples=10)
@given(data=st.data())
def test_an_update_of_restored_ranks_is_the_uncut_one_to_the_last_bit(
    data: st.DataObject, shard: bool, ranks: Ranks, batch: Batch
) -> None:
    """Each row is a micro-batch, so a rank sums several gradients, and the sum's bits depend on which."""
    rows = st.lists(st.integers(0, len(batch) - 1), min_size=1, unique=True).map(partial(rows_of, batch))
    past, future = data.draw(st.lists(rows, min_size=1, max_size=2)), data.draw(rows)
    each_alone = replace(SETTINGS, micro_batch_tokens=1)

    async def compare(folder: Path) -> None:
        models = [tiny.apart(without_critic)() for _ in range(2)]
        uncut, resumed = (trainer_of(each, ranks, shard=shard, settings=each_alone) for each in models)
        await trained(uncut, past)
        await uncut.write(folder)
        await resumed.restore(folder)
        assert (await resumed.update(future)).metrics == (await uncut.update(future)).metrics
        assert weights_digest(models[1].actor) == weights_digest(models[0].actor)

    with TemporaryDirectory() as folder:
        anyio.run(compare, Path(folder))


@pytest.mark.parametrize("shard", [True, pytest.param(False, marks=pytest.mark.deep)], ids=["sharded", "whole"])
async def test_only_rank_0_reads_a_checkpoint(shard: bool, thread: Thread, batch: Batch, tmp_path: Path) -> None:
    models = [tiny.apart(plain)() for _ in range(2)]
    alone = trainer_of(models[0], thread)
    await alone.update(batch)
    await alone.write(tmp_path)
    with Ranks("trainer", 2, setup=blind) as ranks:
        together = trainer_of(models[1], ranks, shard=shard)
        await together.restore(tmp_path)
        before = weights_of(models[0])
        for trainer in (alone, together):
            await trainer.update(batch)
        assert together.version == alone.version == 2
    moved = norm(difference(weights_of(models[0]), before))
    assert norm(difference(weights_of(models[1]), weights_of(models[0]))) < 0.01 * moved


async def test_the_models_that_ranks_save_are_those_that_the_parent_has(
    ranks: Ranks, batch: Batch, tmp_path: Path
) -> None:
    models = tiny.apart(plain)()
    trainer = trainer_of(models, ranks)
    await trainer.update(batch)
    await trainer.save(tmp_path)
    for name, model in (("actor", models.actor), ("critic", models.critic)):
        assert model is not None
        stored = load_file(tmp_path / name / "model.safetensors")
        kept = model.state_dict()
        assert stored.keys() <= kept.keys()
        assert all(torch.equal(tensor, kept[key]) for key, tensor in stored.items())


async def test_a_disk_that_refuses_is_an_error_after_which_training_goes_on(
    ranks: Ranks, batch: Batch, tmp_path: Path
) -> None:
    trainer = trainer_of(tiny.apart(plain)(), ranks)
    await trainer.update(batch)
    with pytest.raises(OSError, match="missing"):
        await trainer.write(tmp_path / "missing" / "folder")
    await trainer.update(batch)
    assert trainer.version == 2


async def test_an_update_that_fails_in_every_rank_can_be_made_again(
    ranks: Ranks, thread: Thread, batch: Batch, tmp_path: Path
) -> None:
    models, usual = tiny.apart(plain)(), tiny.apart(plain)()
    loss = FailsOnce(mark=tmp_path)
    trainer = HfTrainer(
        models.actor, models.critic, sampling=SAMPLING, place=ranks, settings=SETTINGS, loss=loss, shard=True
    )
    with pytest.raises(ValueError, match="no loss today"):
        await trainer.update(batch)
    assert trainer.version == 0
    await trainer.update(batch)
    alone = trainer_of(usual, thread)
    await alone.update(batch)
    apart = norm(difference(weights_of(models), weights_of(usual)))
    assert apart < 0.01 * norm(difference(weights_of(usual), weights_of(tiny.apart(plain)())))


async def test_a_rank_that_is_killed_in_an_update_is_a_lost_model(batch: Batch, tmp_path: Path) -> None:
    with Ranks("trainer", 2, setup=partial(deadly, tmp_path)) as ranks, anyio.fail_after(60):
        trainer = trainer_of(tiny.apart(plain)(), ranks)
        await trainer.update(batch)
        pids = ranks.pids
        death = r"rank 1 of 'trainer' .* was killed by SIGKILL .* while it did 'update'"
        with pytest.raises(ModelLost, match=death) as lost:
            await trainer.update(batch)
        assert any("go on from there (oppo resume)" in note for note in lost.value.__notes__)
        assert gone(pids)
        assert trainer.version == 1


async def test_it_keeps_the_contract_of_a_trainer(ranks: Ranks, batch: Batch) -> None:
    models, followed = tiny.apart(plain)(), tiny.causal(seed=5)

    async def made() -> HfTrainer:
        return trainer_of(models, ranks)

    with Thread("actor", setup=ONE) as thread:
        await check_trainer(made, batch, [HfPolicy(followed, sampling=SAMPLING, place=thread)])
    assert weights_digest(followed) == weights_digest(models.actor)


async def test_a_model_without_layers_that_transformers_marks_is_refused_by_name(ranks: Ranks, batch: Batch) -> None:
    models = tiny.apart(plain)()
    layers = models.actor.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    del layers[:]
    with pytest.raises(ModelRefused, match=r"no layers that transformers marks .*shard = false"):
        await trainer_of(models, ranks).update(batch)


async def test_weights_of_several_dtypes_are_not_sharded(ranks: Ranks, batch: Batch) -> None:
    trainer = trainer_of(replace(plain(), actor=tiny.causal(seed=1, dtype=torch.bfloat16)), ranks)
    with pytest.raises(ModelRefused, match=r"bfloat16.*float32.*one dtype"):
        await trainer.update(batch)


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 4))
def test_every_part_is_dealt_once_and_rounds_are_equally_many(costs: list[int], size: int) -> None:
    dealt = [deal(costs, size, rank) for rank in range(size)]
    assert sorted(part for mine in dealt for part in mine if part is not None) == list(range(len(costs)))
    assert {len(mine) for mine in dealt} == {-(-len(costs) // size)}
    loads = [sum(costs[part] for part in mine if part is not None) for mine in dealt]
    assert max(loads) - min(loads) <= max(costs, default=0)


def port(number: int, first: Child) -> str:
    del number
    return str(first.ask(pack(Call(None, listen, ("127.0.0.1",)))).result("rank 0"))


@pytest.mark.parametrize("at_a_port", [False, True])
async def test_ranks_exchange_json_and_listen_at_no_address_that_nobody_chose(at_a_port: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if at_a_port:
            patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        started = partial(RankedChild, [ChildProcess] * 2, port, int)
        with Process("talkers", start=started) if at_a_port else Ranks("talkers", 2) as ranks:
            talkers = ranks.host(Talkers)
            said, addresses, heard = await talkers.call("exchange", Talkers.exchange)
    assert said == [{"a": [1, [2.5, None, "\u20ac"]]}, [], "b"]
    assert addresses == {"127.0.0.1"}
    assert heard == "ModelError: rank 0 failed: ZeroDivisionError: division by zero"


TWO_MINIBATCHES = TrainerSettings(learning_rate=1e-3, epochs=1, minibatches=2, micro_batch_tokens=64)


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


def trainer_beside(models: Models, place: Place, *, share: bool = True) -> HfTrainer:
    trained = ActorCritic(models.actor, models.critic)
    if not share:
        trained = trained.copied()
    return HfTrainer(trained.actor, trained.critic, sampling=SAMPLING, place=place, settings=TWO_MINIBATCHES)


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
    told = await trainer_beside(models, process).update(replace(batch, responses=(odd, *others)))
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
        trainer = trainer_beside(models, process)
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
        trainer = trainer_beside(models, process)
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
