"""The lengths that are trained are those that are generated: in the metric, and over a long run of fakes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest

from oppo.events import Batch, Chunk, Defer, Finish, Prompt, Response
from oppo.stages import GAE
from oppo.stages.batch import ScoredRollout
from oppo.stages.metrics import WINDOW, LengthBias
from oppo.testing import run_virtual
from tests.pipelines import Pipeline, Setting

STEPS, BATCH = 100, 16
EXTRA = (16, pytest.param(4, marks=pytest.mark.deep))


def batch(lengths: dict[int, int], carried: Sequence[int] = ()) -> Batch:
    """A batch of rollouts, by their number, of these lengths."""
    rows = []
    for rollout, length in lengths.items():
        prompt = Prompt(rollout, rollout, np.arange(3, dtype=np.int32), group=rollout)
        ints, floats = np.zeros(length, np.int32), np.zeros(length, np.float32)
        response = Response.empty(prompt).then(Chunk(rollout, 0, ints, floats, ints))
        rows.append(ScoredRollout(Finish(rollout, response, "eos"), floats, 0.0, floats))
    return GAE().batch(rows, deferred=[Defer(rollout, 1) for rollout in carried])


def test_where_nothing_is_carried_there_is_no_bias() -> None:
    lengths = LengthBias()
    random = np.random.default_rng(0)
    for step in range(3 * WINDOW):
        drawn = {2 * step + k: int(random.integers(1, 90)) for k in range(2)}
        assert lengths.after(batch(drawn)) == 1


def test_a_long_response_that_is_carried_is_missing_until_it_is_trained() -> None:
    lengths = LengthBias()
    assert lengths.after(batch({1: 4, 2: 6}, carried=[0])) is None, "nothing below the oldest in flight is known"
    assert lengths.after(batch({0: 40, 3: 6}, carried=[4])) == 1
    assert lengths.after(batch({5: 8, 6: 8}, carried=[4])) == (72 / 6) / (56 / 4)
    assert lengths.after(batch({4: 40, 7: 8})) == 1


def test_what_is_known_of_lengths_goes_into_a_checkpoint_and_back() -> None:
    one, other = LengthBias(), LengthBias()
    one.after(batch({1: 4, 2: 6}, carried=[0]))
    other.load_state_dict(one.state_dict())
    later = batch({0: 40, 3: 6, 5: 2}, carried=[4])
    assert one.after(later) == other.after(later)
    assert one.state_dict() == other.state_dict()


@functools.cache
def simulated(extra: int) -> Pipeline:
    """A long run over lognormal lengths, up to a cap."""
    drawn = np.random.default_rng(3).lognormal(2.3, 0.9, 2 * STEPS * BATCH)
    setting = Setting(
        lengths=tuple(int(length) for length in drawn.clip(1, 120)),
        batch=BATCH,
        extra=extra,
        max_deferrals=3,
        steps=STEPS,
        prompts=2 * STEPS * BATCH,
    )
    pipeline = Pipeline(setting)
    run_virtual(pipeline.run)
    return pipeline


def lengths_of(batches: Sequence[Batch]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.diff(batch.offsets) for batch in batches])


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """The statistic of Kolmogorov and Smirnov: the largest difference of two empirical distributions."""
    points = np.union1d(one, other)
    shares = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.parametrize("extra", EXTRA)
def test_over_a_long_run_the_lengths_trained_are_those_generated(extra: int) -> None:
    pipeline = simulated(extra)
    taken = sorted(pipeline.tap.story())
    generated = [pipeline.setting.lengths[rollout] for rollout in taken]
    trained = lengths_of(pipeline.batches).tolist()
    assert sorted(trained) == sorted(generated), "no length was discarded"
    half = len(pipeline.batches) // 2
    late = lengths_of(pipeline.batches[half:]).tolist()
    critical = 1.36 * np.sqrt(1 / len(late) + 1 / len(pipeline.setting.lengths))  # 5 %, two samples
    assert distance(late, pipeline.setting.lengths) < critical


@pytest.mark.parametrize("extra", EXTRA)
def test_nothing_starves_and_the_bias_of_the_first_steps_is_made_good(extra: int) -> None:
    pipeline = simulated(extra)
    assert max(report.metrics["staleness/lag_max"] for report in pipeline.reports) <= pipeline.setting.max_deferrals
    assert sum(report.metrics["deferral/trained_late"] > 0 for report in pipeline.reports) > STEPS / 2
    first = lengths_of(pipeline.batches[:1]).mean()
    assert first < 0.8 * np.mean(pipeline.setting.lengths[: BATCH + extra]), "the first batch is one of short responses"
    bias = [report.metrics["deferral/length_bias"] for report in pipeline.reports[WINDOW:]]
    assert abs(float(np.mean(bias)) - 1) < 0.02
    assert 0.85 < min(bias) <= max(bias) < 1.15
