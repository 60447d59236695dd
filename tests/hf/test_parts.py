"""Rows are split into parts of similar length, and models attend part by part."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from oppo.hf.anatomy import backbone
from oppo.hf.incremental import Incremental
from oppo.hf.masks import attention
from oppo.hf.parts import NAME, WASTE, attend_in_parts, parted
from tests.hf import tiny

torch.set_num_threads(1)


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=60))
def test_every_row_is_in_one_part_and_no_part_wastes_much(lengths: list[int]) -> None:
    parts = parted(lengths)
    assert sorted(at for part in parts for at in part) == list(range(len(lengths)))
    for part in parts:
        held = [lengths[at] for at in part]
        assert max(held) * len(held) <= WASTE * sum(held)
        assert part == sorted(part)
    longest = [max(lengths[at] for at in part) for part in parts]
    assert longest == sorted(longest, reverse=True)


def test_rows_of_like_length_are_one_part() -> None:
    assert parted([60, 70, 65, 80]) == [[0, 1, 2, 3]]


def test_carried_rows_are_parted_from_fresh_ones() -> None:
    assert parted([20, 300, 22, 290, 25, 20]) == [[1, 3], [0, 2, 4, 5]]


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
        reader.extend(order, [tokens[row][:-1] for row in order], last_only=True)
        got = reader.step(order, torch.stack([tokens[row][-1] for row in order]))
        for row, out in zip(order, got, strict=True):
            with torch.no_grad():
                want = backbone(model)(tokens[row][None]).last_hidden_state[0, -1]
            assert ((out - want).abs() / (1 + want.abs())).max() < 1e-5
