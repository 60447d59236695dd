"""A function as an environment: text in, text out; what fails, hangs or is no answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import anyio
import numpy as np
import pytest

from oppo.environments import EnvironmentFailure, FunctionEnvironment, TextTurn
from oppo.events import Drop, Prompt
from oppo.testing import run_virtual
from oppo.turns import Answer, Turn
from tests.forked import is_alive


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


def encode(text: str) -> list[int]:
    return list(text.encode())


def turn(text: str = "2+3=", number: int = 0, state: object = None, rollout: int = 4) -> Turn:
    prompt = Prompt(rollout, rollout, np.array(encode("add"), np.int32), columns={"gold": 5})
    return Turn(prompt, number, np.array(encode(text), np.int32), state)


def environment(function: Callable[[TextTurn], object] | str, **options: object) -> FunctionEnvironment:
    return FunctionEnvironment(function, decode, encode, **options)  # type: ignore[arg-type] # keywords of the test


def answered(function: Callable[[TextTurn], object], **options: object) -> Answer | Drop | None:
    return run_virtual(lambda: environment(function, **options).answer(turn()))


def test_a_function_is_given_the_turn_as_text_and_answers_with_text() -> None:
    seen: list[TextTurn] = []

    def add(turn: TextTurn) -> str:
        seen.append(turn)
        return "5;"

    answer = answered(add)
    assert isinstance(answer, Answer)
    assert (answer.tokens.tolist(), answer.state) == (encode("5;"), None)
    assert answer.tokens.dtype == np.int32
    assert seen == [TextTurn("add", "2+3=", 0, None, {"gold": 5})]


def test_it_may_return_a_state_end_the_response_or_be_async() -> None:
    async def count(turn: TextTurn) -> tuple[str, object]:
        await anyio.sleep(1)
        return "x", {"calls": 1}

    answer = answered(count)
    assert isinstance(answer, Answer)
    assert answer.state == {"calls": 1}
    assert answered(lambda turn: None) is None


def test_a_reason_of_a_drop_can_be_written() -> None:
    dropped = answered(lambda turn: Drop.because("the tool said \ud800"))
    assert dropped == Drop(4, "the tool said \\ud800")


def test_a_prompt_column_is_given_instead_of_the_prompts_text() -> None:
    prompt = Prompt(0, 0, np.array(encode("a"), np.int32), columns={"question": "why?"})
    asked: list[object] = []
    asking = environment(lambda turn: asked.append((turn.prompt, dict(turn.columns))), prompt_column="question")
    run_virtual(lambda: asking.answer(Turn(prompt, 0, np.array([65], np.int32))))
    assert asked == [("why?", {})]


def raises(turn: TextTurn) -> str:
    raise KeyError("gold")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, r"environment 'raises' raised KeyError: 'gold' at .*test_environments.py:\d+ in raises"),
        (lambda turn: 5, r"must return a text, a pair of text and state, or None; got 5 \(int\)"),
        (lambda turn: "", r"must return a text.*got ''"),
        (lambda turn: ("a", 1, 2), "got .*tuple"),
        (lambda turn: "\ud800", "which cannot be tokenised: UnicodeEncodeError"),
        (lambda turn: ("a", {1j}), "must return a state of JSON values"),
        (lambda turn: pytest.fail("no"), "raised Failed: no at "),
        (lambda turn: Drop.because(None), "raised TypeError: the reason of a Drop is a text; got None"),  # type: ignore[arg-type] # that is the fault
        (lambda turn: "x" * 10_000_000, "returned 10000000 characters"),
    ],
)
def test_a_failure_names_the_function_and_the_turn_or_drops_the_rollout(
    function: Callable[[TextTurn], object], message: str
) -> None:
    with pytest.raises(EnvironmentFailure, match=message) as caught:
        answered(function)
    assert "(turn 0 of rollout 4)" in str(caught.value)
    dropped = answered(function, on_failure="drop")
    assert isinstance(dropped, Drop)
    assert (dropped.rollout, dropped.reason) == (4, str(caught.value))
    assert dropped.reason.encode("utf-8")


def test_what_a_function_does_to_the_columns_stays_with_it() -> None:
    prompt = Prompt(4, 4, np.array(encode("add"), np.int32), columns={"left": [1, 2], "prompt": ["a"]})
    seen = list[object]()

    def pops(turn: TextTurn) -> None:
        left, asked = turn.columns["left"], turn.prompt
        assert isinstance(left, list)
        assert isinstance(asked, list)
        seen.append((left.pop(), asked.pop()))

    for _ in range(2):
        run_virtual(environment(pops).answer, Turn(prompt, 0, np.array([65], np.int32)))
    assert seen == [(2, "a"), (2, "a")]
    assert prompt.columns == {"left": [1, 2], "prompt": ["a"]}


async def test_as_many_sync_calls_overlap_as_were_asked_for() -> None:
    together = threading.Barrier(64, timeout=30)

    def meets(turn: TextTurn) -> str:
        together.wait()
        return "a"

    asking = environment(meets)
    async with anyio.create_task_group() as tasks:
        for rollout in range(64):
            tasks.start_soon(asking.answer, turn(rollout=rollout))


APART = """
import os, time
def pid(turn):
    while turn.text == "hang":
        time.sleep(3600)
    while turn.text == "hold out":
        try:
            time.sleep(3600)
        except BaseException:
            pass
    return str(os.getpid())
"""


async def test_a_process_is_interrupted_where_it_hangs_and_killed_where_it_holds_out(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(APART)
    asking = environment(f"{tmp_path / 'tools.py'}:pid", process=True, timeout=3.0, concurrency=1)

    async def pid() -> int:
        answer = await asking.answer(turn())
        assert isinstance(answer, Answer)
        return int(decode(answer.tokens.tolist()))

    with closing(asking):
        first = await pid()
        assert first == await pid() != os.getpid()
        with pytest.raises(EnvironmentFailure, match=r"environment 'pid' took longer than 3 s"):
            await asking.answer(turn("hang"))
        assert first == await pid()
        with pytest.raises(EnvironmentFailure, match=r"environment 'pid' took longer than 3 s"):
            await asking.answer(turn("hold out"))
        assert not is_alive(first)
        second = await pid()
        assert is_alive(second)
    assert not is_alive(second)
