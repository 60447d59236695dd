"""The theorem behind overcommit, as properties of the pure ledger, and the prompts that it takes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo import Graph, StepReport, ppo
from oppo.admission import (
    Admission,
    AdmitView,
    Continuous,
    CutView,
    Observation,
    Overcommit,
    SlopeAdaptive,
    Synchronous,
    TailAdaptive,
    TailBatched,
)
from oppo.data import PromptStream
from oppo.errors import AdmissionError, ConfigError, DataError, ProtocolError
from oppo.events import Chunk, Finish, IntArray, Prompt, RolloutEvent
from oppo.models import Capabilities
from oppo.stages.in_flight import OpenRollouts
from oppo.stages.ledger import InFlightRollout, Ledger, RolloutSnapshot, Unit
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    check_admission,
    fake_per_token,
    fake_scalar,
    prompts,
    run_virtual,
)
from tests.kit.pipelines import Pipeline, Setting
from tests.kit.virtual import virtually

pytestmark = pytest.mark.schedules


def group(admission: int, samples: int = 1) -> tuple[Prompt, ...]:
    return Prompt(admission, admission, np.zeros(1, np.int32)).samples(samples)


@dataclass
class Run:
    """A run of the ledger alone: one decode step makes one token for every live rollout."""

    ledger: Ledger
    lengths: list[int]
    steps: int
    samples: int = 1
    made: dict[int, int] = field(default_factory=dict)
    batches: list[list[Unit]] = field(default_factory=list)
    admitted: int = 0
    most_live: int = 0

    def length(self, prompt: Prompt) -> int:
        return self.lengths[prompt.rollout % len(self.lengths)]

    def play(self, prompts: int) -> None:
        for step in range(self.steps):
            count = min(self.ledger.wanted(self.steps - step), prompts - self.admitted)
            new = [group(self.admitted + k, self.samples) for k in range(count)]
            self.admitted += count
            live = [
                prompt for unit in self.ledger.deferred for prompt in unit.prompts if prompt.rollout in unit.unfinished
            ]
            self.ledger.begin(new)
            self.decode(live + [prompt for prompts_ in new for prompt in prompts_], self.steps - step, prompts)
            self.batches.append(list(self.ledger.placed))
            self.ledger.end()

    def decode(self, live: list[Prompt], remaining: int, prompts: int) -> None:
        if self.ledger.is_cut():
            return
        live = live + self.joining(remaining, prompts)
        while live:
            self.most_live = max(self.most_live, len({prompt.admission for prompt in live}))
            for prompt in live:
                self.made[prompt.rollout] = self.made.get(prompt.rollout, 0) + 1
            ended = [prompt for prompt in live if self.made[prompt.rollout] >= self.length(prompt)]
            live = [prompt for prompt in live if prompt not in ended]
            if ended and self.ledger.finished(sorted(prompt.rollout for prompt in ended)):
                assert not self.ledger.refill(remaining), "nothing joins after the cut"
                return
            live += self.joining(remaining, prompts)

    def joining(self, remaining: int, prompts: int) -> list[Prompt]:
        """Let units join, as an admission that refills wants."""
        joined: list[Prompt] = []
        while count := min(self.ledger.refill(remaining), prompts - self.admitted):
            new = [group(self.admitted + k, self.samples) for k in range(count)]
            self.admitted += count
            self.ledger.add(new)
            joined += [prompt for prompts_ in new for prompt in prompts_]
        return joined


Kept = Overcommit | Continuous


@st.composite
def runs(draw: st.DrawFn) -> tuple[Run, Kept, int]:
    batch = draw(st.integers(1, 6))
    admission: Kept = Overcommit(batch, draw(st.integers(0, batch)), draw(st.integers(1, 3)))
    if draw(st.booleans()):
        admission = Continuous(batch, max(1, admission.overcommit), admission.max_deferrals)
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=30))
    samples = draw(st.sampled_from([1, 1, 2, 3]))
    run = Run(Ledger(admission), lengths, steps=draw(st.integers(1, 8)), samples=samples)
    prompts = draw(st.integers(0, 60))
    run.play(prompts)
    return run, admission, prompts


@given(runs())
def test_the_theorem_of_overcommit(played: tuple[Run, Kept, int]) -> None:
    run, admission, prompts = played
    trained = [unit.admission for batch in run.batches for unit in batch]
    assert sorted(trained) == list(range(run.admitted)), "each once"
    sizes = [len(batch) for batch in run.batches if batch]
    assert all(size == admission.batch for size in sizes[:-1]), "all but the last batch are full"
    assert sum(sizes) == min(prompts, run.steps * admission.batch)
    assert all(unit.age <= admission.max_deferrals for batch in run.batches for unit in batch)
    order = {unit.admission: step for step, batch in enumerate(run.batches) for unit in batch}
    born = {unit.admission: step - unit.age for step, batch in enumerate(run.batches) for unit in batch}
    for step in range(run.steps):
        assert sum(born[a] <= step < order[a] for a in order) <= admission.overcommit, "so many are deferred at most"
    most = admission.overcommit if isinstance(admission, Continuous) else admission.batch + admission.overcommit
    assert run.most_live <= most


def test_a_completed_unit_is_replaced_and_what_joined_is_deferred() -> None:
    ledger = Ledger(Continuous(batch=4, overcommit=2))
    assert ledger.wanted(9) == 2
    ledger.begin([group(0), group(1)])
    assert ledger.refill(9) == 0
    assert not ledger.finished([1])
    assert ledger.refill(9) == 1
    ledger.add([group(2)])
    assert not ledger.finished([0, 2])
    assert ledger.refill(9) == 2
    ledger.add([group(3), group(4)])
    assert ledger.refill(9) == 0
    assert ledger.finished([4]), "the batch is full"
    assert [unit.admission for unit in ledger.end()] == [3]
    assert ledger.wanted(9) == 1, "one decodes on"


def test_no_more_join_than_the_remaining_steps_can_train() -> None:
    ledger = Ledger(Continuous(batch=3, overcommit=3))
    assert ledger.wanted(1) == 3
    ledger.begin([group(n) for n in range(3)])
    ledger.finished([0, 1])
    assert ledger.refill(1) == 0
    assert ledger.refill(2) == 2


def test_complete_units_that_were_deferred_are_no_reason_to_decode_fewer() -> None:
    ledger = Ledger(Continuous(batch=4, overcommit=2))
    ledger.restore([(group(0), 1, set()), (group(1), 1, set())])
    assert ledger.wanted(9) == 2
    assert [unit.admission for unit in ledger.begin([group(2), group(3)])] == [0, 1]


def test_an_overdue_unit_keeps_its_place_though_younger_ones_finish_first() -> None:
    ledger = Ledger(Overcommit(batch=2, overcommit=1, max_deferrals=1))
    ledger.begin([group(0), group(1), group(2)])
    assert ledger.finished([1, 2])
    assert [unit.admission for unit in ledger.end()] == [0]
    ledger.begin([group(3), group(4)])
    assert not ledger.finished([3])
    assert not ledger.finished([4]), "the batch may not be cut without the overdue unit"
    assert ledger.place_of(4) is None, "the last free place is kept for it"
    assert ledger.finished([0])
    assert [unit.admission for unit in ledger.placed] == [3, 0]
    assert [unit.admission for unit in ledger.end()] == [4]


def test_what_is_deferred_stands_oldest_first() -> None:
    ledger = Ledger(Overcommit(batch=2, overcommit=2, max_deferrals=3))
    ledger.begin([group(n) for n in range(4)])
    ledger.finished([0, 3])
    ledger.end()
    ledger.begin([group(4), group(5)])
    ledger.finished([2, 5])
    assert [(unit.admission, unit.age) for unit in ledger.end()] == [(1, 2), (4, 1)]


def test_a_group_takes_one_place_when_its_last_sample_ends() -> None:
    ledger = Ledger(Synchronous(1))
    ledger.begin([group(3, samples=2)])
    assert not ledger.finished([6])
    assert ledger.place_of(6) is None
    assert ledger.finished([7])
    assert ledger.place_of(6) is ledger.place_of(7)


def test_a_rollout_that_is_not_decoded_cannot_finish() -> None:
    ledger = Ledger(Synchronous(1))
    ledger.begin([group(0)])
    with pytest.raises(ProtocolError, match="rollout 5 finished, but it was not being decoded"):
        ledger.finished([5])


class Counting(Overcommit):
    """Counts how often the oldest allowed age is asked for: as often as something is counted by it."""

    asked = 0

    def __getattribute__(self, name: str) -> object:
        if name == "max_deferrals":
            Counting.asked += 1
        return super().__getattribute__(name)


def asked_per_rollout(rollouts: int) -> float:
    ledger = Ledger(Counting(batch=rollouts))
    ledger.begin([group(admission) for admission in range(rollouts)])
    Counting.asked = 0
    for rollout in range(rollouts):
        assert ledger.finished([rollout]) == (rollout == rollouts - 1)
        assert ledger.place_of(rollout) is not None
    return Counting.asked / rollouts


def test_a_finish_costs_the_same_however_many_rollouts_are_in_flight() -> None:
    assert asked_per_rollout(500) == asked_per_rollout(20)


class Own:
    """An admission of one's own, with any answers."""

    def __init__(self, batch: object = 4, max_deferrals: object = 2, admit: object = 6, cut: object = None) -> None:
        self.batch = batch
        self.max_deferrals = max_deferrals
        self._admit = admit
        self._cut = cut

    def admit(self, view: AdmitView) -> object:
        return self._admit if view.deferred == 0 or self._admit != 6 else 6 - view.deferred

    def cut(self, view: CutView) -> object:
        return view.placed >= 4 and not view.overdue if self._cut is None else self._cut

    def observe(self, seen: Observation) -> None:
        pass


