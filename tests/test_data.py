from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer as Words, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oppo.data import PromptStream, read_prompts
from oppo.errors import DataError
from oppo.events import Prompt
from oppo.hf.text import Text

if TYPE_CHECKING:
    from oppo.data import OverLong

VOCABULARY = ["[UNK]", "</s>", "a", "b", "c", "d", "user", "assistant", ":"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def text(template: str | None = None) -> Text:
    words = Words(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="</s>")
    tokenizer.chat_template = template
    return Text(tokenizer)


def words(tokens: Sequence[int]) -> str:
    return " ".join(VOCABULARY[token] for token in tokens)


def jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def refused(path: Path, **options: str) -> str:
    with pytest.raises(DataError) as caught:
        read_prompts(path, text(), column=options.get("column", "prompt"))
    return str(caught.value)


def test_text_prompts_keep_their_order_and_their_columns(tmp_path: Path) -> None:
    prompts = read_prompts(jsonl(tmp_path, {"prompt": "a b", "answer": 3}, {"prompt": "c"}), text())
    assert [words(prompt.tokens.tolist()) for prompt in prompts] == ["a b", "c"]
    assert prompts[0].tokens.dtype == np.int32
    assert prompts[0].columns == {"prompt": "a b", "answer": 3}
    assert [prompt.admission for prompt in prompts] == [0, 1]


def test_a_chat_ends_where_the_assistant_is_to_speak(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": [{"role": "user", "content": "a b"}]})
    (prompt,) = read_prompts(path, text(TEMPLATE))
    assert words(prompt.tokens.tolist()) == "user : a b assistant :"


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    message = refused(jsonl(tmp_path, {"prompt": [{"role": "user", "content": "a"}]}))
    assert "line 1" in message
    assert "chat messages need a tokenizer with a chat template" in message


def test_parquet_is_read_like_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    parquet.write_table(pa.table({"question": ["a b", "c"], "answer": [1, 2]}), path)
    prompts = read_prompts(path, text(), column="question")
    assert [words(prompt.tokens.tolist()) for prompt in prompts] == ["a b", "c"]
    assert prompts[1].columns["answer"] == 2


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{'prompt': 1}", "line 2: not valid JSON: Expecting property name enclosed in double quotes at character 2"),
        ("[1]", "line 2: expected a JSON object, got [1] (list)"),
        ({"question": "a", "answer": 1}, "line 2: no column 'prompt'; the columns there are question, answer"),
        ({"prompt": "  "}, "line 2, column 'prompt': the prompt is empty"),
        ({"prompt": []}, "line 2, column 'prompt': the prompt is empty"),
        ({"prompt": 7}, "line 2, column 'prompt': expected text or a list of chat messages, got 7 (int)"),
        ({"prompt": [{"role": "user"}]}, "a chat message is {'role': text, 'content': text}, got {'role': 'user'}"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, sentence: str) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, row)
    message = refused(path)
    assert str(path) in message
    assert sentence in message


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    assert "there is no prompt file" in refused(tmp_path / "none.jsonl")
    other = tmp_path / "prompts.csv"
    other.write_text("a")
    assert "expected a .jsonl or .parquet file" in refused(other)
    broken = tmp_path / "broken.parquet"
    broken.write_text("not parquet")
    assert "is not a readable parquet file" in refused(broken)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in refused(binary)
    assert "holds no prompt" in refused(jsonl(tmp_path))


@pytest.mark.parametrize(("policy", "kept"), [("filter", ["a"]), ("truncate", ["a", "c d"])])
def test_over_long_prompts_are_left_out_or_cut_and_counted(tmp_path: Path, policy: OverLong, kept: list[str]) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "a b c d"})
    notices: list[str] = []
    prompts = read_prompts(path, text(), max_prompt_tokens=2, over_long=policy, tell=notices.append)
    assert [words(prompt.tokens.tolist()) for prompt in prompts] == kept
    assert len(notices) == 1
    assert notices[0].startswith(f"1 of 2 prompts of {path} are longer than 2 tokens")


def test_over_long_prompts_can_be_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "a b c"})
    with pytest.raises(DataError, match=r"1 of 2 prompts .* longer than 2 tokens, the first at .*line 2"):
        read_prompts(path, text(), max_prompt_tokens=2, over_long="error")


def test_no_prompt_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no prompt .* is left: all are over-long"):
        read_prompts(jsonl(tmp_path, {"prompt": "a b c"}), text(), max_prompt_tokens=2)


def pool(count: int) -> list[Prompt]:
    return [Prompt(i, i, np.array([i], np.int32)) for i in range(count)]


@given(count=st.integers(1, 20), seed=st.integers(0, 2**32), epochs=st.integers(1, 4))
def test_every_epoch_holds_every_prompt_once_under_consecutive_numbers(count: int, seed: int, epochs: int) -> None:
    stream = PromptStream(pool(count), seed=seed, epochs=epochs)
    taken = list(stream)
    assert len(taken) == len(stream) == count * epochs
    assert [prompt.admission for prompt in taken] == [prompt.rollout for prompt in taken] == list(range(len(taken)))
    for epoch in range(epochs):
        part = taken[epoch * count : (epoch + 1) * count]
        assert sorted(int(prompt.tokens[0]) for prompt in part) == list(range(count))


@given(count=st.integers(1, 9), seed=st.integers(0, 2**32), position=st.integers(0, 40))
def test_a_stream_goes_on_from_its_position(count: int, seed: int, position: int) -> None:
    first = PromptStream(pool(count), seed=seed)
    before = list(islice(first, position))
    assert len(before) == position
    second = PromptStream(pool(count), seed=seed)
    second.load_state_dict(first.state_dict())
    assert [p.tokens.tolist() for p in islice(second, 5)] == [p.tokens.tolist() for p in islice(first, 5)]


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = [[p.tokens[0] for p in PromptStream(pool(30), seed=seed, epochs=2)] for seed in (0, 1)]
    assert orders[0][:30] != orders[0][30:]
    assert orders[0] != orders[1]


def test_an_endless_stream_has_no_length_and_an_empty_one_is_refused() -> None:
    with pytest.raises(TypeError, match="endless"):
        len(PromptStream(pool(1)))
    with pytest.raises(DataError, match="at least one prompt"):
        PromptStream([])
