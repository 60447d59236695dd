"""The comparison with ``generate``: what it counts, not how long it takes."""

from __future__ import annotations

import itertools

import torch

from benchmarks.decoding import as_json, compare_decoding, measure, show
from benchmarks.harness import Spread
from benchmarks.ladder.workloads import SMOKE
from tests.hf import tiny


@tiny.apart
def test_both_are_timed_in_turns_and_their_figures_belong_together() -> None:
    # generate, ours; ours, generate; ...: with a second between two of them
    clock = itertools.accumulate(itertools.cycle([1.0, 4.0, 1.0, 2.0, 1.0, 2.0, 1.0, 4.0])).__next__
    before = torch.get_num_threads()
    found = compare_decoding(tiny.causal(), lengths=[9, 3, 20], prompts=[4, 17, 8], rounds=3, clock=clock)
    assert torch.get_num_threads() == before
    assert (found.batch, found.tokens) == (3, 32)
    assert (found.ours, found.generate) == ((16.0,) * 3, (8.0,) * 3)
    assert found.ratio == Spread(2.0, 2.0, 2.0)


def test_every_case_is_compared_shown_and_written_as_files_of_record_are() -> None:
    found = tiny.apart(measure)(1, {"tiny": SMOKE.models.actor}, {"3 ragged": [5, 2, 9], "1": [6]})
    cases = as_json(found, 1)["cases"]
    assert isinstance(cases, list)
    assert [case["batch"] for case in cases] == ["3 ragged", "1"]
    assert all(len(case["found"]["ours"]) == 1 and case["ratio"][0] > 0 for case in cases)
    assert show(found).count("tiny") == 2