NO_ADMISSIONS = [
    ({"admit": 7.5}, r"Own\.admit\(\) must return a whole number, 0 to 8, .* got 7.5"),
    ({"admit": 8.0}, r"Own\.admit\(\) must return a whole number"),
    ({"admit": True}, r"Own\.admit\(\) must return a whole number"),
    ({"admit": None}, r"Own\.admit\(\) must return a whole number"),
    ({"admit": np.ones(2)}, r"Own\.admit\(\) must return a whole number"),
    ({"admit": -1}, r"Own\.admit\(\) must return a whole number, 0 to 8, .* got -1"),
    ({"admit": 9}, r"Own\.admit\(\) must return a whole number, 0 to 8, .* got 9"),
    ({"admit": 0}, r"Own\.admit\(\) returned 0 where nothing is deferred"),
    ({"cut": True}, r"Own\.cut\(\) may not cut a step in which 0 of 4 units have a place, .* must be full"),
    ({"cut": 1}, r"Own\.cut\(\) must return a bool; got 1"),
    ({"max_deferrals": 0}, "max_deferrals of Own must be at least 1, not 0"),
    ({"max_deferrals": 1.5}, "max_deferrals of Own must be a whole number"),
    ({"batch": 0}, "batch of Own must be at least 1, not 0"),
]
"""Admissions that ask for what no step can do, and the words for it."""


