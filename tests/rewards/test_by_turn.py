"""Rewards of turns: of environment classes and functions, reward functions and judges; and those that are none."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from oppo.environments import EnvironmentClass, EnvironmentFailure, FunctionEnvironment, TextAnswer, TextTurn, tools_of
from oppo.errors import ConfigError, RewardError
from oppo.events import AnsweredTurn, Drop, Finish, Prompt
from oppo.hf.chat import ChatFormat
from oppo.rewards import ByTurn, FunctionReward, TokenRewards
from oppo.rewards.judge import reading_of
from oppo.testing import run_virtual
from oppo.turns import Answer, Turn
from tests.kit.responses import ended
from tests.kit.turns import Said, byte_chat, call


class Walk:
    """A walk on a line; each step has a reward, which the environment forgets once it was asked for."""

    def reset(self, **row: object) -> None:
        self.place, self.earned = 0, 0.0

    def step(self, by: int) -> str:
        """Go on.

        Args:
            by: how far.
        """
        self.place += by
        self.earned += 0.5 * by
        return "here"

    def get_turn_reward(self) -> float:
        earned, self.earned = self.earned, 0.0
        return earned

    def get_turn_state(self) -> dict[str, int]:
        return {"place": self.place}

    def get_reward(self) -> float:
        return 10.0 * self.place + 100.0 * self.earned  # nothing, if each turn was asked for


class OddReward(Walk):
    def get_turn_reward(self) -> Any:
        return "much"


class OddState(Walk):
    def get_turn_state(self) -> Any:
        return object()


@cache
def chat() -> ChatFormat:
    return byte_chat(tools_of(Walk))


def walk(kind: type[Walk] = Walk, **options: Any) -> Said:
    prompt = Prompt(3, 3, np.array([65], np.int32), columns={"prompt": "?"})
    return Said(EnvironmentClass(kind, chat(), **options), prompt, chat().tokenizer)


def steps(*by: int) -> str:
    return "".join(call("step", by=each) for each in by)


def ends(said: Said) -> list[int]:
    return [turn.end - 1 for turn in said.answered]


def test_a_class_says_what_a_turn_earned_and_in_which_state_it_was_taken() -> None:
    said = walk()
    for text in (steps(1), steps(2, 3), "done"):
        run_virtual(said.say, text)
    assert [turn.reward for turn in said.answered] == [0.5, 2.5, None]
    assert [turn.key for turn in said.answered] == ['{"place": 0}', '{"place": 1}', '{"place": 6}']
    score = run_virtual(said.reward)
    assert isinstance(score, TokenRewards)
    assert score == 60.0 + 3.0
    assert {at: score.rewards[at] for at in np.flatnonzero(score.rewards)} == {
        **dict(zip(ends(said)[:2], [0.5, 2.5], strict=True)),
        said.length - 1: 60.0,
    }


def test_a_class_that_is_resumed_is_asked_for_the_rewards_of_its_turns_again() -> None:
    said = walk()
    run_virtual(lambda: said.say(steps(1)))
    said.environment = walk().environment  # a resumed run's, given the calls so far
    run_virtual(lambda: said.say(steps(2)))
    assert [turn.reward for turn in said.answered] == [0.5, 1.0], "the first turn's is not earned again"
    said.environment = walk().environment
    assert run_virtual(said.reward) == 30.0 + 1.5


def test_the_policy_does_not_call_what_a_run_asks_and_its_text_does_not_either() -> None:
    assert [tool.__name__ for tool in tools_of(Walk)] == ["step"]
    said = walk()
    run_virtual(lambda: said.say(steps(4) + call("get_turn_reward")))
    assert "there is no tool" in said.text()
    assert [turn.reward for turn in said.answered] == [2.0]
    said.environment = walk().environment
    assert run_virtual(said.reward) == 42.0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OddReward, r"get_turn_reward\(\) of the environment must return a finite number; got 'much'"),
        (OddState, r"get_turn_state\(\) of the environment must return JSON values that are equal in equal states"),
    ],
)
def test_a_reward_or_a_state_that_is_none_ends_the_run_or_drops_the_rollout(kind: type[Walk], words: str) -> None:
    with pytest.raises(EnvironmentFailure, match=words):
        run_virtual(lambda: walk(kind).say(steps(1)))
    dropped = run_virtual(lambda: walk(kind, on_failure="drop").say(steps(1)))
    assert isinstance(dropped, Drop)


def environment(outcome: object) -> FunctionEnvironment:
    def answer(turn: TextTurn) -> object:
        return outcome

    return FunctionEnvironment(answer, lambda ids: bytes(ids).decode(), lambda text: [*text.encode()])


def turn() -> Turn:
    return Turn(Prompt(3, 3, np.array([65], np.int32)), 0, np.array([66], np.int32))


def answered(outcome: object) -> Answer | Drop | None:
    made = environment(outcome)
    made._decode = lambda tokens: bytes(tokens).decode()
    return run_virtual(lambda: made.answer(turn()))


def test_a_function_answers_with_a_reward_and_a_key_and_may_end_the_response_with_them() -> None:
    answer = answered(TextAnswer("on", {"at": 1}, reward=0.5, key="k"))
    assert isinstance(answer, Answer)
    assert (bytes(answer.tokens.tolist()), answer.state, answer.reward, answer.key) == (b"on", {"at": 1}, 0.5, "k")
    last = answered(TextAnswer("", reward=1.0))
    assert isinstance(last, Answer)
    assert (len(last.tokens), last.reward) == (0, 1.0)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (TextAnswer(""), "must return a text, a pair of text and state, a TextAnswer, or None"),
        (TextAnswer("on", reward=float("inf")), "must return a finite number or None as the reward of a turn"),
        (TextAnswer("on", reward=True), "must return a finite number or None as the reward of a turn"),
        (TextAnswer("on", key=7), "and a text as its key"),  # type: ignore[arg-type]
        (TextAnswer("on", object()), "must return a state of JSON values"),
    ],
)
def test_an_answer_that_is_none_is_a_failure_of_the_function(outcome: object, words: str) -> None:
    with pytest.raises(EnvironmentFailure, match=words):
        answered(outcome)


def of_turns(*rewards: float | None) -> Finish:
    """Return a response of four tokens a turn, with these rewards and one turn more."""
    answered = [AnsweredTurn(4 * (number + 1), reward) for number, reward in enumerate(rewards)]
    return replace(ended(3, [0] * 4 * (len(rewards) + 1)), answered=answered)


def test_a_function_is_a_reward_unless_it_rewarded_nothing() -> None:
    reward = environment(None).reward
    (score,) = run_virtual(lambda: reward.finish([of_turns(0.5, None)]))
    assert isinstance(score, TokenRewards)
    assert (float(score), score.rewards[3]) == (0.5, 0.5)
    assert run_virtual(lambda: reward.finish([of_turns()])) == [0.0], "its only turn was not answered"
    with pytest.raises(EnvironmentFailure, match=r"'answer' gave no turn a reward, .* TextAnswer\(\.\.\., reward"):
        run_virtual(lambda: reward.finish([of_turns(None)]))


def scored(returned: object, **options: Any) -> float | Drop:
    def reward(completions: list[str]) -> list[object]:
        return [returned]

    function = FunctionReward(reward, lambda tokens: "?", **options)
    return run_virtual(lambda: function.finish([of_turns(None)]))[0]


@pytest.mark.parametrize(
    ("returned", "rewards"),
    [
        (ByTurn([0.5, 2]), {3: 0.5, 7: 2}),
        (ByTurn({-1: 1, 0: 3}), {3: 3, 7: 1}),
        (ByTurn([0.5]), {3: 0.5}),
        (ByTurn({}), {}),
    ],
)
def test_a_reward_function_rewards_turns_at_their_last_tokens(returned: ByTurn, rewards: dict[int, float]) -> None:
    score = scored(returned)
    assert isinstance(score, TokenRewards)
    assert {at: score.rewards[at] for at in np.flatnonzero(score.rewards)} == rewards
    assert float(score) == float(returned) == float(pickle.loads(pickle.dumps(returned)))


def test_a_reward_for_a_turn_that_is_not_there_is_a_failure_of_the_function() -> None:
    with pytest.raises(RewardError, match="there is no turn 2 in a response of 2 turns to be rewarded"):
        scored(ByTurn([1, 2, 3]))
    assert isinstance(scored(ByTurn({5: 1.0}), on_failure="drop"), Drop)
    with pytest.raises(ValueError, match=r"'much' \(str\) is no finite number"):
        ByTurn({0: "much"})  # type: ignore[dict-item]


def test_a_judge_gives_a_score_for_each_turn_in_a_list() -> None:
    choice = {"message": {"content": f"Thus: {json.dumps({'scores': [1, 0.5]})}"}}
    score = reading_of("json:scores")(choice)
    assert isinstance(score, ByTurn)
    assert score.rewards == {0: 1.0, 1: 0.5}
    with pytest.raises(ValueError, match="expected a finite number as the score, got 'NaN'"):
        reading_of("json:scores")({"message": {"content": '{"scores": ["NaN"]}'}})


def test_a_class_without_any_reward_gives_none() -> None:
    class Silent:
        reset, step = Walk.reset, Walk.step

    made = EnvironmentClass(Silent, chat())
    assert not made.gives_reward
    with pytest.raises(ConfigError, match=r"no method get_reward\(\)"):
        _ = made.reward
