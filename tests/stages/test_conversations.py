"""Turns and tool tokens in a whole pipeline of fakes: answers join, wait, fail and are resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo import GAE, Graph, Overcommit, StepReport, grpo, ppo, wrap
from oppo.admission import Observation, TailBatched
from oppo.errors import ProtocolError
from oppo.events import Chunk, Drop, Finish, IntArray, Prompt, Response, ToolTokens
from oppo.graph import Step
from oppo.stages.conversations import Conversations
from oppo.stages.ledger import InFlightRollout, RolloutSnapshot
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer, fake_scalar, prompts, run_virtual
from oppo.turns import Answer, Answered, Turn, TurnDecode
from tests.kit.dialogues import turns_answered
from tests.kit.known import known
from tests.kit.pipelines import Pipeline, Setting, same_batches, settings

TurnOutcome = Answer | Drop | None


@dataclass
class Tool:
    """An environment that takes its time, and remembers what it was asked."""

    seconds: Callable[[Turn], float] = lambda turn: 0.0
    length: int = 2
    outcome: Callable[[Turn], TurnOutcome] | None = None
    asked: list[tuple[int, int, list[int], object]] = field(default_factory=list)

    async def answer(self, turn: Turn) -> TurnOutcome:
        self.asked.append((turn.prompt.rollout, turn.number, turn.tokens.tolist(), turn.state))
        await anyio.sleep(self.seconds(turn))
        if self.outcome is not None:
            return self.outcome(turn)
        return Answer(np.full(self.length, 90_000 + turn.number, np.int32), {"answered": turn.number + 1})


def pipeline(
    setting: Setting, tool: Tool, turns: Callable[[Prompt], Sequence[int]], *, holds: bool = False
) -> Pipeline:
    made = Pipeline(setting)
    made.policy.turns, made.policy.holds = turns, holds
    made.generate = replace(made.generate, environment=tool)
    return made


def played(setting: Setting, tool: Tool, turns: Callable[[Prompt], Sequence[int]], *, holds: bool = False) -> Pipeline:
    made = pipeline(setting, tool, turns, holds=holds)
    run_virtual(made.run)
    return made


def first_has_turns(prompt: Prompt) -> Sequence[int]:
    return (3, 5) if prompt.rollout == 0 else ()


ONE_STEP = Setting(lengths=(8, 20, 20, 20), steps=1)
LATE = Setting(lengths=(8, 10, 10, 10), extra=1, steps=4, max_deferrals=3)


def in_two_parts(tool: Tool, folder: Path) -> list[Pipeline]:
    """Play a run that is killed after its first step, and the run that goes on behind it."""
    parts = [pipeline(LATE, tool, first_has_turns) for _ in range(2)]
    run_virtual(partial(parts[0].run_part, 0, 1, folder))
    run_virtual(partial(parts[1].run_part, 1, 4, folder))
    return parts


def test_answers_are_read_and_not_trained_and_the_next_turn_follows_them() -> None:
    tool = Tool()
    (batch,) = played(ONE_STEP, tool, first_has_turns).batches
    response = batch.responses[0]
    assert len(response) == 8 + 2 * 2
    given = np.flatnonzero(~response.sampled).tolist()
    assert given == [3, 4, 7, 8]
    assert response.tokens[given].tolist() == [90_000, 90_000, 90_001, 90_001]
    assert turns_answered(response) == 2
    assert [(number, state) for _, number, _, state in tool.asked] == [(0, None), (1, {"answered": 1})]
    assert [tokens for _, _, tokens, _ in tool.asked] == [response.tokens[:3].tolist(), response.tokens[5:7].tolist()]
    assert not known(batch.rewards)[batch.rows()[0]][given].any()


@pytest.mark.parametrize(("holds", "seconds"), [(False, 20 * 0.01), (True, (20 + 2 * 5) * 0.01)])
def test_the_others_decode_on_while_a_tool_works_unless_decoding_is_exact(holds: bool, seconds: float) -> None:
    tool = Tool(lambda turn: 0.05)
    (report,) = played(replace(ONE_STEP, capacity=100), tool, first_has_turns, holds=holds).reports
    assert report.seconds == pytest.approx(seconds)


def test_what_the_step_waits_for_is_its_slowest_tool() -> None:
    made = played(ONE_STEP, Tool(lambda turn: 7.0), lambda prompt: (3,))
    assert made.reports[0].seconds == pytest.approx(7.0 + 20 * 0.01)
    assert made.reports[0].metrics["turns/answer_seconds"] == pytest.approx(7.0)
    assert made.policy.tokens == 8 + 3 * 20, "nothing was decoded while all of them waited"


def test_calls_of_tools_are_counted_for_each_response_also_of_one_that_was_deferred_and_restored(
    tmp_path: Path,
) -> None:
    def outcome(turn: Turn) -> Answer:
        return Answer(np.array([90_000], np.int32), calls=2, failures=turn.number)

    tool = Tool(lambda turn: 0.3 if turn.number == 1 else 0.0, outcome=outcome)
    measured = [each.metrics for made in in_two_parts(tool, tmp_path) for each in made.reports]
    late = [each for each in measured if each["num_turns/mean"] > 1]
    assert [each["num_turns/mean"] for each in late] == [pytest.approx((3 + 1 + 1 + 1) / 4)]
    assert [each["tools/call_frequency"] for each in late] == [pytest.approx(4 / 4)]
    assert [each["tools/failure_frequency"] for each in late] == [pytest.approx(1 / 4)]
    assert all("tools/failure_frequency" not in each for each in measured if each not in late)


def test_a_finished_response_has_what_its_answers_said_also_one_that_was_restored(tmp_path: Path) -> None:
    def outcome(turn: Turn) -> Answer:
        said = [{"role": "tool", "name": name, "content": f"{turn.number}</tool_response>"} for name in "ab"]
        return Answer(np.array([90_000], np.int32), said=said)

    tool = Tool(lambda turn: 0.3 if turn.number == 1 else 0.0, outcome=outcome)
    items = [item for made in in_two_parts(tool, tmp_path) for _, _, item in made.tap.items]
    finished = [item for item in items if isinstance(item, Finish)]
    for each in finished:
        said = [[message["content"] for message in answer] for answer in (turn.said for turn in each.answered)]
        assert said == [[f"{number}</tool_response>"] * 2 for number in range(turns_answered(each.response))]
    assert max(len(each.answered) for each in finished) == 2


def test_what_is_told_of_a_step_counts_sampled_tokens_alone(tmp_path: Path) -> None:
    """Within a step, and of a rollout that is deferred or restored with an answer in it."""
    tool = Tool(lambda turn: 0.3 if turn.number == 1 else 0.0, length=50)
    items = [item for made in in_two_parts(tool, tmp_path) for _, _, item in made.tap.items]
    first, *rest = [item for item in items if isinstance(item, Observation)]
    assert (first.tokens, first.decode_steps, first.deferred) == (3 * 10 + 8 + 5, 10, (5,))
    assert len(rest) == 3
    gains = [0, *(sum(seen.deferred) for seen in (first, *rest))]
    for before, seen, after in zip(gains[1:], rest, gains[2:], strict=False):
        assert seen.tokens == sum(seen.finished) + after - before
        assert seen.decode_steps == sum(each.steps for each in seen.stretches) == max(seen.finished) == 10


def test_a_rollout_whose_tool_is_slow_is_deferred_and_asked_and_told_of_once() -> None:
    tool = Tool(lambda turn: 0.3 if turn.prompt.rollout == 0 else 0.0)
    made = played(LATE, tool, first_has_turns)
    deferred = [report.index for report in made.reports if 0 in {each.rollout for each in report.deferred}]
    assert deferred == [0, 1, 2]
    assert [number for rollout, number, _, _ in tool.asked] == [0, 1]
    told = [(step, each.rollout, each.turn, each.tokens, each.error) for step, each in answers(made)]
    assert told == [(3, 0, 0, 2, ""), (3, 0, 1, 2, "")], "observers, of each answer once and in the step that it joined"
    assert [each.seconds for _, each in answers(made)] == pytest.approx([0.3, 0.3])
    (response,) = [each for batch in made.batches for each in batch.responses if each.prompt.rollout == 0]
    assert turns_answered(response) == 2


def answers(made: Pipeline) -> list[tuple[int, Answered]]:
    """Return what observers were told of answers, and the steps."""
    return [(step, item) for step, _, item in made.tap.items if isinstance(item, Answered)]


def test_observers_are_told_why_there_was_no_answer() -> None:
    dropped = played(ONE_STEP, Tool(outcome=lambda turn: Drop(0, "no power")), first_has_turns)
    ended = played(ONE_STEP, Tool(outcome=lambda turn: None), first_has_turns)
    assert answers(dropped) == [(0, Answered(0, 0, 0, 0.0, "no power"))]
    assert answers(ended) == [(0, Answered(0, 0, 0, 0.0))]

    def fail(turn: Turn) -> TurnOutcome:
        raise OSError("unplugged")

    broken = pipeline(ONE_STEP, Tool(outcome=fail), first_has_turns)
    with pytest.raises(OSError, match="unplugged"):
        run_virtual(broken.run)
    assert answers(broken) == [(0, Answered(0, 0, 0, 0.0, "OSError: unplugged"))]


def test_a_call_that_is_unanswered_at_a_kill_is_made_again(tmp_path: Path) -> None:
    tools = [Tool(lambda turn: 0.3 if turn.number == 1 else 0.0) for _ in range(2)]
    parts = [pipeline(LATE, tool, first_has_turns) for tool in tools]
    run_virtual(lambda: parts[0].run_part(0, 1, tmp_path))
    assert [(number, state) for _, number, _, state in tools[0].asked] == [(0, None), (1, {"answered": 1})]
    assert [(step, each.turn) for step, each in answers(parts[0])] == [(0, 0)]
    run_virtual(lambda: parts[1].run_part(1, 4, tmp_path))
    assert tools[1].asked == tools[0].asked[1:], "the same turn with the same state, and not the one before"
    assert [each.turn for _, each in answers(parts[1])] == [1]


def test_an_overdue_rollout_is_waited_for() -> None:
    tool = Tool(lambda turn: 5.0)
    setting = Setting(lengths=(8, 10, 10, 10), extra=1, steps=3, max_deferrals=1)
    made = played(setting, tool, first_has_turns)
    assert 0 in made.reports[1].trained
    assert made.reports[1].seconds > 5


def test_an_answer_that_leaves_no_room_ends_the_response_with_its_turn() -> None:
    made = pipeline(ONE_STEP, Tool(length=30), first_has_turns)
    made.policy.cap = 32
    run_virtual(made.run)
    batch = made.batches[0]
    assert (len(batch.responses[0]), batch.reasons[0]) == (3, "length")


@pytest.mark.parametrize("samples", [1, 2])
def test_a_dropped_conversation_is_not_trained_and_its_group_is(samples: int) -> None:
    setting = replace(ONE_STEP, samples=samples, lengths=(8, 20, 20, 20, 20, 20, 20, 20))
    tool = Tool(outcome=lambda turn: Drop(turn.prompt.rollout, "the calculator is on fire"))
    made = played(setting, tool, first_has_turns)
    (report,) = made.reports
    assert [(each.rollout, each.reason) for each in report.dropped] == [(0, "the calculator is on fire")]
    assert report.trained == tuple(range(1, 4 * samples))


def test_a_dropped_conversation_may_be_deferred_first() -> None:
    setting = Setting(lengths=(8, 30, 30, 30), batch=2, extra=2, steps=3, samples=2, max_deferrals=2)
    tool = Tool(outcome=lambda turn: Drop(turn.prompt.rollout, "no"))
    made = played(setting, tool, lambda prompt: (3,) if prompt.rollout == 4 else ())
    assert [drop.rollout for report in made.reports for drop in report.dropped] == [4]
    trained = sorted(rollout for report in made.reports for rollout in report.trained)
    assert len(trained) == len(set(trained)) == 11


def test_a_call_whose_rollout_begins_anew_is_cancelled() -> None:
    ended = list[tuple[int, float]]()

    class Slow:
        async def answer(self, turn: Turn) -> TurnOutcome:
            try:
                await anyio.sleep(50.0 if turn.prompt.rollout == 0 and not ended else 0.0)
            finally:
                ended.append((turn.prompt.rollout, anyio.current_time()))
            return None

    made = Pipeline(replace(ONE_STEP, batch=4, steps=2, extra=1), admission=TailBatched(4))
    made.policy.turns = first_has_turns
    made.generate = replace(made.generate, environment=Slow())
    run_virtual(made.run)
    assert {0} <= {each.rollout for each in made.reports[0].deferred}
    (first, again) = ended
    assert (first[0], again[0]) == (0, 0)
    assert first[1] < 1, "it ended with the step that gave its rollout up"


def test_an_error_names_the_rollout_and_the_turn() -> None:
    def fail(turn: Turn) -> TurnOutcome:
        raise OSError("unplugged")

    with pytest.raises(OSError, match="unplugged") as caught:
        played(ONE_STEP, Tool(outcome=fail), first_has_turns)
    assert "while answering turn 0 of rollout 0" in caught.value.__notes__


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (7, r"an environment returns an Answer, a Drop, or None to end; got 7 \(int\)"),
        (Answer(np.zeros(0, np.int32)), r"int32 \[1 or more\]; got an array of shape \(0,\)"),
        (Answer(np.zeros(2, np.int64)), "got an array of shape .* and type int64"),
        (Answer(np.zeros(2, np.int32), {1j}), r"must be JSON values; got \{1j\} \(set\)"),
    ],
)
def test_what_is_no_answer_is_refused(answer: Answer, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        played(ONE_STEP, Tool(outcome=lambda turn: answer), first_has_turns)


def test_a_recipe_is_given_the_environment() -> None:
    def graphs(tool: Tool) -> list[Graph[StepReport]]:
        policy = FakePolicy(lambda prompt: 8, turns=lambda prompt: (3,))
        reward: FakeScorer[float | Drop] = FakeScorer(fake_scalar)
        same = {"policy": policy, "reward": reward, "admission": Overcommit(batch=2), "environment": tool}
        return [
            ppo(**same, trainer=FakeTrainer(), advantage=GAE(kl=0.0)),  # type: ignore[arg-type] # one mapping for three recipes
            grpo(**same, trainer=FakeTrainer(), samples=2),  # type: ignore[arg-type] # likewise
            wrap(lambda batch: {}, Weightless(), **same),  # type: ignore[arg-type] # likewise
        ]

    async def main(graph: Graph[StepReport]) -> int:
        async with graph.open(prompts(4)) as run:
            return sum([len(report.trained) async for report in run.steps(1)])

    for number in range(3):
        tool = Tool()
        trained = run_virtual(main, graphs(tool)[number])
        assert len(tool.asked) == trained > 0


class Weightless:
    def state_dict(self) -> dict[str, object]:
        return {}


@pytest.mark.schedules
@given(settings(prompts=(7, 1_000)), st.lists(st.sampled_from([0.0, 0.003, 0.05, 1.0]), min_size=1, max_size=5))
def test_every_rollout_is_trained_once_with_all_of_its_turns(setting: Setting, seconds: list[float]) -> None:
    tool = Tool(lambda turn: seconds[(turn.prompt.rollout + turn.number) % len(seconds)])
    made = played(setting, tool, some_turns)
    rollouts = [rollout for batch in made.batches for rollout in batch.rollouts]
    assert sorted(rollouts) == list(range(len(rollouts)))
    for response in (each for batch in made.batches for each in batch.responses):
        turns = [end for end in some_turns(response.prompt) if end < setting.length(response.prompt)]
        assert turns_answered(response) == len(turns)
        assert response.sampled.sum() == setting.length(response.prompt)
    asked = [(rollout, number) for rollout, number, _, _ in tool.asked]
    assert len(asked) == len(set(asked)), "a cut asks no question again"


@pytest.mark.schedules
@given(settings(prompts=(1_000,), lookaheads=(0,)), st.lists(st.sampled_from([0.0, 0.02, 1.0]), min_size=1, max_size=5))
def test_where_decoding_holds_nothing_depends_on_how_long_tools_take(setting: Setting, seconds: list[float]) -> None:
    setting = replace(setting, paces=())
    tool = Tool(lambda turn: seconds[(turn.prompt.rollout + turn.number) % len(seconds)])
    slow = played(setting, tool, some_turns, holds=True)
    quick = played(setting, Tool(), some_turns, holds=True)
    assert same_batches(slow.batches, quick.batches)
    assert [report.deferred for report in slow.reports] == [report.deferred for report in quick.reports]


def some_turns(prompt: Prompt) -> Sequence[int]:
    """Return where turns end: none, one or three of them."""
    return ((), (2,), (1, 2, 9))[prompt.rollout % 3]


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


def tool_tokens_pipeline() -> Pipeline:
    made = Pipeline(SETTING)
    made.policy.given = lambda prompt: ANSWER
    made.critic = Reader()
    return made


def test_a_scorer_that_reads_a_rollout_again_is_told_again_what_was_given() -> None:
    played = tool_tokens_pipeline()
    run_virtual(played.run)
    assert isinstance(played.critic, Reader)
    whole = [rollout for rollout, start, length in played.critic.given if (start, length) == (3, 3)]
    carried = {defer.rollout for report in played.reports for defer in report.deferred}
    again = {rollout for rollout in whole if whole.count(rollout) > 1}
    assert again
    assert again <= carried


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


@dataclass
class AcceptsLate:
    """A decode whose turn is answered as the step is cut: the response ends with the next step, not with this one."""

    turns: list[IntArray]
    accepted: list[IntArray | None] = field(default_factory=list)

    async def turn(self) -> IntArray | None:
        return self.turns.pop() if self.turns else None

    def proceed(self, given: IntArray) -> bool:
        self.accepted.append(given)
        return True

    def finish(self) -> bool:
        self.accepted.append(None)
        return True


async def begins_none(segment: Prompt) -> bool:
    raise AssertionError(segment)


@pytest.mark.parametrize("length", [0, 2])
def test_a_turn_that_a_resumed_run_asks_again_is_rewarded_once(length: int) -> None:
    """Its answer ended the response, with a reward or as it had no room, and no step has seen that end."""
    prompt, turn = Prompt(0, 0, np.array([1], np.int32)), np.array([4, 5, 6], np.int32)

    async def played() -> list[tuple[int, object, Sequence[float | None]]]:
        tool = Tool(outcome=lambda turn: Answer(np.full(length, 7, np.int32), {"n": turn.number + 1}, reward=0.5))
        found = list[tuple[int, object, Sequence[float | None]]]()
        state: dict[str, Any] = {}
        for _ in range(3):  # each run but the last dies before a step sees the end
            decode = AcceptsLate([turn])
            async with Conversations(tool) as conversations:
                conversations.load_state_dict(state)
                rollout = InFlightRollout(prompt, cast("TurnDecode", decode))
                await conversations.converse(rollout, Step(0, 1, 0.0), begins_none)
                assert len(decode.accepted) == 1
                state = conversations.state_dict({0: len(turn)})
                rewards = [each.reward for each in conversations.answered(0)]
                found.append((tool.asked[-1][1], tool.asked[-1][3], rewards))
                assert [each["answered"] for each in conversations.state_dict({}).values()] == [int(length > 0)]
        return found

    assert run_virtual(played) == [(0, None, [0.5])] * 3