@pytest.mark.parametrize(("answers", "words"), NO_ADMISSIONS)
def test_an_admission_that_asks_for_the_impossible_is_refused_by_a_run_and_by_its_check(
    answers: dict[str, object], words: str
) -> None:
    async def make() -> Admission:
        return cast("Admission", Own(**answers))

    async def main() -> None:
        pipeline = Pipeline(Setting(steps=4), admission=await make())
        await pipeline.run()

    for play in (main, partial(check_admission, make)):
        with pytest.raises(AdmissionError, match=words):
            run_virtual(play)


KEPT: list[Callable[[], Admission]] = [
    lambda: Overcommit(4, 2),
    lambda: Synchronous(3),
    lambda: Continuous(4, 3),
    lambda: TailBatched(4),
    lambda: SlopeAdaptive(batch=8),
    lambda: TailAdaptive(batch=4),
    lambda: cast("Admission", Own()),
]


@pytest.mark.parametrize("new", KEPT)
@pytest.mark.virtual
async def test_the_admissions_of_this_library_keep_their_contract(
    new: Callable[[], Admission], check_admission: Callable[..., Awaitable[None]]
) -> None:
    async def make() -> Admission:
        return new()

    await check_admission(make)


class Moody(Overcommit):
    """Decides by how many there are of it."""

    made = 0

    def admit(self, view: AdmitView) -> int:
        Moody.made += 1
        return max(1, super().admit(view) - Moody.made // 9)


class Forgetful(Overcommit):
    """Takes more in each step, and its state does not say so."""

    taken: ClassVar[dict[int, int]] = {}

    def admit(self, view: AdmitView) -> int:
        self.taken[id(self)] = self.taken.get(id(self), 0) + 1
        return max(1, self.batch + 2 * (self.taken[id(self)] > 4) - view.deferred)

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: object) -> None:
        pass


