"""Calls of tools that templates write are read as they were made, whatever the schema; so they are by transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from os.path import commonprefix
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedTokenizerBase

from oppo.errors import ConfigError
from oppo.hf.chat import ChatFormat, ParsedTurn
from oppo.hf.tokenizer import HfTokenizer
from tests.hf.random_calls import Case, case
from tests.hf.spot_tokenizers import byte_tokenizer
from tests.hf.test_chat import OF_TOOLS, OWN_TOOLS, SPECIAL, TEMPLATES, USER, tokenizer

SEEDS = st.integers(0, 2**32 - 1)
CALLS = 25
"""In an example."""


def drawn(seed: int, count: int = CALLS) -> list[Case]:
    return [case(Random(seed + at), ("act{}", "act-{}.x", "act<s>{}")[at % 3].format(at)) for at in range(count)]


def reading(name: str, cases: Sequence[Case]) -> ChatFormat:
    return ChatFormat(HfTokenizer(tokenizer(name).inner, tools=[each.tool for each in cases]), ("user", "tool"))


def turn(name: str, *calls: object) -> list[int]:
    """Return the tokens of a turn with these calls: what the template writes for it."""
    own, message = tokenizer(name), {"role": "assistant", "content": "", "tool_calls": [*calls]}
    whole, prompt = own.rendered([USER, message], answered=True), own.rendered([USER], answered=False)
    said = whole.after(len(commonprefix([whole.text, prompt.text])))  # noqa: RUF071 - characters are compared
    return own.encode_rendered(replace(said, text=said.text.rstrip("\n")))


@pytest.mark.parametrize("name", OWN_TOOLS)
@given(seed=SEEDS)
@settings(max_examples=3)
def test_a_call_that_a_template_writes_is_read_as_it_was_made(name: str, seed: int) -> None:
    cases = drawn(seed)
    chat = reading(name, cases)
    for each in cases:
        found = chat.parse(turn(name, each.call))
        assert [call.name for call in found.tool_calls] == [each.name], found
        assert each.differences(found.tool_calls[0].arguments) == {}
        assert found == ParsedTurn("", found.reasoning, found.tool_calls)


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize("name", ["glm4moe", "qwen3_5_think"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (NULLABLE, "123", "123"),
        (NULLABLE, "null", None),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "012", "012"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"enum": [1, 2]}, "3", 3),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "str"}, "7", "7"),
        ({"$ref": "#/$defs/Loop"}, "[1]", [1]),
        ({"$ref": "https://example.org/schema"}, "7", 7),
    ],
)
def test_a_text_between_marks_is_read_as_its_schema_allows(name: str, schema: object, text: str, value: object) -> None:
    properties = {"p": schema}
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "array"}]}
    parameters = {"type": "object", "properties": properties, "$defs": {"Loop": loop}}
    tool = {"type": "function", "function": {"name": "act", "parameters": parameters}}
    chat = reading(name, [Case("act", tool, {}, {})])
    (call,) = chat.parse(turn(name, Case("act", tool, {"p": text}, {}).call)).tool_calls
    assert (call.arguments["p"], type(call.arguments["p"])) == (value, type(value))


PYTHONIC = "{% if tools %}{{ tools | tojson }}{% endif %}" + (TEMPLATES / "qwen3_5_think.jinja").read_text().replace(
    "args_value | tojson | safe if args_value is mapping or (args_value is sequence and args_value is not string) else "
    "args_value | string",
    "args_value | string",
)
"""One that writes lists and objects as Python does, as Qwen3-Coder's first did."""


def test_nested_values_that_a_template_writes_as_python_does_are_read() -> None:
    arguments: dict[str, object] = {"p": [None, True, {"a": "it's"}], "q": {"k": [0.5]}, "r": "[None]"}
    properties = {"p": {"type": "array"}, "q": {"type": "object"}, "r": {"type": "string"}}
    parameters = {"type": "object", "properties": properties}
    tool = {"type": "function", "function": {"name": "act", "parameters": parameters}}
    own = HfTokenizer(byte_tokenizer(PYTHONIC, special=SPECIAL["qwen3_5_think"]).inner, tools=[tool])
    call = Case("act", tool, arguments, {}).call
    text = own.rendered([USER, {"role": "assistant", "content": "", "tool_calls": [call]}], answered=True).text
    assert "[None, True, {'a': \"it's\"}]" in text
    found = ChatFormat(own, ("tool",)).parse(own.encode_whole(text[text.rindex("<think>") + 7 :].rstrip()))
    assert found.tool_calls[0].arguments == arguments


