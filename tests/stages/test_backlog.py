"""What is to be read: in which order, how much at once, and nothing twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from oppo.events import Chunk, Defer, Drop, Finish, Prompt, Response
from oppo.stages.score import Backlog


def prompt(rollout: int) -> Prompt:
    return Prompt(rollout, rollout, np.zeros(1, np.int32))


def chunk(rollout: int, start: int, length: int) -> Chunk:
    ints = np.arange(start, start + length, dtype=np.int32)
    return Chunk(rollout, start, ints, np.zeros(length, np.float32), ints)


def finish(rollout: int) -> Finish:
    return Finish(rollout, Response.empty(prompt(rollout)), "eos")


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
    assert sizes(backlog, 100) == [(2, 1), (1, 5), (1, 1)]


def test_outcomes_are_taken_at_once_and_unread_events_rollout_by_rollout() -> None:
    backlog = Backlog()
    assert not backlog.is_urgent()
    backlog.add([prompt(1), prompt(2), chunk(1, 0, 5), Defer(2, 1)])
    assert not backlog.is_urgent(), "nobody waits for what is deferred"
    backlog.add([finish(1), Drop(3, "filtered")])
    assert backlog.is_urgent()
    finished, dropped, deferred = backlog.take_outcomes()
    assert [each.rollout for each in finished] == [1]
    assert (dropped, deferred) == ([Drop(3, "filtered")], [Defer(2, 1)])
    assert [type(each) for each in backlog.take_unread(1)] == [Prompt, Chunk]
    assert not backlog.is_urgent()
    assert sizes(backlog, 100) == [(2, 1)]
    assert [event.rollout for event in backlog.take_unread(2)] == [2]
    assert not backlog.portion(100)


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
