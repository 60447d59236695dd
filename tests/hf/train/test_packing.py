"""Packing: minibatches and micro-batches lose no row, and every token is predicted from the one before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from oppo.errors import ConfigError, ModelRefused
from oppo.events import Batch, Prompt, Response, Support, TokenColumns
from oppo.hf.kv.attention import cheapest_groups, filled
from oppo.hf.loading import require_supported
from oppo.hf.train.optim import MasterWeights
from oppo.hf.train.packing import micro_batches, minibatches, pack, tokens_read, units
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.losses import SupportIndex
from oppo.placement import Thread
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.train.test_trainer import SAMPLING, rollouts
from tests.kit.known import known

LENGTHS = ((3, 5), (9, 1), (1, 4))  # tokens of each row's prompt and response


def batch() -> Batch:
    """Return rows whose token ids are 100 x row + position; the second row has no sampled token."""
    rows = []
    for r, (prompt, response) in enumerate(LENGTHS):
        ids = 100 * (r + 1) + np.arange(prompt + response, dtype=np.int32)
        zeros = np.zeros(response, np.float32)
        masks = np.full(response, r != 1)
        prompted = Prompt(r, r, ids[:prompt], group=7 if r != 1 else 8)
        rows.append(Response(prompted, ids[prompt:], zeros, np.zeros(response, np.int32), masks))
    tokens = np.concatenate([row.tokens for row in rows])
    numbered = np.arange(len(tokens), dtype=np.float32)
    return Batch(
        responses=tuple(rows),
        reasons=tuple("length" for _ in rows),
        scores=np.arange(len(rows), dtype=np.float32),
        offsets=np.cumsum([0, *map(len, rows)]),
        tokens=tokens,
        versions=np.zeros(len(tokens), np.int32),
        sampled=np.concatenate([row.sampled for row in rows]),
        logprobs=numbered,
        proximal=numbered,
        reference=numbered,
        values=numbered + 100,
        rewards=numbered,
        advantages=numbered + 200,
        returns=numbered + 300,
    )


def test_what_tokens_were_sampled_from_travels_with_them() -> None:
    made = batch()
    plain = pack(made, [2, 0], torch.device("cpu"))
    assert plain.support.empty
    first = Support(np.array([103, 7, 104, 8, 9, 105, 107], np.int32), np.array([2, 3, 1, 0, 1], np.int32))
    second = Support(np.array([1, 2, 303], np.int32), np.array([0, -2, 1, 0], np.int32))
    rows = (
        replace(made.responses[0], extra=TokenColumns(first)),
        made.responses[1],
        replace(made.responses[2], extra=TokenColumns(second)),
    )
    cpu = torch.device("cpu")
    support = SupportIndex.of(pack(replace(made, responses=rows), [2, 0, 1], cpu).support, cpu)
    assert support is not None
    assert support.narrow.tolist() == [2, 4, 5, 6, 8]
    assert support.kept.tolist() == [[0, 1, 1, 2, 2, 2, 3, 4], [0, 0, 1, 0, 1, 2, 0, 0], [303, *first.ids.tolist()]]
    assert support.width == 3
    assert support.wide.tolist() == [1]
    assert support.barred.tolist() == [[0, 0], [1, 2]]
    assert support.free


@pytest.mark.parametrize("count", [1, 3, 12])
def test_minibatches_are_a_shuffled_partition_that_its_key_decides(count: int) -> None:
    whole, single = [[0], [1, 2], [3], [4, 5, 6], [7], [8], [9], [10]], batch().responses[0]
    row_of = {at: replace(single, prompt=replace(single.prompt, rollout=at)) for at in range(11)}
    for at, first in ((8, 0), (10, 3)):  # further conversations
        row_of[at] = replace(single, prompt=replace(single.prompt, rollout=first + 2**32, branch=1))
    lengths = np.cumsum([0] + [len(single)] * 11)
    empty = np.zeros(lengths[-1], np.float32)
    rows = Batch(
        responses=tuple(row_of.values()),
        reasons=("eos",) * 11,
        scores=np.zeros(11, np.float32),
        offsets=lengths,
        tokens=empty.astype(np.int32),
        versions=empty.astype(np.int32),
        sampled=empty == 0,
        logprobs=empty,
    )

    def epoch(last: int) -> list[list[list[int]]]:
        return list(minibatches(rows, whole, count, (0, 1, last)))

    assert sorted(chain.from_iterable(epoch(2))) == whole
    assert len(epoch(2)) == min(count, 6)
    assert epoch(2) == epoch(2)
    assert list(chain.from_iterable(epoch(2))) != list(chain.from_iterable(epoch(3)))
    assert all(([0] in each) == ([8] in each) and ([3] in each) == ([10] in each) for each in epoch(2))


def test_units_are_rows_or_the_rows_of_a_prompt_that_have_a_sampled_token() -> None:
    assert units(batch(), "token") == units(batch(), "row") == [[0], [2]]
    assert units(batch(), "group") == [[0, 2]]


@pytest.mark.parametrize("budget", [1, 15, 10_000])
def test_micro_batches_never_part_a_unit_and_keep_its_order(budget: int) -> None:
    whole = [[0, 2], [1]]
    parts = list(micro_batches(batch(), whole, torch.device("cpu"), budget))
    assert parts == ([[1, 0, 2]] if budget == 10_000 else [[1], [0, 2]])


@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_packed_micro_batches_fill_the_budget_and_never_part_a_unit(budget: int) -> None:
    whole = [[0, 2], [1]]
    parts = list(micro_batches(batch(), whole, torch.device("cpu"), budget, packed=True))
    sizes = [tokens_read(batch(), part, packed=True) for part in parts]
    assert sorted(chain.from_iterable(parts)) == [0, 1, 2]
    assert all((0 in part) == (2 in part) for part in parts)
    assert len(parts) == 1 or all(sum(pair) > budget for pair in pairwise(sizes))


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(1, 60))
def test_groups_are_filled_up_to_the_budget(sizes: list[int], budget: int) -> None:
    groups = [[sizes[at] for at in group] for group in filled(sizes, budget)]
    assert sorted(at for group in filled(sizes, budget) for at in group) == list(range(len(sizes)))
    assert all(len(group) == 1 or sum(group) <= budget for group in groups)
    assert all(sum(group) + after[0] > budget for group, after in pairwise(groups))


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), max_size=9),
    st.integers(1, 60),
    st.integers(0, 40),
)
def test_no_other_way_to_read_neighbours_within_the_budget_costs_less(
    rows_of: list[tuple[int, int]], budget: int, overhead: int
) -> None:
    lengths, counts = [length for length, _ in rows_of], [count for _, count in rows_of]

    def cost(groups: Iterable[Sequence[int]]) -> float:
        sizes = [sum(counts[row] for row in group) * max(lengths[row] for row in group) for group in groups]
        alone = [len(group) == 1 for group in groups]
        fits = all(size <= budget or single for size, single in zip(sizes, alone, strict=True))
        return sum(sizes) + overhead * len(sizes) if fits else math.inf

    def every_way(rows: Sequence[int]) -> Iterator[list[Sequence[int]]]:
        if not rows:
            yield []
        for size in range(1, len(rows) + 1):
            for rest in every_way(rows[size:]):
                yield [rows[:size], *rest]

    groups = cheapest_groups(lengths, range(len(lengths)), overhead=overhead, budget=budget, counts=counts)
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    assert [row for group in groups for row in group] == longest_first
    assert cost(groups) == min(cost(way) for way in every_way(longest_first))


ULP = 2.0**-7  # the difference between 1 and the next number in bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_smaller_than_a_bit_of_the_weight_add_up(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    masters = MasterWeights([weight])
    optimizer = torch.optim.SGD([masters.of(weight)], lr=ULP / 100)
    seen = []
    for _ in range(100):
        weight.grad = torch.full_like(weight, -1)
        masters.collect()
        optimizer.step()
        optimizer.zero_grad()
        masters.write_back()
        seen.append(float(weight[0].detach()))
    assert seen[0] == 1, "one step alone is lost in the weight"
    assert seen[-1] == pytest.approx(1 + ULP, abs=1e-4), "a hundred are not"
    assert seen == sorted(seen)


def test_gradients_of_several_passes_add_up_in_float32() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = MasterWeights([weight])
    for _ in range(512):
        weight.grad = torch.ones_like(weight)
        masters.collect()
    assert weight.grad is None
    master = masters.of(weight)
    assert master.grad is not None
    assert master.grad.item() == 512, "in bfloat16 the sum would have stopped at 256"
    weight.grad = torch.ones_like(weight)
    masters.clear()
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_enough_bits_are_optimized_themselves(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    masters = MasterWeights([weight])
    assert masters.of(weight) is weight
    weight.grad = torch.ones_like(weight)
    masters.collect()
    masters.clear()
    assert weight.grad is not None


def trainer_in(dtype: torch.dtype, thread: Thread, **settings: object) -> HfTrainer:
    actor = tiny.causal("llama", seed=1, dtype=dtype)
    critic = tiny.scalar("llama", seed=2)
    nn.Module.to(critic, dtype=dtype)
    chosen = TrainerSettings(**{"epochs": 1} | settings)  # type: ignore[arg-type] # by keyword
    return HfTrainer(actor, critic, sampling=SAMPLING, place=thread, settings=chosen)


def test_bfloat16_models_learn_what_a_single_update_would_lose(thread: Thread) -> None:
    trainer = trainer_in(torch.bfloat16, thread, learning_rate=1e-5)
    oracle = tiny.causal("llama", seed=1), tiny.scalar("llama", seed=2)
    batch = rollouts(*oracle)
    start = weights_digest(trainer.core.actor)
    norm = dict(trainer.core.actor.named_parameters())["model.norm.weight"]
    metrics = anyio.run(trainer.update, batch).metrics
    optimisation = trainer.core.optimisation
    master = optimisation.masters.of(norm)
    assert optimisation.optimizer.state[master]["exp_avg"].dtype == torch.float32
    assert torch.equal(norm, torch.ones_like(norm)), "a step of 1e-5 from 1 is no bit of bfloat16"
    assert torch.any(master != 1), "but it is kept"
    assert metrics["train/grad_norm"] > 0
    for _ in range(5):
        anyio.run(trainer.update, batch)
    moved = (master - 1).abs().max()
    assert 3e-5 < moved < 7e-5, "six steps of at most 1e-5 each have added up"
    assert weights_digest(trainer.core.actor) != start, "small weights have moved by now"
    assert {p.dtype for p in optimisation.models.parameters()} == {torch.bfloat16}


def test_an_update_that_is_not_finite_leaves_copies_and_weights_alone(thread: Thread) -> None:
    trainer = trainer_in(torch.bfloat16, thread)
    batch = rollouts(tiny.causal("llama", seed=1), tiny.scalar("llama", seed=2))
    known(batch.returns)[:] = float("inf")
    masters = trainer.core.optimisation.weights[0]
    before = [master.detach().clone() for master in masters]
    digest = weights_digest(trainer.core.actor)
    assert anyio.run(trainer.update, batch).nonfinite == batch.rollouts
    assert weights_digest(trainer.core.actor) == digest
    assert all(torch.equal(master, old) for master, old in zip(masters, before, strict=True))
    assert all(master.grad is None for master in masters)


def test_a_restored_trainer_goes_on_from_the_copies(thread: Thread, tmp_path: Path) -> None:
    batch = rollouts(tiny.causal("llama", seed=1), tiny.scalar("llama", seed=2))
    first, second = (trainer_in(torch.bfloat16, thread, learning_rate=1e-5) for _ in range(2))
    anyio.run(first.update, batch)
    anyio.run(first.write, tmp_path)
    anyio.run(second.restore, tmp_path)
    for _ in range(2):
        for trainer in (first, second):
            anyio.run(trainer.update, batch)
    assert first.version == second.version == 3
    for ours, theirs in zip(
        chain(*first.core.optimisation.weights), chain(*second.core.optimisation.weights), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert weights_digest(first.core.actor) == weights_digest(second.core.actor)


def test_float16_is_not_trained(thread: Thread) -> None:
    with pytest.raises(ModelRefused, match=r"LlamaForCausalLM is in float16.*dtype = 'bfloat16' or 'float32'"):
        trainer_in(torch.float16, thread)


def test_what_a_device_does_not_compute_with_is_refused_with_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        require_supported(dtype, cpu)
    with pytest.raises(ConfigError, match=r"float16 is not for a CPU.*'float32' or 'bfloat16'"):
        require_supported(torch.float16, cpu)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *, including_emulation: including_emulation)
    with pytest.raises(ConfigError, match=r"Tesla T4 does not compute in bfloat16 itself: expected"):
        require_supported(torch.bfloat16, cuda)
    require_supported(torch.float16, cuda)
