"""Triton's kernels, interpreted, give what a CPU gives, and compile for GPUs, which need not be there."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping
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
from oppo.hf.serve.sampling import Drawing
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.trainer import HfTrainerCore
from oppo.log import routed
from oppo.losses import ClippedLoss
from oppo.models import Sampling
from oppo.placement.trainer import TrainerCounts
from oppo.training import TrainerSettings
from tests.hf import tiny
from tests.kit.forked import Program

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),  # the interpreter's
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]
BOUND = 2e-6
"""The largest difference from float64, in units of the largest logit; torch's entropies differ more."""


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


def test_tokens_are_drawn_in_two_launches_and_measured_in_one_each_way(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, interpreter = list[tuple[int, ...]](), importlib.import_module("triton.runtime.interpreter")
    execute = interpreter.GridExecutor.__call__

    def launch(run: Any, *given: object, **named: object) -> None:
        launched.append(run.grid)
        execute(run, *given, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    for vocabulary, parts, wide in ((100, 1, 1), (20_000, 10, 3)):
        logits = torch.zeros(3, vocabulary, requires_grad=True)
        Drawing(Sampling(), CPU, kernels)(logits.detach(), [(at, 0) for at in range(3)], [0, 0, 0])
        found = kernels.measured(logits, torch.arange(3), vocabulary=vocabulary, temperature=1.0)
        torch.autograd.grad(found, logits, [torch.ones(3), torch.ones(3)])
        assert launched == [(3, parts), (3,), (3,), (3, wide)]
        launched.clear()


def exactly(logits: Tensor, tokens: Tensor, barred: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Return log-probs and entropies as their definitions say, in the dtype of the logits."""
    every = (logits / (temperature or 1.0)).masked_fill(barred, -torch.inf).log_softmax(-1)
    surprises = every.exp() * every.where(every > -torch.inf, 0.0)
    return every.gather(1, tokens[:, None]).squeeze(1), -surprises.sum(1)


@given(data=st.data())
def test_they_give_numbers_and_slopes_within_rounding(kernels: ModuleType, data: st.DataObject) -> None:
    rows, vocabulary = data.draw(st.integers(1, 5)), data.draw(st.integers(10, 20_000))
    padded, dtype = data.draw(st.sampled_from([0, 7])), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    temperature, size = data.draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])), data.draw(st.sampled_from([0.0, 1.0, 30.0]))
    impossible = data.draw(st.sampled_from([0.0, -torch.inf, torch.finfo(torch.float32).min]))
    bars = data.draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=rows, max_size=rows))
    generator = torch.Generator().manual_seed(vocabulary)
    drawn = torch.randn(rows, vocabulary + padded, generator=generator) * size
    drawn[:, 8 : vocabulary // 2] += impossible
    logits, exact = (drawn.to(dtype).to(kind, copy=True).requires_grad_() for kind in (dtype, torch.float64))
    tokens, slopes = torch.arange(rows), torch.randn(2, rows, generator=generator)
    counts, barred = -np.array(bars, np.int32), torch.zeros(rows, vocabulary, dtype=torch.bool)
    ids = [5 + (row + at) % 3 for row, count in enumerate(-counts) for at in range(count)]
    barred[np.repeat(np.arange(rows), -counts), ids] = True
    support = Support(np.array(ids, np.int32), counts)
    sampling = Sampling(temperature=temperature, vocabulary=vocabulary)

    def measured(by: ModuleType | None) -> list[Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head, "kernels_on", lambda device: by)
            found = head.token_measures(logits, tokens, support, sampling, entropy=True, learnt=True)
        return [*found.values(), *torch.autograd.grad([*found.values()], logits, [*slopes])]

    wanted = exactly(exact[:, :vocabulary], tokens, barred, temperature)
    wanted += torch.autograd.grad(wanted, exact, [*slopes.double()])
    largest = max(1.0, float(drawn[:, :8].abs().max()) / (temperature or 1.0))
    for each, torchs, other in zip(measured(kernels), measured(None), wanted, strict=True):
        assert each.dtype == torchs.dtype
        rounding = 2**-7 if each.dtype == torch.bfloat16 else BOUND  # the interpreter truncates
        torch.testing.assert_close(each.double(), other, atol=BOUND * largest, rtol=rounding)
        torch.testing.assert_close(each, torchs, atol=20 * BOUND * largest, rtol=20 * rounding)


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
            TrainerSettings(epochs=1, learning_rate=0.1, eps=1.0),  # in proportion to the gradient
            ClippedLoss(entropy_coefficient=entropy),
            TrainerCounts.new(),
        )
        batch = longest_batch(4, Load(4, 8, 16, 8), critic=False)
        core.update(replace(batch, advantages=np.linspace(-1, 1, len(batch.tokens), dtype=np.float32)))
        found.append([weight.detach() for weight in core.actor.parameters()])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_kernels_that_differ_or_do_not_run_are_left_out_and_the_log_says_why(kernels: ModuleType) -> None:
    class Skewed(ModuleType):
        @staticmethod
        def measured(*given: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            logprobs, found = kernels.measured(*given, **options)
            return logprobs + 0.01, found

    assert head._agree(CPU, kernels)
    assert not head._agree(CPU, Skewed("skewed"))
    said = list[str]()
    with routed(said.append):
        assert triton_kernels(kernels.__name__, CPU, lambda kernels: False, "work is done") is None
        assert head.kernels_on.__wrapped__(torch.device("cuda", 7)) is None
    assert re.match("work is done operation by operation on cpu: .*something else than a CPU", said[0])
    assert said[1].startswith("log-probs of tokens are computed operation by operation on cuda:7: ")


COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from oppo.hf import kernels

kernels_of, kinds = json.loads(sys.argv[1])
found = {}
for name, constants in kernels_of.items():
    kernel = getattr(kernels, name)
    options = {"enable_fp_fusion": False} if "parts" in name else {"num_warps": 16}
    for capability in (80, 90):
        for logits in ("*fp32", "*bf16"):
            every = kinds | {"logits": logits} | dict.fromkeys(constants, "constexpr")
            signature = {name: every.get(name, "*fp32") for name in kernel.arg_names}
            constexprs = {(at,): constants[name] for at, name in enumerate(kernel.arg_names) if name in constants}
            source = ASTSource(kernel, signature=signature, constexprs=constexprs)
            made = compile(source, GPUTarget("cuda", capability, 32), options)
            fused = made.asm["ptx"].count("fma.")
            found[f"{name} {capability} {logits}"] = bool(made.asm["cubin"]), fused
print(json.dumps(found))
"""


COMPILED: Mapping[str, Mapping[str, object]] = {
    "_draw_parts": {"block": 2048, "barred": 2, "sampled": True},
    "_join_parts": {"width": 128},
    "_measure": {"bars": True, "block": 8192},
    "_differentiate": {"bars": True, "block": 8192},
}
"""Kernels, and their constants."""
KINDS = {
    **dict.fromkeys(("vocabulary", "stride", "parts", "least", "width"), "i32"),
    **dict.fromkeys(("keys", "ends", "barred"), "*i32"),
    "temperature": "fp32",
    "tokens": "*i64",
}


def test_they_compile_for_gpus_and_draw_without_a_fused_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logit and its noise are rounded apart, as by torch."""
    monkeypatch.delenv("TRITON_INTERPRET")
    with Program(COMPILE, [json.dumps((COMPILED, KINDS))]) as program:
        out, said = program.communicate()
    assert program.returncode == 0, said
    found = json.loads(out)
    assert len(found) == 4 * len(COMPILED)
    assert all(cubin for cubin, _ in found.values()), found
    assert not any(fused for name, (_, fused) in found.items() if name.startswith("_draw")), found
