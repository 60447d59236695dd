from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer as Words, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oppo.data import read_prompts
from oppo.errors import DataError
from oppo.hf.tokenizer import HfTokenizer
from tests.hf.spot_tokenizers import byte_tokenizer

if TYPE_CHECKING:
    from oppo.data import OverLongPrompt

VOCABULARY = ["[UNK]", "</s>", "a", "b", "c", "d", "user", "assistant", ":"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def tokenizer_of(template: str | None = None) -> HfTokenizer:
    words = Words(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="</s>")
    tokenizer.chat_template = template
    return HfTokenizer(tokenizer)


def words(tokens: Sequence[int]) -> str:
    return " ".join(VOCABULARY[token] for token in tokens)


def jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def refused(path: Path, **options: str) -> str:
    with pytest.raises(DataError) as caught:
        read_prompts(path, tokenizer_of(), column=options.get("column", "prompt"))
    said = str(caught.value)
    del caught  # its traceback has this frame: a cycle, in which a file would stay open until it is collected
    return said


def test_text_prompts_keep_their_order_and_their_columns(tmp_path: Path) -> None:
    prompts = read_prompts(jsonl(tmp_path, {"prompt": "a b", "answer": 3}, {"prompt": "c"}), tokenizer_of())
    assert [words(prompt.tokens.tolist()) for prompt in prompts] == ["a b", "c"]
    assert prompts[0].tokens.dtype == np.int32
    assert prompts[0].columns == {"prompt": "a b", "answer": 3}
    assert [prompt.admission for prompt in prompts] == [0, 1]


def test_a_chat_ends_where_the_assistant_is_to_speak(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": [{"role": "user", "content": "a b"}]})
    (prompt,) = read_prompts(path, tokenizer_of(TEMPLATE))
    assert words(prompt.tokens.tolist()) == "user : a b assistant :"


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    message = refused(jsonl(tmp_path, {"prompt": [{"role": "user", "content": "a"}]}))
    assert "line 1" in message
    assert "chat messages need a tokenizer with a chat template" in message


def test_every_field_of_a_message_reaches_the_template() -> None:
    template = (
        "{% for m in messages %}[{{m.role}}]{% if m.reasoning_content %}<think>{{m.reasoning_content}}</think>"
        "{% endif %}{% for c in m.tool_calls or [] %}<call {{c.name}}>{% endfor %}{{m.content}}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = [
        {"role": "user", "content": "sum?", "tool_calls": None},
        {"role": "assistant", "content": "", "reasoning_content": "add", "tool_calls": [{"name": "plus"}]},
        {"role": "assistant", "tool_calls": [{"name": "minus"}]},
        {"role": "tool", "content": "3"},
    ]
    tokenizer = byte_tokenizer(template)
    (prompt,) = read_prompts([{"prompt": chat}], tokenizer)
    assert tokenizer.decode_whole(prompt.tokens.tolist()) == (
        "[user]sum?[assistant]<think>add</think><call plus>[assistant]<call minus>[tool]3[assistant]"
    )
    assert prompt.columns["prompt"] == chat


@pytest.mark.parametrize(
    "message", [{"role": "user", "content": None}, {"role": "user", "content": 3, "name": "x"}, {"content": "a"}]
)
def test_a_message_that_a_template_would_change_in_silence_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(DataError, match=r"row 1, column 'prompt': a .*chat message is"):
        read_prompts([{"prompt": [message]}], byte_tokenizer(TEMPLATE))


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("images", ["a.png"], "images"),
        ("image", np.zeros((2, 2, 3)), "images"),
        ("image", np.zeros(()), "images"),
        ("video", {"bytes": None, "path": "a.mp4"}, "videos"),
    ],
)
def test_a_prompt_with_more_than_text_is_refused(column: str, value: object, kind: str) -> None:
    with pytest.raises(DataError, match=f"row 1: column '{column}' has {kind} for the prompt"):
        read_prompts([{"prompt": "a", column: value}], byte_tokenizer(TEMPLATE))


@pytest.mark.parametrize("value", [None, [], [None], "", math.nan, {"bytes": None, "path": None}])
def test_a_prompt_without_them_is_read_from_a_mixed_dataset(value: object) -> None:
    assert len(read_prompts([{"prompt": "a", "images": value, "image": value}], byte_tokenizer(TEMPLATE))) == 1


def test_of_a_prompt_of_megabytes_only_the_end_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    monkeypatch.setattr("oppo.data.prompts.CHARACTERS", 1 << 12)

    class Counting(HfTokenizer):
        def encode_whole(self, text: str) -> list[int]:
            nonlocal longest
            longest = max(longest, len(text))
            return super().encode_whole(text)

    long = "a b c d " * 5_000
    tokenizer = Counting(tokenizer_of(TEMPLATE).inner)
    rows: list[dict[str, object]] = [{"prompt": long}, {"prompt": [{"role": "user", "content": long}]}]
    cut, chat = read_prompts(rows, tokenizer, max_prompt_tokens=3, over_long="truncate")
    assert words(cut.tokens.tolist()) == "b c d"
    assert words(chat.tokens.tolist()) == "d assistant :"
    assert longest <= 1 << 12
    with pytest.raises(DataError, match="all are over-long"):
        read_prompts(rows, tokenizer, max_prompt_tokens=3)


