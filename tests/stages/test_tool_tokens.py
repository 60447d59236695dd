"""Tokens of a response that nobody sampled: scored, never trained, and still known as such after a cut and a resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from oppo.events import Chunk, Prompt, Response, ToolTokens
from oppo.stages.ledger import RolloutSnapshot
from oppo.testing import FakeCritic, run_virtual
from tests.known import known
from tests.pipelines import Pipeline, Setting, same_batches

ANSWER = range(3, 6)
SETTING = Setting(lengths=(5, 9, 7, 30), extra=2, steps=4)


class Reader(FakeCritic):
    """A critic that remembers what was given to it as such."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[int, int, int]] = []

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        self.given += [
            (event.rollout, event.start, len(event.tokens)) for event in events if isinstance(event, ToolTokens)
        ]
        await super().extend(events)


def pipeline() -> Pipeline:
    made = Pipeline(SETTING)
    made.policy.given = lambda prompt: ANSWER
    made.critic = Reader()
    return made


def test_what_a_tool_answered_is_not_trained_however_often_its_rollout_was_deferred() -> None:
    played = pipeline()
    run_virtual(played.run)
    assert any(report.deferred for report in played.reports)
    for batch in played.batches:
        for response, row in zip(batch.responses, batch.rows(), strict=True):
            places = np.arange(len(response))
            want = ~np.isin(places, ANSWER)
            assert (batch.sampled[row] == want).all()
            assert not batch.logprobs[row][~want].any()
            assert not known(batch.rewards)[row][~want].any()


def test_a_scorer_that_reads_a_rollout_again_is_told_again_what_was_given() -> None:
    played = pipeline()
    run_virtual(played.run)
    assert isinstance(played.critic, Reader)
    whole = [rollout for rollout, start, length in played.critic.given if (start, length) == (3, 3)]
    carried = {defer.rollout for report in played.reports for defer in report.deferred}
    again = {rollout for rollout in whole if whole.count(rollout) > 1}
    assert again
    assert again <= carried


def test_a_resumed_run_knows_what_was_given(tmp_path: Path) -> None:
    whole, parts = pipeline(), pipeline()
    later = pipeline()
    (tmp_path / "whole").mkdir()
    run_virtual(lambda: whole.run_part(0, 4, tmp_path / "whole"))
    run_virtual(lambda: parts.run_part(0, 2, tmp_path))
    run_virtual(lambda: later.run_part(2, 4, tmp_path))
    assert same_batches(whole.batches[2:], later.batches)


def test_a_deferred_response_keeps_its_mask() -> None:
    prompt = Prompt(4, 4, np.arange(3, dtype=np.int32), group=4)
    floats, ints = np.full(2, -1, np.float32), np.zeros(2, np.int32)
    pieces: list[Chunk | ToolTokens] = [
        Chunk(4, 0, np.array([7, 8], np.int32), floats, ints),
        Chunk(4, 2, np.array([9, 9], np.int32), floats, ints),
        ToolTokens(4, 4, np.array([1], np.int32)),
        ToolTokens(4, 5, np.array([2], np.int32)),
        Chunk(4, 6, np.array([5, 6], np.int32), floats, ints),
    ]
    response = Response.of(prompt, pieces)
    again = RolloutSnapshot.of(RolloutSnapshot(response, None).state_dict()).response
    assert again.sampled.tolist() == response.sampled.tolist() == [True] * 4 + [False] * 2 + [True] * 2
    assert [(type(piece), piece.start, len(piece.tokens)) for piece in again.pieces()] == [
        (Chunk, 0, 4),
        (ToolTokens, 4, 2),
        (Chunk, 6, 2),
    ]
    assert Response.empty(prompt).pieces() == []
