"""Functions as environments and as tools: their answers, and what fails, hangs or is none."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo.data import read_prompts
from oppo.environments import EnvironmentFailure, FunctionEnvironment, TextTurn, Tools
from oppo.errors import ConfigError, DataError
from oppo.events import Drop, Prompt
from oppo.hf.chat import ChatFormat, chatting
from oppo.run.rewards import begin_of
from oppo.testing import run_virtual
from oppo.turns import Answer, Turn
from tests.hf.spot_tokenizers import byte_tokenizer
from tests.kit.forked import is_alive
from tests.kit.turns import TEMPLATE, byte_chat, call


async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long.
    """
    await anyio.sleep(seconds)
    return f"waited {seconds}"


def add(left: int, right: int = 1) -> int:
    """Add two numbers.

    Args:
        left: the first.
        right: the second.
    """
    return left + right


def broken() -> str:
    """Break."""
    raise OSError("no network")


def odd() -> object:
    """Return what is no JSON."""
    return {1j}


def pid() -> int:
    """Return where it runs."""
    return os.getpid()


EVERY: tuple[Callable[..., object], ...] = (slow, add, broken, odd, pid)


@cache
def chat() -> ChatFormat:
    return byte_chat(EVERY)


def turn(text: str, number: int = 0) -> Turn:
    tokens = chat()._tokenizer.encode_whole(text + "<|im_end|>")
    return Turn(Prompt(4, 4, np.array([65], np.int32)), number, np.array(tokens, np.int32))


def said(answer: Answer | Drop | None) -> list[str]:
    """Return what each call was answered."""
    assert isinstance(answer, Answer)
    text = chat()._tokenizer.decode_whole(answer.tokens.tolist())
    assert text.startswith("\n<|im_start|>user\n<tool_response>")
    assert text.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
    return [part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]


def answered(text: str, **options: Any) -> Answer | Drop | None:
    return run_virtual(lambda: Tools(EVERY, chat(), **options).answer(turn(text)))


@given(st.lists(st.sampled_from([each.__name__ for each in EVERY]), unique=True))
def test_a_row_is_shown_the_tools_that_it_names_and_calls_no_others(names: list[str]) -> None:
    tools = Tools(EVERY, chat(), column="for")
    asked = turn(call("pid") + call("add", left=2))
    prompt, row = asked.prompt, {"for": names}
    view = tools.of(row)
    rendered = view.chat.tokenizer.rendered([{"role": "user", "content": "Hello."}], answered=False).text
    assert [each.__name__ for each in EVERY if f'"name": "{each.__name__}"' in rendered] == view.names
    assert view.names == [name for name in tools.names if name in names]
    answer = run_virtual(tools.answer, replace(asked, prompt=replace(prompt, columns=row)))
    if not names:  # without tools there are no calls
        assert answer is None
        return
    found = {"pid": str(os.getpid()), "add": "3"}
    no = "Error: there is no tool {!r}; the tools are " + ", ".join(view.names)
    assert said(answer) == [text if name in names else no.format(name) for name, text in found.items()]
    assert tools.of({"for": None}) is tools.of({}) is tools


@pytest.mark.parametrize("named", [["add", "sub"], "add", [3], {"add": 1}, [["add"]]])
def test_a_row_that_names_an_unknown_tool_is_refused_when_it_is_read(named: object) -> None:
    begin = begin_of(Tools([add, pid], chat(), column="for"))
    rows: list[dict[str, object]] = [{"prompt": "Add.", "for": ["add"]}, {"prompt": "Add.", "for": named}]
    words = r"expected a list of some of add, pid in the column 'for', got .*: correct the data, or give"
    with pytest.raises(DataError, match=words) as caught:
        read_prompts(rows, chat().tokenizer, begin=begin)
    assert caught.value.__notes__ == ["while reading row 2"]


