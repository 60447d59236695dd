"""The order in which prompts are served: shuffled, in epochs, from one source or a mixture, and resumed anywhere."""

from __future__ import annotations

import doctest
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from types import ModuleType
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, strategies as st

import oppo.data.row_stream
import oppo.data.stream
from oppo.data import PromptStream
from oppo.data.stream import whole_numbers
from oppo.errors import DataError
from oppo.events import Prompt


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


def test_two_sources_are_shuffled_apart() -> None:
    mixture: Mixture = [(1, [prompt_of(source, i) for i in range(40)]) for source in range(2)]
    taken = keys(PromptStream.mixed(mixture, epochs=1))
    orders = [[index for each, index in taken if each == source] for source in range(2)]
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


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


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = [[p.tokens[0] for p in PromptStream(pool(30), seed=seed, epochs=2)] for seed in (0, 1)]
    assert orders[0][:30] != orders[0][30:]
    assert orders[0] != orders[1]


def test_an_endless_stream_has_no_length_and_an_empty_one_is_refused() -> None:
    with pytest.raises(TypeError, match="endless"):
        len(PromptStream(pool(1)))
    with pytest.raises(DataError, match="at least one prompt"):
        PromptStream([])
    with pytest.raises(DataError, match="at least one prompt"):
        PromptStream.mixed([(1, pool(1)), (1, [])])
    with pytest.raises(DataError, match="at least one source"):
        PromptStream.mixed([])


@pytest.mark.parametrize("module", [oppo.data.stream, oppo.data.row_stream])
def test_the_examples_of_the_docstrings_are_so(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0
