"""Rows of a program, served as they come."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

import anyio
import pytest
from hypothesis import given, strategies as st

from oppo.data import RowStream, Tokenizer, read_prompts
from oppo.errors import DataError
from oppo.testing import run_virtual
from tests.data.test_prompts import tokenizer_of, words


def rows(count: int) -> list[dict[str, object]]:
    return [{"prompt": " ".join("abcd"[(i + k) % 4] for k in range(1 + i % 5)), "number": i} for i in range(count)]


async def served(given: Iterable[Mapping[str, object]]) -> AsyncIterator[Mapping[str, object]]:
    for row in given:
        await anyio.sleep(0.5)
        yield row


def taken(stream: RowStream, count: int = 1000) -> list[tuple[int, str, object]]:
    """Return number, text and column of the next prompts."""

    async def main() -> list[tuple[int, str, object]]:
        found = []
        async for prompt in stream:
            assert prompt.rollout == prompt.group == prompt.admission
            found.append((prompt.admission, words(prompt.tokens.tolist()), prompt.columns["number"]))
            if len(found) == count:
                break
        return found

    return run_virtual(main) if count else []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rows_come_in_their_order_and_the_stream_ends_with_them(asynchronous: bool) -> None:
    given = rows(7)
    stream = RowStream(served(given) if asynchronous else iter(given), tokenizer_of())
    assert taken(stream) == [(i, row["prompt"], i) for i, row in enumerate(given)]
    assert stream.ended


def test_a_row_is_asked_for_when_its_prompt_is() -> None:
    asked: list[int] = []

    def endless() -> Iterator[dict[str, object]]:
        for i in range(10**9):
            asked.append(i)
            yield {"prompt": "a", "number": i}

    stream = RowStream(endless(), tokenizer_of())
    assert [number for number, _, _ in taken(stream, 3)] == [0, 1, 2]
    assert asked == [0, 1, 2]
    assert not stream.ended


def test_a_sync_iterable_is_asked_in_a_thread() -> None:
    threads: set[int] = set()

    def slow() -> Iterator[dict[str, object]]:
        threads.add(threading.get_ident())
        yield {"prompt": "a", "number": 0}

    async def main() -> int:
        return len([prompt async for prompt in RowStream(slow(), tokenizer_of())])

    assert anyio.run(main) == 1
    assert threads.isdisjoint({threading.get_ident()})


@given(count=st.integers(0, 12), position=st.integers(0, 12), longest=st.integers(1, 5))
def test_a_stream_over_the_same_rows_goes_on_from_anywhere(count: int, position: int, longest: int) -> None:
    def stream() -> RowStream:
        return RowStream(iter(rows(count)), tokenizer_of(), max_prompt_tokens=longest)

    first, second = stream(), stream()
    taken(first, position)
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert second.state_dict() == state, "also before a row was asked for"
    assert taken(second) == taken(first)
    assert second.state_dict() == first.state_dict()


def test_other_rows_are_not_taken_for_those_that_a_run_had(tmp_path: object) -> None:
    first = RowStream(iter(rows(9)), tokenizer_of())
    taken(first, 5)
    other = RowStream(iter(rows(9)[1:]), tokenizer_of())
    other.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="the first 5 rows of the program are not those that the run had taken"):
        taken(other)
    fewer = RowStream(iter(rows(3)), tokenizer_of())
    fewer.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="had taken 5 rows of the program, and now there are 3"):
        taken(fewer)


def test_over_long_prompts_are_left_out_or_cut_and_told_once(messages: list[str]) -> None:
    given = rows(10)
    left = taken(RowStream(iter(given), tokenizer_of(), max_prompt_tokens=3))
    assert [number for number, _, _ in left] == list(range(6)), "numbers are consecutive"
    assert [row for _, _, row in left] == [0, 1, 2, 5, 6, 7]
    cut = taken(RowStream(iter(given), tokenizer_of(), max_prompt_tokens=3, over_long="truncate"))
    assert len(cut) == 10
    assert max(len(prompt.split()) for _, prompt, _ in cut) == 3
    assert messages == [
        "row 4: a prompt of 4 tokens, longer than 3, is left out, as are all others",
        "row 4: a prompt of 4 tokens, longer than 3, loses its beginning",
    ]
    with pytest.raises(DataError, match="row 4: a prompt of 4 tokens, longer than 3; filter or truncate such prompts"):
        taken(RowStream(iter(given), tokenizer_of(), max_prompt_tokens=3, over_long="error"))


def test_a_malformed_row_is_named() -> None:
    given: list[Mapping[str, object]] = [{"prompt": "a", "number": 0}, {"question": "b"}]
    with pytest.raises(DataError, match="row 2: no column 'prompt'; the columns there are question"):
        taken(RowStream(iter(given), tokenizer_of()))


def begin(row: Mapping[str, object], column: str) -> tuple[Mapping[str, object], Tokenizer]:
    if row["number"] == 3:
        raise DataError("no such game")
    return {**row, column: f"{row[column]} d", "thread": threading.current_thread().name}, tokenizer_of()


def test_rows_begin_before_they_are_read_in_a_thread_unless_time_is_virtual() -> None:
    given = [{"prompt": "a b", "number": 1}, {"prompt": "c", "number": 2}]
    assert taken(RowStream(iter(given), tokenizer_of(), begin=begin)) == [(0, "a b d", 1), (1, "c d", 2)]

    async def main() -> None:
        found = [prompt.columns async for prompt in RowStream(iter(given), tokenizer_of(), begin=begin)]
        assert [each["prompt"] for each in found] == ["a b d", "c d"]
        assert threading.current_thread().name not in {each["thread"] for each in found}

    anyio.run(main)
    assert [words(each.tokens.tolist()) for each in read_prompts(given, tokenizer_of(), begin=begin)] == [
        "a b d",
        "c d",
    ]
    with pytest.raises(DataError, match="no such game") as caught:
        read_prompts([{"prompt": "a", "number": 3}], tokenizer_of(), begin=begin)
    assert caught.value.__notes__[0].startswith("while reading row 1")


async def test_a_row_that_is_read_for_ever_can_be_given_up() -> None:
    goes_on, was_waited_for = threading.Event(), list[bool]()

    def begin(row: Mapping[str, object], column: str) -> tuple[Mapping[str, object], Tokenizer]:
        was_waited_for.append(not goes_on.wait(20))
        return row, tokenizer_of()

    stream = RowStream(iter(rows(1)), tokenizer_of(), begin=begin)
    with anyio.move_on_after(0.05) as scope:
        await anext(stream)
    goes_on.set()
    assert scope.cancelled_caught
    assert was_waited_for in ([], [False])
