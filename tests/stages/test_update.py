"""Update on fakes: what a step is said to be bound by; when a run of NaN ends, and what it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from oppo.admission import Bottleneck, together
from oppo.admission.bottleneck import StepPart
from oppo.errors import GraphError, ModelDiverged
from oppo.events import Batch
from oppo.models import Trained
from oppo.report.log import dump_batch
from oppo.stages import GAE, Generate, Update
from oppo.stages.update import composition
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, run_virtual
from tests.kit.known import deep
from tests.kit.pipelines import Pipeline, Setting
from tests.report.synthetic import batch, finish


def diverging(when: Callable[[int], bool], steps: int = 9, **chosen: object) -> Pipeline:
    """Return a pipeline whose update is not finite where ``when`` says so of the update's number."""
    pipeline = Pipeline(Setting(steps=steps, prompts=1_000))
    trainer = pipeline.trainer
    trainer.nonfinite = lambda rollout: when(trainer.version) and rollout % 4 == 1
    graph = pipeline.graph()
    update = Update(trainer, synced=[pipeline.policy, pipeline.critic], **chosen)  # type: ignore[arg-type] # by keyword
    pipeline.graph = lambda: graph.replace(update=update)  # type: ignore[method-assign] # the same, but for one stage
    return pipeline


def test_the_run_ends_after_so_many_updates_in_a_row_and_names_the_rollouts() -> None:
    pipeline = diverging(lambda update: update >= 3, max_nonfinite=2)
    with pytest.raises(ModelDiverged, match=r"in 2 updates in a row, lastly for rollouts \[13\]: lower"):
        run_virtual(pipeline.run)
    assert len(pipeline.reports) == 3
    assert pipeline.policy.version == 3, "what diverged was not synced"


def test_a_policy_that_would_never_get_the_weights_is_refused() -> None:
    pipeline = Pipeline(Setting())
    with pytest.raises(GraphError, match=r"'update' never gives its weights to FakePolicy, which decodes: name it, "):
        pipeline.graph().replace(update=Update(pipeline.trainer, synced=[pipeline.critic]))
    with pytest.raises(GraphError, match=r"'update' never gives its weights to Another, which decodes"):
        pipeline.graph().replace(generate=replace(pipeline.generate, policy=Another()))


def test_a_policy_may_get_the_weights_of_another_trainer() -> None:
    pipeline = Pipeline(Setting())
    graph = pipeline.graph()
    critics = Update(FakeTrainer(), synced=[pipeline.critic])
    assert critics.faults([graph.stage("generate", Generate), graph.stage("update", Update), critics], ()) == []
    assert len(critics.faults([graph.stage("generate", Generate), critics], ())) == 1


class Another(FakePolicy):
    """Not the policy that is synced to."""


class Undefined(GAE):
    """Its advantages are not finite."""

    def estimated(self, batch: Batch) -> Batch:
        found = super().estimated(batch)
        return replace(found, advantages=np.full(len(found.tokens), np.nan, np.float32))


def test_what_a_stage_estimated_is_named_where_it_is_not_finite() -> None:
    pipeline = diverging(lambda update: True, max_nonfinite=1)
    graph = pipeline.graph().replace(advantage=Undefined())
    pipeline.graph = lambda: graph  # type: ignore[method-assign] # the same, but for one stage
    with pytest.raises(ModelDiverged, match=r"lastly for rollouts .*: the advantages came so from their stage: look"):
        run_virtual(pipeline.run)


def test_a_finite_update_in_between_begins_the_count_again() -> None:
    pipeline = diverging(lambda update: update % 3 != 0, max_nonfinite=3)
    run_virtual(pipeline.run)
    assert len(pipeline.reports) == 9


def test_minibatches_that_are_skipped_end_the_run_though_others_trained_their_rollouts() -> None:
    class Skipping(FakeTrainer):
        async def update(self, batch: Batch) -> Trained:
            return replace(await super().update(batch), skipped=batch.rollouts[:2])

    pipeline = Pipeline(Setting(steps=9, prompts=1_000))
    pipeline.trainer = Skipping()
    with pytest.raises(ModelDiverged, match=r"in 3 updates in a row, lastly for rollouts \[8, 9\]: lower"):
        run_virtual(pipeline.run)
    assert [(report.trained, report.dropped) for report in pipeline.reports] == [((0, 1, 2, 3), ()), ((4, 5, 6, 7), ())]


def test_with_zero_the_run_never_ends_early() -> None:
    pipeline = diverging(lambda update: True, max_nonfinite=0)
    run_virtual(pipeline.run)
    assert len(pipeline.reports) == 9


def test_steps_of_which_every_score_is_nan_end_the_run_too() -> None:
    hopeless = FakeScorer(lambda finish, tokens, version: float("nan"))
    pipeline = Pipeline(Setting(steps=9, prompts=1_000), reward=hopeless)
    with pytest.raises(ModelDiverged, match="in 3 updates in a row"):
        run_virtual(pipeline.run)
    assert [len(report.dropped) for report in pipeline.reports] == [4, 4]
    assert all(drop.reason == "nonfinite score" for report in pipeline.reports for drop in report.dropped)


