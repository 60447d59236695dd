"""A scorer that follows the trainer: no weights come between what its stage accepts and what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from numpy.typing import NDArray

from oppo.errors import ConfigError
from oppo.events import Batch, Chunk, Finish, FloatArray, Prompt, Scored, ToolTokens
from oppo.graph import Graph, Step
from oppo.models import Capabilities, Loads, ServesByReference, SyncedModel, Trained, Weights, sync
from oppo.stages import Score, Update, synced_models
from oppo.stages.sync import WeightSync
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer, fake_per_token, fake_scalar, run_virtual
from tests.kit.pipelines import Pipeline, Setting, settings
from tests.kit.virtual import virtually

AT_ONCE = Capabilities(turns=True, loads_while_decoding="between decode steps")


def synced_at_once(setting: Setting) -> Pipeline:
    """Play a pipeline whose trainer waits for no stage before it syncs."""
    pipeline = Pipeline(setting)
    pipeline.policy.capabilities = AT_ONCE
    graph = pipeline.graph()
    update = Update(pipeline.trainer, synced=synced_models(pipeline.policy, graph.stage("value", Score)))
    pipeline.graph = lambda: graph.replace(update=update)  # type: ignore[method-assign] # the same, but for one stage
    run_virtual(pipeline.run)
    return pipeline


@pytest.mark.schedules
@given(settings(lookaheads=(1, 2, 3)))
@example(Setting(lookahead=1, steps=5, critic=0.004, update=0.5))
@example(Setting(lookahead=2, steps=5, critic=0.03, per_call=0.004))
def test_a_value_is_of_the_weights_that_it_names_whenever_they_are_synced(setting: Setting) -> None:
    pipeline = synced_at_once(replace(setting, steps=setting.steps + 2))
    ends = {item.rollout: item for _, stage, item in pipeline.tap.items if isinstance(item, Finish)}
    values = [item for _, stage, item in pipeline.tap.items if stage == "value" and isinstance(item, Scored)]
    for each in values:
        response = ends[each.rollout].response
        tokens = (*response.prompt.tokens.tolist(), *response.tokens.tolist())
        assert np.array_equal(each.value, fake_per_token(ends[each.rollout], tokens, each.version))


class Slow(FakeCritic):
    """Notes the version at both ends of each call."""

    def __init__(self) -> None:
        super().__init__(per_call=1.0)
        self.seen: list[tuple[int, int]] = []

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        before = self.version
        await super().extend(events)
        self.seen.append((before, self.version))

    async def finish(self, finished: Sequence[Finish]) -> Sequence[FloatArray]:
        before = self.version
        values = await super().finish(finished)
        self.seen.append((before, self.version))
        return values


@virtually
async def test_weights_wait_for_what_is_being_read() -> None:
    critic = Slow()
    stage = Score(critic)
    model = stage.synced
    assert model is not None
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            async with model.reading():
                await critic.extend([Prompt(0, 0, np.arange(3, dtype=np.int32))])

        tasks.start_soon(read)
        await anyio.sleep(0.5)
        await model.load(Weights(1))
        assert (model.version, critic.version) == (1, 1)
        assert anyio.current_time() == 1.0
    assert critic.seen == [(0, 0)]


class Array(FakeScorer[FloatArray]):
    """A critic with one weight, a number that is to be that of its version."""

    def __init__(self, seconds: float) -> None:
        super().__init__(fake_per_token, per_call=seconds)
        self.seconds = seconds
        self.weight = np.zeros(1)
        self.kept = 0

    async def load(self, weights: Weights) -> None:
        await anyio.sleep(self.seconds)
        self.weight[:] = cast("NDArray[np.float64]", weights.critic["weight"])
        self.version = weights.version

    async def finish(self, finished: Sequence[Finish]) -> Sequence[FloatArray]:
        values = await super().finish(finished)
        assert self.weight[0] == self.version, "the weights are those of the version"
        return values


class Copying(Array):
    """Copies weights that must wait."""

    async def copied(self, weights: Weights) -> Weights:
        self.kept += 1
        await anyio.sleep(self.seconds)
        weight = cast("NDArray[np.float64]", weights.critic["weight"])
        return Weights(weights.version, critic={"weight": weight.copy()})


class InPlace(FakeTrainer):
    """A trainer that changes its one tensor bit by bit during an update."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.weight = np.zeros(1)

    async def update(self, batch: Batch) -> Trained:
        self.weight += 0.5
        trained = await super().update(batch)
        self.weight += 0.5
        return trained

    async def sync_weights(self, *synced: SyncedModel) -> None:
        with anyio.CancelScope(shield=True):
            await sync(Weights(self.version, critic={"weight": self.weight}), synced)