@pytest.mark.parametrize(("kind", "words"), [(Moody, "same observations"), (Forgetful, "load_state_dict")])
def test_decisions_that_cannot_be_repeated_are_found_out(kind: type[Overcommit], words: str) -> None:
    kept = []

    async def make() -> Admission:
        kept.append(kind(3, 3))
        return kept[-1]

    with pytest.raises(ProtocolError, match=words):
        run_virtual(check_admission, make)


def test_a_check_whose_function_returns_the_thing_itself_says_what_it_wants() -> None:
    with pytest.raises(ProtocolError, match=r"expected an async function, `async def make\(\): return Overcommit\("):
        run_virtual(check_admission, cast("Callable[[], Awaitable[Admission]]", lambda: Overcommit(3, 3)))


def test_no_more_units_enter_beyond_a_batch_than_the_policy_has_room_for(messages: list[str]) -> None:
    ledger = Ledger(Overcommit(batch=4, overcommit=3))
    assert [ledger.wanted(9, room) for room in (math.inf, 7.0)] == [7, 7]
    assert not messages
    assert [ledger.wanted(9, room) for room in (6.9, 4.0, 0.0)] == [6, 4, 4]
    assert ["no room for as many rollouts as admission asks for" in each for each in messages] == [True]


@virtually
async def test_a_step_has_as_many_rollouts_as_the_cache_will_hold_by_what_others_needed() -> None:
    pipeline = Pipeline(Setting(lengths=(10,), batch=4, extra=3, steps=4))
    setattr(pipeline.policy, "free_kv_tokens", 10**6)  # noqa: B010 - no field of fakes
    async with pipeline.graph().open(prompts(100), observers=[pipeline.tap]) as run:
        async for report in run.steps(8):
            if report.index == 1:
                needed = 10 + len(pipeline.batches[0].responses[0].prompt.tokens)
                setattr(pipeline.policy, "free_kv_tokens", 2 * needed)  # noqa: B010
    entered = Counter(
        step for step, stage, item in pipeline.tap.items if stage == "generate" and isinstance(item, Prompt)
    )
    assert [entered[step] for step in range(5)] == [7, 4, 2, 3, 4]  # as many as fit, or as make the batch full


def pipeline() -> Graph[StepReport]:
    return ppo(
        policy=FakePolicy(lambda prompt: 5 + 30 * (prompt.admission % 3 == 0)),
        reference=FakeScorer(fake_per_token),
        reward=FakeScorer(fake_scalar),
        critic=FakeCritic(),
        trainer=FakeTrainer(),
        admission=Overcommit(batch=4, overcommit=2),
    )


def steps_over(source: Iterable[object], count: int = 3) -> list[StepReport]:
    async def make() -> list[StepReport]:
        async with pipeline().open(source) as run:
            return [report async for report in run.steps(count)]

    return run_virtual(make)


def test_a_prompt_number_that_comes_twice_in_a_step_is_refused() -> None:
    with pytest.raises(DataError, match=r"prompt 0 came again while .* oppo\.PromptStream numbers them, anew in each"):
        steps_over(itertools.cycle(prompts(5)))


def test_a_prompt_number_of_a_deferred_rollout_is_refused() -> None:
    carried = prompts(6)
    with pytest.raises(DataError, match="prompt 3 came again"):
        steps_over([*carried, *(prompts(4)[3:] * 4)])


