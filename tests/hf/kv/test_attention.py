"""Rows are split into segments of similar length, and models attend segment by segment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oppo.hf.devices import CPU
from oppo.hf.introspection import backbone
from oppo.hf.kv import attention
from oppo.hf.kv.attention import NAME, Segments, attend_in_segments, attends_eagerly, overhead_of, segmented
from oppo.hf.kv.reader import Incremental
from tests.hf import tiny

torch.set_num_threads(1)


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=60), overhead=st.integers(0, 5000))
def test_every_row_is_in_one_segment_and_segments_are_of_similar_length(lengths: list[int], overhead: int) -> None:
    found = segmented(lengths, overhead)
    assert sorted(at for segment in found for at in segment) == list(range(len(lengths)))
    assert all(segment == sorted(segment) for segment in found)
    held = [[lengths[at] for at in segment] for segment in found]
    assert all(min(longer) > max(shorter) for longer, shorter in pairwise(held))
    assert sum(max(rows) * len(rows) + overhead for rows in held) <= max(lengths) * len(lengths) + overhead


def test_rows_of_similar_length_are_one_segment() -> None:
    assert segmented([60, 70, 65, 80], overhead=60) == [[0, 1, 2, 3]]


def test_deferred_rows_are_segmented_from_fresh_ones_if_that_saves_more_than_it_costs() -> None:
    assert segmented([20, 300, 22, 290, 25, 20], overhead=1000) == [[1, 3], [0, 2, 4, 5]]
    assert segmented([20, 300, 22, 290, 25, 20], overhead=1200) == [[0, 1, 2, 3, 4, 5]]


def test_the_more_bytes_a_token_has_the_fewer_tokens_pay_for_another_segment() -> None:
    assert overhead_of(2 * attention.SEGMENT_BYTES, CPU) == 1
    assert overhead_of(attention.SEGMENT_BYTES / 100, CPU) == 100


def test_a_model_that_attends_in_segments_reads_and_generates_as_before(tmp_path: Path) -> None:
    model = tiny.causal("qwen2")
    before = copy.deepcopy(model)
    assert attend_in_segments(model)
    assert attend_in_segments(model), "a second time it does already"
    assert not attends_eagerly(model)
    ids = torch.randint(3, tiny.VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.no_grad():
        for given_mask in (None, mask):
            assert torch.equal(model(ids, given_mask).logits, before(ids, given_mask).logits)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


class Layer(torch.nn.Module):
    """What transformers' attention asks of the layer that it is called for."""

    def __init__(self, num_key_value_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups


@pytest.mark.parametrize("unusual", ["nothing", "a mask for each head", "position_bias", "dropout", "several queries"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_whatever_it_is_asked_for_attention_is_that_of_transformers(groups: int, unusual: str) -> None:
    draw = torch.Generator().manual_seed(0)
    queries = 3 if unusual == "several queries" else 1
    query = torch.randn(5, 4, queries, 8, generator=draw)
    key, value = (torch.randn(5, groups, 9, 8, generator=draw) for _ in range(2))
    mask = torch.randn(5, 4 if unusual == "a mask for each head" else 1, queries, 9, generator=draw)
    bias = torch.randn(1, 4, queries, 9, generator=draw) if unusual == "position_bias" else None
    module = Layer(4 // groups).train(unusual == "dropout")
    seen = []
    for name in (NAME, "sdpa"):
        torch.manual_seed(0)
        options = {"scaling": 0.3, "dropout": 0.5 * module.training, "position_bias": bias}
        seen.append(ALL_ATTENTION_FUNCTIONS[name](module, query, key, value, mask, **options)[0])
    assert seen[0].shape == (5, queries, 4, 8)
    torch.testing.assert_close(*seen)  # to the bit where transformers, too, lets heads stand as queries; 5.10 does not


@pytest.mark.parametrize("queries", [1, 4])
def test_segments_attend_as_each_would_alone(queries: int) -> None:
    draw = torch.Generator().manual_seed(0)
    module = Layer(2).eval()
    query = torch.randn(5, 4, queries, 8, generator=draw)
    keys, values = (
        tuple(torch.randn(rows, 2, columns, 8, generator=draw) for rows, columns in ((2, 30), (3, 11)))
        for _ in range(2)
    )
    mask = torch.rand(5, 1, queries, 30, generator=draw) < 0.7
    attend = ALL_ATTENTION_FUNCTIONS[NAME]
    together = attend(module, query, Segments(keys), Segments(values), mask, scaling=0.3)[0]
    long = attend(module, query[:2], keys[0], values[0], mask[:2], scaling=0.3)[0]
    short = attend(module, query[2:], keys[1], values[1], mask[2:, ..., :11], scaling=0.3)[0]
    assert torch.equal(together, torch.cat((long, short)))


@pytest.mark.parametrize("make", [lambda: tiny.causal("gemma2"), tiny.own_attention], ids=["gemma2", "xglm"])
def test_a_model_whose_attention_is_its_own_is_stepped_as_one_rectangle(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    was = model.config._attn_implementation
    assert not attend_in_segments(model)
    assert model.config._attn_implementation == was


def test_rows_of_every_length_are_read_in_one_pass_and_attend_in_segments() -> None:
    model = tiny.causal("qwen2")
    passes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    reader, lengths = Incremental(model), [30, 100, 150, 7]
    tokens = [torch.randint(3, tiny.VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    for row, sequence in enumerate(tokens):
        reader.extend([row], [sequence[:-5]])
    passes.clear()
    sizes = [5, 3, 4, 5]
    starts = [n - 5 for n in lengths]
    pieces = [all_[start : start + n] for all_, start, n in zip(tokens, starts, sizes, strict=True)]
    got = reader.extend(range(4), pieces)
    assert passes == [(4, 5)]
    assert reader.extend([], []) == []
    for sequence, start, size, out in zip(tokens, starts, sizes, got, strict=True):
        with torch.no_grad():
            want = model(input_ids=sequence[None]).logits[0, start : start + size]
        assert ((out - want).abs() / (1 + want.abs())).max() < 1e-5


def test_a_rows_place_among_segments_does_not_show() -> None:
    model = tiny.causal("llama")
    lengths = [30, 150, 31, 140, 12, 29]
    tokens = [torch.randint(3, tiny.VOCABULARY, (n + 1,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    reader = Incremental(backbone(model))
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 0, 2]):
        reader.clear()
        reader.extend(order, [tokens[row][:-1] for row in order], last=[1] * len(order))
        got = reader.step(order, torch.stack([tokens[row][-1] for row in order]))
        for row, out in zip(order, got, strict=True):
            with torch.no_grad():
                want = backbone(model)(tokens[row][None]).last_hidden_state[0, -1]
            assert ((out - want).abs() / (1 + want.abs())).max() < 1e-5


@pytest.mark.parametrize("heads", [2, 4])
def test_the_kernel_for_rows_of_any_length_is_asked_for_what_rows_one_by_one_say(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(*given: Any, window_size: tuple[int, int], scale: float) -> Tensor:
        query, key, value, starts, ends, longest, most = given
        assert (window_size, scale, longest, most) == ((-1, 0), 0.3, 6, 6)
        assert starts is ends
        assert starts.dtype == torch.int32
        parts = []
        for first, last in pairwise(starts.tolist()):
            queries, keys, values = (each[first:last].transpose(0, 1) for each in (query, key, value))
            parts.append(scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=0.3).transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    generator, packed = torch.Generator().manual_seed(0), attention.Packed([4, 1, 6])
    query, key, value = (torch.randn(1, each, 11, 8, generator=generator) for each in (4, heads, heads))
    module = torch.nn.Module()
    setattr(module, "num_key_value_groups", 4 // heads)  # noqa: B010 - a number, where torch declares modules
    module.train(mode=False)
    with attention.rows_apart(packed):
        expected, _ = ALL_ATTENTION_FUNCTIONS[NAME](module, query, key, value, None, scaling=0.3)
    torch.testing.assert_close(attention._packed_attention(packed, query, key, value, 0.3), expected)
