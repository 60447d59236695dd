"""Tail batching: short rounds, long rounds, and the whole graph: no staleness, no prompt lost, no token reused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given

from oppo.admission import AdmitView, TailBatched
from oppo.errors import AdmissionError
from oppo.events import Chunk, Defer, Finish, Prompt
from oppo.stages.ledger import Ledger
from oppo.testing import FakeScorer, prompts, run_virtual
from tests.pipelines import Pipeline, Setting, same_batches, settings


def batched(setting: Setting, launch: float = 1.5) -> Pipeline:
    pipeline = Pipeline(setting)
    pipeline.generate.admission = TailBatched(setting.batch, launch)
    pipeline.generate.__post_init__()
    return pipeline


def played(setting: Setting) -> Pipeline:
    pipeline = batched(setting)
    run_virtual(pipeline.run)
    return pipeline


def test_short_rounds_launch_more_until_a_batch_waits_for_a_long_one() -> None:
    rounds = TailBatched(batch=8)
    assert rounds.admit(AdmitView(deferred=7, oldest=3, remaining=9)) == 10
    assert rounds.admit(AdmitView(deferred=9, oldest=4, remaining=9)) == 0


@pytest.mark.parametrize(("waiting", "new", "restarted"), [(7, 10, 0), (9, 0, 8), (5, 6, 2), (1, 6, 1)])
def test_a_round_for_which_there_are_too_few_new_ones_is_filled_up(waiting: int, new: int, restarted: int) -> None:
    every = [(prompt,) for prompt in prompts(waiting + new)]
    ledger = Ledger(TailBatched(batch=8))
    ledger.restore((unit, 1, {unit[0].rollout}) for unit in every[:waiting])
    ledger.begin(every[waiting:])
    assert [unit.prompts for unit in ledger.restarted] == every[:restarted]
    assert len(ledger.end()) == waiting + new


@pytest.mark.schedules
@given(settings())
@example(Setting(steps=4, prompts=7))
def test_every_prompt_taken_is_trained_exactly_once_by_the_weights_that_wrote_it(setting: Setting) -> None:
    pipeline = played(setting)
    taken = sorted(pipeline.tap.story())
    assert sorted(rollout for batch in pipeline.batches for rollout in batch.rollouts) == taken
    assert taken == list(range(len(taken))), "no prompt is skipped"
    for step, batch in enumerate(pipeline.batches):
        version = max(0, step - setting.lookahead)
        assert not np.any(batch.versions != version), "a token of older weights was trained"


@pytest.mark.schedules
@given(settings())
def test_batches_are_full_but_the_last_one(setting: Setting) -> None:
    sizes = [len(batch) for batch in played(setting).batches]
    assert all(size == setting.batch * setting.samples for size in sizes[:-1])
    assert sum(sizes) == min(setting.prompts, setting.steps * setting.batch) * setting.samples


@pytest.mark.schedules
@given(settings())
def test_a_rollout_that_begins_anew_begins_with_its_prompt(setting: Setting) -> None:
    for story in played(setting).tap.story().values():
        restarts = [k for k, event in enumerate(story) if isinstance(event, Defer)]
        life = story[restarts[-1] + 1 if restarts else 0 :]
        assert isinstance(life[0], Prompt)
        assert isinstance(life[-1], Finish)
        read = [event for event in life if isinstance(event, Chunk)]
        assert np.array_equal(np.concatenate([chunk.tokens for chunk in read]), life[-1].response.tokens)
        assert all(event.restart for event in story if isinstance(event, Defer))


def test_scorers_keep_nothing_of_what_was_closed() -> None:
    pipeline = played(Setting(lengths=(5, 9, 3, 30, 21), steps=6))
    assert isinstance(pipeline.reward, FakeScorer)
    assert not pipeline.reward.sessions
    assert not pipeline.critic.sessions


def test_it_is_faster_than_waiting_and_says_what_that_wastes() -> None:
    setting = Setting(lengths=(5, 5, 5, 5, 5, 5, 5, 200), steps=8)
    pipeline = played(setting)
    waiting = Pipeline(setting)
    run_virtual(waiting.run)
    assert sum(step.seconds for step in pipeline.reports) < 0.8 * sum(step.seconds for step in waiting.reports)
    assert any(step.metrics.get("deferral/discarded_tokens", 0.0) > 0 for step in pipeline.reports)
    assert all(step.metrics["staleness/max"] == 0 for step in pipeline.reports)


def test_an_interrupted_run_makes_the_same_rounds(tmp_path: Path) -> None:
    setting = Setting(lengths=(5, 9, 3, 30, 21), steps=6)
    whole = batched(setting)
    run_virtual(whole.run_part, 0, setting.steps, tmp_path)
    parts = [batched(replace(setting)) for _ in range(setting.steps)]
    for step, part in enumerate(parts):
        run_virtual(part.run_part, step, step + 1, tmp_path)
    assert same_batches([batch for part in parts for batch in part.batches], whole.batches)


@pytest.mark.parametrize(
    ("batch", "launch", "message"),
    [(0, 1.25, "batch must be at least 1, not 0"), (4, 2.5, r"launch must lie in 1 \.\. 2, not 2.5")],
)
def test_impossible_settings_are_refused(batch: int, launch: float, message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        TailBatched(batch, launch)