def test_a_few_prompts_are_trained_epoch_after_epoch_when_they_are_numbered_anew() -> None:
    reports = steps_over(PromptStream(prompts(5)))
    trained = [rollout for report in reports for rollout in report.trained]
    assert [len(report.trained) for report in reports] == [4, 4, 4]
    assert len(set(trained)) == 12


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("What is streaming?", "reads prompts as oppo.Prompt, token ids with a number; got 'What is streaming"),
        (np.arange(3, dtype=np.int32), "reads prompts as oppo.Prompt"),
        (Prompt(0, 0, np.zeros(0, np.int32)), r"tokens of prompt 0 must be .* int32 \[1 or more\], not int32 \[0\]"),
        (Prompt(7, 7, cast("IntArray", np.arange(3))), r"tokens of prompt 7 must be .*, not int64 \[3\]"),
        (Prompt(7, 7, cast("IntArray", [1, 2])), r"tokens of prompt 7 must be .*, not \[1, 2\]"),
    ],
)
def test_what_is_no_prompt_is_refused_where_it_is_taken(item: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        steps_over([item])


LENGTH = 6
GROUPS = [(prompt,) for prompt in prompts(4)]


class Sent(list[RolloutEvent]):
    async def send(self, item: RolloutEvent, /) -> None:
        self.append(item)


async def read(policy: FakePolicy, rollout: InFlightRollout, stop: int) -> None:
    """Read up to ``stop`` tokens of a rollout, and no more of any."""
    async with policy.decoding([rollout.decode], lambda finished: True):
        while rollout.length < stop:
            piece = await rollout.decode.read(1)
            rollout.append(piece)
            if piece.state != "live":
                assert piece.state == "eos"
                rollout.reason = piece.state


@virtually
async def test_what_was_written_goes_on_after_a_checkpoint_and_ends_with_the_same_tokens() -> None:
    policy, sent, ended = FakePolicy(lambda prompt: LENGTH), Sent(), list[int]()
    rollouts = OpenRollouts(None, None)
    opened = await rollouts.open(policy, GROUPS)
    await read(policy, opened[1], 2)
    await read(policy, opened[2], LENGTH)
    states = [rollouts.snapshot(prompt).state_dict() for (prompt,) in GROUPS]

    again = OpenRollouts(None, None)
    again.restore(policy, [RolloutSnapshot.of(state) for state in states])
    assert not again
    assert [len(again.snapshot(prompt).response) for (prompt,) in GROUPS] == [0, 2, LENGTH, 0]
    await again.reopen(policy)
    assert {each.prompt.rollout for each in again.live} == {0, 1, 3}
    for held in (rollouts, again):
        await read(policy, held[1], LENGTH)
        for number in (2, 1):
            await held.finish(Unit(GROUPS[number], 0, set()), sent, ended)
    assert ended == [2, 1, 2, 1]
    tokens = [event.response.tokens.tolist() for event in sent if isinstance(event, Finish)]
    assert tokens[:2] == tokens[2:]
    assert len(tokens[0]) == LENGTH
    assert sorted(again) == [0, 3]


@virtually
async def test_a_discarded_unit_is_closed_and_its_tokens_are_counted() -> None:
    policy, rollouts = FakePolicy(lambda prompt: LENGTH), OpenRollouts(None, None)
    opened = await rollouts.open(policy, GROUPS)
    await read(policy, opened[0], 3)
    assert await rollouts.discard(Unit(GROUPS[0], 0, {0})) == 3
    assert sorted(rollouts) == [1, 2, 3]
    assert opened[0].decode.closed  # type: ignore[attr-defined]  # a FakeDecode


@virtually
async def test_room_is_for_rollouts_as_long_as_those_that_ended() -> None:
    class Small(FakePolicy):
        free_kv_tokens = 100

    policy, rollouts = Small(lambda prompt: LENGTH), OpenRollouts(None, None)
    opened = await rollouts.open(policy, GROUPS[:2])
    assert rollouts.room(policy, 2) == np.inf, "nothing has ended yet"
    await read(policy, opened[0], LENGTH)
    await rollouts.finish(Unit(GROUPS[0], 0, set()), Sent(), [])
    whole = len(GROUPS[0][0].tokens) + LENGTH
    assert rollouts.room(policy, 2) == (100 - LENGTH) / (2 * whole), "the other one needs so many yet"


def test_a_policy_that_cannot_go_on_with_responses_is_refused_when_they_are_restored() -> None:
    policy = FakePolicy(capabilities=Capabilities(resumes="refused"))
    begun = OpenRollouts(None, None).snapshot(GROUPS[0][0]).response
    OpenRollouts(None, None).restore(policy, [RolloutSnapshot(begun, None)])
    one = np.ones(1, np.int32)
    begun = begun.then(Chunk(0, 0, one, -np.ones(1, np.float32), one))
    with pytest.raises(ConfigError, match=r"rollouts \[0\] are half-written, and FakePolicy cannot go on"):
        OpenRollouts(None, None).restore(policy, [RolloutSnapshot(begun, None)])
