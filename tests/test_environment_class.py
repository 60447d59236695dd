"""Classes of environments by TRL's contract: an instance for each response, its methods as tools, and its reward."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache, wraps
from typing import Any, ClassVar, Self, cast
from weakref import WeakSet

import anyio
import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo import FunctionReward, Graph, Overcommit, Rewards, StepReport, Synchronous, grpo
from oppo.admission import Admission, TailBatched
from oppo.environments import EnvironmentClass, EnvironmentFailure, Environments, tools_of
from oppo.errors import ConfigError, DataError, RewardError
from oppo.evaluation import Evaluation
from oppo.events import Chunk, Drop, Finish, Prompt, Response, ToolTokens
from oppo.hf.chat import ChatFormat
from oppo.rewards import RewardInputs
from oppo.testing import FakePolicy, FakeTrainer, run_virtual
from oppo.turns import Answer, Turn
from tests.kit.turns import Guesses, Said, byte_chat, call
from tests.kit.virtual import virtually


class Guessing:
    """A number is to be guessed."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.guesses: list[int] = []
        self.lock = object()  # nothing that a checkpoint could hold

    def reset(self, secret: int, **row: object) -> str | None:
        """Begin."""
        self.secret = secret
        return f" It is below {secret + 10}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess.
        """
        self.guesses.append(number)
        return f"guess {len(self.guesses)}: {'right' if number == self.secret else 'wrong'}"

    def surrender(self) -> str:
        """End the game."""
        raise RuntimeError("no surrender")

    def get_reward(self) -> float:
        if self.secret == 13:
            return float("nan")
        return float(self.secret in self.guesses) - 0.1 * len(self.guesses)

    def _help(self) -> None:
        raise AssertionError


@cache
def chat() -> ChatFormat:
    return byte_chat(tools_of(Guessing))


def prompt(secret: int, rollout: int = 0) -> Prompt:
    return Prompt(rollout, rollout, np.array([65], np.int32), columns={"secret": secret, "prompt": "?"})


def tokens(text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(chat()._tokenizer.encode_whole(text + "<|im_end|>"), np.int32)


def guess(*numbers: int) -> str:
    return "".join(call("guess", number=number) + "\n" for number in numbers)


class Game:
    """A response that is played turn by turn."""

    def __init__(
        self, environment: EnvironmentClass, secret: int, rollout: int = 0, columns: Mapping[str, Any] | None = None
    ) -> None:
        start = prompt(secret, rollout)
        self.played = Said(environment, start if columns is None else replace(start, columns=columns), chat().tokenizer)

    def say(self, text: str) -> str | None:
        """Return what was answered."""
        answer = run_virtual(self.played.say, text)
        return chat().tokenizer.decode_whole(answer.tokens.tolist()) if isinstance(answer, Answer) else None

    def reward(self, environment: EnvironmentClass | None = None) -> float | Drop:
        asked: EnvironmentClass = environment or self.played.environment
        return run_virtual(asked.reward.finish, [self.played.finish()])[0]


class Connected(Guessing):
    """A game over a connection."""

    open: ClassVar[list[Connected]] = []

    def reset(self, secret: int, **row: object) -> str | None:
        """Begin."""
        self.open.append(self)
        return super().reset(secret, **row)

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess.
        """
        assert self in self.open
        return super().guess(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self in self.open:
            self.open.remove(self)


@pytest.fixture
def connections() -> list[Connected]:
    Connected.open.clear()
    return Connected.open


def played(environment: EnvironmentClass, secret: int) -> Game:
    game = Game(environment, secret)
    first = game.say(guess(3, 4) + call("surrender"))
    assert first is not None
    assert (
        first.index("guess 1: wrong") < first.index("guess 2: wrong") < first.index("Error: RuntimeError: no surrender")
    )
    return game


def test_an_instance_goes_through_a_response_and_gives_its_reward() -> None:
    environment, before = EnvironmentClass(Guessing, chat()), Guessing.made
    game = played(environment, 7)
    assert "guess 3: right" in str(game.say(guess(7)))
    assert game.say("It was 7.") is None
    assert game.reward() == pytest.approx(0.7)
    assert Guessing.made == before + 1


def test_the_calls_are_made_again_where_the_instance_is_gone() -> None:
    game = played(EnvironmentClass(Guessing, chat()), 7)
    game.played.environment = EnvironmentClass(Guessing, chat())
    assert "guess 3: right" in str(game.say(guess(7)))
    assert game.say("It was 7.") is None
    assert game.reward(EnvironmentClass(Guessing, chat())) == game.reward() == pytest.approx(0.7)


def test_a_response_goes_on_with_an_instance_that_no_other_has_left(connections: list[Connected]) -> None:
    environment = EnvironmentClass(Connected, chat())
    ahead, behind = Game(environment, 7, 0), Game(environment, 7, 1)
    ahead.say(guess(1))
    assert ahead.say("It was 7.") is None
    behind.say(guess(1))
    assert "guess 2: right" in str(behind.say(guess(7)))
    assert [game.reward() for game in (ahead, behind)] == pytest.approx([-0.1, 0.8])
    assert connections == []


@virtually
async def test_an_instance_whose_calls_are_made_again_in_vain_is_left(connections: list[Connected]) -> None:
    class Slow(Connected):
        async def guess(self, number: int) -> str:  # type: ignore[override]
            """Guess the number.

            Args:
                number: the guess.
            """
            await anyio.sleep(10)
            return str(number)

    environment = EnvironmentClass(Slow, chat())
    with anyio.move_on_after(1):
        await environment.answer(Turn(prompt(7), 1, tokens("x"), {"key": "", "calls": [["guess", {"number": 1}]]}))
    assert connections == []


def test_rows_end_with_what_reset_says() -> None:
    environment = EnvironmentClass(Guessing, chat())
    chats: list[dict[str, object]] = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Guess."}]
    rows = [{"prompt": "Guess.", "secret": 5}, {"prompt": chats, "secret": 6}]
    text, messages = (each["prompt"] for each in environment.rows(rows))
    assert text == "Guess. It is below 15."
    assert messages == [chats[0], {"role": "user", "content": "Guess. It is below 16."}]
    assert rows[1]["prompt"] == chats
    assert environment.begun({"secret": 5})["prompt"] == [{"role": "user", "content": " It is below 15."}]
    with pytest.raises(DataError, match="added to a prompt of text or to its last message; the prompt is "):
        list(environment.rows([{"prompt": [], "secret": 5}]))


def begun(environment: EnvironmentClass, rollout: int = 0, /, **row: object) -> Game:
    """Return a response to a row that the environment began."""
    return Game(environment, 0, rollout, environment.begun({"prompt": "?", **row}))


class Counting(Guessing):
    resets = 0

    def reset(self, secret: int, **row: object) -> str | None:
        type(self).resets += 1
        self.own = type(self).resets
        return super().reset(secret, **row)


def test_an_instance_is_reset_once_a_response_also_where_its_prompt_was_made_of_it() -> None:
    environment = EnvironmentClass(Counting, chat())
    Counting.resets = 0
    first = begun(environment, secret=7)
    twin = Game(environment, 0, 1, first.played.prompt.columns)
    assert Counting.resets == 1
    for game in (first, twin):
        assert "right" in str(game.say(guess(7)))
        assert game.say("It was 7.") is None
        assert game.reward() == pytest.approx(0.9)
    assert Counting.resets == 2
    silent = begun(environment, 2, secret=8)
    assert silent.reward() == 0.0
    assert Counting.resets == 3


def test_instances_that_rows_were_read_with_are_kept_for_the_latest_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = WeakSet[object]()

    class Remembered(Counting):
        def reset(self, secret: int, **row: object) -> str | None:
            alive.add(self)
            return super().reset(secret, **row)

    monkeypatch.setattr("oppo.environments.classes.BEGUN", 3)
    environment = EnvironmentClass(Remembered, chat())
    games = [begun(environment, at, secret=at, number=at) for at in range(9)]
    gc.collect()
    assert len(alive) == 3
    Remembered.resets = 0
    for at, resets in (8, 0), (0, 1):
        assert games[at].reward() == 0.0
        assert Remembered.resets == resets


def test_what_reset_says_must_depend_on_the_row_alone() -> None:
    class Fickle(Counting):
        def reset(self, secret: int, **row: object) -> str | None:
            super().reset(secret)
            return f" It is the {type(self).resets}. time."

    environment = EnvironmentClass(Fickle, chat())
    first, _ = (begun(environment, at, secret=7) for at in range(2))
    second = Game(environment, 0, 1, first.played.prompt.columns)
    assert "wrong" in str(first.say(guess(1)))
    with pytest.raises(
        EnvironmentFailure, match=r"reset\(\) of the environment said ' It is the \d+. time.', and of the same"
    ):
        second.say(guess(1))


@pytest.mark.parametrize("content", ["", [], [{"type": "image", "image": "a.png"}], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("said", [None, " Now."])
def test_a_last_message_may_have_no_text_where_reset_says_none(content: object, said: str | None) -> None:
    class Silent(Guessing):
        def reset(self, secret: int, **row: object) -> str | None:
            super().reset(secret)
            resets.append(secret)
            return said if len(resets) > 1 else None

    resets = list[int]()
    environment = EnvironmentClass(Silent, chat())
    game = begun(environment, prompt=[{"role": "user", "content": content}], secret=7)
    twin = Game(environment, 0, 1, game.played.prompt.columns)
    assert "wrong" in str(game.say(guess(1)))
    if said is None:
        assert "wrong" in str(twin.say(guess(1)))
        return
    with pytest.raises(EnvironmentFailure, match=r"said ' Now.', and of the same row before what the prompt ends with"):
        twin.say(guess(1))


def test_functions_that_make_instances_are_factories() -> None:
    environment = EnvironmentClass(lambda: Guessing(), chat())  # noqa: PLW0108 - that is the case
    assert environment.name == "Guessing"
    assert played(environment, 7).reward() == pytest.approx(-0.2)
    with pytest.raises(ConfigError, match=r"the factory of environments .* raised ZeroDivisionError"):
        EnvironmentClass(lambda: 1 / 0, chat())
    with pytest.raises(ConfigError, match="objects of this process: leave process out"):
        EnvironmentClass(Guessing, chat(), process=True)


def test_a_reward_function_sees_the_instances_that_give_the_reward() -> None:
    environment = EnvironmentClass(Counting, chat())
    game = begun(environment, secret=7)
    game.say(guess(1, 7))
    resets = Counting.resets

    def count(completions: object, environments: list[Counting]) -> list[float]:
        return [float(len(each.guesses)) for each in environments]

    both = Rewards(
        {"won": (1.0, environment.reward), "count": (1.0, count)},
        str,
        inputs=RewardInputs(environments=environment.instance),
    )
    finish = game.played.finish()
    assert run_virtual(both.finish, [finish]) == [pytest.approx(0.8 + 2.0)]
    assert Counting.resets == resets
    plain = FunctionReward(lambda completions, environments=None: [float(environments is None)], str)
    assert run_virtual(plain.finish, [finish]) == [1.0]
    with pytest.raises(RewardError, match="asks for environments, and there are none"):
        FunctionReward(count, str)
    with pytest.raises(RewardError, match="environments, which are objects of this process"):
        FunctionReward(count, str, inputs=RewardInputs(environments=environment.instance), process=True)


class Sums:
    def reset(self, **row: object) -> None:
        assert "environment" not in row

    def add(self, left: int, right: int) -> int:
        """Add.

        Args:
            left: the first.
            right: the second.
        """
        return left + right


def test_a_column_names_the_environment_of_a_row() -> None:
    sums = EnvironmentClass(Sums, byte_chat(tools_of(Sums)))
    environment = Environments({"guess": EnvironmentClass(Guessing, chat()), "sum": sums})
    game = begun(cast("EnvironmentClass", environment), environment="guess", secret=7)
    other = begun(cast("EnvironmentClass", environment), 1, environment="sum")
    assert "right" in str(game.say(guess(7)))
    assert "3" in str(other.say(call("add", left=1, right=2)))
    assert "there is no tool 'guess'; the tools are add" in str(other.say(guess(7)))
    assert game.reward() == pytest.approx(0.9)
    none = other.reward()
    assert isinstance(none, Drop)
    assert none.reason == "the reward does not apply"
    with pytest.raises(DataError, match="expected one of guess, sum in the column 'environment' of each row, got 'x'"):
        environment.begun({"environment": "x"})
    with pytest.raises(ConfigError, match="at least one environment"):
        Environments({})
    with pytest.raises(ConfigError, match=r"none of sum has a method get_reward\(\)"):
        _ = Environments({"sum": sums}).reward


def test_a_reward_that_is_none_ends_the_run_or_drops_the_rollout() -> None:
    with pytest.raises(
        EnvironmentFailure, match=r"get_reward\(\) of the environment must return a finite number; got nan"
    ):
        Game(EnvironmentClass(Guessing, chat()), 13).reward()
    dropped = Game(EnvironmentClass(Guessing, chat(), on_failure="drop"), 13, 4).reward()
    assert isinstance(dropped, Drop)
    assert dropped.rollout == 4


def logged(method: Callable[..., str]) -> Callable[..., str]:
    @wraps(method)
    def wrapper(this: object, *args: Any, **kwargs: Any) -> str:
        return f"logged: {method(this, *args, **kwargs)}"

    return wrapper


class Kinds(dict[str, int]):
    """Methods of every kind; those of ``dict`` are shown to nobody."""

    def reset(this, /, secret: int, **row: object) -> None:  # noqa: N805 - a name is free
        this.secret = secret

    def plain(this, x: int) -> str:  # noqa: N805 - a name is free
        """Add.

        Args:
            x: a number.
        """
        return str(this.secret + x)

    @logged
    def wrapped(self, x: int) -> str:
        """Add.

        Args:
            x: a number.
        """
        return str(self.secret + x)

    @staticmethod
    def static(x: int) -> str:
        """Double.

        Args:
            x: a number.
        """
        return str(2 * x)

    @classmethod
    async def of_class(cls, x: int) -> str:
        """Name.

        Args:
            x: a number.
        """
        return f"{cls.__name__} {x}"

    def by_position(self, y: int = 1, x: int = 2, /) -> str:
        """Subtract.

        Args:
            y: a number.
            x: a number.
        """
        return str(x - y)

    def close(self) -> str:
        """Free what it holds."""
        raise AssertionError

    def get_reward(this) -> float:  # noqa: N805 - a name is free
        return float(this.secret)


def test_a_public_method_of_any_kind_is_called_but_no_method_of_life() -> None:
    names = [tool.__name__ for tool in tools_of(Kinds)]
    assert names == ["plain", "wrapped", "static", "of_class", "by_position"]
    chat = byte_chat(tools_of(Kinds))
    environment = EnvironmentClass(Kinds, chat)
    played = Said(environment, prompt(4), chat.tokenizer)

    async def main() -> tuple[Any, object]:
        answer = await played.say("\n".join(call(name, x=3) for name in names))
        return answer, await environment.earned(Finish(0, Response.empty(played.prompt), "eos"))

    answer, earned = run_virtual(main)
    assert [each["content"] for each in answer.said] == ["7", "logged: 7", "6", "Kinds 3", "2"]
    assert earned == 4.0


class NoReset:
    def guess(self, number: int) -> str:
        return ""


class NoReward(Guessing):
    get_reward = None  # type: ignore[assignment] # that is the case


def test_a_class_that_keeps_no_contract_is_refused() -> None:
    assert [tool.__name__ for tool in tools_of(NoReward)] == ["guess", "surrender"]
    with pytest.raises(ConfigError, match="NoReset is no class of environments: it needs reset"):
        EnvironmentClass(NoReset, chat())
    with pytest.raises(ConfigError, match=r"NoReward has no method get_reward\(\)"):
        _ = EnvironmentClass(NoReward, chat()).reward


def games(*secrets: int) -> list[Prompt]:
    tokens, several = np.array([1, 2], np.int32), len(secrets)
    return [Prompt(at, at, tokens, group=at, columns={"secret": secrets[at % several]}) for at in range(60)]


def straggling(*turns: int, cap: int = 1000) -> FakePolicy:
    """A policy whose every third response has 60 tokens more after the seventh."""

    def late(prompt: Prompt) -> int:
        return 60 * (prompt.rollout % 3 == 0)

    return FakePolicy(
        length=lambda prompt: turns[-1] + 1 + late(prompt),
        turns=lambda prompt: [end + late(prompt) * (end > 7) for end in turns],
        cap=cap,
    )


def playing(environment: EnvironmentClass, policy: FakePolicy, **others: Any) -> Graph[StepReport]:
    models: dict[str, Any] = {
        "reward": environment.reward,
        "trainer": FakeTrainer(),
        "admission": Overcommit(batch=4, overcommit=3),
    }
    return grpo(policy=policy, samples=2, environment=environment, **models | others)


def test_an_evaluation_leaves_the_instances_of_deferred_responses_alone(connections: list[Connected]) -> None:
    environment = EnvironmentClass(Connected, cast("ChatFormat", Guesses()), max_turns=2)
    policy, rows = straggling(3, 7), games(4)
    graph = playing(environment, policy)
    evaluation = Evaluation(prompts=rows[:3], reward=environment.reward, greedy=policy, environment=environment)

    async def main() -> list[list[Connected]]:
        found = []
        async with graph.open(rows) as run:
            async for report in run.steps(3):
                before = [*connections]
                await evaluation.measure(report.index)
                assert connections == before
                found.append(before)
        return found

    assert any(run_virtual(main))
    assert connections == []


@pytest.mark.parametrize("admission", [TailBatched(batch=4, launch=2), Overcommit(batch=4, overcommit=3)])
@virtually
async def test_what_is_open_at_the_end_of_a_step_without_its_reward_is_of_responses_that_go_on(
    admission: Admission, connections: list[Connected]
) -> None:
    environment = EnvironmentClass(Connected, cast("ChatFormat", Guesses()), max_turns=2)

    def zeros(completions: list[str], **row: object) -> list[float]:
        return [0.0] * len(completions)

    graph = playing(environment, straggling(3, 7, cap=20), reward=FunctionReward(zeros, str), admission=admission)
    deferred = list[int]()
    async with graph.open(games(4, 5)) as run:
        async for report in run.steps(6):
            going_on = 0 if isinstance(admission, TailBatched) else len(report.deferred)
            assert len(connections) <= going_on
            deferred.append(len(report.deferred))
    assert sum(deferred) > 0


class Tallied:
    """Tells what was done with each instance."""

    instances: ClassVar[list[Tallied]] = []

    def __init__(self) -> None:
        self.resets, self.calls, self.left = 0, 0, 0
        self.instances.append(self)

    def reset(self, **row: object) -> None:
        self.resets += 1

    def guess(self, number: int) -> str:
        self.calls += 1
        if number == 6:
            raise ValueError("no sixes")
        return ""

    def get_reward(self) -> float:
        return float(self.calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.left += 1


class Asked(EnvironmentClass):
    """Counts the calls of the last beginning of each rollout, and of all."""

    def __init__(self, kind: type, **options: Any) -> None:
        super().__init__(kind, cast("ChatFormat", Guesses()), **options)
        self.calls = Counter[int]()
        self.made = 0

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        self.calls[turn.prompt.rollout] = turn.number + 1
        self.made += 1
        return await super().answer(turn)


@pytest.mark.schedules
@given(
    st.lists(st.sampled_from([(), (3,), (6,), (3, 7), (2, 6, 9), (1, 2, 3, 20)]), min_size=1, max_size=5),
    st.sampled_from([5, 9, 20, 1000]),
    st.sampled_from([Overcommit(batch=4, overcommit=3), TailBatched(batch=4, launch=2), Synchronous(batch=2)]),
    st.sampled_from([0, 1]),
    st.booleans(),
)
@virtually
async def test_an_instance_lives_as_long_as_its_rollout_and_what_was_done_is_scored(
    turns: list[tuple[int, ...]], cap: int, admission: Admission, lookahead: int, drops: bool
) -> None:
    Tallied.instances = []
    environment = Asked(Tallied, on_failure="drop" if drops else "answer")
    trainer, policy = FakeTrainer(), straggling(1, cap=cap)
    policy.turns = lambda prompt: turns[prompt.rollout % len(turns)]
    policy.length = lambda prompt: 24 + 40 * (prompt.rollout % 3 == 0)
    scored: list[object] = []

    def second(completions: object, environments: list[Tallied]) -> list[float]:
        scored.extend(environments)
        return [0.0] * len(environments)

    both: dict[str, Any] = {"won": (1.0, environment.reward), "none": (1.0, second)}
    reward = Rewards(both, str, inputs=RewardInputs(environments=environment.instance))
    graph = playing(environment, policy, reward=reward, trainer=trainer, admission=deepcopy(admission))
    async with graph.open(games(4, 5), lookahead=lookahead) as run:
        async for report in run.steps(4):
            in_flight = 0 if isinstance(admission, TailBatched) else len(report.deferred)
            assert lookahead or sum(not each.left for each in Tallied.instances) <= in_flight
            assert lookahead or len(environment._lives) <= in_flight + len(report.trained) + len(report.dropped)
    scores = [(at, score) for batch in trainer.batches for at, score in zip(batch.rollouts, batch.scores, strict=True)]
    assert scores or drops
    assert all(score == environment.calls[at] for at, score in scores)
    assert all((each.resets, each.left) == (1, 1) for each in Tallied.instances)
    assert sum(each.calls for each in Tallied.instances) == environment.made
    assert len(set(map(id, scored))) == len(scored)
    assert not environment._lives


def test_calls_are_made_once_however_many_responses_are_in_flight_and_rewards_ask() -> None:
    Tallied.instances = []
    environment, said = Asked(Tallied), np.array([1], np.int32)
    zero = np.zeros(1, np.float32)

    async def main() -> list[float | Drop]:
        starts, finished = [prompt(1, rollout) for rollout in range(4200)], list[Finish]()
        for start in starts:
            await environment.answer(Turn(start, 0, said))
        for start in starts:
            pieces: list[Chunk | ToolTokens] = [Chunk(0, 0, said, zero, zero.astype(np.int32)), ToolTokens(0, 1, said)]
            finished.append(Finish(start.rollout, Response.of(start, pieces), "eos"))
        async with environment:
            return [*await environment.reward.finish(finished), *await environment.reward.finish(finished[:600])]

    assert run_virtual(main) == [1.0] * 4800
    assert {(each.resets, each.calls, each.left) for each in Tallied.instances} == {(1, 1, 1)}
    assert len(Tallied.instances) == 4200


def test_what_was_done_without_room_for_the_answer_is_scored_in_a_resumed_run_too() -> None:
    game = Game(EnvironmentClass(Guessing, chat()), 7)
    game.say(guess(7))
    game.played.pieces.pop()
    resumed = EnvironmentClass(Guessing, chat())
    resumed.forget(game.played.prompt, game.played.state)
    assert game.reward(resumed) == game.reward() == pytest.approx(0.9)


def test_a_reset_that_hangs_while_rows_are_read_is_logged_and_ends_at_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hanging(Tallied):
        def reset(self, **row: object) -> None:
            at_work.append(environment.at_work)
            while not said:
                time.sleep(0.001)

    at_work, said = list[str](), list[str]()
    monkeypatch.setattr("oppo.user_code.logger.warning", said.append)
    environment = EnvironmentClass(Hanging, cast("ChatFormat", Guesses()), timeout=0.01)
    with pytest.raises(
        EnvironmentFailure, match=r"reset\(\) of the environment took longer than 0.01 s \(reading a row"
    ):
        environment.begun({})
    monkeypatch.setattr("oppo.user_code.NOTICE_SECONDS", 0.01)
    environment = EnvironmentClass(Hanging, cast("ChatFormat", Guesses()))
    environment.begun({})
    assert at_work == ["reset() of the environment"] * 2
    assert "reset() of the environment has not returned for 0.01 s (reading a row): a timeout would end it" in said[0]
