"""Scorers on other machines: the scores of this one, the weights that are synced, and deaths that change nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import PreTrainedModel

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.errors import ModelError, SessionsLost
from oppo.events import Finish, FloatArray
from oppo.hf.loading import ModelRecipe
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ReferenceLogprobs, RewardModel, ValueModel
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.models import Sampling, Weights
from oppo.placement import Place, Thread
from oppo.placement.ray import Cluster, RayPlace
from oppo.scheduling import Preemptible
from oppo.testing import check_scorer
from oppo.training import TrainerSettings
from tests.hf import child, tiny
from tests.kit.responses import responses
from tests.placement.ray.machines import Machine, Machines

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SAMPLING = Sampling(max_new_tokens=40, temperature=0.9, stop=tuple(range(3, 9)), seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("actor", "reference"):
        tiny.causal("llama", seed=1).save_pretrained(folder / name)
    tiny.scalar("llama", seed=2).save_pretrained(folder / "reward")
    tiny.scalar("llama", seed=3).save_pretrained(folder / "critic")
    return folder


@pytest.fixture(scope="module")
def thread() -> Iterator[Thread]:
    with Thread("scorers", setup=child.set_up) as thread:
        yield thread


@pytest.fixture(scope="module")
def place(cluster: Cluster) -> Iterator[RayPlace]:
    with RayPlace("scorers", cluster, setup=child.set_up) as place:
        yield place


def recipe(folder: Path, name: str) -> ModelRecipe:
    causal = name in {"actor", "reference"}
    return ModelRecipe(path=str(folder / name), kind="causal" if causal else "scalar")


def on(machine: Machine) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(machine.node, soft=True)


async def test_a_scorer_keeps_the_contract(place: RayPlace, folder: Path) -> None:
    finished = [Finish(response.prompt.rollout, response, "eos") for response in responses(3, seed=4)]

    async def critic() -> ValueModel:
        return ValueModel(recipe(folder, "critic"), place=place)

    def close(a: FloatArray, b: FloatArray) -> bool:
        return np.allclose(a, b, rtol=1e-5, atol=1e-5)

    await check_scorer(critic, finished, close)


async def test_a_critic_follows_and_its_replacement_has_the_weights_that_were_synced_before_it_reads(
    cluster: Cluster, two: Machines, thread: Thread, folder: Path
) -> None:
    other, (response,) = tiny.scalar("llama", seed=9), responses(1, seed=6)
    finish = Finish(response.prompt.rollout, response, "eos")
    expected = ValueModel(other, place=thread, deterministic=True)
    with RayPlace("critic", cluster, setup=child.set_up, restarts=1) as place, anyio.fail_after(300):
        critic = ValueModel(recipe(folder, "critic"), place=place, deterministic=True)
        await critic.load(Weights(1, critic=other.state_dict()))
        assert critic.version == 1
        assert not critic.serves(Weights(1, critic=other.state_dict()))
        with pytest.raises(ModelError, match="cannot take these weights"):
            await critic.load(Weights(2))
        assert critic.version == 1
        await critic.extend([response.prompt])
        await expected.extend([response.prompt])
        os.kill(place.pid, signal.SIGKILL)
        with pytest.raises(SessionsLost):
            await critic.extend([response.chunk()], priority=Preemptible(lambda: False))
        await critic.extend([response.prompt, response.chunk()])
        await expected.extend([response.chunk()])
        (values,), (right,) = await critic.finish([finish]), await expected.finish([finish])
        assert np.array_equal(values, right)


async def trained(folder: Path, scoring: Place, between: Callable[[int], None]) -> tuple[str, str]:
    """Make three deterministic steps of PPO, with rollouts deferred; return what actor and critic have become."""
    recipes = {name: recipe(folder, name) for name in ("actor", "reference", "reward", "critic")}
    models = {name: tiny.apart(each.load)() for name, each in recipes.items()}
    actor, critic = models["actor"], models["critic"]
    given: Mapping[str, PreTrainedModel | ModelRecipe] = recipes if isinstance(scoring, RayPlace) else models
    settings = TrainerSettings(learning_rate=1e-3, epochs=2, minibatches=2)
    prompts = [
        replace(response.prompt, rollout=n, admission=n, group=n) for n, response in enumerate(responses(14, seed=2))
    ]
    with Thread("decode", setup=child.set_up) as decoding:
        graph = ppo(
            policy=HfPolicy(actor, sampling=SAMPLING, place=decoding, deterministic=True),
            reference=ReferenceLogprobs(given["reference"], sampling=SAMPLING, place=scoring, deterministic=True),
            reward=RewardModel(given["reward"], place=scoring, deterministic=True),
            critic=ValueModel(given["critic"], place=scoring, deterministic=True),
            trainer=HfTrainer(actor, critic, sampling=SAMPLING, place=decoding, settings=settings),
            admission=Overcommit(batch=4, overcommit=2),
            chunks=Fixed(5),
        )
        async with graph.open(prompts) as run:
            carried = 0
            async for step in run.steps(3):
                carried += len(step.deferred)
                between(step.index)
    assert carried, "this run is meant to carry rollouts over"
    return weights_digest(actor), weights_digest(critic)


async def test_a_machine_dies_and_the_run_is_the_same(
    cluster: Cluster, two: Machines, thread: Thread, folder: Path, messages: list[str]
) -> None:
    _, other = two.all

    def lose(step: int) -> None:
        if step == 1:
            two.lose(other)

    with (
        RayPlace("scorers", cluster, setup=child.set_up, strategy=on(other), restarts=1) as place,
        anyio.fail_after(500),
    ):
        there = await trained(folder, place, lose)
    assert there == await trained(folder, thread, lambda step: None)
    assert sum("it is started again (1 of 1)" in each for each in messages) == 1, messages  # it may wait for room first
