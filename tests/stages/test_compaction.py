"""Rollouts that go on behind summaries, in segments: begun, deferred, scored, compared and dropped as one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo import Overcommit, grpo
from oppo.admission import Admission, TailBatched
from oppo.environments import Compaction, Tools
from oppo.errors import ConfigError, DataError
from oppo.events import Batch, Drop, Finish, Prompt, Response
from oppo.losses.base import Whole
from oppo.models import Capabilities
from oppo.returns import NamedScores, TokenRewards, group_advantages
from oppo.scorers import OfLastSegment, WholeScorer
from oppo.stages import GroupRelative
from oppo.testing import FakePolicy, FakeTrainer, run_virtual
from oppo.turns import Answer, Turn
from tests.agents.conftest import stepped
from tests.agents.test_branches import described
from tests.kit.turns import byte_chat, call

HELD = Capabilities(turns=True, adds_while_held=True)
ADDING = Capabilities(turns=True, adds_while_decoding=True)
NONE = np.zeros(0, np.int32)


@dataclass
class Summing:
    """An environment whose rollouts have so many segments, and whose summaries take a while to be read."""

    count: Callable[[Prompt], int]
    seconds: Callable[[Turn], float] = lambda turn: 0.0
    dropped: Sequence[int] = ()  # admissions whose last segment is dropped
    max_segments: int = 4
    asked: list[tuple[int, int, int]] = field(default_factory=list)

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        prompt = turn.prompt
        await anyio.sleep(self.seconds(turn))
        self.asked.append((prompt.rollout, prompt.branch, turn.length))
        if prompt.branch + 1 < self.count(prompt):
            tokens = [prompt.admission + 5, 100 + prompt.branch, int(turn.tokens[-1])]
            return Answer(NONE, segment=np.array(tokens, np.int32))
        return Drop(prompt.rollout, "why not") if prompt.admission in self.dropped else None


@dataclass
class Judge:
    """A reward that passes first samples, and notes which tokens it was asked about."""

    asked: list[tuple[int, list[int]]] = field(default_factory=list)

    async def score(self, finish: Finish) -> float:
        prompt = finish.response.prompt
        assert prompt.branch == 0
        self.asked.append((prompt.rollout, prompt.tokens.tolist()))
        return 1.0 - prompt.sample


def source() -> Iterator[Prompt]:
    return (Prompt(at, at, np.array([7, at], np.int32), group=at) for at in itertools.count())


def trained(
    environment: Summing, admission: Admission, steps: int = 3, *, can: Capabilities = HELD, judge: Judge | None = None,
    **options: Any,
) -> tuple[list[Batch], list[dict[str, float]], list[str]]:  # fmt: skip
    policy = FakePolicy(length=lambda _: 6, turns=lambda _: [3], holds=can is HELD, capabilities=can, **options)
    trainer, reward = FakeTrainer(), OfLastSegment(WholeScorer((judge or Judge()).score))
    graph = grpo(
        policy=policy, trainer=trainer, admission=admission, environment=environment, samples=2, reward=reward
    ).replace(advantage=GroupRelative("centred", mask_truncated=True))
    return trainer.batches, *stepped(graph, source(), steps)


def test_a_rollout_in_three_segments_is_compared_and_weighed_once() -> None:
    judge = Judge()
    environment = Summing(lambda prompt: 3 if prompt.sample == 0 else 1)
    (batch,), (metrics,), reasons = trained(environment, Overcommit(batch=1), 1, judge=judge)
    assert reasons == []
    rows = described([batch])
    branch = 1 << 32
    assert {rollout: (row[0], row[1]) for rollout, row in rows.items()} == {
        0: (1.0, 0.5), branch: (1.0, 0.5), 2 * branch: (1.0, 0.5), 1: (0.0, -0.5)
    }  # fmt: skip
    assert sorted(rollout for rollout, _ in judge.asked) == [1, 2 * branch]
    assert [tokens[:2] for _, tokens in judge.asked if len(tokens) == 3] == [[5, 101]]
    assert Whole.of(batch, range(len(batch)), 9).rows == 2
    assert metrics["compaction/segments/mean"] == 2
    assert metrics["compaction/segments/max"] == metrics["compaction/summary_tokens"] == 3
    assert metrics["compaction/capped"] == 0
    alone = group_advantages(np.array([1, 1, 1, 0], np.float32), "centred")  # had each segment been a response
    assert alone.tolist() == [0.25, 0.25, 0.25, -0.75]


@given(
    segments=st.lists(st.integers(1, 4), min_size=7, max_size=7),
    seconds=st.lists(st.sampled_from([0.0, 0.004, 0.05, 0.4]), min_size=5, max_size=5),
    overcommit=st.integers(0, 3),
    can=st.sampled_from([HELD, ADDING]),
)
def test_deferred_segments_are_trained_as_those_of_serial_steps(
    segments: list[int], seconds: list[float], overcommit: int, can: Capabilities
) -> None:
    def count(prompt: Prompt) -> int:
        return segments[(2 * prompt.admission + prompt.sample) % len(segments)]

    late = Summing(count, lambda turn: seconds[turn.prompt.rollout % len(seconds)])
    streamed, _, reasons = trained(late, Overcommit(batch=3, overcommit=overcommit), 4, can=can)
    serial, _, _ = trained(Summing(count), Overcommit(batch=3), 6)
    one, other = described(streamed), described(serial)
    assert reasons == []
    assert all(one[rollout] == other[rollout] for rollout in one.keys() & other.keys())
    found = [sorted(each.prompt.branch for each in family) for family in families(streamed)]
    assert [branches == list(range(len(branches))) for branches in found] == [True] * len(found)
    assert sorted(map(len, found)) == sorted(count(family[0].prompt) for family in families(streamed))
    assert {length for _, _, length in late.asked} == {3}


def families(batches: Sequence[Batch]) -> list[list[Response]]:
    found: dict[int, list[Response]] = {}
    for each in (response for batch in batches for response in batch.responses):
        found.setdefault(each.prompt.first, []).append(each)
    return [*found.values()]


def test_what_drops_the_last_segment_drops_all_of_the_rollout() -> None:
    environment = Summing(lambda prompt: 1 + 2 * (prompt.sample == 0), dropped=[1])
    (batch,), _, reasons = trained(environment, Overcommit(batch=3), 1)
    assert reasons == ["why not"] * 4
    assert {each.prompt.admission for each in batch.responses} == {0, 2}


def test_all_segments_of_a_rollout_that_has_no_room_in_the_last_are_masked() -> None:
    environment = Summing(lambda prompt: 2 + prompt.sample)
    environment.max_segments = 3
    policy = FakePolicy(
        length=lambda prompt: 6 if prompt.branch < 1 + prompt.sample else 9,
        turns=lambda prompt: [3] if prompt.branch < 1 + prompt.sample else [],
        cap=8, holds=True, capabilities=HELD,
    )  # fmt: skip
    trainer = FakeTrainer()
    graph = grpo(
        policy=policy, trainer=trainer, admission=Overcommit(batch=1), environment=environment, samples=2,
        reward=OfLastSegment(WholeScorer(Judge().score)),
    ).replace(advantage=GroupRelative("centred", mask_truncated=True))  # fmt: skip
    (metrics,), _ = stepped(graph, source(), 1)
    (batch,) = trainer.batches
    assert len(batch) == 5
    assert {*batch.reasons} == {"length"}
    assert not batch.sampled.any()
    assert metrics["compaction/capped"] == 0.5


@pytest.mark.parametrize(
    ("admission", "can", "words"),
    [
        (TailBatched(batch=2), ADDING, "TailBatched begins late rollouts anew: leave one of them out"),
        (Overcommit(batch=2), Capabilities(turns=True), "FakePolicy decodes no rollouts that come later"),
    ],
)
def test_segments_that_nothing_decodes_are_refused(admission: Admission, can: Capabilities, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trained(Summing(lambda _: 2), admission, can=can)


def test_calls_for_segments_may_overlap_and_earlier_ones_get_a_plain_sum() -> None:
    parts = {"a": (1.0, 0.25)}
    scores: dict[int, float | Drop] = {
        8: TokenRewards([0.25, 0.0], parts),
        9: TokenRewards([1.0, 2.0]),
        7: Drop(7, "no"),
    }

    async def slow(finish: Finish) -> float | Drop:
        await anyio.sleep(1)
        return scores[finish.response.prompt.admission]

    def finish(admission: int, branch: int, segments: int) -> Finish:
        prompt = Prompt(0, admission, np.array([1], np.int32), branch=branch).numbered(1)
        return Finish(prompt.rollout, Response.empty(prompt), "eos", segments=segments)

    async def main() -> list[Sequence[float | Drop]]:
        scorer, found = OfLastSegment(WholeScorer(slow)), list[Sequence[float | Drop]]()
        for admission in (7, 8, 9):
            calls = [[finish(admission, 2, 3)], [finish(admission, 1, 3)], [finish(admission, 0, 3)]]
            made = dict[int, Sequence[float | Drop]]()

            async def ask(at: int, finished: list[Finish], made: dict[int, Sequence[float | Drop]] = made) -> None:
                made[at] = await scorer.finish(finished)

            async with anyio.create_task_group() as tasks:
                for at, each in reversed([*enumerate(calls)]):
                    tasks.start_soon(ask, at, each)
            found += [[score for at in range(3) for score in made[at]]]
        return found

    dropped, named, summed = run_virtual(main)
    assert all(isinstance(score, Drop) for score in dropped)
    assert [type(score) for score in named] == [TokenRewards, NamedScores, NamedScores]
    assert [isinstance(each, NamedScores) and each.terms == parts for each in named] == [False, True, True]
    assert [(type(score), score) for score in summed] == [(TokenRewards, 3.0), (float, 3.0), (float, 3.0)]


def add(left: int) -> str:
    """Count.

    Args:
        left: how many letters are returned.
    """
    return "a" * left


def compaction(**options: Any) -> Compaction:
    return Compaction(**{"after": 300, "room": 600, "longest": 2000, "summary": 100, "segments": 3, **options})


def asked(
    length: int,
    said: str,
    *,
    row: Mapping[str, object] | None = None,
    branch: int = 0,
    state: Any = None,
    **options: Any,
) -> Any:
    """Return the outcome of a turn at the end of a response of ``length`` tokens, and the texts of its tokens."""
    chat = replace_roles(byte_chat([add]))
    tools = Tools([add], chat, compaction=compaction(**options))
    columns = {"prompt": [{"role": "user", "content": "Count."}], "number": 3} if row is None else row
    prompt = Prompt(4, 4, np.array([65], np.int32), columns=columns, branch=branch)
    tokens = np.array(chat.tokenizer.encode_whole(said + "<|im_end|>"), np.int32)
    outcome = run_virtual(tools.answer, Turn(prompt, 1, tokens, state, length=length))
    if not isinstance(outcome, Answer):
        return outcome, ""
    return outcome, chat.tokenizer.decode_whole(outcome.tokens if outcome.segment is None else outcome.segment)


def replace_roles(chat: Any) -> Any:
    return type(chat)(chat.tokenizer, ("tool", "user"))


def test_a_summary_is_asked_for_once_a_response_nears_its_room_and_begins_the_next_segment() -> None:
    early, text = asked(100, call("add", left=3))
    assert (early.state, early.limit.tokens, "This conversation ends here" in text) == (None, 0, False)
    due, text = asked(290, call("add", left=3), room=900)
    assert (due.limit.tokens, due.calls, due.failures) == (100, 1, 0)
    assert [each["role"] for each in due.said] == ["tool", "user"]
    assert "<tool_response>\naaa\n</tool_response><|im_end|>\n<|im_start|>user\nThis conversation ends here." in text
    after, text = asked(400, "I counted 3 letters." + call("add", left=9), state=due.state)
    assert (len(after.tokens), after.calls, after.state) == (0, 0, None)
    assert "<|im_start|>user\nCount.\n\nYour summary of the work so far:\nI counted 3 letters.<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")
    assert '"name": "add"' in text
    last, text = asked(290, call("add", left=3), branch=2)
    assert "This conversation ends here" not in text
    assert last.state is None


def test_an_answer_that_leaves_no_room_for_a_summary_is_left_out_and_the_policy_is_told() -> None:
    crowded, text = asked(250, call("add", left=400), request="Sum up.", room=600)
    assert "the result is longer than this conversation has room for" in text
    assert text.endswith("Sum up.<|im_end|>\n<|im_start|>assistant\n")
    assert len(crowded.tokens) + 250 + 100 <= 600
    full, text = asked(590, call("add", left=3), request="Sum up.")  # its turn has taken the room: it ends there
    assert "Sum up." not in text
    assert full.limit.tokens == 0


def test_a_summary_without_room_is_refused_or_its_rollout_dropped_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"a summary of 400 tokens behind 300 of a response has no room in the 600"):
        compaction(summary=400)
    long, _ = asked(400, "x" * 700, state={"summing": True}, longest=700)
    assert isinstance(long, Drop)
    assert long.reason.startswith("its summary has no room: behind it the prompt has ")
    with pytest.raises(DataError, match="stands in place of a user's message"):
        asked(400, "so", state={"summing": True}, row={"prompt": [{"role": "system", "content": "x"}]})
    with pytest.raises(ConfigError, match="give the chat format the role 'user'"):
        Tools([add], byte_chat([add]), compaction=compaction())


def test_a_row_s_own_tools_are_shown_behind_its_summary() -> None:
    chat = replace_roles(byte_chat([add, compaction_free]))
    tools = Tools([add, compaction_free], chat, column="for", compaction=compaction())
    columns = {"prompt": "Count.", "for": ["add"]}
    tokens = np.array(chat.tokenizer.encode_whole("3<|im_end|>"), np.int32)
    turn = Turn(Prompt(4, 4, np.array([65], np.int32), columns=columns), 1, tokens, {"summing": True}, length=400)
    answer = run_virtual(tools.answer, turn)
    assert isinstance(answer, Answer)
    assert answer.segment is not None
    text = chat.tokenizer.decode_whole(answer.segment.tolist())
    assert text == "<s>Count.\n\nYour summary of the work so far:\n3"


def compaction_free() -> str:
    """Do nothing."""
    return ""
