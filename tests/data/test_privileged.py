"""The teacher's prompt: from a column, or a template in place of what the user said last."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo.data import PrivilegedPrompt
from oppo.data.prompts import template_fields
from oppo.errors import ConfigError, DataError
from oppo.events import IntArray, Prompt


class Spelling:
    """A tokenizer whose ids are characters; of chat messages those of their JSON."""

    has_chat_template = True

    def encode(self, text: str, *, last: int | None = None) -> Sequence[int]:
        assert last is None
        return [ord(character) for character in text]

    def encode_chat(self, messages: Sequence[Mapping[str, object]], *, last: int | None = None) -> Sequence[int]:
        return self.encode(json.dumps(messages), last=last)


def prompt(**columns: object) -> Prompt:
    return Prompt(7, 7, np.array([1, 2], np.int32), columns=columns)


def spelt(tokens: IntArray) -> str:
    return "".join(map(chr, tokens.tolist()))


def made(**given: str) -> PrivilegedPrompt:
    return PrivilegedPrompt(tokenizer=Spelling(), decode=lambda ids: "".join(map(chr, ids)), **given)


def read(maker: PrivilegedPrompt, **columns: object) -> Prompt:
    found = maker(prompt(**columns))
    assert found is not None
    assert (found.rollout, found.admission) == (7, 7)
    return found


words = st.text("ab {}", max_size=6)


@given(words, words, st.integers(-5, 5), st.text("xyz {}", max_size=5))
def test_a_template_is_filled_from_the_row_whatever_its_texts_spell(
    ask: str, hint: str, number: int, text: str
) -> None:
    ask += "?"  # an empty prompt is refused
    template = text.replace("{", "{{").replace("}", "}}") + "{prompt}|{hint}|{number}"
    expected = f"{text}{ask}|{hint}|{number}"
    assert spelt(read(made(template=template), prompt=ask, hint=hint, number=number).tokens) == expected
    before = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "0"},
        {"role": "assistant", "content": "1"},
    ]
    chat = [*before, {"role": "user", "content": ask}]
    found = read(made(template=template), prompt=chat, hint=hint, number=number)
    assert json.loads(spelt(found.tokens)) == [*before, {"role": "user", "content": expected}]
    assert found.columns["prompt"] == [*before, {"role": "user", "content": expected}]
    assert chat[-1]["content"] == ask


def test_a_column_holds_the_whole_prompt() -> None:
    assert spelt(read(made(column="hint"), prompt="a", hint="b").tokens) == "b"
    chat = [{"role": "system", "content": "it is 4"}, {"role": "user", "content": "2 + 2?"}]
    found = read(made(column="hint", prompt_column="ask"), ask="a", hint=chat)
    assert json.loads(spelt(found.tokens)) == chat
    assert found.columns == {"ask": chat, "hint": chat}


def test_a_sibling_is_shown_as_its_text_and_without_one_there_is_no_prompt() -> None:
    maker = made(template="{prompt} {sibling}")
    assert spelt(read(maker, prompt="a", sibling=np.array([98, 99], np.int32)).tokens) == "a bc"
    assert maker(prompt(prompt="a", sibling=None)) is None
    assert maker(prompt(prompt="a")) is None


@pytest.mark.parametrize(
    ("maker", "columns", "message"),
    [
        (made(column="hint"), {"prompt": "a"}, "'hint': expected text or chat messages for the teacher, and"),
        (
            made(column="hint"),
            {"hint": 3},
            "prompt 7, column 'hint': expected text or chat messages for the teacher, got",
        ),
        (made(column="hint"), {"hint": [1]}, "prompt 7, the teacher's prompt: a chat message is"),
        (made(template="{prompt}{hint}"), {"prompt": "a"}, "'hint': expected text or a number for teacher.template"),
        (made(template="{prompt}"), {"prompt": [{"role": "system", "content": "a"}]}, "and there is none"),
    ],
)
def test_a_row_without_what_the_prompt_is_made_of_is_an_error(
    maker: PrivilegedPrompt, columns: Mapping[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        maker(prompt(**columns))


def test_columns_are_checked_before_anything_is_read() -> None:
    known = {"prompt", "solution", "sibling"}
    with pytest.raises(ConfigError, match=r"teacher.template names 'soluton', which is no column .* \(did"):
        made(template="{prompt}{soluton}").check_columns(known)
    with pytest.raises(ConfigError, match=r"teacher.column names 'hint', .* are prompt, sibling, sol"):
        made(column="hint").check_columns(known)
    with pytest.raises(ConfigError, match=r"data.prompts has a column of that name: give the column another one"):
        made(template="{sibling}").check_columns(known)
    made(template="{prompt}{solution}").check_columns(known)
    made(template="{prompt}{sibling}", prompt_column="solution").check_columns({"solution"})


@pytest.mark.parametrize("template", ["{}", "{0}", "{a.b}", "{a!r}", "{a:3}", "{", "}", "{a b}"])
def test_what_is_no_field_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        template_fields(template)
    with pytest.raises(ConfigError, match=r"^template: "):
        made(template=template)


@pytest.mark.parametrize("given", [{}, {"column": "a", "template": "b"}])
def test_a_prompt_has_one_source(given: Mapping[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"from a column or a template: give one of the two"):
        made(**given)
