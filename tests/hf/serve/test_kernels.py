"""Triton's kernels draw what a CPU draws, interpreted, and compile for GPUs, which need not be there."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from oppo.hf.serve.sampling import Drawing
from oppo.models import Sampling
from tests.hf.compiled import compiled, launches

pytestmark = pytest.mark.triton
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    assert os.environ.get("TRITON_INTERPRET") == "1", "expected by Triton's modules when they are imported"
    return importlib.import_module("oppo.hf.kernels")


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    seed=st.integers(0, 2**31),
    min_new_tokens=st.sampled_from([0, 3, 3]),
    stop=st.sampled_from([(), (4,), (9, 4, 70_000)]),
    top_k=st.sampled_from([0, 0, 5]),
)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # the interpreter's, in numpy
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@given(
    sampling=samplings,
    vocabulary=st.integers(10, 5000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    odd=st.sampled_from([0.0, -torch.inf, torch.nan]),
    positions=st.lists(st.integers(0, 6), min_size=1, max_size=5).map(tuple),
)
def test_tokens_are_a_cpu_s_to_the_bit_and_log_probs_but_for_rounding(
    kernels: ModuleType,
    *,
    sampling: Sampling,
    vocabulary: int,
    dtype: torch.dtype,
    odd: float,
    positions: tuple[int, ...],
) -> None:
    wide = torch.randn(len(positions), vocabulary + 3, generator=torch.Generator().manual_seed(vocabulary)) * 4
    wide[0, : vocabulary // 2] += odd
    logits, rows = wide.to(dtype)[:, :vocabulary], [(at * 2**33, at) for at in range(len(positions))]
    ours, theirs = (Drawing(sampling, CPU, each)(logits, rows, positions) for each in (None, kernels))
    broken = int(np.isnan(odd))  # a row that is no number has no token
    assert torch.equal(theirs.tokens[broken:], ours.tokens[broken:])
    assert theirs.tokens.tolist() == theirs.tokens.clamp(0, vocabulary - 1).tolist()
    torch.testing.assert_close(theirs.logprobs, ours.logprobs, atol=2e-5, rtol=1e-5, equal_nan=True)
    assert np.array_equal(theirs.read_back()[2].ids, ours.read_back()[2].ids)
    assert theirs.logprobs.isfinite().tolist() == ours.logprobs.isfinite().tolist()


def test_a_token_is_drawn_in_two_launches(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launches(monkeypatch)
    for vocabulary in (100, 20_000):
        Drawing(Sampling(), CPU, kernels)(torch.zeros(3, vocabulary), [(at, 0) for at in range(3)], [0, 0, 0])
    assert launched == [(3, 1), (3,), (3, 10), (3,)]


def test_they_compile_for_gpus_without_a_fused_operation(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logit and its noise are rounded apart, as by torch."""
    numbers = {"vocabulary": "i32", "stride": "i32", "parts": "i32", "least": "i32", "temperature": "fp32"}
    made = compiled(
        monkeypatch,
        kernels.__name__,
        *("_draw_parts", "_join_parts"),
        kinds=numbers | {"keys": "*i32", "ends": "*i32", "ids": "*i32", "tokens": "*i64"},
        constants={"block": kernels.BLOCK, "barred": 2, "sampled": True, "width": 128},
        options={"enable_fp_fusion": False},
    )
    assert all(cubin for cubin, _ in made.values()), made
    assert not any(fused for name, (_, fused) in made.items() if name.startswith("_draw")), made
