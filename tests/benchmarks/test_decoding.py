"""The comparison with ``generate``: what it counts, not how long it takes."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.decoding.compare import compare_decoding, lognormal_lengths
from tests.hf import tiny


@tiny.apart
def test_both_are_timed_in_turns_and_their_figures_belong_together() -> None:
    clock = itertools.accumulate(itertools.cycle([1.0, 2.0, 1.0, 4.0])).__next__
    before = torch.get_num_threads()
    found = compare_decoding(tiny.causal(), lengths=[9, 3, 20], prompts=[4, 17, 8], rounds=3, clock=clock)
    assert torch.get_num_threads() == before
    assert (found.batch, found.tokens) == (3, 32)
    assert found.ours == (16.0,) * 3
    assert found.generate == (8.0,) * 3
    assert found.ratio == (2.0, 2.0, 2.0)


@tiny.apart
def test_the_cache_is_reported_at_its_worst() -> None:
    cache = compare_decoding(tiny.causal(), lengths=[40] * 6, prompts=[8] * 6, rounds=1).cache
    needed = 2 * 2 * 6 * 47 * tiny.HIDDEN * 4  # layers x (keys and values) x rows x tokens read x numbers of four bytes
    assert needed // 2 <= cache.needed <= needed, "grouped attention needs less than all heads"
    assert cache.allocated > cache.needed
    assert 1 <= cache.worst < 3


@tiny.apart
def test_a_prompt_for_each_length() -> None:
    for lengths, prompts in (([3, 4], [5]), ([3, 0], [5, 5]), ([], [])):
        with pytest.raises(ValueError, match="as many prompts as lengths"):
            compare_decoding(tiny.causal(), lengths=lengths, prompts=prompts)


def test_lengths_are_within_the_cap_and_the_same_every_time() -> None:
    lengths = lognormal_lengths(200, cap=300)
    assert lengths == lognormal_lengths(200, cap=300)
    assert 1 <= min(lengths) < 20
    assert max(lengths) == 300
