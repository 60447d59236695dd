"""Triton's kernels of log-probs and entropies, interpreted, give what torch gives, and compile for GPUs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from oppo.events import Support
from oppo.hf import head
from oppo.hf.devices import CPU, triton_kernels
from oppo.hf.memory import Load, longest_batch
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.trainer import HfTrainerCore
from oppo.log import routed
from oppo.losses import ClippedLoss
from oppo.models import Sampling
from oppo.placement.trainer import TrainerCounts
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.hf.compiled import compiled, launches

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # the interpreter's, in numpy
]
BOUND = 2e-6
"""The largest difference from float64, in units of the largest logit; torch's entropies differ more."""


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    assert os.environ.get("TRITON_INTERPRET") == "1", "expected by Triton's modules when they are imported"
    return importlib.import_module("oppo.hf.kernels")


def exactly(logits: Tensor, tokens: Tensor, barred: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies as their definitions say, in the dtype of the logits."""
    every = (logits / (temperature or 1.0)).masked_fill(barred, -torch.inf).log_softmax(-1)
    surprises = every.exp() * every.where(every > -torch.inf, 0.0)
    return every.gather(1, tokens[:, None]).squeeze(1), -surprises.sum(1)


def differentiated(measured: Sequence[Tensor], logits: Tensor, slopes: Tensor) -> list[Tensor]:
    return [*measured, *torch.autograd.grad(measured, logits, [*slopes.to(measured[0].dtype)])]


@given(
    rows=st.integers(1, 5),
    vocabulary=st.integers(10, 20_000),
    padded=st.sampled_from([0, 7]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    size=st.sampled_from([0.0, 1.0, 30.0]),
    impossible=st.sampled_from([0.0, -torch.inf, torch.finfo(torch.float32).min]),
    bars=st.lists(st.sampled_from([0, 0, 1, 2]), min_size=5, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_they_give_numbers_and_slopes_within_rounding(
    kernels: ModuleType,
    *,
    rows: int,
    vocabulary: int,
    padded: int,
    temperature: float,
    size: float,
    impossible: float,
    bars: list[int],
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    drawn = torch.randn(rows, vocabulary + padded, generator=generator) * size
    drawn[:, 8 : vocabulary // 2] += impossible
    logits, exact = (drawn.to(dtype).to(kind, copy=True).requires_grad_() for kind in (dtype, torch.float64))
    tokens, slopes = torch.arange(rows), torch.randn(2, rows, generator=generator)
    counts, barred = -np.array(bars[:rows], np.int32), torch.zeros(rows, vocabulary, dtype=torch.bool)
    ids = [5 + (row + at) % 3 for row, count in enumerate(-counts) for at in range(count)]
    barred[np.repeat(np.arange(rows), -counts), ids] = True
    support = Support(np.array(ids, np.int32), counts)
    sampling = Sampling(temperature=temperature, vocabulary=vocabulary)

    def measured(by: ModuleType | None) -> list[Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head, "kernels_on", lambda device: by)
            found = head.token_measures(logits, tokens, support, sampling, entropy=True, learnt=True)
        return differentiated([found["logprobs"], found["entropies"]], logits, slopes)

    wanted = differentiated(exactly(exact[:, :vocabulary], tokens, barred, temperature), exact, slopes)
    largest = max(1.0, float(drawn[:, :8].abs().max()) / (temperature or 1.0))
    for each, torchs, other in zip(measured(kernels), measured(None), wanted, strict=True):
        assert each.dtype == torchs.dtype
        rounding = 2**-7 if each.dtype == torch.bfloat16 else BOUND  # the interpreter truncates
        torch.testing.assert_close(each.double(), other, atol=BOUND * largest, rtol=rounding)
        torch.testing.assert_close(each, torchs, atol=20 * BOUND * largest, rtol=20 * rounding)


def test_logits_are_read_once_and_their_gradient_is_written_in_one_launch_more(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launches(monkeypatch)
    for vocabulary in (100, 20_000):
        logits = torch.zeros(3, vocabulary, requires_grad=True)
        found = kernels.measured(logits, torch.arange(3), vocabulary=vocabulary, temperature=1.0)
        torch.autograd.grad(found, logits, [torch.ones(3), torch.ones(3)])
    assert launched == [(3,), (3, 1), (3,), (3, 3)]


@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_an_update_by_them_is_that_of_operations(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, entropy: float
) -> None:
    monkeypatch.setattr("oppo.hf.head.CPU_LOGITS_BYTES", 4 * tiny.VOCABULARY * 5)  # several chunks
    sampling, found = Sampling(max_new_tokens=16, temperature=0.7), list[list[Tensor]]()
    for each in (None, kernels):
        monkeypatch.setattr(head, "kernels_on", lambda device, each=each: each)
        core = HfTrainerCore(
            ActorCritic(tiny.causal(seed=1)),
            sampling,
            TrainerSettings(epochs=1, learning_rate=1e-3),
            ClippedLoss(entropy_coefficient=entropy),
            TrainerCounts.new(),
        )
        batch = longest_batch(4, Load(4, 8, 16, 8), critic=False)
        core.update(replace(batch, advantages=np.linspace(-1, 1, len(batch.tokens), dtype=np.float32)))
        found.append([weight.detach() for weight in core.actor.parameters()])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_they_compile_for_gpus(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        "vocabulary": "i32",
        "stride": "i32",
        "width": "i32",
        "temperature": "fp32",
        "tokens": "*i64",
        "barred": "*i32",
    }
    made = compiled(
        monkeypatch,
        kernels.__name__,
        *("_measure", "_differentiate"),
        kinds=kinds,
        constants={"bars": True, "block": kernels.WIDE_BLOCK},
        options={"num_warps": 16},
    )
    assert all(cubin for cubin, _ in made.values()), made


def test_kernels_that_differ_or_do_not_run_are_left_out_and_the_log_says_why(kernels: ModuleType) -> None:
    class Skewed(ModuleType):
        @staticmethod
        def measured(*given: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            logprobs, found = kernels.measured(*given, **options)
            return logprobs + 0.01, found

    assert head._agree(CPU, kernels)
    assert not head._agree(CPU, Skewed("skewed"))
    messages = list[str]()
    with routed(messages.append):
        assert triton_kernels(kernels.__name__, CPU, lambda kernels: False, "work is done") is None
        assert head.kernels_on.__wrapped__(torch.device("cuda", 7)) is None
    differs, fails = messages
    assert differs.startswith("work is done operation by operation on cpu: ")
    assert "something else than a CPU" in differs
    assert fails.startswith("log-probs of tokens are computed operation by operation on cuda:7: ")
