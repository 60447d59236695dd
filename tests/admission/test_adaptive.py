"""Controllers: the paper's two rules as written, the tail, and the size of chunks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given
from numpy.typing import NDArray

from oppo.admission import AdmitView, CutView, Observation, Scoring, SlopeAdaptive, TailAdaptive, TailBatched
from oppo.admission.chunking import Fixed, Tuned, WholeRollout
from oppo.admission.overcommit import SlopeRule
from oppo.events import Chunk, Defer, Finish, Prompt
from oppo.stages.ledger import Ledger
from oppo.testing import FakeScorer, prompts, run_virtual
from tests.kit.pipelines import Pipeline, Setting, settings


def told(controller: SlopeAdaptive, *scores: float) -> list[int]:
    """Return what the controller chose after each of the scores."""
    chosen = []
    for step, score in enumerate(scores):
        controller.observe(Observation(step, score=score))
        chosen.append(controller.overcommit)
    return chosen


def test_the_text_moves_by_one_with_the_sign_of_the_slope() -> None:
    controller = SlopeAdaptive(batch=32, window=2, most=6, initial=4)
    assert told(controller, 0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0) == [4, 4, 5, 6, 6, 5, 4]


def test_algorithm_1_moves_by_a_quarter_at_least_by_one() -> None:
    controller = SlopeAdaptive(batch=64, rule="algorithm1", window=1, most=40, initial=16)
    assert told(controller, 0.0, 1.0, 2.0, 3.0, 4.0) == [16, 20, 25, 31, 38]
    falling = SlopeAdaptive(batch=64, rule="algorithm1", window=1, most=40, initial=5)
    assert told(falling, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0) == [5, 4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize("rule", ["text", "algorithm1"])
def test_the_sum_telescopes_so_that_only_two_scores_of_the_window_count(rule: SlopeRule) -> None:
    def after(*between: float) -> int:
        return told(SlopeAdaptive(batch=32, rule=rule, window=4), 1.0, *between, 1.1)[-1]

    assert after(2.0, 3.0, 9.0) == after(-5.0, 0.0, -9.0) == after(1.0, 1.0, 1.0) == 5


@pytest.mark.parametrize("rule", ["text", "algorithm1"])
def test_on_a_noisy_plateau_it_does_not_decay(rule: SlopeRule) -> None:
    """The weakness: nothing is learned any more, and yet about half of the largest staleness is paid for ever."""
    random = np.random.default_rng(0)
    plateau = (4.0 + 0.1 * random.standard_normal(4_000)).tolist()
    chosen = told(SlopeAdaptive(batch=32, rule=rule, most=8), *plateau)
    assert 0.3 * 8 < np.mean(chosen[1_000:]) < 0.7 * 8


def test_a_step_without_a_score_changes_nothing() -> None:
    controller = SlopeAdaptive(batch=32, window=1)
    assert told(controller, 1.0, math.nan, 2.0) == [4, 4, 5]


def test_it_goes_on_from_its_state() -> None:
    scores = np.random.default_rng(1).standard_normal(40).tolist()
    whole, first = SlopeAdaptive(batch=32, window=5), SlopeAdaptive(batch=32, window=5)
    expected = told(whole, *scores)
    told(first, *scores[:17])
    second = SlopeAdaptive(batch=32, window=5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert told(second, *scores[17:]) == expected[17:]


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
            lookahead=self.lookahead,
        )


def tail_told(controller: TailAdaptive, observations: Sequence[Observation]) -> list[int]:
    chosen = []
    for each in observations:
        controller.observe(each)
        chosen.append(controller.overcommit)
    return chosen


def adapted_extra(world: World, **settings: float) -> int:
    return tail_told(TailAdaptive(BATCH, **settings), world.observations(20))[-1]  # type: ignore[arg-type]  # by keyword


def test_it_defers_nothing_at_first_and_then_rises_by_doubling() -> None:
    controller = TailAdaptive(BATCH, price=0.1)
    assert controller.overcommit == 0
    chosen = tail_told(controller, World().observations(8))
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
    before = tail_told(controller, World().observations(10))[-1]
    after = tail_told(controller, World(rest=400.0).observations(4))
    assert before >= 4
    assert after[-1] == 0
    assert len(set(after) - {before, 0}) <= 1, "it does not climb down step by step"


def test_a_step_that_decoded_nothing_says_nothing() -> None:
    controller = TailAdaptive(BATCH)
    tail_told(controller, World().observations(6))
    before = controller.state_dict()
    controller.observe(Observation(6, seconds=1.0, rest_seconds=1.0))
    assert controller.state_dict() == before


def test_a_step_of_models_that_take_no_time_says_nothing() -> None:
    controller = TailAdaptive(BATCH)
    observations = World(step=0.0, rest=0.0).observations(1) + World().observations(3)
    assert tail_told(controller, observations)[0] == 0
    assert controller.state_dict()["seen"] == [each.as_json() for each in observations[1:]]
    pipeline = adaptive(Setting(lengths=(5, 9, 3, 30)))
    pipeline.policy.seconds = 0.0
    run_virtual(pipeline.run)
    assert [step.metrics["deferral/overcommit"] for step in pipeline.reports] == [0.0] * 3


def test_it_says_what_it_expects_of_a_step() -> None:
    controller = TailAdaptive(BATCH, price=1000.0)
    assert "deferral/predicted_seconds" not in controller.metrics()
    observations = World(rest=3.0).observations(8)
    tail_told(controller, observations)
    seconds = np.mean([each.seconds for each in observations])
    assert controller.metrics() == {
        "deferral/overcommit": 0.0,
        "deferral/predicted_seconds": pytest.approx(seconds, rel=0.1),
    }


def test_the_same_events_make_the_same_decisions_across_a_restart() -> None:
    observations = [replace(each, deferred=(300, 20)) for each in World().observations(16)]
    whole, first, second = (TailAdaptive(BATCH, price=0.5) for _ in range(3))
    expected = tail_told(whole, observations)
    tail_told(first, observations[:7])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.metrics() == first.metrics()
    assert tail_told(second, observations[7:]) == expected[7:]
    assert second.state_dict() == whole.state_dict()


def adaptive(setting: Setting) -> Pipeline:
    pipeline = Pipeline(setting)
    pipeline.generate.admission = TailAdaptive(setting.batch, price=0.1)
    pipeline.generate.__post_init__()
    return pipeline


def test_it_admits_and_cuts_as_fixed_overcommit_does() -> None:
    controller = TailAdaptive(BATCH)
    tail_told(controller, World().observations(12))
    assert controller.admit(AdmitView(deferred=3, oldest=1, remaining=9)) == BATCH + controller.overcommit - 3
    assert controller.admit(AdmitView(deferred=BATCH + 40, oldest=1, remaining=9)) == 0
    assert controller.cut(CutView(placed=BATCH, decoding=5, overdue=0))
    assert not controller.cut(CutView(placed=BATCH, decoding=5, overdue=1))


def sizes_of(chunks: Tuned, steps: int, seconds: Callable[[int, int], float], first: int = 0) -> list[int]:
    """Return the size in each step; a step takes ``seconds(size, tokens)``, and there are more tokens in each."""
    sizes = []
    for step in range(first, first + steps):
        sizes.append(chunks.size())
        tokens = 1_000 + 100 * step
        chunks.observe(Observation(step, seconds=seconds(sizes[-1], tokens), tokens=tokens))
    return sizes


def test_each_candidate_is_tried_in_turns_and_the_fastest_is_kept() -> None:
    sizes = sizes_of(Tuned(cap=800, every=20, trials=2), 24, lambda size, tokens: tokens * (1.0 if size == 50 else 1.1))
    assert sizes[:2] == [100, 100], "the middle one, until the first probe"
    assert sizes[2:8] == [50, 100, 200, 50, 100, 200]
    assert sizes[8:22] == [50] * 14
    assert sizes[22:] == [50, 100], "the next probe"


def sizes_in_flight(chunks: Tuned, steps: int, seconds: Callable[[int], float], lookahead: int) -> list[int]:
    """Return the size in each step; a step is observed before the one begins that is ``lookahead + 1`` steps later."""
    sizes: list[int] = []
    for step in range(steps):
        if (over := step - lookahead - 1) >= 0:
            took = seconds(sizes[over])
            chunks.observe(Observation(over, seconds=took, tokens=1_000, lookahead=lookahead, chunk=sizes[over]))
        sizes.append(chunks.size())
    return sizes


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
@pytest.mark.parametrize("fastest", [50, 100, 200])
@pytest.mark.parametrize("every", [6, 9, 20])
def test_with_steps_in_flight_seconds_count_for_the_size_that_took_them(
    lookahead: int, fastest: int, every: int
) -> None:
    chunks = Tuned(cap=800, every=every, trials=2)
    steps = 2 + 6 + 2 * lookahead + max(0, every - 6 - lookahead)
    sizes = sizes_in_flight(chunks, steps + 1, lambda size: 1.0 if size == fastest else 1.1, lookahead)
    tried = sizes[2 + lookahead : 8 + lookahead]
    assert tried == [50, 100, 200, 50, 100, 200]
    assert chunks.state_dict()["size"] == fastest
    kept = sizes[8 + 2 * lookahead : 2 + lookahead + every]
    assert set(kept) <= {fastest}


def test_growing_lengths_are_not_mistaken_for_a_slow_size() -> None:
    """Seconds grow with the tokens, whatever the size: by raw seconds the size that is tried first would win."""
    sizes = sizes_of(Tuned(cap=800, every=20, trials=1), 12, lambda size, tokens: tokens * (1.0 - size / 10_000))
    assert sizes[-1] == 200


def test_it_follows_what_is_fastest_now() -> None:
    chunks = Tuned(cap=800, every=20, trials=2)
    sizes_of(chunks, 20, lambda size, tokens: tokens * size)
    sizes = sizes_of(chunks, 20, lambda size, tokens: tokens / size, first=20)
    assert sizes[-1] == 200


def test_a_step_that_decoded_nothing_is_no_trial() -> None:
    chunks = Tuned(cap=800)
    sizes_of(chunks, 3, lambda size, tokens: tokens)
    before = chunks.state_dict()
    chunks.observe(Observation(3, seconds=9.0))
    assert chunks.state_dict() == before


def test_it_goes_on_from_its_state_in_the_middle_of_a_probe() -> None:
    def seconds(size: int, tokens: int) -> float:
        return tokens * (2.0 if size == 100 else 3.0)

    whole, first, second = (Tuned(cap=800, every=20) for _ in range(3))
    expected = sizes_of(whole, 30, seconds)
    sizes_of(first, 6, seconds)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert sizes_of(second, 24, seconds, first=6) == expected[6:]


def test_short_responses_leave_fewer_candidates() -> None:
    assert Tuned(cap=4).candidates == (1,)
    assert Tuned(cap=4, parts=(0.5, 0.5, 1.0)).candidates == (2, 4)


def test_the_others_never_change() -> None:
    for chunks in (Fixed(7), WholeRollout()):
        before = chunks.size()
        chunks.observe(Observation(0, seconds=1.0, tokens=9))
        assert chunks.size() == before


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
def test_every_prompt_is_trained_once_in_full_batches_by_the_weights_that_wrote_it_from_its_prompt_on(
    setting: Setting,
) -> None:
    pipeline = played(setting)
    stories = pipeline.tap.story()
    assert sorted(rollout for batch in pipeline.batches for rollout in batch.rollouts) == sorted(stories)
    assert sorted(stories) == list(range(len(stories))), "no prompt is skipped"
    sizes = [len(batch) for batch in pipeline.batches]
    assert all(size == setting.batch * setting.samples for size in sizes[:-1])
    assert sum(sizes) == min(setting.prompts, setting.steps * setting.batch) * setting.samples
    for step, batch in enumerate(pipeline.batches):
        version = max(0, step - setting.lookahead)
        assert not np.any(batch.versions != version), "a token of older weights was trained"
    for story in stories.values():
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
