"""A trainer on two machines: it learns what one process learns, from weights that only this machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest
import ray

from oppo.errors import ModelError, ModelLost
from oppo.events import Batch
from oppo.hf.devices import use_cores
from oppo.hf.loading import ModelRecipe
from oppo.hf.train.actor_critic import ActorCriticRecipe, value_model_on
from oppo.hf.train.trainer import HfTrainer
from oppo.losses import PPOLoss
from oppo.placement import Hosting, Member, Thread
from oppo.placement.ray import Cluster, RayRanks, Room
from tests.hf import tiny
from tests.hf.train.test_ranks import (
    SAMPLING,
    SEVERAL_STEPS,
    Models,
    difference,
    norm,
    require_equal_metrics,
    trained,
    weights_of,
)
from tests.hf.train.test_trainer import rollouts
from tests.placement.instances import Caller, gone
from tests.placement.ray.machines import Machines

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ONE = partial(use_cores, 1)


@pytest.fixture(scope="module")
def ranks(cluster: Cluster) -> Iterator[RayRanks]:
    with RayRanks("trainer", cluster, 2, spread=True, setup=ONE) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def thread() -> Iterator[Thread]:
    with Thread("trainer", setup=ONE) as thread:
        yield thread


@pytest.fixture(scope="module")
def batch() -> Batch:
    return tiny.apart(rollouts)(tiny.causal(seed=1), tiny.scalar(seed=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of the same shapes as those that are trained, with other weights."""
    folder = tmp_path_factory.mktemp("models")
    tiny.causal(seed=7).save_pretrained(folder / "actor")
    tiny.scalar(seed=8).save_pretrained(folder / "critic")
    return folder


def recipe(folder: Path) -> ActorCriticRecipe:
    return ActorCriticRecipe(
        actor=ModelRecipe(path=str(folder / "actor")), critic=ModelRecipe(path=str(folder / "critic"), kind="scalar")
    )


def plain() -> Models:
    return Models(tiny.causal(seed=1), tiny.causal(seed=1), tiny.scalar(seed=3))


def trainer_of(models: Models, place: Hosting, how: ActorCriticRecipe | None, *, shard: bool = True) -> HfTrainer:
    return HfTrainer(
        models.actor,
        models.critic,
        sampling=SAMPLING,
        place=place,
        settings=SEVERAL_STEPS,
        loss=PPOLoss(),
        shard=shard,
        recipe=how,
    )


class Where:
    """Knows on which machine it is, as one of several copies."""

    def __init__(self) -> None:
        self.rank = -1

    def join(self, rank: int, size: int, meeting: str) -> None:
        del size, meeting
        self.rank = rank

    def note(self, folder: Path) -> None:
        node = ray.get_runtime_context().get_node_id() if self.rank else "the driver's"
        (folder / str(self.rank)).write_text(node)


@pytest.mark.parametrize("shard", [True, False], ids=["sharded", "whole"])
async def test_two_machines_learn_what_one_process_learns(
    shard: bool, ranks: RayRanks, thread: Thread, batch: Batch, folder: Path
) -> None:
    one, two = tiny.apart(plain)(), tiny.apart(plain)()
    begun = weights_of(one)
    theirs = await trained(trainer_of(one, thread, None), [batch] * 3)
    together = trainer_of(two, ranks, recipe(folder), shard=shard)
    ours = await trained(together, [batch] * 3)
    require_equal_metrics(ours, theirs, close=1e-5)
    assert together.version == 3
    moved = norm(difference(weights_of(one), begun))
    assert moved > 0
    assert norm(difference(weights_of(two), weights_of(one))) < 0.01 * moved, "as the driver sees them"


async def test_adapters_and_a_shared_trunk_are_trained_on_two_machines(
    ranks: RayRanks, thread: Thread, batch: Batch, folder: Path
) -> None:
    adapted = ModelRecipe(path=str(folder / "actor"), lora_rank=4, lora_seed=2)

    def made() -> Models:
        actor = adapted.load()
        return Models(actor, actor, value_model_on(actor))

    one, two = tiny.apart(made)(), tiny.apart(made)()
    begun = weights_of(one)
    how = ActorCriticRecipe(actor=replace(adapted, lora_seed=3), shared_trunk=True)
    await trained(trainer_of(one, thread, None, shard=False), [batch] * 2)
    await trained(trainer_of(two, ranks, how, shard=False), [batch] * 2)
    moved = norm(difference(weights_of(one), begun))
    assert moved > 0
    assert norm(difference(weights_of(two), weights_of(one))) < 0.01 * moved


async def test_the_ranks_are_on_machines_of_their_own(ranks: RayRanks, two: Machines, tmp_path: Path) -> None:
    where = ranks.host(Where)
    await where.call("note", Where.note, tmp_path)
    assert (tmp_path / "0").read_text() == "the driver's"
    assert (tmp_path / "1").read_text() == two.all[1].node


async def test_what_cannot_be_made_on_another_machine_is_refused(ranks: RayRanks) -> None:
    with pytest.raises(ModelError, match=r"needs to know how its models are loaded there: .* recipe="):
        trainer_of(tiny.apart(plain)(), ranks, None)
    with pytest.raises(ModelError, match="Caller cannot work in the ranks"):
        await ranks.host(Caller).call("look", repr)
    assert isinstance(Where(), Member)


async def test_no_room_is_said_with_what_was_asked_for(cluster: Cluster) -> None:
    expected = r"no room for the ranks of 'trainer' beside the first, .* each of 2 takes 1 CPU, 1 GPU, and free are"
    with pytest.raises(ModelError, match=expected):
        RayRanks("trainer", cluster, 3, room=Room(gpus=1), patience=1)


async def test_the_death_of_another_machine_is_a_lost_model_and_ends_all_ranks(
    cluster: Cluster, two: Machines, batch: Batch, folder: Path
) -> None:
    third = two.add()
    before = two.pids()
    with (
        RayRanks("trainer", cluster, 3, spread=True, setup=ONE, patience=60) as ranks,
        anyio.fail_after(120),
    ):
        trainer = trainer_of(tiny.apart(plain)(), ranks, recipe(folder))
        await trainer.update(batch)
        pids = ranks.pids
        assert os.getpid() not in pids
        assert {*pids[1:]} <= two.pids() - before
        two.lose(third)
        with pytest.raises(ModelLost, match=r"rank \d of 'trainer' .* while it did 'update' for 'trainer'; the other"):
            await trained(trainer, [batch] * 10_000)  # its other processes outlive a raylet for a while
        assert gone(pids[:1])
        assert not {*pids[1:]} & two.settled(before)
