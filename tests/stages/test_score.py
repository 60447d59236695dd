"""Score and its backlog: portions, sessions that are kept and replayed, errors of the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo.errors import ProtocolError, RewardError, SessionsLost
from oppo.events import Chunk, Defer, Drop, Finish, FloatArray, Prompt, Response, RolloutEvent, Scored, ToolTokens
from oppo.graph import Channel, Step
from oppo.rewards import FunctionReward
from oppo.scheduling import DEFAULT_TIME_SLICE, IN_ORDER, Preempted, Preemptible, Priority, TimeSlice, Urgent
from oppo.scorers import ScorerCapabilities
from oppo.stages import Score
from oppo.stages.score import Backlog
from oppo.testing import FakeCritic, FakeScorer, fake_scalar, run_virtual
from tests.kit.pipelines import Pipeline, Setting, same_batches
from tests.kit.virtual import virtually


def prompt(rollout: int) -> Prompt:
    return Prompt(rollout, rollout, np.arange(3, dtype=np.int32), group=rollout)


def chunk(rollout: int, start: int = 0, length: int = 4) -> Chunk:
    tokens = np.arange(start, start + length, dtype=np.int32)
    return Chunk(rollout, start, tokens, np.zeros(length, np.float32), np.zeros(length, np.int32))


def finish(rollout: int, *pieces: Chunk) -> Finish:
    response = Response.empty(prompt(rollout))
    for piece in pieces:
        response = response.then(piece)
    return Finish(rollout, response, "eos")


@dataclass
class Out:
    """Takes what a stage sends."""

    items: list[object] = field(default_factory=list)

    async def send(self, item: object, /) -> None:
        self.items.append(item)


async def scored(stage: Score[float] | Score[FloatArray], *events: RolloutEvent) -> list[object]:
    """Run one step whose events have all queued up before the scorer looks."""
    channel, out = Channel[RolloutEvent]("generate->score", 100), Out()
    for event in events:
        channel.send_nowait(event)
    channel.close()
    await stage.run(channel, out=out, step=Step(0, 1, 0.0))
    return out.items


async def scored_apart(stage: Score[float] | Score[FloatArray], *events: RolloutEvent) -> list[object]:
    """Run one step in which the scorer has dealt with each event before the next one comes."""
    channel, out = Channel[RolloutEvent]("generate->score", 100), Out()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(stage.run, channel, out=out, step=Step(0, 1, 0.0)))
        for event in events:
            channel.send_nowait(event)
            await anyio.sleep(1.0)
        channel.close()
    return out.items


def test_a_rollout_that_was_dropped_before_it_was_read_leaves_no_session() -> None:
    scorer = FakeScorer(fake_scalar)
    sent = run_virtual(scored, Score(scorer), prompt(1), chunk(1), Drop(1, "filtered"))
    assert sent == [Drop(1, "filtered")]
    assert not scorer.sessions
    assert not scorer.tokens, "nothing is read of a rollout that is known to be dropped"


def test_a_critic_reads_nothing_of_a_rollout_that_is_deferred_by_the_time_it_looks() -> None:
    critic = FakeCritic()
    run_virtual(scored, Score(critic), prompt(1), chunk(1), Defer(1, 1))
    assert not critic.sessions
    assert not critic.tokens, "its weights change before the rollout goes on, so it must be read again anyway"


def test_a_frozen_scorer_reads_a_deferred_rollout_in_the_time_that_is_left() -> None:
    scorer = FakeScorer(fake_scalar)
    run_virtual(scored, Score(scorer), prompt(1), chunk(1), Defer(1, 1))
    assert scorer.sessions[1].received == 7


def test_a_dropped_rollout_does_not_keep_others_from_their_score() -> None:
    scorer = FakeScorer(fake_scalar)
    done = chunk(2)
    sent = run_virtual(
        scored, Score(scorer), prompt(1), prompt(2), chunk(1), done, Drop(1, "filtered"), finish(2, done)
    )
    assert [(type(item), item.rollout) for item in sent if isinstance(item, Scored | Drop)] == [(Scored, 2), (Drop, 1)]


def test_a_session_made_with_other_weights_is_read_again_when_its_rollout_finishes() -> None:
    scorer = FakeScorer(fake_scalar)
    stage = Score(scorer)
    run_virtual(scored, stage, prompt(1), prompt(2), chunk(1), chunk(2), Defer(1, 1), Defer(2, 1))
    scorer.version = 1
    late = chunk(1, start=4)
    ends = [finish(1, chunk(1), late), finish(2, chunk(2))]
    scores = run_virtual(scored, stage, late, *ends)
    for end, score in zip(ends, scores, strict=True):
        tokens = (*end.response.prompt.tokens.tolist(), *end.response.tokens.tolist())
        assert isinstance(score, Scored)
        assert (score.value, score.version) == (fake_scalar(end, tokens, 1), 1)
    assert scorer.tokens == (7 + 7) + (11 + 7), "the late chunk is not read into a session that must be dropped"


@dataclass(eq=False)
class Noted(FakeScorer[float]):
    """Takes priorities, and notes each call with what it is for."""

    notes: list[tuple[str, list[int], type[Priority]]] = field(default_factory=list)

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None:
        self.notes.append(("extend", [event.rollout for event in events], type(priority)))
        await super().extend(events)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[float]:
        self.notes.append(("finish", [event.rollout for event in finished], type(priority)))
        return await super().finish(finished)

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        self.notes.append(("forget", list(rollouts), type(priority)))
        await super().forget(rollouts)


def test_calls_for_finished_rollouts_are_urgent_and_all_others_preemptible() -> None:
    scorer, done = Noted(fake_scalar), chunk(2)
    run_virtual(scored, Score(scorer), prompt(1), prompt(2), chunk(1), done, finish(2, done))
    assert scorer.notes == [
        ("extend", [2, 2], Urgent),
        ("finish", [2], Urgent),
        ("extend", [1, 1], Preemptible),
    ]


def test_every_call_of_a_replay_is_urgent_since_its_first_one_holds_the_place() -> None:
    scorer = Noted(fake_scalar)
    stage = Score(scorer)
    run_virtual(scored, stage, prompt(1), chunk(1), Defer(1, 1))
    scorer.version, scorer.notes = 1, []
    run_virtual(scored, stage, finish(1, chunk(1)))
    assert scorer.notes == [("forget", [1], Urgent), ("extend", [1, 1], Urgent), ("finish", [1], Urgent)]


def test_a_scorer_that_takes_priorities_in_some_of_its_methods_is_refused() -> None:
    class Half(FakeScorer[float]):
        async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None:
            del priority
            await super().extend(events)

    with pytest.raises(
        ProtocolError, match=r"keyword `priority` .* got Half, which lacks it in finish, forget: declare"
    ):
        Score(Half(fake_scalar))


class NotedCritic(FakeCritic):
    """Notes what it reads: rollouts and numbers of tokens, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[list[tuple[int, int]]] = []

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        self.notes.append([(event.rollout, len(event.tokens)) for event in events])
        await super().extend(events)