def test_a_template_that_runs_out_of_memory_is_named() -> None:
    tokenizer = byte_tokenizer("{{ 'x' * 10 ** 18 }}")
    with pytest.raises(DataError, match=r"row 1, .*the chat template of the policy's tokenizer cannot read"):
        read_prompts([{"prompt": [{"role": "user", "content": "a"}]}], tokenizer)


def test_csv_is_read_with_its_header_and_quotes_and_every_column_is_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_bytes('\ufeffprompt,answer\r\n"a\nb",1\r\n\r\n"c",""\r\n'.encode())
    prompts = read_prompts(path, tokenizer_of())
    assert [words(prompt.tokens.tolist()) for prompt in prompts] == ["a b", "c"]
    assert [prompt.columns for prompt in prompts] == [{"prompt": "a\nb", "answer": "1"}, {"prompt": "c", "answer": ""}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prompt,answer\na\n", "line 2: 1 field, where the header names 2"),
        ("prompt,prompt\na,b\n", "line 1: the header names a column twice: prompt, prompt"),
        ('prompt\n"a\n', "line 2: not valid CSV: unexpected end of data"),
        ("question\na\n", "line 2: no column 'prompt'; the columns there are question"),
        ("", "holds no prompt"),
        ("prompt\n", "holds no prompt"),
    ],
)
def test_a_csv_that_cannot_be_used_is_named_by_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text(content)
    refusal = refused(path)
    assert str(path) in refusal
    assert message in refusal


def test_a_dataset_on_the_disk_is_read_like_a_file(tmp_path: Path) -> None:
    import datasets

    rows = {"prompt": ["a b", "a b"], "answer": [1, 2]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "one")
    prompts = read_prompts(tmp_path / "one", tokenizer_of())
    assert [(words(prompt.tokens.tolist()), prompt.columns["answer"]) for prompt in prompts] == [("a b", 1), ("a b", 2)]
    split = datasets.DatasetDict(
        {"train": datasets.Dataset.from_dict({"prompt": ["a"]}), "test": datasets.Dataset.from_dict({"prompt": ["b"]})}
    )
    split.save_to_disk(tmp_path / "several")
    assert [words(p.tokens.tolist()) for p in read_prompts(tmp_path / "several", tokenizer_of())] == ["a"]
    assert [words(p.tokens.tolist()) for p in read_prompts(tmp_path / "several", tokenizer_of(), split="test")] == ["b"]
    with pytest.raises(DataError, match="has no split 'dev'; the splits there are train, test"):
        read_prompts(tmp_path / "several", tokenizer_of(), split="dev")
    (tmp_path / "one" / "state.json").write_text("{}")
    assert "cannot be read as a dataset: " in refused(tmp_path / "one")


CALLS = "{% for m in messages %}{{ m | tojson(sort_keys=true) }} {% endfor %}"


