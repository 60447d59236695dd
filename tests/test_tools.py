"""Functions as tools: calls of a turn overlap, are answered together, and fail as they are told to."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from oppo.environments import EnvironmentFailure, Tools
from oppo.errors import ConfigError
from oppo.events import Drop, Prompt
from oppo.hf.chat import ChatFormat, chatting
from oppo.testing import run_virtual
from oppo.turns import Answer, Turn
from tests.hf.spot_tokenizers import byte_tokenizer

TEMPLATE = (Path(__file__).parent / "hf" / "templates" / "qwen3.jinja").read_text(encoding="utf-8")


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
    tokenizer = byte_tokenizer(special=("<|im_end|>", "<|im_start|>"))
    return ChatFormat(chatting(tokenizer, template=TEMPLATE, tools=EVERY), ("tool",))


def turn(text: str, number: int = 0) -> Turn:
    tokens = chat()._tokenizer.encode_whole(text + "<|im_end|>")
    return Turn(Prompt(4, 4, np.array([65], np.int32)), number, np.array(tokens, np.int32))


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


def said(answer: Answer | Drop | None) -> list[str]:
    """Return what each call was answered."""
    assert isinstance(answer, Answer)
    text = chat()._tokenizer.decode_whole(answer.tokens.tolist())
    assert text.startswith("\n<|im_start|>user\n<tool_response>")
    assert text.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")
    return [part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]


def answered(text: str, **options: Any) -> Answer | Drop | None:
    return run_virtual(lambda: Tools(EVERY, chat(), **options).answer(turn(text)))


def test_calls_of_a_turn_overlap_and_are_answered_in_their_order() -> None:
    async def main() -> tuple[Answer | Drop | None, float]:
        tools = Tools(EVERY, chat())
        answer = await tools.answer(
            turn(call("slow", '{"seconds": 3}') + call("slow", '{"seconds": 2}') + call("add", '{"left": 2}'))
        )
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
        (call("add", '{"left": 1, "up": 2}'), "Error: add(): got an unexpected keyword argument 'up'", True),
        (
            "<tool_call>\n{not json}\n</tool_call>",
            "Error: the call cannot be read: JSONDecodeError: Expecting property",
            True,
        ),
        (call("slow", '{"seconds": 60}'), "Error: tool 'slow' took longer than 9 s (turn 0 of rollout 4)", False),
    ],
)
def test_a_failure_is_told_beside_what_did_not_fail_and_one_of_a_tool_may_drop_the_rollout(
    text: str, words: str, *, wrote_wrongly: bool
) -> None:
    answer = answered(call("add", '{"left": 2}') + text, timeout=9)
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
            await tools.answer(turn(call("slow", '{"seconds": 60}')))
        assert not tools.at_work
        return anyio.current_time()

    assert run_virtual(main) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([print], "is not shown the tool 'print'"),
        ([add, add], "tools need names of their own"),
        ([], "there must be one"),
    ],
)
def test_tools_that_the_policy_cannot_tell_are_refused(tools: list[Callable[..., object]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Tools(tools, chat())
    plain = ChatFormat(chatting(byte_tokenizer(special=("<|im_end|>", "<|im_start|>")), template=TEMPLATE))
    with pytest.raises(ConfigError, match="give it the role 'tool'"):
        Tools(tools, plain)


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
