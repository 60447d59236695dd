"""A run that ends and is resumed elsewhere trains on what an uninterrupted one trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from hypothesis import example, given

from oppo.data import PromptStream
from oppo.errors import ConfigError, GraphError
from oppo.events import Batch
from oppo.models import Capabilities
from oppo.returns import AdaptiveKL, ScoreShaping
from oppo.run.checkpoint import read_state, write_state
from oppo.stages import GAE, Generate, GroupRelative, Update
from oppo.testing import FakePolicy, FakeTrainer, prompts, run_virtual
from tests.pipelines import Pipeline, Setting, same_batches, settings

CARRIED = Setting(lengths=(5, 9, 3, 30, 21), extra=2, steps=4)


def interrupted(setting: Setting, directory: Path) -> list[Pipeline]:
    """Return a run as so many processes as it has checkpoints."""
    parts = []
    for first in range(0, setting.steps, setting.checkpoint_every):
        parts.append(part := Pipeline(setting))
        run_virtual(part.run_part, first, min(first + setting.checkpoint_every, setting.steps), directory)
    return parts


def batches(parts: list[Pipeline]) -> list[Batch]:
    return [batch for part in parts for batch in part.batches]


@pytest.mark.schedules
@given(settings(prompts=(1_000,)))
@example(CARRIED)
@example(replace(CARRIED, samples=2))
@example(replace(CARRIED, lengths=(1,), extra=4))
@example(replace(CARRIED, steps=6, lookahead=1, checkpoint_every=3))
@example(replace(CARRIED, steps=6, lookahead=2, checkpoint_every=2))
def test_a_run_interrupted_at_every_checkpoint_equals_an_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting
) -> None:
    setting = replace(setting, paces=())  # where the order of what finishes is the decode loop's alone
    directory, uninterrupted = tmp_path_factory.mktemp("state"), Pipeline(setting)
    run_virtual(uninterrupted.run_part, 0, setting.steps, directory)
    parts = interrupted(setting, directory)
    assert same_batches(batches(parts), uninterrupted.batches)
    reports = [report for part in parts for report in part.reports]
    assert [report.index for report in reports] == list(range(setting.steps))
    assert [report.deferred for report in reports] == [report.deferred for report in uninterrupted.reports]


@pytest.mark.schedules
@given(settings(prompts=(1_000,)))
def test_an_interruption_neither_loses_nor_doubles_a_prompt_or_a_token(
    tmp_path_factory: pytest.TempPathFactory, setting: Setting
) -> None:
    trained = batches(interrupted(setting, tmp_path_factory.mktemp("state")))
    rollouts = sorted(rollout for batch in trained for rollout in batch.rollouts)
    assert rollouts == list(range(setting.steps * setting.batch * setting.samples))
    for response in (response for batch in trained for response in batch.responses):
        assert len(response) == setting.length(response.prompt)
        assert np.all(np.diff(response.versions) >= 0)


@pytest.mark.parametrize("kind", [GAE, partial(GroupRelative, "centred")], ids=["GAE", "GroupRelative"])
def test_controllers_of_kl_and_scores_go_on_where_they_were(
    kind: Callable[..., GAE | GroupRelative],
) -> None:
    learned = kind(kl=AdaptiveKL(0.2, target=1.0, horizon=10), shaping=ScoreShaping(norm=True))
    learned.control = learned.control.after(5.0, 4)
    learned.shaping = learned.shaping.after(np.array([1, 2, 5], np.float32))
    fresh = kind(kl=AdaptiveKL(0.2, target=1.0, horizon=10), shaping=ScoreShaping(norm=True))
    fresh.load_state_dict(learned.state_dict())
    assert (fresh.control, fresh.shaping) == (learned.control, learned.shaping)


def test_a_state_of_other_stages_is_refused_by_name() -> None:
    async def main() -> None:
        pipeline = Pipeline(CARRIED)
        async with pipeline.graph().open(()) as run:
            state = run.state_dict()
            del state["stages"]["advantage"]
            with pytest.raises(GraphError, match=r"whose stages \['generate', 'update'\] keep state"):
                run.load_state_dict(state)

    run_virtual(main)


def test_a_state_comes_before_the_first_step() -> None:
    async def main() -> None:
        pipeline = Pipeline(CARRIED)
        async with pipeline.graph().open(pipeline.prompts()) as run:
            await run.step()
            with pytest.raises(GraphError, match="has made 1 steps: load a state before the first"):
                run.load_state_dict(run.state_dict())

    run_virtual(main)


def test_half_written_responses_are_refused_by_name_for_a_policy_that_cannot_go_on_with_them() -> None:
    async def main() -> None:
        pipeline = Pipeline(CARRIED)
        async with pipeline.graph().open(pipeline.prompts()) as run:
            await run.step()
            state = run.state_dict()
        other = Generate(FakePolicy(capabilities=Capabilities(resumes="refused")), pipeline.generate.admission)
        with pytest.raises(ConfigError, match=r"rollouts \[.*\] are half-written, and FakePolicy cannot go on"):
            other.load_state_dict(state["stages"]["generate"])

    run_virtual(main)


def test_a_state_that_was_loaded_is_the_state_until_the_first_step() -> None:
    async def main() -> None:
        pipeline = Pipeline(CARRIED)
        async with pipeline.graph().open(pipeline.prompts()) as run:
            await run.step()
            state = run.state_dict()["stages"]["generate"]
        other = Generate(FakePolicy(), pipeline.generate.admission)
        other.load_state_dict(state)
        tokens = [[each["tokens"].tolist() for each in unit["rollouts"]] for unit in state["units"]]
        assert any(map(any, tokens)), "something half-written is deferred"
        assert [
            [each["tokens"].tolist() for each in unit["rollouts"]] for unit in other.state_dict()["units"]
        ] == tokens

    run_virtual(main)


def test_columns_of_any_type_stay_out_of_the_state_and_are_read_again(tmp_path: Path) -> None:
    data = PromptStream([replace(prompt, columns={"lock": Lock()}) for prompt in prompts(40)], epochs=1)

    async def main() -> None:
        pipeline = Pipeline(CARRIED)
        pipeline.generate.columns = data.columns
        async with pipeline.graph().open(data) as run:
            await run.step()
            write_state(tmp_path, run.state_dict()["stages"]["generate"])
        other = Generate(FakePolicy(), pipeline.generate.admission, columns=data.columns)
        other.load_state_dict(read_state(tmp_path))
        carried = [prompt for unit in other._ledger.deferred for prompt in unit.prompts]
        assert carried
        assert all(prompt.columns["lock"] is data.columns(prompt.admission)["lock"] for prompt in carried)

    run_virtual(main)


def test_updates_that_were_not_finite_go_on_being_counted() -> None:
    counting = Update(FakeTrainer(), max_nonfinite=3)
    counting.load_state_dict({**counting.state_dict(), "nonfinite": 2})
    assert counting.state_dict()["nonfinite"] == 2