def test_the_last_batch_is_written_with_everything_that_is_known_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "nonfinite"
    pipeline = diverging(lambda update: True, max_nonfinite=1, dump=partial(dump_batch, folder=folder))
    with pytest.raises(ModelDiverged) as caught:
        run_virtual(pipeline.run)
    assert f"the batch of the last update is in {folder}" in caught.value.__notes__
    (batch,) = pipeline.batches
    arrays = load_file(folder / "batch.safetensors")
    for name in ("tokens", "logprobs", "advantages", "offsets", "scores", "sampled"):
        assert np.array_equal(arrays[name], getattr(batch, name))
    first = slice(*arrays["prompt_offsets"][:2].tolist())
    assert np.array_equal(arrays["prompts"][first], batch.responses[0].prompt.tokens)
    told = json.loads((folder / "batch.json").read_text(encoding="utf-8"))
    assert [row["rollout"] for row in told["rows"]] == list(batch.rollouts)
    assert {name for name in ("reference", "proximal", "values", "returns") if name in arrays} == {
        name for name in ("reference", "proximal", "values", "returns") if getattr(batch, name) is not None
    }


def test_a_dump_that_fails_does_not_hide_why_the_run_ended(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    dump = partial(dump_batch, folder=tmp_path / "file" / "nonfinite")
    with pytest.raises(ModelDiverged) as caught:
        run_virtual(diverging(lambda update: True, max_nonfinite=1, dump=dump).run)
    assert any("could not be written" in note for note in caught.value.__notes__)


REGIMES: dict[StepPart, Setting] = {
    "decode": Setting(lengths=(30,)),
    "tail": Setting(lengths=(5, 9, 3, 30)),
    "cap": Setting(lengths=(5, 9, 3, 60)),
    "score": Setting(lengths=(20, 24, 28, 30), reward=0.01),
    "train": Setting(update=5.0),
}
"""Pipelines of fakes whose bottleneck is known; the cap is 40 tokens."""


@pytest.mark.parametrize("bottleneck", REGIMES)
def test_each_step_says_what_it_is_bound_by(bottleneck: StepPart) -> None:
    pipeline = Pipeline(REGIMES[bottleneck])
    pipeline.policy.cap = 40
    run_virtual(pipeline.run)
    bottlenecks = [Bottleneck.of_metrics(report.metrics, report.seconds) for report in pipeline.reports]
    assert [found and found.largest for found in bottlenecks] == [bottleneck] * 3
    for found, report in zip(bottlenecks, pipeline.reports, strict=True):
        assert found is not None
        assert sum(found.shares.values()) == pytest.approx(1)
        assert found.shares["train"] * report.seconds == pytest.approx(pipeline.setting.update)


@pytest.mark.parametrize("lookahead", [1, 2])
@pytest.mark.parametrize("bottleneck", [part for part in REGIMES if part != "score"])
def test_each_step_in_flight_says_what_it_is_bound_by(bottleneck: StepPart, lookahead: int) -> None:
    pipeline = Pipeline(replace(REGIMES[bottleneck], lookahead=lookahead, steps=9))
    pipeline.policy.cap = 40
    run_virtual(pipeline.run)
    full = pipeline.reports[4:-lookahead]
    found = [Bottleneck.of_metrics(report.metrics, report.seconds) for report in full]
    assert [each and each.largest for each in found] == [bottleneck] * len(full)


def test_a_step_in_flight_that_a_scorer_holds_up_says_so() -> None:
    pipeline = Pipeline(Setting(lengths=(20, 24, 28, 30), reward=0.02, lookahead=1, steps=9))
    run_virtual(pipeline.run)
    found = Bottleneck.of_metrics(pipeline.reports[6].metrics, pipeline.reports[6].seconds)
    assert found is not None
    assert found.largest == "score"


@pytest.mark.parametrize(("lookahead", "update"), [(0, 0.05), (1, 0.25), *deep((1, 0.05), (2, 0.25))])
def test_the_limit_holds_however_many_are_deferred_up_to_half_a_batch_and_is_nearly_reached(
    lookahead: int, update: float
) -> None:
    setting = Setting((5, 9, 3, 30, 12, 7, 22, 4, 40, 6), batch=8, steps=30, update=update)
    ahead = [replace(setting, extra=extra, lookahead=lookahead) for extra in (0, 2, 4)]
    pipelines = [Pipeline(each) for each in (setting, *ahead)]
    for pipeline in pipelines:
        run_virtual(pipeline.run)
    waiting = [Bottleneck.of_metrics(report.metrics, report.seconds) for report in pipelines[0].reports]
    bound = together([found for found in waiting if found is not None])
    assert bound is not None
    took = [sum(report.seconds for report in pipeline.reports) for pipeline in pipelines]
    limit = bound.limit if lookahead else bound.limits["defer"]
    assert 0.8 * limit < took[0] / min(took) < limit


def test_estimates_are_measured_over_sampled_tokens() -> None:
    whole = batch([finish(0, 1, 2), finish(1, 3, 4)], [2.0, -1.0])
    values, returns = np.array([0, 1, 9, 2], np.float32), np.array([1, 2, 0, 4], np.float32)
    measured = replace(
        whole, values=values, returns=returns, advantages=values - 1, sampled=np.array([1, 1, 0, 1], bool)
    )
    found = composition(measured, 0)
    assert (found["objective/scores_min"], found["objective/scores_max"]) == (-1.0, 2.0)
    assert [found[f"values/{name}"] for name in ("mean", "min", "max")] == [1.0, 0.0, 2.0]
    assert [found[f"advantages/{name}"] for name in ("min", "max")] == [-1.0, 1.0]
    differences = np.array([1.0, 1.0, 2.0])
    expected = 1 - differences.var() / np.array([1.0, 2.0, 4.0]).var()
    assert found["val/explained_variance"] == pytest.approx(expected)
    assert "val/explained_variance" not in composition(whole, 0), "all returns are equal"
    assert "values/mean" not in composition(replace(whole, values=None), 0)
