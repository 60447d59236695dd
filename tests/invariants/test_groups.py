"""Training without a critic over whole graphs of fakes: groups are deferred, compared and trained as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from oppo.admission import Overcommit
from oppo.algorithms.group import grpo
from oppo.errors import ConfigError
from oppo.events import FloatArray, StepReport
from oppo.graph import Graph
from oppo.stages import Generate, GroupRelative
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, run_virtual
from tests.kit.known import known
from tests.kit.pipelines import Pipeline, Setting, same_batches, settings

CARRIED = Setting(lengths=(5, 9, 3, 30, 21, 7, 8, 60), extra=2, steps=4, samples=2)


@dataclass
class Grouped(Pipeline):
    """The recipe on fakes; it has a critic, to which nobody speaks."""

    referred: bool = True

    def graph(self) -> Graph[StepReport]:
        assert self.reward is not None
        s = self.setting
        recorded: FakeScorer[FloatArray] = FakeScorer(lambda event, tokens, version: event.response.logprobs)
        graph = grpo(
            policy=self.policy,
            reward=self.reward,
            trainer=self.trainer,
            admission=self.admission or Overcommit(s.batch, s.extra, s.max_deferrals),
            samples=s.samples,
            advantage=GroupRelative("leave_one_out", 0.05) if self.referred else GroupRelative(),
            reference=self.reference if self.referred else None,
            proximal=recorded if self.proximal else None,
            chunks=s.chunks,
        )
        return graph.replace(generate=replace(graph.stage("generate", Generate), replay=self.replay))


def groups(prompts: tuple[int, ...] = (0, 3, 7, 1_000)) -> st.SearchStrategy[Setting]:
    """Any run in which two or three responses are made to each prompt."""
    return settings(prompts).map(lambda setting: replace(setting, samples=setting.samples + 1))


def played(setting: Setting, *, referred: bool = True, proximal: bool = False) -> Grouped:
    pipeline = Grouped(setting, referred=referred, proximal=proximal)
    run_virtual(pipeline.run)
    return pipeline


@pytest.mark.schedules
@given(groups(), st.booleans())
@example(CARRIED, False)
def test_every_group_taken_is_trained_exactly_once_and_whole(setting: Setting, referred: bool) -> None:
    pipeline = played(setting, referred=referred)
    trained = [rollout for batch in pipeline.batches for rollout in batch.rollouts]
    assert sorted(trained) == list(range(len(trained)))
    assert len(trained) == min(setting.prompts, setting.steps * setting.batch) * setting.samples
    for batch in pipeline.batches:
        members = np.array(batch.rollouts).reshape(-1, setting.samples)
        assert (members // setting.samples == members[:, :1] // setting.samples).all(), "a group is in one batch"
        carried = np.array([event.rollout for event in batch.deferred]).reshape(-1, setting.samples)
        assert (carried // setting.samples == carried[:, :1] // setting.samples).all(), "and is deferred as one"
        assert (batch.values, batch.returns) == (None, None)
        first = np.array([known(batch.advantages)[row][0] for row in batch.rows()]).reshape(-1, setting.samples)
        assert np.abs(first.sum(1)).max(initial=0) < 1e-5


def test_groups_are_deferred_where_that_saves_time() -> None:
    carrying, waiting = played(CARRIED), played(replace(CARRIED, extra=0))
    assert any(report.deferred for report in carrying.reports)
    assert sum(report.seconds for report in carrying.reports) < sum(report.seconds for report in waiting.reports)


@pytest.mark.parametrize("referred", [True, False], ids=["referred", "alone"])
def test_proximal_log_probs_change_nothing_where_nothing_is_stale(*, referred: bool) -> None:
    plain, corrected = played(CARRIED, referred=referred), played(CARRIED, referred=referred, proximal=True)
    assert any(report.deferred for report in plain.reports)
    assert same_batches(plain.batches, corrected.batches)


def test_the_graph_has_no_critic_and_only_the_scorers_it_was_given() -> None:
    alone, referred = Grouped(CARRIED, referred=False).graph(), Grouped(CARRIED, proximal=True).graph()
    assert "ref_logp" not in alone.table()
    assert "value" not in referred.table()
    assert "generate, reward, reference=ref_logp, proximal=proximal" in referred.table()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 1}, "samples must be 2 or more, not 1: a response alone has nothing to be compared with"),
        (
            {"advantage": GroupRelative("centred", 0.05)},
            "the KL penalty, kl = 0.05, needs a reference: give one, or leave",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grpo(
            policy=FakePolicy(),
            reward=FakeScorer(fake_scalar),
            trainer=FakeTrainer(),
            admission=Overcommit(batch=4),
            **options,
        )