@pytest.mark.schedules
@pytest.mark.parametrize("copies", [True, False])
@given(settings(lookaheads=(0, 1, 2, 3)), st.sampled_from([0.0, 0.03, 0.4]), st.sampled_from([0.0, 0.05, 1.0]))
@example(Setting(lookahead=2, steps=6), 0.03, 0.05)
@example(Setting(lookahead=1, steps=6, extra=2), 0.4, 0.0)
def test_the_trainer_changes_no_weights_that_wait_to_be_served(
    copies: bool, setting: Setting, loading: float, update: float
) -> None:
    pipeline = Pipeline(replace(setting, steps=setting.steps + 2))
    critic = Copying(loading) if copies else Array(loading)
    pipeline.critic, pipeline.trainer = critic, InPlace(update)  # type: ignore[assignment] # it is no FakeCritic
    run_virtual(pipeline.run)
    for step, report in enumerate(pipeline.reports):
        version = max(0, step - setting.lookahead)
        scored = [item for number, stage, item in pipeline.tap.items if (number, stage) == (step, "value")]
        assert {item.version for item in scored if isinstance(item, Scored)} <= {version}
        assert report.version == step + 1
    assert critic.version == pipeline.trainer.version, "it has the newest weights at the end"
    assert setting.lookahead > 1 or not critic.kept, "the trainer's own memory does"


class Trunk(FakePolicy):
    """A policy over the one weight of a critic."""

    critic: Array

    def serves(self, weights: Weights) -> bool:
        return False

    def tensors(self) -> frozenset[int]:
        return frozenset({id(self.critic.weight)})

    async def load(self, weights: Weights) -> None:
        await super().load(weights)
        self.critic.weight[:] = cast("NDArray[np.float64]", weights.critic["weight"])


class OnTrunk(Copying):
    """A critic over a weight that the policy has too."""

    def serves(self, weights: Weights) -> bool:
        return False

    def tensors(self) -> frozenset[int]:
        return frozenset({id(self.weight)})


def shared(setting: Setting) -> Pipeline:
    """Return a pipeline whose policy and critic serve a tensor together."""
    pipeline = Pipeline(setting)
    s, critic = setting, OnTrunk(setting.critic)
    policy = Trunk(s.length, 0.01, s.pace, kept=s.kept)
    policy.critic = critic
    pipeline.generate = replace(pipeline.generate, policy=policy)
    pipeline.policy, pipeline.critic, pipeline.trainer = policy, critic, InPlace(s.update)  # type: ignore[assignment]
    return pipeline


@pytest.mark.schedules
@given(settings(lookaheads=(1, 2, 3)))
@example(Setting(lookahead=1, steps=5, critic=0.3))
@example(Setting(lookahead=2, steps=5, critic=0.3))
def test_what_policy_and_critic_serve_together_changes_when_neither_uses_it(setting: Setting) -> None:
    pipeline = shared(setting)
    run_virtual(pipeline.run)
    for step, stage, item in pipeline.tap.items:
        if stage == "value" and isinstance(item, Scored):
            assert item.version == max(0, step - setting.lookahead)
        if stage == "generate" and isinstance(item, Chunk):
            assert set(item.versions) == {max(0, step - setting.lookahead)}


