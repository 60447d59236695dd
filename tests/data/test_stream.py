"""Prompts as they are served: shuffled, in epochs, mixed, or of rows that come one by one; resumed anywhere."""

from __future__ import annotations

import doctest
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

import anyio
import numpy as np
import pytest
from hypothesis import given, strategies as st

import oppo.data.stream
from oppo.data import PromptStream, RowStream, Tokenizer, read_prompts
from oppo.data.stream import whole_numbers
from oppo.errors import DataError, counted
from oppo.events import Prompt
from oppo.testing import run_virtual
from tests.data.test_prompts import tokenizer_of, words


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


@given(count=st.integers(1, 20), seed=st.integers(0, 2**32), epochs=st.integers(1, 4), batch=st.integers(1, 25))
def test_every_epoch_is_whole_batches_of_prompts_that_differ(count: int, seed: int, epochs: int, batch: int) -> None:
    if batch > count:
        with pytest.raises(DataError, match=f"no batch of {batch} is filled by {counted(count, 'prompt')}: add"):
            PromptStream(pool(count), multiple=batch)
        return
    stream, served = PromptStream(pool(count), seed=seed, epochs=epochs, multiple=batch), count // batch * batch
    taken = [int(prompt.tokens[0]) for prompt in stream]
    assert len(taken) == len(stream) == served * epochs
    assert all(len(set(taken[first : first + served])) == served for first in range(0, len(taken), served))
    everything = [int(prompt.tokens[0]) for prompt in PromptStream(pool(count), seed=seed, epochs=epochs)]
    assert taken[:served] == everything[:served]


Mixture: TypeAlias = Sequence[tuple[int, list[Prompt]]]

seeds = st.integers(0, 2**32)


def prompt_of(source: int, index: int) -> Prompt:
    return Prompt(index, index, np.array([source, index], np.int32), columns={"source": source})


def mixture_of(parts: list[tuple[int, int]]) -> Mixture:
    """Return sources of these weights and numbers of prompts."""
    return [(weight, [prompt_of(source, i) for i in range(count)]) for source, (weight, count) in enumerate(parts)]


mixtures: st.SearchStrategy[Mixture] = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=5
).map(mixture_of)


def keys(prompts: Iterable[Prompt]) -> list[tuple[int, ...]]:
    return [tuple(prompt.tokens.tolist()) for prompt in prompts]


@given(mixture=mixtures, seed=seeds, count=st.integers(0, 200))
def test_of_any_first_prompts_a_source_has_its_share_within_one(mixture: Mixture, seed: int, count: int) -> None:
    taken = Counter(source for source, _ in keys(islice(PromptStream.mixed(mixture, seed=seed), count)))
    total = sum(weight for weight, _ in mixture)
    for source, (weight, _) in enumerate(mixture):
        assert abs(taken[source] - count * weight / total) < 1
        if count % total == 0:
            assert taken[source] * total == count * weight


@given(mixture=mixtures, seed=seeds, epochs=st.integers(1, 3))
def test_in_every_pass_over_a_source_each_prompt_comes_once(mixture: Mixture, seed: int, epochs: int) -> None:
    stream = PromptStream.mixed(mixture, seed=seed, epochs=epochs)
    taken = list(stream)
    assert len(taken) == len(stream)
    assert [prompt.admission for prompt in taken] == [prompt.group for prompt in taken] == list(range(len(taken)))
    ended = 0
    for source, (_, pool) in enumerate(mixture):
        own = [index for each, index in keys(taken) if each == source]
        passes = [own[first : first + len(pool)] for first in range(0, len(own), len(pool))]
        assert len(passes) <= epochs
        assert all(sorted(each) == list(range(len(pool))) for each in passes[:-1])
        assert all(len(set(each)) == len(each) for each in passes)
        ended += len(own) == epochs * len(pool)
    assert ended, "the stream ends where a source would begin another pass"


@given(mixture=mixtures, seed=seeds, position=st.integers(0, 60))
def test_a_mixture_goes_on_from_any_position(mixture: Mixture, seed: int, position: int) -> None:
    first, whole = PromptStream.mixed(mixture, seed=seed), PromptStream.mixed(mixture, seed=seed)
    assert len(list(islice(first, position))) == position
    second = PromptStream.mixed(mixture, seed=seed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert keys(islice(second, 20)) == keys(islice(first, 20)) == keys(islice(whole, position, position + 20))
    assert second.columns(position) == whole.at(position).columns


def test_sources_epochs_and_seeds_are_shuffled_apart() -> None:
    mixture: Mixture = [(1, [prompt_of(source, i) for i in range(40)]) for source in range(2)]
    taken = keys(PromptStream.mixed(mixture, epochs=1))
    orders = [[index for each, index in taken if each == source] for source in range(2)]
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])
    passes = [[prompt.tokens[0] for prompt in PromptStream(pool(30), seed=seed, epochs=2)] for seed in (0, 1)]
    assert passes[0][:30] != passes[0][30:]
    assert passes[0] != passes[1]


def test_one_source_with_a_weight_is_served_as_without() -> None:
    assert keys(PromptStream.mixed([(0.3, pool(9))], seed=4, epochs=2)) == keys(PromptStream(pool(9), seed=4, epochs=2))


@pytest.mark.parametrize(
    ("weights", "whole"), [([0.7, 0.2, 0.1], [7, 2, 1]), ([2, 4], [1, 2]), ([1.5, 1], [3, 2]), ([1e-3, 1.0], [1, 1000])]
)
def test_weights_are_as_whole_numbers(weights: list[float], whole: list[int]) -> None:
    assert whole_numbers(weights) == whole


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.333333, 0.666667], "the weights 0.333333, 0.666667 are as 333333 to 666667: give rounder ones"),
        ([0, 1], "the weight of a source must be more than 0, not 0"),
        ([float("nan")], "the weight of a source must be a finite number, not nan"),
    ],
)
def test_weights_that_cannot_be_kept_exactly_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PromptStream.mixed([(weight, pool(2)) for weight in weights])


def test_an_endless_stream_has_no_length_and_an_empty_one_is_refused() -> None:
    with pytest.raises(TypeError, match="endless"):
        len(PromptStream(pool(1)))
    with pytest.raises(DataError, match="at least one prompt"):
        PromptStream([])
    with pytest.raises(DataError, match="at least one prompt"):
        PromptStream.mixed([(1, pool(1)), (1, [])])
    with pytest.raises(DataError, match="at least one source"):
        PromptStream.mixed([])


def test_the_examples_of_the_docstrings_are_so() -> None:
    assert doctest.testmod(oppo.data.stream).failed == 0


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


def test_other_rows_are_not_taken_for_those_that_a_run_had() -> None:
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
