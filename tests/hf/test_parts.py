"""Rows are split into parts of similar length, and models attend part by part."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from oppo.hf import parts
from oppo.hf.anatomy import backbone
from oppo.hf.incremental import Incremental
from oppo.hf.masks import attention
from oppo.hf.parts import NAME, attend_in_parts, overhead_of, parted
from tests.hf import tiny

torch.set_num_threads(1)


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=60), overhead=st.integers(0, 5000))
def test_every_row_is_in_one_part_and_parts_are_of_similar_length(lengths: list[int], overhead: int) -> None:
    found = parted(lengths, overhead)
    assert sorted(at for part in found for at in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in found)
    held = [[lengths[at] for at in part] for part in found]
    assert all(min(longer) > max(shorter) for longer, shorter in pairwise(held))
    assert sum(max(part) * len(part) + overhead for part in held) <= max(lengths) * len(lengths) + overhead


def test_rows_of_like_length_are_one_part() -> None:
    assert parted([60, 70, 65, 80], overhead=60) == [[0, 1, 2, 3]]


def test_carried_rows_are_parted_from_fresh_ones_where_that_saves_more_than_it_costs() -> None:
    assert parted([20, 300, 22, 290, 25, 20], overhead=1000) == [[1, 3], [0, 2, 4, 5]]
    assert parted([20, 300, 22, 290, 25, 20], overhead=1200) == [[0, 1, 2, 3, 4, 5]]


def test_the_more_a_token_takes_the_less_must_be_saved_for_another_part() -> None:
    assert overhead_of(2 * parts.PART_BYTES) == 1
    assert overhead_of(parts.PART_BYTES / 100) == 100


def test_a_model_that_attends_in_parts_reads_and_generates_as_before(tmp_path: Path) -> None:
    model = tiny.causal("qwen2")
    before = copy.deepcopy(model)
    assert attend_in_parts(model)
    assert attend_in_parts(model), "a second time it does already"
    assert attention(model) == "sdpa"
    ids = torch.randint(3, tiny.VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.no_grad():
        for given_mask in (None, mask):
            assert torch.equal(model(ids, given_mask).logits, before(ids, given_mask).logits)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("name", ["gemma2", "gptj"])
def test_a_model_whose_attention_is_its_own_is_stepped_as_one_rectangle(name: str) -> None:
    model = tiny.causal(name)
    was = model.config._attn_implementation
    assert not attend_in_parts(model)
    assert model.config._attn_implementation == was


def test_a_rows_place_among_parts_does_not_show() -> None:
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