@dataclass(eq=False)
class Queued(Noted):
    """Each call waits for a second before it begins, and may be preempted meanwhile, as in a shared place."""

    read: list[list[int]] = field(default_factory=list)

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None:
        is_preempted = priority.preemption()
        await anyio.sleep(1)
        if is_preempted():
            raise Preempted
        self.read.append([event.rollout for event in events])
        await super().extend(events, priority=priority)


@dataclass(eq=False)
class Plain(FakeScorer[float]):
    """The same without the keyword."""

    read: list[list[int]] = field(default_factory=list)

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        await anyio.sleep(1)
        self.read.append([event.rollout for event in events])
        await super().extend(events)


async def finished_while_waiting(scorer: FakeScorer[float]) -> list[int]:
    """Run a step in which rollout 2 finishes while a call waits that reads rollout 1; return whose score is sent."""
    channel, out, done = Channel[RolloutEvent]("generate->score", 100), Out(), chunk(2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(Score(scorer).run, channel, out=out, step=Step(0, 1, 0.0)))
        for event in (prompt(1), prompt(2)):
            channel.send_nowait(event)
        await anyio.sleep(1.5)
        for piece in (chunk(1), done):
            channel.send_nowait(piece)
        await anyio.sleep(0.5)
        channel.send_nowait(finish(2, done))
        channel.close()
    return [each.rollout for each in out.items if isinstance(each, Scored)]


def test_a_rollout_that_finishes_preempts_the_call_that_waits_to_read_another() -> None:
    scorer = Queued(fake_scalar)
    assert run_virtual(finished_while_waiting, scorer) == [2]
    assert scorer.read == [[1, 2], [2], [1]], "everything is read once"
    assert [kind for _, _, kind in scorer.notes] == [Preemptible, Urgent, Urgent, Preemptible]


def test_a_scorer_without_the_keyword_makes_every_call_in_its_order() -> None:
    scorer = Plain(fake_scalar)
    assert run_virtual(finished_while_waiting, scorer) == [2]
    assert scorer.read == [[1, 2], [1], [2]]


def test_what_nobody_waits_for_is_read_in_short_calls() -> None:
    """A token takes so long that eight of them, and not nine, take as long as such a call may."""
    scorer = Noted(fake_scalar, per_token=DEFAULT_TIME_SLICE.seconds / 8.5)
    stage = Score(scorer)
    events = [each for n in range(1, 4) for each in (prompt(n), chunk(n))]
    run_virtual(scored, stage, *events)
    assert [rollouts for _, rollouts, _ in scorer.notes] == [[1, 1, 2, 2, 3, 3]], "nobody knows how long a token takes"
    run_virtual(scored, stage, *(chunk(n, start) for n in range(1, 4) for start in (4, 8)))
    assert [rollouts for _, rollouts, _ in scorer.notes[1:]] == [[1, 1], [2, 2], [3, 3]]


