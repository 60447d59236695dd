"""Score alone: which sessions it keeps, and what it says when its model fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from oppo.events import Chunk, Defer, Drop, Finish, FloatArray, Given, Prompt, Response, RolloutEvent, Scored
from oppo.graph.channel import Channel
from oppo.placement.place import is_ahead
from oppo.stages import Score
from oppo.stages.score import waves
from oppo.testing import FakeCritic, FakeScorer, fake_scalar, run_virtual


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
    await stage.run(channel, out=out)
    return out.items


def test_a_rollout_that_was_dropped_before_it_was_read_leaves_no_session() -> None:
    scorer = FakeScorer(fake_scalar)
    sent = run_virtual(scored, Score(scorer), prompt(1), chunk(1), Drop(1, "filtered"))
    assert sent == [Drop(1, "filtered")]
    assert not scorer.sessions
    assert not scorer.tokens, "nothing is read of a rollout that is known to be dropped"


def test_a_critic_reads_nothing_of_a_rollout_that_is_parked_by_the_time_it_looks() -> None:
    critic = FakeCritic()
    run_virtual(scored, Score(critic), prompt(1), chunk(1), Defer(1, 1))
    assert not critic.sessions
    assert not critic.tokens, "its weights change before the rollout goes on, so it must be read again anyway"


def test_a_frozen_scorer_reads_a_parked_rollout_in_the_time_that_is_left() -> None:
    scorer = FakeScorer(fake_scalar)
    run_virtual(scored, Score(scorer), prompt(1), chunk(1), Defer(1, 1))
    assert len(scorer.sessions[1]) == 7


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


def test_finished_rollouts_are_scored_before_anything_is_read_of_those_that_go_on() -> None:
    read: list[int] = []

    class Noting(FakeScorer[float]):
        async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
            read.extend(event.rollout for event in events)
            await super().extend(events)

        async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
            assert set(read) == {2}
            return await super().finish(finished)

    done = chunk(2)
    run_virtual(scored, Score(Noting(fake_scalar)), prompt(1), prompt(2), chunk(1), done, finish(2, done))
    assert read == [2, 2, 1, 1]


@dataclass(eq=False)
class Noted(FakeScorer[float]):
    """Notes what it is called for, and whether ahead of others."""

    notes: list[tuple[str, list[int], bool]] = field(default_factory=list)

    async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        self._note("extend", events)
        await super().extend(events)

    async def finish(self, finished: Sequence[Finish]) -> Sequence[float]:
        self._note("finish", finished)
        return await super().finish(finished)

    def _note(self, label: str, events: Sequence[Prompt | Chunk | Given | Finish]) -> None:
        self.notes.append((label, [event.rollout for event in events], is_ahead()))


def test_what_has_finished_goes_ahead_in_its_place_and_nothing_else_does() -> None:
    scorer, done = Noted(fake_scalar), chunk(2)
    run_virtual(scored, Score(scorer), prompt(1), prompt(2), chunk(1), done, finish(2, done))
    assert scorer.notes == [
        ("extend", [2], True),
        ("extend", [2], True),
        ("finish", [2], True),
        ("extend", [1], False),
        ("extend", [1], False),
    ]


def test_closing_forgets_the_sessions_of_parked_rollouts() -> None:
    async def main() -> None:
        scorer = FakeScorer(fake_scalar)
        async with Score(scorer) as stage:
            await scored(stage, prompt(1), chunk(1), Defer(1, 1))
            assert scorer.sessions
        assert not scorer.sessions

    run_virtual(main)


class Broken(FakeScorer[float]):
    """Fails at what it is told to."""

    def __init__(self, at: str) -> None:
        super().__init__(fake_scalar)
        self.at = at

    async def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
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


def test_a_wave_holds_one_event_of_a_rollout_and_chunks_that_follow_one_another_are_one() -> None:
    def chunk(rollout: int, start: int, length: int) -> Chunk:
        ints = np.arange(start, start + length, dtype=np.int32)
        return Chunk(rollout, start, ints, np.zeros(length, np.float32), ints)

    prompts = [Prompt(n, n, np.zeros(1, np.int32)) for n in range(2)]
    tool = Given(1, 3, np.zeros(2, np.int32))
    events: list[Prompt | Chunk | Given]
    events = [prompts[0], prompts[1], chunk(1, 0, 1), chunk(2, 4, 3), chunk(1, 1, 2), tool, chunk(1, 5, 1)]
    first, second, third, fourth = waves(events)
    assert first == [prompts[0], prompts[1], events[3]]
    assert [(part.start, part.tokens.tolist()) for part in second if isinstance(part, Chunk)] == [(0, [0, 1, 2])]
    assert third == [tool]
    assert fourth == [events[-1]]
    assert not list(waves([]))
