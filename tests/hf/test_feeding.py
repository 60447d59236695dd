from __future__ import annotations

import pickle

import numpy as np

from oppo.events import Chunk, Given, Prompt
from oppo.hf.cores import Core
from oppo.hf.feeding import Fed, Feed


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def chunk(rollout: int, start: int, *tokens: int) -> Chunk:
    n = len(tokens)
    return Chunk(rollout, start, ints(*tokens), np.zeros(n, np.float32), np.zeros(n, np.int32))


def told(feed: Feed) -> list[tuple[str, int, int, list[int]]]:
    """Return what a scorer reads of a feed; prompts start at -1."""
    return [
        ("Prompt", event.rollout, -1, event.tokens.tolist())
        if isinstance(event, Prompt)
        else ("Given", event.rollout, event.start, event.tokens.tolist())
        for event in feed.events
    ]


def test_a_feed_crosses_as_its_token_ids() -> None:
    prompt = Prompt(7, 7, ints(1, 2), columns={"judge": lambda: None})
    feed = Feed([prompt, chunk(3, 5, 9, 8, 7), Given(4, 0, ints()), Given(5, 2, ints(6))])
    crossed = pickle.loads(pickle.dumps(feed))
    assert told(crossed) == told(feed)
    assert all(event.tokens.dtype == np.int32 for event in crossed.events)
    assert crossed.events[0].columns == {}
    assert told(pickle.loads(pickle.dumps(Feed([])))) == []


def test_a_feed_costs_few_bytes() -> None:
    feed = Feed([chunk(rollout, 0, *range(32)) for rollout in range(32)])
    assert len(pickle.dumps(feed, 5)) < 1.5 * 4 * 32 * 32


def test_the_journal_holds_the_open_rollouts_with_their_tokens_so_far() -> None:
    fed = Fed(Core.extend)
    fed.note(Core.extend, (Feed([Prompt(0, 0, ints(1)), Prompt(1, 1, ints(2, 3)), Prompt(2, 2, ints(4))]),))
    fed.note(Core.extend, (Feed([chunk(0, 0, 5, 6), chunk(1, 0, 7)]),))
    fed.note(Core.extend, (Feed([Given(0, 2, ints(8)), Prompt(3, 3, ints(9))]),))
    fed.note(Core.forget, ([1, 77],))
    fed.note(Core.extend, (Feed([chunk(0, 3, 10)]),))
    fed.note(Core.forget, ({2: 0},))
    replayed = list(fed.replay())
    assert [work for work, _ in replayed] == [Core.extend] * 2
    feeds = [feed for _, (feed,) in replayed if isinstance(feed, Feed)]
    assert [told(feed) for feed in feeds] == [
        [("Prompt", 0, -1, [1]), ("Prompt", 3, -1, [9])],
        [("Given", 0, 0, [5, 6, 8, 10])],
    ]
    fed.note(Core.forget, ([0, 3],))
    assert [told(feed) for _, (feed,) in fed.replay() if isinstance(feed, Feed)] == [[], []]