def test_calls_of_a_turn_overlap_and_are_answered_in_their_order() -> None:
    async def main() -> tuple[Answer | Drop | None, float]:
        tools = Tools(EVERY, chat())
        answer = await tools.answer(turn(call("slow", seconds=3) + call("slow", seconds=2) + call("add", left=2)))
        assert not tools.at_work
        return answer, anyio.current_time()

    answer, seconds = run_virtual(main)
    assert said(answer) == ["waited 3", "waited 2", "3"]
    assert seconds == pytest.approx(3.0)
    assert isinstance(answer, Answer)
    assert (answer.calls, answer.failures, answer.state) == (3, 0, None)


def test_a_turn_without_a_call_or_one_too_many_ends_the_response() -> None:
    assert answered("The answer is 5.") is None
    tools = Tools(EVERY, chat(), max_turns=2)
    given = [run_virtual(tools.answer, turn(call("pid"), at)) for at in range(3)]
    assert [each is None for each in given] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "words", "wrote_wrongly"),
    [
        (call("broken"), "Error: OSError: no network", False),
        (call("odd"), "Error: TypeError: Object of type set is not JSON serializable", False),
        (call("multiply"), "Error: there is no tool 'multiply'; the tools are slow, add, broken, odd, pid", True),
        (call("add"), "Error: add(): missing a required argument: 'left'", True),
        (call("add", left=1, up=2), "Error: add(): got an unexpected keyword argument 'up'", True),
        (
            "<tool_call>\n{not json}\n</tool_call>",
            "Error: the call cannot be read: JSONDecodeError: Expecting property",
            True,
        ),
        (call("slow", seconds=60), "Error: tool 'slow' took longer than 9 s (turn 0 of rollout 4)", False),
    ],
)
def test_a_failure_is_told_beside_what_did_not_fail_and_one_of_a_tool_may_drop_the_rollout(
    text: str, words: str, *, wrote_wrongly: bool
) -> None:
    answer = answered(call("add", left=2) + text, timeout=9)
    assert isinstance(answer, Answer)
    first, second = said(answer)
    assert first == "3"
    assert second.startswith(words)
    assert (answer.calls, answer.failures) == (2, 1)
    assert [each["content"] for each in answer.said] == [first, second]
    dropped = answered(text, on_failure="drop", timeout=9)
    assert isinstance(dropped, Answer if wrote_wrongly else Drop)
    assert wrote_wrongly or (isinstance(dropped, Drop) and dropped.rollout == 4)


def test_a_failure_of_a_tool_ends_the_run_if_asked_but_not_what_the_policy_does_wrong() -> None:
    with pytest.raises(EnvironmentFailure, match=r"tool 'broken' raised OSError: no network at .*test_tools.py"):
        answered(call("broken"), on_failure="fail")
    assert said(answered(call("add"), on_failure="fail"))[0].startswith("Error: add()")


async def test_sync_tools_work_in_processes_of_their_own() -> None:
    tools = Tools([pid], chat(), process=True, concurrency=1)
    with closing(tools):
        async with tools:
            (one,) = said(await tools.answer(turn(call("pid"))))
    assert int(one) != os.getpid()