def test_nulls_that_a_format_of_columns_adds_to_messages_are_in_no_prompt(tmp_path: Path) -> None:
    import datasets

    def chat(content: str | None, **arguments: object) -> list[dict[str, object]]:
        call = {"type": "function", "function": {"name": "act", "arguments": arguments}}
        return [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "name": "act", "content": "ok"},
        ]

    rows: list[dict[str, object]] = [
        {"prompt": chat(None, left=1, deep={"a": [{"x": 1}, {"y": "b"}]}), "gold": {"a": 1}},
        {"prompt": chat("so", query="null", deep={"b": True}), "gold": {"b": None}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    own = byte_tokenizer(CALLS)
    by_lines = read_prompts(tmp_path / "rows.jsonl", own, max_prompt_tokens=1000)
    for source in (tmp_path / "rows.parquet", tmp_path / "rows", datasets.Dataset.from_list(rows)):
        found = read_prompts(source, own, max_prompt_tokens=1000)
        assert [each.columns["prompt"] for each in found] == [each.columns["prompt"] for each in by_lines]
        assert [own.decode_whole(each.tokens.tolist()) for each in found] == [
            own.decode_whole(each.tokens.tolist()) for each in by_lines
        ]
        assert [each.columns["gold"] for each in found] == [{"a": 1, "b": None}, {"a": None, "b": None}]


@pytest.mark.parametrize("name", ["someone/prompts", "some-one/prompts.v2"])
def test_a_dataset_of_a_hub_that_cannot_be_asked_is_one_message(name: str, messages: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        read_prompts(name, tokenizer_of())
    said = str(caught.value)
    assert said.startswith(f"{name!r} is no file or directory here, and as a dataset of a hub it could not be had (")
    assert len(said.splitlines()) == 1
    assert messages == [], "offline nothing is asked"


def test_a_dataset_of_a_hub_is_asked_for_by_name_split_and_subset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets

    asked: list[tuple[object, ...]] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> object:
        asked.append((name, subset, split))
        if split == "dev":
            raise ValueError('Unknown split "dev".')
        return datasets.Dataset.from_dict({"prompt": ["a b"], "answer": [3]})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, name, timeout: None)
    (prompt,) = read_prompts("someone/sums", tokenizer_of(), split="test", subset="main")
    assert prompt.columns == {"prompt": "a b", "answer": 3}
    with pytest.raises(DataError, match=r"the dataset 'someone/sums', split 'dev', cannot be loaded \(ValueError"):
        read_prompts("someone/sums", tokenizer_of(), split="dev")
    assert asked == [("someone/sums", "main", "test"), ("someone/sums", None, "dev")]
    monkeypatch.undo()
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    (tmp_path / "someone___sums").mkdir()
    assert len(read_prompts("someone/sums", tokenizer_of())) == 1, "this machine's copy needs no hub"


def test_without_the_library_a_dataset_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    monkeypatch.setattr("oppo.libraries.find_spec", lambda name: None)
    assert "a dataset needs datasets, which is not installed: pip install 'oppo[datasets]'" in refused(tmp_path)


def test_rows_of_a_program_are_read_like_a_file() -> None:
    rows = [{"prompt": "a b", "answer": 1}, {"prompt": "c", "answer": 2}]
    assert [words(prompt.tokens.tolist()) for prompt in read_prompts(rows, tokenizer_of())] == ["a b", "c"]
    with pytest.raises(DataError, match=r"row 2: expected a mapping of columns, got 'c' \(str\)"):
        read_prompts([{"prompt": "a"}, "c"], tokenizer_of())  # type: ignore[list-item]
    with pytest.raises(DataError, match="the program's rows holds no prompt"):
        read_prompts([], tokenizer_of())


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (pa.table([["a"], ["b"]], names=["prompt", "prompt"]), "names a column twice: prompt, prompt"),
        (
            pa.table({"x": ["a"], "prompt": pa.array([b"\xff"]).view(pa.string())}),
            "is not a readable parquet file in its column 'prompt': ",
        ),
        (
            pa.table({"x": pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["y", "y"])}),
            "is not a readable parquet file",
        ),
    ],
)
def test_a_parquet_file_of_which_columns_would_be_lost_is_refused(tmp_path: Path, table: pa.Table, words: str) -> None:
    parquet.write_table(table, tmp_path / "prompts.parquet")
    assert words in refused(tmp_path / "prompts.parquet", column="x")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{'prompt': 1}", "line 2: not valid JSON: Expecting property name enclosed in double quotes at character 2"),
        ("[1]", "line 2: expected a JSON object, got [1] (list)"),
        ({"question": "a", "answer": 1}, "line 2: no column 'prompt'; the columns there are question, answer"),
        ({"prompt": "  "}, "line 2, column 'prompt': the prompt is empty"),
        ({"prompt": []}, "line 2, column 'prompt': the prompt is empty"),
        ({"prompt": 7}, "line 2, column 'prompt': expected text or a list of chat messages, got 7 (int)"),
        ('{"prompt": "a", "x": 1, "prompt": "b"}', "line 2: not valid JSON: an object names a column twice: prompt, x"),
        ('{"prompt": "a", "x": {"y": 1, "y": 2}}', "line 2: not valid JSON: an object names a column twice: y, y"),
        ({"prompt": [{"role": "user"}]}, "a chat message is {'role': text, 'content': text}, got {'role': 'user'}"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, row)
    refusal = refused(path)
    assert str(path) in refusal
    assert message in refusal


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert "there is no prompt file" in refused(tmp_path / "none.jsonl")
    other = tmp_path / "prompts.txt"
    other.write_text("a")
    assert "expected a file of prompts whose name ends in .jsonl, .csv or .parquet" in refused(other)
    assert "is a directory without dataset_info.json or dataset_dict.json" in refused(tmp_path)
    broken = tmp_path / "broken.parquet"
    broken.write_text("not parquet")
    assert "is not a readable parquet file" in refused(broken)
    column = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(struct.pack("ii", 0, 1)), pa.py_buffer(b"\xff")])
    parquet.write_table(pa.table({"prompt": column}), broken)
    assert f"{broken} is not a readable parquet file" in refused(broken), "its text is no UTF-8"
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in refused(binary)
    assert "holds no prompt" in refused(jsonl(tmp_path))


@pytest.mark.parametrize(("policy", "kept"), [("filter", ["a"]), ("truncate", ["a", "c d"])])
def test_over_long_prompts_are_left_out_or_cut_and_counted(
    tmp_path: Path, policy: OverLongPrompt, kept: list[str], messages: list[str]
) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "a b c d"})
    prompts = read_prompts(path, tokenizer_of(), max_prompt_tokens=2, over_long=policy)
    assert [words(prompt.tokens.tolist()) for prompt in prompts] == kept
    assert len(messages) == 1
    assert messages[0].startswith(f"1 of 2 prompts of {path} are longer than 2 tokens")
    with pytest.raises(DataError, match=r"1 of 2 prompts .* longer than 2 tokens, the first at .*line 2"):
        read_prompts(path, tokenizer_of(), max_prompt_tokens=2, over_long="error")