def refused(pipeline: Pipeline, *sync: SyncedModel) -> str:
    graph = pipeline.graph()
    update = Update(pipeline.trainer, synced=sync or graph.stage("update", Update).synced)
    pipeline.graph = lambda: graph.replace(update=update)  # type: ignore[method-assign] # the same, but for one stage
    with pytest.raises(ConfigError) as caught:
        run_virtual(pipeline.run)
    assert not pipeline.trainer.version, "it is said before the first update"
    return str(caught.value)


@pytest.mark.parametrize("loads", ["refused", "when decoding ends"])
def test_an_engine_that_cannot_adopt_weights_while_it_decodes_is_refused_in_flight(loads: Loads) -> None:
    pipeline = Pipeline(Setting(lookahead=1))
    pipeline.policy.capabilities = Capabilities(turns=True, loads_while_decoding=loads)
    said = refused(pipeline)
    assert (
        f"FakePolicy cannot adopt them between decode steps, by its capabilities.loads_while_decoding = '{loads}'"
        in said
    )


def test_tensors_that_are_served_together_are_refused_in_flight() -> None:
    pipeline = shared(Setting(lookahead=1))
    pipeline.policy.capabilities = AT_ONCE
    assert "OnTrunk reads with tensors that another synced model serves too" in refused(pipeline)


def test_a_scorer_that_may_be_reading_is_refused_in_flight() -> None:
    pipeline = Pipeline(Setting(lookahead=1))
    pipeline.policy.capabilities = AT_ONCE
    assert "FakeCritic may be reading: sync to its stage" in refused(pipeline, pipeline.policy, pipeline.critic)


def test_without_lookahead_nothing_is_in_flight_and_nothing_refused() -> None:
    pipeline = Pipeline(Setting())
    graph = pipeline.graph()
    update = Update(pipeline.trainer, synced=[pipeline.policy, pipeline.critic])
    pipeline.graph = lambda: graph.replace(update=update)  # type: ignore[method-assign] # the same, but for one stage
    run_virtual(pipeline.run)
    assert pipeline.policy.version == pipeline.critic.version == 3


def test_what_is_synced_to_are_the_models_that_follow_or_their_stages() -> None:
    policy, values = FakePolicy(), Score(FakeCritic())
    assert synced_models(policy, values, Score(FakeScorer(fake_scalar)), None) == (policy, values.synced)


def test_a_stage_says_whether_its_scorer_serves_the_trained_tensors() -> None:
    class Trunk(FakeCritic):
        def serves(self, weights: Weights) -> bool:
            return weights.version == 3

        def tensors(self) -> frozenset[int]:
            return frozenset()

    for scorer, serves in ((Trunk(), True), (FakeCritic(), False)):
        model = Score(scorer).synced
        assert isinstance(model, ServesByReference)
        assert model.serves(Weights(3)) is serves


class Starving(FakePolicy):
    """Has lost what it could serve, once."""

    served = False

    async def settled(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def starved(self) -> None:
        if self.served:
            await anyio.sleep_forever()
        self.served = True


class Waits:
    """A step whose later ones have returned after half a second."""

    async def previous(self, *stages: str) -> None:
        del stages

    async def later(self, *stages: str) -> None:
        del stages
        await anyio.sleep(0.5)

    def working(self, *work: str) -> AbstractContextManager[None]:
        del work
        return nullcontext()


class Journal(FakeTrainer):
    """A trainer that takes a second to sync, and notes both ends of it."""

    def __post_init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    async def sync_weights(self, *synced: SyncedModel) -> None:
        self.seen.append(("begun", anyio.current_time()))
        await anyio.sleep(1)
        await super().sync_weights(*synced)
        self.seen.append(("ended", anyio.current_time()))


@virtually
async def test_weights_that_come_early_come_whole() -> None:
    trainer = Journal()
    await WeightSync(trainer, [Starving()], after=["generate"]).sync(cast("Step", Waits()))
    assert trainer.seen == [("begun", 0.0), ("ended", 1.0), ("begun", 1.0), ("ended", 2.0)]


def test_no_scorer_follows_in_a_graph_without_one() -> None:
    graph = Pipeline(Setting()).graph()
    assert isinstance(graph, Graph)
    assert graph.stage("reward", Score).synced is None
