"""A workload as files: a response is as long as its prompt says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ladder.directory import (
    BEYOND,
    EOS,
    FILLERS,
    Countdown,
    announced,
    files_of,
    language_of,
    workload_in,
    write_prompts,
)
from benchmarks.ladder.workloads import CAPPED, SMOKE, WORKLOADS, BenchWorkload, Lengths
from oppo.errors import ConfigError


def test_a_response_has_as_many_tokens_as_its_prompt_announces() -> None:
    language = Countdown(20)
    assert [len(language.response(number)) for number in (1, 2, 20)] == [1, 2, 20]
    assert language.response(1) == [EOS]
    assert max(language.response(20)) < language.number(20) == language.vocabulary - 1
    ids = [2, language.number(3), *language.response(3)]
    assert language.tokenizer(64)("f0 3 2 1 <eos>")["input_ids"] == ids


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda each: each.name)
def test_announced_lengths_are_those_of_the_table(workload: BenchWorkload) -> None:
    lengths = announced(workload.lengths, 4000, seed=1)
    assert min(lengths) >= workload.lengths.shortest
    assert max(lengths) <= language_of(workload).numbers
    assert np.median(lengths) == pytest.approx(workload.lengths.median, rel=0.15)
    capped = float(np.mean([length >= workload.lengths.cap for length in lengths]))
    assert workload.capped[0] <= capped <= workload.capped[1]


def test_one_in_eight_is_cut_off_in_every_eight_prompts_of_the_capped_workload() -> None:
    lengths = np.array(announced(CAPPED.lengths, 64, seed=3)).reshape(8, 8)
    assert ((lengths > CAPPED.lengths.cap).sum(1) == 1).all()


def test_prompts_say_how_long_the_response_is_that_is_trained(tmp_path: Path) -> None:
    workload = replace(SMOKE, lengths=Lengths(median=20, sigma=0.5, cap=24))
    write_prompts(tmp_path / "prompts.jsonl", workload)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == workload.prompts
    language = language_of(workload)
    for row in rows:
        *fillers, number = row["tokens"]
        assert all(2 <= token < 2 + FILLERS for token in fillers)
        assert workload.prompt_tokens[0] <= len(row["tokens"]) <= workload.prompt_tokens[1]
        assert row["length"] == min(number - language.number(0), workload.lengths.cap)
    assert max(row["tokens"][-1] for row in rows) == language.number(workload.lengths.cap + BEYOND // 2)


def test_a_workload_is_read_back_from_its_directory_and_another_recipe_has_another(tmp_path: Path) -> None:
    scripted = replace(SMOKE, models=replace(SMOKE.models, taught=0))
    files = files_of(scripted, tmp_path)
    assert workload_in(files.directory) == scripted
    assert files_of(scripted, tmp_path).directory == files.directory
    assert files_of(replace(scripted, chunk=9), tmp_path).directory != files.directory
    grouped = files_of(replace(scripted, samples=2), tmp_path)
    assert workload_in(grouped.directory).samples == 2
    assert [json.loads((each.directory / "spec.json").read_text()).get("samples") for each in (files, grouped)] == [
        None,
        2,
    ]
    taught = replace(scripted, teacher=SMOKE.models.reward)
    assert workload_in(files_of(taught, tmp_path).directory) == taught
    with pytest.raises(ConfigError, match=str(tmp_path)):
        workload_in(tmp_path)