@dataclass(eq=False)
class Patient(Noted):
    """Says itself how long its calls may last."""

    capabilities: ScorerCapabilities = field(default_factory=lambda: ScorerCapabilities(time_slice=TimeSlice(1000.0)))


def test_a_scorer_says_how_long_a_call_may_last_that_nobody_waits_for() -> None:
    scorer = Patient(fake_scalar, per_token=DEFAULT_TIME_SLICE.seconds / 8.5)
    stage = Score(scorer)
    run_virtual(scored, stage, *(each for n in range(1, 4) for each in (prompt(n), chunk(n))))
    run_virtual(scored, stage, *(chunk(n, start) for n in range(1, 4) for start in (4, 8)))
    assert [rollouts for _, rollouts, _ in scorer.notes] == [[1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3]]


def test_a_critic_reads_a_deferred_rollout_again_before_it_finishes() -> None:
    """With the weights that there are then, and together with what comes now."""
    critic = NotedCritic()
    stage = Score(critic)
    run_virtual(scored, stage, prompt(1), prompt(2), chunk(1), chunk(2))
    run_virtual(scored, stage, chunk(1, start=4), Defer(1, 1), Defer(2, 1))
    assert not critic.sessions
    critic.version, critic.notes = 1, []
    run_virtual(scored, stage, chunk(2, start=4))
    assert critic.notes == [[(1, 3), (1, 4), (1, 4), (2, 3), (2, 4), (2, 4)]]
    run_virtual(scored, stage, finish(2, chunk(2, length=8)), finish(1, chunk(1, length=8)))
    assert critic.notes[1:] == []


def test_a_critic_reads_a_deferred_rollout_again_in_the_next_step_though_others_are_deferred_after_it() -> None:
    critic = NotedCritic()
    stage = Score(critic)
    run_virtual(scored_apart, stage, prompt(1), prompt(2), chunk(1), chunk(2), Defer(1, 1), Defer(2, 1))
    assert critic.notes == [[(1, 3)], [(2, 3)], [(1, 4)], [(2, 4)]]
    critic.version, critic.notes = 1, []
    run_virtual(scored_apart, stage, finish(1, chunk(1)), Defer(2, 2))
    assert critic.notes == [[(1, 3), (1, 4)], [(2, 3), (2, 4)]]
    run_virtual(scored_apart, stage, finish(2, chunk(2)))
    assert critic.notes[2:] == [[(2, 3), (2, 4)]], "deferred again, it waits for the step after that"


