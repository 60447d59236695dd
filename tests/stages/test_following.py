"""A scorer that follows the trainer: no weights come between what its stage accepts and what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import anyio
import numpy as np
import pytest
from hypothesis import example, given

from oppo.events import Chunk, Finish, FloatArray, Given, Prompt, Scored
from oppo.graph import Graph
from oppo.models import Capabilities, ServesByReference, Weights
from oppo.stages import Score, Update, followers
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, fake_per_token, fake_scalar, run_virtual
from tests.pipelines import Pipeline, Setting, settings

AT_ONCE = Capabilities(turns=True, loads_while_decoding="between decode steps")


def published_at_once(setting: Setting) -> Pipeline:
    """Play a pipeline whose trainer waits for no stage before it publishes."""
    pipeline = Pipeline(setting)
    pipeline.policy.capabilities = AT_ONCE
    graph = pipeline.graph()
    update = Update(pipeline.trainer, publish=followers(pipeline.policy, graph.stage("value", Score)))
    pipeline.graph = lambda: graph.replace(update=update)  # type: ignore[method-assign] # the same, but for one stage
    run_virtual(pipeline.run)
    return pipeline


@pytest.mark.schedules
@given(settings(lookaheads=(1, 2, 3)))
@example(Setting(lookahead=1, steps=5, critic=0.004, update=0.5))
@example(Setting(lookahead=2, steps=5, critic=0.03, per_call=0.004))
def test_a_value_is_of_the_weights_that_it_names_whenever_they_are_published(setting: Setting) -> None:
    pipeline = published_at_once(replace(setting, steps=setting.steps + 2))
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

    async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        before = self.version
        await super().extend(events)
        self.seen.append((before, self.version))

    async def finish(self, finished: Sequence[Finish]) -> Sequence[FloatArray]:
        before = self.version
        values = await super().finish(finished)
        self.seen.append((before, self.version))
        return values


def test_weights_wait_for_what_is_being_read() -> None:
    critic = Slow()
    stage = Score(critic)

    async def main() -> None:
        follower = stage.follower
        assert follower is not None
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                async with follower.reading():
                    await critic.extend([Prompt(0, 0, np.arange(3, dtype=np.int32))])

            tasks.start_soon(read)
            await anyio.sleep(0.5)
            await follower.load(Weights(1))
            assert (follower.version, critic.version) == (1, 1)
            assert anyio.current_time() == 1.0

    run_virtual(main)
    assert critic.seen == [(0, 0)]


def test_what_is_published_to_are_the_models_that_follow_or_their_stages() -> None:
    policy, values = FakePolicy(), Score(FakeCritic())
    assert followers(policy, values, Score(FakeScorer(fake_scalar)), None) == (policy, values.follower)


def test_a_stage_says_whether_its_scorer_serves_the_trained_tensors() -> None:
    class Trunk(FakeCritic):
        def serves(self, weights: Weights) -> bool:
            return weights.version == 3

    for scorer, serves in ((Trunk(), True), (FakeCritic(), False)):
        follower = Score(scorer).follower
        assert isinstance(follower, ServesByReference)
        assert follower.serves(Weights(3)) is serves


def test_no_scorer_follows_in_a_graph_without_one() -> None:
    graph = Pipeline(Setting()).graph()
    assert isinstance(graph, Graph)
    assert graph.stage("reward", Score).follower is None
