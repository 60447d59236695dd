"""What vLLM's own parsers make of the end of a turn and of calls that templates write; `make test-vllm` runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.detokenizer import check_stop_strings

from oppo.agents.requests import ChatRequests
from oppo.models import SamplingSettings
from tests.hf.random_calls import Case
from tests.hf.test_chat import SPECIAL, drawn, reading, tokenizer, turn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PARSERS = {
    "glm4moe": "glm47",
    "granite4": "granite4",
    "llama3_1": "llama3_json",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "qwen3_xml",
}
CASES = 500


class Vocabulary:
    """As much of a tokenizer as the parsers of texts ask for."""

    def get_vocab(self) -> dict[str, int]:
        return {mark: at for at, mark in enumerate(["<tool_call>", "</tool_call>", "<|python_tag|>", "<|tool_call|>"])}

    def encode(self, text: str, **options: object) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **options: object) -> str:
        return bytes(ids).decode(errors="replace")


def theirs(parser: str, case: Case, text: str) -> list[tuple[str, object]]:
    """Return the calls that a parser of vLLM finds."""
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}], "tools": [case.tool]}
    request = ChatCompletionRequest(model="m", **fields)
    made: Any = ToolParserManager.get_tool_parser(parser)
    found = made(Vocabulary(), request.tools).extract_tool_calls(text, request)
    return [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]


def lost(case: Case, key: str) -> bool:
    """Return whether vLLM cannot read an argument.

    It reads no ``$ref`` and no ``const``, an argument without a type as text, null as JSON writes it, a whole number
    without its fraction, and a text as any other type that is allowed and that Python makes of it.
    """
    schema, value = case.tool["function"]["parameters"]["properties"][key], case.arguments[key]
    values = schema.get("enum", [None, True, 0, 0.5, [], {}])
    mixed = isinstance(value, str) and any(case.allows[key](each) for each in values)
    whole = isinstance(value, float) and value.is_integer()
    return bool({"$ref", "const"}.intersection(schema)) or not schema or value is None or whole or mixed


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_what_vllm_reads_otherwise_of_a_call_it_loses_by_its_own_rules(name: str) -> None:
    same = 0
    for seed in range(0, CASES, 25):
        cases = drawn(seed * 1000, 25)
        chat = reading(name, cases)
        for case in cases:
            tokens = turn(name, case.call)
            (ours,) = chat.parse(tokens).tool_calls
            assert (ours.name, case.differences(ours.arguments)) == (case.name, {})
            if "<" in "".join([case.name, *case.arguments]) and name.startswith("qwen3_5"):
                continue  # its marks end at the first >
            text = tokenizer(name).decode_whole([each for each in tokens if not ends(name, each)])
            ((called, found),) = theirs(PARSERS[name], case, text.rpartition("</think>")[2].lstrip())
            differing = case.differences(found)
            assert (called, [key for key in differing if not lost(case, key)]) == (case.name, []), (differing, text)
            same += not differing
    assert same > CASES // 4


def ends(name: str, token: int) -> bool:
    """Return whether a token ends a turn."""
    return token in tokenizer(name).control_ids and tokenizer(name).name_of(token) in {SPECIAL[name][0], "</s>"}


class Spelled:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._texts[each] for each in tokens)


TEXTS = st.text("ab\n:", min_size=1, max_size=3)


@given(st.lists(TEXTS, min_size=1, max_size=3), st.text("ab\n:", max_size=12), TEXTS)
def test_the_end_of_a_turn_begins_where_vllm_truncates_it(stops: list[str], before: str, last: str) -> None:
    tokenizer: Any = Spelled([before, last])
    found = check_stop_strings(before + last, len(last), stops, include_in_output=False)
    end = ChatRequests(tokenizer, SamplingSettings(stop_strings=tuple(stops))).stopped(tokenizer, [0, 1])
    assert end == ("" if found is None else (before + last)[found[1] :])