@virtually
async def test_nothing_is_read_again_before_something_comes() -> None:
    """Where a stage before this one holds everything back while it is decoded, scorers have nothing to do either."""
    critic, channel = NotedCritic(), Channel[RolloutEvent]("generate->score", 100)
    stage = Score(critic)
    await scored(stage, prompt(1), chunk(1), Defer(1, 1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(stage.run, channel, out=Out(), step=Step(0, 1, 0.0)))
        await anyio.sleep(1.0)
        assert not critic.notes
        channel.send_nowait(chunk(1, start=4))
        channel.close()
    assert critic.notes == [[(1, 3), (1, 4), (1, 4)]]


def test_what_was_closed_is_not_read_again() -> None:
    critic = NotedCritic()
    stage = Score(critic)
    run_virtual(scored, stage, prompt(1), prompt(2), chunk(1), chunk(2), Defer(1, 1, restart=True), Drop(2, "filtered"))
    run_virtual(scored, stage, prompt(3))
    assert critic.notes == [[(3, 3)]]


@virtually
async def test_closing_forgets_the_sessions_of_deferred_rollouts() -> None:
    scorer = FakeScorer(fake_scalar)
    async with Score(scorer) as stage:
        await scored(stage, prompt(1), chunk(1), Defer(1, 1))
        assert scorer.sessions
    assert not scorer.sessions


class Broken(FakeScorer[float]):
    """Fails at what it is told to."""

    def __init__(self, at: str) -> None:
        super().__init__(fake_scalar)
        self.at = at

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        if self.at == "extend":
            raise ZeroDivisionError("no score")
        await super().extend(events)

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        if self.at == "finish":
            raise ZeroDivisionError("no score")
        return await super().finish(finished)


@pytest.mark.parametrize("at", ["extend", "finish"])
def test_an_error_of_the_model_names_the_rollouts(at: str) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_virtual(scored, Score(Broken(at)), prompt(4), chunk(4), finish(4, chunk(4)))
    assert caught.value.__notes__ == ["while scoring rollouts [4]"]


@pytest.mark.parametrize("returned", [[1.0, 2.0], ["good"], [[1.0]], None])
def test_an_error_of_a_reward_function_names_the_rollouts_once(returned: Any) -> None:
    reward = FunctionReward(lambda completions: returned, decode=str)
    with pytest.raises(RewardError) as caught:
        run_virtual(scored, Score(reward), prompt(47), chunk(47), finish(47, chunk(47)))
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert len(re.findall(r"rollouts? \[?47\b", told)) == 1


def test_the_drop_of_a_scorer_keeps_what_it_says_under_the_number_of_its_rollout() -> None:
    class Broken(FakeScorer[float | Drop]):
        async def finish(self, finished: Sequence[Finish]) -> list[float | Drop]:
            return [Drop(-1, "nan", nonfinite=True) for _ in finished]

    sent = run_virtual(scored, Score(Broken(fake_scalar)), prompt(1), chunk(1), finish(1, chunk(1)))
    (drop,) = [item for item in sent if isinstance(item, Drop)]
    assert (drop.rollout, drop.reason, drop.nonfinite) == (1, "nan", True)


class Mortal(FakeScorer[float]):
    """Loses its sessions in some calls, each of which it has half made."""

    def __init__(self, deaths: Collection[int]) -> None:
        super().__init__(fake_scalar, 0.001, 0.001)
        self.deaths, self.made, self.lost = deaths, 0, 0

    def _die(self) -> None:
        self.made += 1
        if self.made in self.deaths:
            self.sessions.clear()
            self.lost += 1
            raise SessionsLost("'reward' was lost, and works again")

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        await super().extend(events)
        self._die()

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        values = await super().finish(finished)
        self._die()
        return values

    async def forget(self, rollouts: Sequence[int]) -> None:
        self._die()
        await super().forget(rollouts)


class MortalCritic(FakeCritic):
    """Loses its sessions at every fourth call."""

    made = 0

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        await super().extend(events)
        self.made += 1
        if self.made % 4 == 0:
            self.sessions.clear()
            raise SessionsLost("'critic' was lost, and works again")


def test_a_run_is_the_same_whenever_its_scorers_lose_their_sessions() -> None:
    setting = Setting(lengths=(5, 9, 3, 30), extra=2, steps=3, critic=0.001)
    alone = Pipeline(setting)
    undying = alone.reward = Mortal([])
    run_virtual(alone.run)
    for first in range(1, undying.made + 1, 2):  # which loses the call after it too
        disturbed = Pipeline(setting)
        mortal = disturbed.reward = Mortal([first, first + 1, first + 4])
        disturbed.critic = MortalCritic(per_token=setting.critic)
        run_virtual(disturbed.run)
        assert mortal.lost
        assert same_batches(alone.batches, disturbed.batches), first


def sizes(backlog: Backlog, tokens: float) -> list[tuple[int, int]]:
    return [(event.rollout, len(event.tokens)) for event in backlog.portion(tokens)]


def test_a_portion_is_as_many_tokens_as_asked_for_and_at_least_one_event() -> None:
    backlog = Backlog()
    backlog.add([chunk(1, 0, 2), chunk(2, 0, 3), chunk(1, 2, 2), chunk(3, 0, 1)])
    assert sizes(backlog, 1) == [(1, 2)]
    assert sizes(backlog, 6) == [(1, 2), (1, 2)], "the next three would be too many"
    assert sizes(backlog, 7) == [(1, 2), (1, 2), (2, 3)]
    assert sizes(backlog, 8) == [(1, 2), (1, 2), (2, 3), (3, 1)]


def test_what_has_been_read_is_gone_and_what_follows_it_waits_behind_others() -> None:
    backlog = Backlog()
    backlog.add([prompt(1), prompt(2), chunk(1, 0, 5)])
    first = backlog.portion(1)
    backlog.add([chunk(1, 5, 1)])  # while it is read
    backlog.mark_read(first)
    assert sizes(backlog, 100) == [(2, 3), (1, 5), (1, 1)]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=12),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=12),
)
def test_everything_is_read_once_and_in_order(came: list[tuple[int, int]], reads: list[tuple[int, int]]) -> None:
    backlog, length, read = Backlog(), dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)

    def take(tokens: int) -> None:
        portion = backlog.portion(tokens)
        backlog.mark_read(portion)
        for event in portion:
            assert isinstance(event, Chunk)
            assert event.start == read[event.rollout]
            read[event.rollout] += len(event.tokens)

    for at, (rollout, count) in enumerate(came):
        backlog.add([chunk(rollout, length[rollout], count)])
        length[rollout] += count
        for tokens in [tokens for when, tokens in reads if when == at]:
            take(tokens)
    while backlog.portion(1):
        take(5)
    assert read == length