def test_a_cancelled_turn_cancels_its_calls() -> None:
    async def main() -> float:
        tools = Tools(EVERY, chat())
        with anyio.move_on_after(1):
            await tools.answer(turn(call("slow", seconds=60)))
        assert not tools.at_work
        return anyio.current_time()

    assert run_virtual(main) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([print], "is not shown the tool 'print'"),
        ([add, add], "each with a name of its own; got add, add"),
        ([], "got none: of a class, public methods are tools"),
    ],
)
def test_tools_that_the_policy_cannot_tell_are_refused(tools: list[Callable[..., object]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Tools(tools, chat())
    plain = ChatFormat(chatting(byte_tokenizer(special=("<|im_end|>", "<|im_start|>")), template=TEMPLATE))
    with pytest.raises(ConfigError, match="give it the role 'tool'"):
        Tools(tools, plain)


@pytest.mark.parametrize("function", [lambda: None, lambda turn, more: None])
def test_a_function_that_takes_no_turn_is_refused_at_once(function: Callable[..., object]) -> None:
    environment(type)  # without a signature: the call will tell
    environment(wraps(function)(lambda turn: None))  # which gives the wrapped function more
    with pytest.raises(ConfigError, match=r"environment '<lambda>' is called with a turn: "):
        environment(function)


def test_a_tool_that_cannot_be_called_as_it_is_shown_is_refused() -> None:
    def many(*numbers: int) -> int:
        """Add.

        Args:
            numbers: all.
        """
        return sum(numbers)

    own = byte_tokenizer(special=("<|im_end|>", "<|im_start|>"))
    with pytest.raises(ConfigError, match=r"tool 'many' cannot be shown .*: 'numbers' takes any number"):
        chatting(own, template=TEMPLATE, tools=[many])
    function = {"name": "add", "parameters": {"properties": {"left": {}, "up": {}}}}
    shows = chatting(own, template=TEMPLATE, tools=[{"type": "function", "function": function}])
    with pytest.raises(ConfigError, match=r"arguments that it is shown: add\(\): got an unexpected .* 'up'"):
        Tools([add], ChatFormat(shows, ("tool",)))


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


def encode(text: str) -> list[int]:
    return list(text.encode())


def text_turn(text: str = "2+3=", number: int = 0, state: object = None, rollout: int = 4) -> Turn:
    prompt = Prompt(rollout, rollout, np.array(encode("add"), np.int32), columns={"gold": 5})
    return Turn(prompt, number, np.array(encode(text), np.int32), state)


def environment(function: Callable[[TextTurn], object] | str, **options: object) -> FunctionEnvironment:
    return FunctionEnvironment(function, decode, encode, **options)  # type: ignore[arg-type] # keywords of the test


def answered_by(function: Callable[[TextTurn], object], **options: object) -> Answer | Drop | None:
    return run_virtual(lambda: environment(function, **options).answer(text_turn()))


def test_a_function_is_given_the_turn_as_text_and_answers_with_text() -> None:
    seen: list[TextTurn] = []

    def add(turn: TextTurn) -> str:
        seen.append(turn)
        return "5;"

    answer = answered_by(add)
    assert isinstance(answer, Answer)
    assert (answer.tokens.tolist(), answer.state) == (encode("5;"), None)
    assert answer.tokens.dtype == np.int32
    assert seen == [TextTurn("add", "2+3=", 0, None, {"gold": 5})]


def test_it_may_return_a_state_end_the_response_or_be_async() -> None:
    async def count(turn: TextTurn) -> tuple[str, object]:
        await anyio.sleep(1)
        return "x", {"calls": 1}

    answer = answered_by(count)
    assert isinstance(answer, Answer)
    assert answer.state == {"calls": 1}
    assert answered_by(lambda turn: None) is None


def test_a_reason_of_a_drop_can_be_written() -> None:
    dropped = answered_by(lambda turn: Drop.because("the tool said \ud800"))
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
        (raises, r"environment 'raises' raised KeyError: 'gold' at .*test_tools.py:\d+ in raises"),
        (lambda turn: 5, r"must return a text, a pair of text and state, a TextAnswer, or None; got 5 \(int\)"),
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
        answered_by(function)
    assert "(turn 0 of rollout 4)" in str(caught.value)
    dropped = answered_by(function, on_failure="drop")
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
            tasks.start_soon(asking.answer, text_turn(rollout=rollout))


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
        answer = await asking.answer(text_turn())
        assert isinstance(answer, Answer)
        return int(decode(answer.tokens.tolist()))

    with closing(asking):
        first = await pid()
        assert first == await pid() != os.getpid()
        with pytest.raises(EnvironmentFailure, match=r"environment 'pid' took longer than 3 s"):
            await asking.answer(text_turn("hang"))
        assert first == await pid()
        with pytest.raises(EnvironmentFailure, match=r"environment 'pid' took longer than 3 s"):
            await asking.answer(text_turn("hold out"))
        assert not is_alive(first)
        second = await pid()
        assert is_alive(second)
    assert not is_alive(second)
