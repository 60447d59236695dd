"""Float32 copies of 16-bit weights: small steps add up, gradients too, and float32 weights are left to themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import anyio
import pytest
import torch
from torch import nn

from oppo.errors import ConfigError, ModelRefused
from oppo.hf.loading import require_supported
from oppo.hf.train.optim import MasterWeights
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.placement import Thread
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.train.test_trainer import SAMPLING, rollouts
from tests.known import known

ULP = 2.0**-7
"""The difference between 1 and the next number in bfloat16."""


@pytest.fixture
def thread() -> Iterator[Thread]:
    torch.set_num_threads(1)
    with Thread("train", setup=lambda: torch.set_num_threads(1)) as thread:
        yield thread


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
