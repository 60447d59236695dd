"""TailAdaptive from lists of events: what it chooses, what it refuses to pay for, and that it forgets nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from oppo.admission import AdmitView, CutView, Observation, Scoring, TailAdaptive
from oppo.errors import AdmissionError
from oppo.testing import run_virtual
from tests.pipelines import Pipeline, Setting, same_batches

Draw = Callable[[np.random.Generator], NDArray[np.int64]]

BATCH = 64


def tailed(random: np.random.Generator) -> NDArray[np.int64]:
    lengths: NDArray[np.float64] = 200 * np.exp(0.9 * random.standard_normal(BATCH))
    return np.clip(lengths, 1, 4_000).astype(np.int64)


def capped(random: np.random.Generator) -> NDArray[np.int64]:
    """A quarter ends at the cap: more than may be deferred."""
    return np.where(random.random(BATCH) < 0.25, 4_000, tailed(random))


@dataclass(frozen=True)
class World:
    """Steps that waited for everybody, told to a controller: what it would do, not what comes of it."""

    draw: Draw = tailed
    step: float = 0.01
    scoring: tuple[Scoring, ...] = ()
    rest: float = 1.0
    mismatch_kl: float | None = None
    effective_samples: float | None = None
    lookahead: int = 0

    def observations(self, count: int, seed: int = 0) -> list[Observation]:
        random = np.random.default_rng(seed)
        return [self._observation(index, self.draw(random)) for index in range(count)]

    def _observation(self, index: int, lengths: NDArray[np.int64]) -> Observation:
        decode = self.step * float(lengths.max())
        return Observation(
            step=index,
            seconds=decode + sum(each.after for each in self.scoring) + self.rest,
            decode_seconds=decode,
            decode_steps=int(lengths.max()),
            tokens=int(lengths.sum()),
            finished=tuple(lengths.tolist()),
            scoring=self.scoring,
            rest_seconds=self.rest,
            mismatch_kl=self.mismatch_kl,
            effective_samples=self.effective_samples,
            lookahead=self.lookahead,
        )


def told(controller: TailAdaptive, observations: Sequence[Observation]) -> list[int]:
    chosen = []
    for each in observations:
        controller.observe(each)
        chosen.append(controller.overcommit)
    return chosen


def adapted_extra(world: World, **settings: float) -> int:
    return told(TailAdaptive(BATCH, **settings), world.observations(20))[-1]  # type: ignore[arg-type]  # by keyword


def test_it_defers_nothing_at_first_and_then_rises_by_doubling() -> None:
    controller = TailAdaptive(BATCH, price=0.1)
    assert controller.overcommit == 0
    chosen = told(controller, World().observations(8))
    assert chosen[:2] == [4, 8]
    assert 8 < max(chosen) <= BATCH // 4


def test_a_long_tail_is_worth_deferring() -> None:
    assert adapted_extra(World()) >= 4


def test_a_higher_price_defers_less() -> None:
    extras = [adapted_extra(World(), price=price) for price in (0.25, 1.0, 4.0, 40.0)]
    assert extras == sorted(extras, reverse=True)
    assert extras[-1] == 0


def test_where_scoring_takes_the_time_nothing_is_deferred() -> None:
    assert adapted_extra(World(scoring=(Scoring("reward", 20.0, 60.0),))) == 0


def test_where_the_update_takes_the_time_nothing_is_deferred() -> None:
    assert adapted_extra(World(rest=400.0)) == 0


@pytest.mark.parametrize("lookahead", [1, 2])
def test_behind_an_update_that_takes_nearly_as_long_less_is_deferred_with_steps_in_flight(lookahead: int) -> None:
    """Decoding need not be shorter than what it hides, where without lookahead every second of it counts."""
    assert adapted_extra(World(rest=12.0)) >= 4
    assert adapted_extra(World(rest=12.0, lookahead=lookahead)) <= 1
    assert adapted_extra(World(rest=0.5, lookahead=lookahead)) == adapted_extra(World(rest=0.5))


def test_where_more_end_at_the_cap_than_may_be_deferred_nothing_is_deferred() -> None:
    assert adapted_extra(World(draw=capped), most=8) == 0


def test_it_drops_at_once_when_there_is_nothing_left_to_gain() -> None:
    controller = TailAdaptive(BATCH, window=4)
    before = told(controller, World().observations(10))[-1]
    after = told(controller, World(rest=400.0).observations(4))
    assert before >= 4
    assert after[-1] == 0
    assert len(set(after) - {before, 0}) <= 1, "it does not climb down step by step"


@pytest.mark.parametrize(
    ("world", "settings"),
    [(World(mismatch_kl=0.05), {"kl_target": 0.001}), (World(effective_samples=0.2), {"ess_target": 0.9})],
)
def test_measured_staleness_raises_the_price(world: World, settings: dict[str, float]) -> None:
    free = adapted_extra(world, price=2.0)
    braked = adapted_extra(world, price=2.0, **settings)
    assert braked < free


def test_a_step_that_decoded_nothing_says_nothing() -> None:
    controller = TailAdaptive(BATCH)
    told(controller, World().observations(6))
    before = controller.state_dict()
    controller.observe(Observation(6, seconds=1.0, rest_seconds=1.0))
    assert controller.state_dict() == before


def test_a_step_of_models_that_take_no_time_says_nothing() -> None:
    controller = TailAdaptive(BATCH)
    observations = World(step=0.0, rest=0.0).observations(1) + World().observations(3)
    assert told(controller, observations)[0] == 0
    assert controller.state_dict()["seen"] == [each.as_json() for each in observations[1:]]
    pipeline = adaptive(Setting(lengths=(5, 9, 3, 30)))
    pipeline.policy.seconds = 0.0
    run_virtual(pipeline.run)
    assert [step.metrics["deferral/overcommit"] for step in pipeline.reports] == [0.0] * 3


def test_it_says_what_it_expects_of_a_step() -> None:
    controller = TailAdaptive(BATCH, price=1000.0)
    assert controller.predicted_seconds is None
    observations = World(rest=3.0).observations(8)
    told(controller, observations)
    assert controller.predicted_seconds == pytest.approx(np.mean([each.seconds for each in observations]), rel=0.1)
    assert controller.metrics() == {
        "deferral/overcommit": 0.0,
        "deferral/predicted_seconds": controller.predicted_seconds,
    }


def test_the_same_events_make_the_same_decisions_across_a_restart() -> None:
    observations = [replace(each, deferred=(300, 20)) for each in World().observations(16)]
    whole, first, second = (TailAdaptive(BATCH, price=0.5) for _ in range(3))
    expected = told(whole, observations)
    told(first, observations[:7])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.metrics() == first.metrics()
    assert told(second, observations[7:]) == expected[7:]
    assert second.state_dict() == whole.state_dict()


def adaptive(setting: Setting) -> Pipeline:
    pipeline = Pipeline(setting)
    pipeline.generate.admission = TailAdaptive(setting.batch, price=0.1)
    pipeline.generate.__post_init__()
    return pipeline


def test_a_resumed_run_goes_on_with_what_was_learned(tmp_path: Path) -> None:
    lengths = tuple(np.random.default_rng(0).geometric(0.05, 97).tolist())
    setting = Setting(lengths=lengths, batch=16, steps=8, update=0.1)
    whole, first, second = (adaptive(setting) for _ in range(3))
    run_virtual(whole.run_part, 0, 8, tmp_path)
    run_virtual(first.run_part, 0, 5, tmp_path)
    run_virtual(second.run_part, 5, 8, tmp_path)
    extras = [step.metrics["deferral/overcommit"] for step in whole.reports]
    assert extras[0] == 0.0
    assert max(extras[1:]) > 0
    assert [step.metrics["deferral/overcommit"] for step in (*first.reports, *second.reports)] == extras
    assert same_batches([*first.batches, *second.batches], whole.batches)


def test_it_admits_and_cuts_as_fixed_overcommit_does() -> None:
    controller = TailAdaptive(BATCH)
    told(controller, World().observations(12))
    assert controller.admit(AdmitView(deferred=3, oldest=1, remaining=9)) == BATCH + controller.overcommit - 3
    assert controller.admit(AdmitView(deferred=BATCH + 40, oldest=1, remaining=9)) == 0
    assert controller.cut(CutView(placed=BATCH, decoding=5, overdue=0))
    assert not controller.cut(CutView(placed=BATCH, decoding=5, overdue=1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"most": BATCH + 1}, "overcommit must lie in 0 .. batch = 64, not 65"),
        ({"window": 0}, "window must be at least 1 step, not 0"),
        ({"price": -1.0}, "price must be 0 or more, not -1.0"),
        ({"kl_target": 0.0}, "kl_target must be more than 0, not 0.0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        TailAdaptive(BATCH, **settings)  # type: ignore[arg-type]  # by keyword
