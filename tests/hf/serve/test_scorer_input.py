from __future__ import annotations

import pickle

import numpy as np

from oppo.events import Chunk, IntArray, Prompt, Support, ToolTokens
from oppo.hf.serve.scorers import ScorerInput


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def chunk(rollout: int, start: int, *tokens: int, ids: tuple[int, ...] = (), counts: tuple[int, ...] = ()) -> Chunk:
    n = len(tokens)
    support = Support(ints(*ids), ints(*counts))
    return Chunk(rollout, start, ints(*tokens), np.full(n, -1, np.float32), np.ones(n, np.int32), support)


def read(scorer_input: object) -> list[tuple[object, ...]]:
    """Return what a scorer reads of its input."""
    assert isinstance(scorer_input, ScorerInput)
    heads = [(type(event).__name__, event.rollout, event.tokens.tolist()) for event in scorer_input.events]
    starts = [() if isinstance(event, Prompt) else (event.start,) for event in scorer_input.events]
    supports = [
        (event.support.ids.tolist(), event.support.counts.tolist())
        if isinstance(event, Chunk) and not event.support.whole
        else ()
        for event in scorer_input.events
    ]
    return [head + start + support for head, start, support in zip(heads, starts, supports, strict=True)]


def inputs() -> ScorerInput:
    return ScorerInput(
        [
            Prompt(7, 7, ints(1, 2), columns={"judge": lambda: None}),
            chunk(3, 5, 9, 8, 7, ids=(9, 1, 4, 5), counts=(2, 0, -2)),
            ToolTokens(4, 0, ints()),
            chunk(6, 0, 3),
            ToolTokens(5, 2, ints(6)),
            chunk(8, 1, 5, 6, ids=(5, 6), counts=(1, 1)),
        ],
        supports=True,
    )


def test_a_scorers_input_crosses_as_its_token_ids_and_their_supports() -> None:
    crossed = pickle.loads(pickle.dumps(inputs()))
    assert read(crossed) == read(inputs())
    assert all(event.tokens.dtype == np.int32 for event in crossed.events)
    assert crossed.events[0].columns == {}
    assert read(pickle.loads(pickle.dumps(ScorerInput([])))) == []


def test_supports_stay_behind_unless_the_scorer_needs_them() -> None:
    crossed = pickle.loads(pickle.dumps(ScorerInput(inputs().events)))
    assert all(event.support.whole for event in crossed.events if isinstance(event, Chunk))
    assert [event.tokens.tolist() for event in crossed.events] == [event.tokens.tolist() for event in inputs().events]


def test_a_scorers_input_costs_few_bytes() -> None:
    long = ScorerInput([chunk(rollout, 0, *range(32)) for rollout in range(32)], supports=True)
    assert len(pickle.dumps(long, 5)) < 1.5 * 4 * 32 * 32
