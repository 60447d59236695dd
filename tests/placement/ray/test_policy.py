"""A policy in an actor: its contract, runs of one in this process bit for bit, in-flight weights, errors and deaths."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import PreTrainedModel

from oppo.errors import ConfigError, ModelError
from oppo.hf.loading import ModelRecipe
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.weights import weights_digest
from oppo.models import Sampling, Weights
from oppo.placement import Process, Thread
from oppo.placement.ray import Cluster, RayPlace
from tests.hf import child, stories, tiny
from tests.hf.serve import test_decoder, test_policy
from tests.hf.serve.test_policy import lose_while_decoding
from tests.hf.stories import SAMPLING, Serving, prompts, told
from tests.placement.ray.machines import Machine, Machines

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ENDLESS = Sampling(max_new_tokens=450, seed=3, stop_strings=("never",))


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> ModelRecipe:
    """The model with which the runs begin, on a disk that all machines share."""
    folder = tmp_path_factory.mktemp("models") / "actor"
    tiny.causal(seed=1).save_pretrained(folder)
    return ModelRecipe(path=str(folder))


@pytest.fixture(scope="module")
def place(cluster: Cluster) -> Iterator[RayPlace]:
    with RayPlace("actor", cluster, setup=child.set_up, restarts=0) as place:
        yield place


@pytest.mark.parametrize("kind", [Thread, Process])
async def test_a_recipe_is_loaded_here_once_where_the_policy_is_here(
    kind: type[Thread | Process], actor: ModelRecipe
) -> None:
    other = tiny.causal(seed=2)
    with stories.serving(other) as policy:
        expected = await told(policy, prompts(3))
    with kind("actor", setup=child.set_up) as place:
        policy = tiny.apart(HfPolicy)(actor, sampling=SAMPLING, place=place)
        again = tiny.apart(policy.with_sampling)(SAMPLING)
        await policy.load(Weights(1, actor=other.state_dict()))
        for each in (policy, again):
            assert (await told(each, prompts(3))).tokens() == expected.tokens()


async def test_a_policy_in_an_actor_shares_no_tensor_with_the_trainer(place: RayPlace, actor: ModelRecipe) -> None:
    policy = HfPolicy(actor, sampling=SAMPLING, place=place)
    assert not policy.serves(Weights(1, actor=tiny.causal(seed=1).state_dict()))
    assert not policy.tensors()


async def test_a_model_that_holds_its_weights_is_refused_and_so_is_a_path_without_a_model(
    place: RayPlace, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"'actor' hosts no weights of this one: expected .* ModelRecipe"):
        HfPolicy(tiny.causal(), sampling=SAMPLING, place=place)
    with pytest.raises(ConfigError, match="nothing"):
        HfPolicy(ModelRecipe(path=str(tmp_path / "nothing")), sampling=SAMPLING, place=place)


def on(machine: Machine) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(machine.node, soft=False)


def slowly(tokens: Sequence[int]) -> str:
    """Return no text, so late that no response ends before a machine does."""
    time.sleep(0.05)
    return ""


async def test_an_actor_killed_while_it_decodes_is_lost_for_every_reader(cluster: Cluster, actor: ModelRecipe) -> None:
    with RayPlace("actor", cluster, setup=child.set_up, restarts=0) as place, anyio.fail_after(120):
        policy = HfPolicy(actor, sampling=ENDLESS, place=place, decode=slowly)
        await told(policy.with_sampling(SAMPLING), prompts(1))
        await lose_while_decoding(policy, partial(os.kill, place.pid, signal.SIGKILL), "")


async def test_a_machine_that_dies_while_it_decodes_is_lost_for_every_reader(
    cluster: Cluster, two: Machines, actor: ModelRecipe
) -> None:
    third = two.add()
    with (
        RayPlace("actor", cluster, setup=child.set_up, strategy=on(third), restarts=0) as place,
        anyio.fail_after(120),
    ):
        policy = HfPolicy(actor, sampling=ENDLESS, place=place, decode=slowly)
        await told(policy.with_sampling(SAMPLING), prompts(1))
        await lose_while_decoding(policy, partial(two.lose, third), "")


# What a policy in a thread and one in a process keep.

HELD = (test_decoder, test_policy)

OF_THIS_MACHINE = {
    "test_the_model_that_was_given_has_the_weights_that_were_synced": "an actor has a model of its own",
    "test_logits_that_are_not_finite_are_an_error_that_names_the_rollouts": "no model is loaded whose weights are not",
}

globals().update(
    {
        name: test
        for module in HELD
        for name, test in vars(module).items()
        if name.startswith("test_") and "serving" in inspect.signature(test).parameters and name not in OF_THIS_MACHINE
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policies")


@pytest.fixture
def serving(place: RayPlace, folder: Path) -> Serving:
    """Is called as :func:`tests.hf.stories.serving` is: the model that it is given is loaded in the actor."""

    @contextmanager
    def elsewhere(
        model: PreTrainedModel | None = None,
        *,
        sampling: Sampling = SAMPLING,
        deterministic: bool = False,
        keep: bool = False,
        portion: int = 8192,
    ) -> Iterator[HfPolicy]:
        given = tiny.causal() if model is None else model
        path = folder / weights_digest(given)
        if not path.exists():
            given.save_pretrained(path)
        yield HfPolicy(
            ModelRecipe(path=str(path)),
            sampling=sampling,
            place=place,
            deterministic=deterministic,
            kv_on_sync="keep" if keep else "recompute",
            prefill_tokens=portion,
        )

    return elsewhere
