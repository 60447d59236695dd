"""Log-probs and entropies of tokens from their logits: by kernels of Triton on a GPU, else operation by operation.

Supports that list the ids which may be drawn (``top_k``, ``top_p``) are read operation by operation everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from oppo.events import Support
from oppo.hf.devices import CPU, triton_kernels
from oppo.losses import Input, SupportIndex, entropies, token_logprobs
from oppo.models import Sampling


def token_measures(
    logits: Tensor, tokens: Tensor, support: Support, sampling: Sampling, *, entropy: bool = False, learnt: bool = False
) -> Mapping[Input, Tensor]:
    """Return log-probs and, with ``entropy``, entropies of tokens [T] with logits [T, V]: float32 [T], nats.

    Entropies have a gradient only if they are ``learnt``.
    """
    kernels = None if (support.counts > 0).any() else kernels_on(logits.device)
    measured = _by_operations if kernels is None else partial(_by_kernels, kernels)
    return measured(logits, tokens, support, sampling, entropy=entropy, learnt=learnt)


def _by_operations(
    logits: Tensor, tokens: Tensor, support: Support, sampling: Sampling, *, entropy: bool, learnt: bool
) -> Mapping[Input, Tensor]:
    logits, index = logits[..., sampling.ids], SupportIndex.of(support, logits.device)
    found: dict[Input, Tensor] = {"logprobs": token_logprobs(logits, tokens, sampling.temperature, index)}
    if entropy:
        found["entropies"] = entropies(logits if learnt else logits.detach(), sampling.temperature, index)
    return found


def _by_kernels(
    kernels: ModuleType,
    logits: Tensor,
    tokens: Tensor,
    support: Support,
    sampling: Sampling,
    *,
    entropy: bool,
    learnt: bool,
) -> Mapping[Input, Tensor]:
    barred, vocabulary = None, logits.shape[-1]
    if not support.empty:
        ends = np.cumsum(np.abs(support.counts)) + len(tokens) + 1
        listed = np.concatenate(([len(tokens) + 1], ends, support.ids), dtype=np.int32)
        barred = torch.from_numpy(listed).to(logits.device)
    logprobs, surprises = kernels.measured(
        *(logits, tokens),
        vocabulary=min(sampling.vocabulary or vocabulary, vocabulary),
        temperature=sampling.temperature,
        barred=barred,
    )
    found: dict[Input, Tensor] = {"logprobs": logprobs}
    if entropy:
        found["entropies"] = surprises if learnt else surprises.detach()
    return found


@cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """Return :mod:`oppo.hf.head_kernels` if they run on this device, and give what a CPU gives but for rounding."""
    if device.type != "cuda":
        return None
    work = "log-probs of tokens are computed"
    return triton_kernels("oppo.hf.head_kernels", device, partial(_agree, device), work)


@torch.inference_mode(mode=False)
@torch.enable_grad()
def _agree(device: torch.device, kernels: ModuleType) -> bool:
    given = torch.randn(4, 9000, generator=torch.Generator().manual_seed(0)) * 4
    support = Support(np.array([7, 8500], np.int32), np.array([0, -2, 0, 0], np.int32))

    def found(on: torch.device, measured: Callable[..., Mapping[Input, Tensor]]) -> list[Tensor]:
        logits, tokens, slopes = given.to(on).requires_grad_(), torch.arange(4).to(on), torch.arange(8.0).to(on)
        outputs = measured(logits, tokens, support, Sampling(temperature=0.7), entropy=True, learnt=True)
        slope = torch.autograd.grad([*outputs.values()], logits, [*slopes.view(2, 4)])
        return [each.detach().cpu() for each in (*outputs.values(), *slope)]

    pairs = zip(found(CPU, _by_operations), found(device, partial(_by_kernels, kernels)), strict=True)
    return all(torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4) for ours, theirs in pairs)