@pytest.mark.parametrize("name", sorted(OF_TOOLS))
def test_arguments_that_are_json_text_are_an_object_in_every_template(name: str) -> None:
    def prompt(arguments: object) -> str:
        call = {"id": "123456789", "type": "function", "function": {"name": "act", "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        answer = {"role": "tool", "name": "act", "content": "5", "tool_call_id": "123456789"}
        return tokenizer(name).rendered([USER, said, answer], answered=False).text

    arguments = {"left": 2, "note": 'a "b" é', "none": None}
    assert prompt(json.dumps(arguments)) == prompt(arguments)
    assert '\\"left' not in prompt(arguments)


@pytest.mark.parametrize("name", OWN_TOOLS)
@given(seed=SEEDS)
@settings(max_examples=2)
def test_special_tokens_that_tools_and_calls_spell_are_ordinary_text(name: str, seed: int) -> None:
    cases = drawn(seed, 5)
    special = [*SPECIAL[name], "<s>", "</s>"]

    def read(number: int) -> tuple[list[int], list[int]]:
        words = (special[number % len(special)], "plain")[number < 0]
        tool, call = (json.loads(re.sub(r"<\|im_end\|>|<s>", words, json.dumps(each))) for each in both)
        own = HfTokenizer(tokenizer(name).inner, tools=[tool])
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        tokens = own.encode_rendered(own.rendered([USER, said], answered=True))
        return tokens, [token for token in tokens if token in own.control_ids]

    for at, each in enumerate(cases):
        both = each.tool, each.call
        assert read(at)[1] == read(-1)[1]


RESPONSES: dict[str, Any] = json.loads((TEMPLATES / "responses.json").read_text())


@pytest.mark.skipif("tools" not in signature(PreTrainedTokenizerBase.parse_response).parameters, reason="before 5.15")
@pytest.mark.parametrize("name", sorted(RESPONSES))
@given(seed=SEEDS)
@settings(max_examples=2)
def test_what_transformers_reads_otherwise_it_loses_by_its_own_rules(name: str, seed: int) -> None:
    cases = [each for each in drawn(seed) if "<" not in "".join([each.name, *each.arguments])]  # its marks have none
    chat = reading(name, cases)
    inner: Any = tokenizer(name).inner
    for each in cases:
        tokens = turn(name, each.call)
        read: Any = inner.parse_response(tokens, RESPONSES[name], prefix=chat._opened, tools=[each.tool])
        theirs, (ours,) = read["tool_calls"][0]["function"], chat.parse(tokens).tool_calls
        assert (each.name, ours.name) == (theirs["name"], each.name)
        assert [key for key in each.differences(theirs["arguments"]) if not lost(each, key)] == []
        assert each.differences(ours.arguments) == {}


def lost(case: Case, key: str) -> bool:
    """Return whether transformers cannot read an argument.

    It reads ``type``, ``anyOf`` and ``oneOf`` of a schema, strips texts, takes 0 and 1 for truth values, and writes a
    large number without an exponent.
    """
    schema, value = case.tool["function"]["parameters"]["properties"][key], case.arguments[key]
    unread = {"allOf", "const", "enum", "$ref"}.intersection(schema) or not schema or "boolean" in json.dumps(schema)
    return bool(unread) or value == 1e300 or (isinstance(value, str) and value != value.strip())


def test_a_schema_that_is_none_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "act", "parameters": {"properties": {"left": 1}}}}
    with pytest.raises(ConfigError, match="tool 'act': expected a JSON schema of 'left', got 1"):
        reading("qwen3", [Case("act", tool, {}, {})])
