"""Drawing tokens: the argmax of logits plus Gumbel noise, over the ids that truncation keeps.

``argmax(logits + g)`` with independent standard Gumbel ``g`` is a sample from ``softmax(logits)`` (Gumbel, 1954;
Maddison et al., 2014, "A* sampling"). Unlike inverting a cumulative sum it is robust: an error of 1e-6 in one logit
changes the token only where the two best perturbed logits nearly tie, so the same noise gives the same tokens under
another batch shape, chunking or device. The noise (:mod:`oppo.hf.serve.noise`) is a function of the seed and of
a token's admission number, sample and position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo.events import Support
from oppo.hf.devices import CPU, triton_kernels
from oppo.hf.kv.cache import runs
from oppo.hf.serve.noise import Noise, keys_at, noise_of, table_on
from oppo.models import Sampling

_NUCLEUS = 1024  # tokens among which the nucleus of `top_p` is searched first: sorting a whole vocabulary is slow


class Drawn(NamedTuple):
    """Tokens, int64 [n], and log-probs, on the device of the logits."""

    # kept: int64 [n, k], the ids that top_k and top_p kept of each row, and -1; None without truncation. barred: the
    # support of the tokens if only ends that come too early were left out.

    tokens: Tensor
    logprobs: Tensor
    kept: Tensor | None
    barred: Support

    def read_back(self) -> tuple[NDArray[np.int32], NDArray[np.float32], Support]:
        """Return tokens, log-probs and the support of the tokens, for which the host waits once."""
        columns = [self.tokens[:, None], self.logprobs[:, None], *([] if self.kept is None else [self.kept])]
        host = torch.cat([column.double() for column in columns], 1).cpu().numpy()  # in float64 all are exact
        ids, support = host[:, 2:].astype(np.int32), self.barred
        if self.kept is not None:
            support = Support(ids[ids >= 0], (ids >= 0).sum(1, dtype=np.int32))
        return host[:, 0].astype(np.int32), host[:, 1].astype(np.float32), support


class Drawing:
    """Draws the next token of rows; on a GPU with Triton in two launches (:mod:`oppo.hf.kernels`)."""

    def __init__(self, sampling: Sampling, device: torch.device, kernels: ModuleType | None = None) -> None:
        self._sampling = sampling
        self._noise = Noise(sampling.seed, device)
        self._kernels = _kernels_on(device) if kernels is None and device.type == "cuda" else kernels
        self._ends = torch.tensor(sampling.stop, dtype=torch.int32, device=device)

    def __call__(self, logits: Tensor, rows: Sequence[tuple[int, int]], positions: Sequence[int]) -> Drawn:
        """Return the token at a position of each row (admission number, sample), sampled from ``logits`` [n, V]."""
        sampling, vocabulary, table = self._sampling, logits.shape[-1], self._noise.table
        too_short = [at for at, position in enumerate(positions) if position < sampling.min_new_tokens]
        if _truncates(sampling, vocabulary):
            keys = self._noise(rows, positions)
            return draw(logits, lambda ids: noise_of(keys, ids, table), sampling, too_short)
        if self._kernels is None:
            noise = self._noise(rows, positions, vocabulary) if sampling.temperature > 0 else None
            return draw(logits, noise, sampling, too_short)
        allowed = _without(logits, range(len(logits)), sampling.barred) if sampling.barred else logits
        tokens, logprobs = self._kernels.draw(
            *(allowed, self._noise(rows, positions), table),
            temperature=sampling.temperature,
            ends=self._ends if too_short else self._ends[:0],
            least=sampling.min_new_tokens,
        )
        return Drawn(tokens, logprobs, None, _barred(sampling, logits.shape, too_short))


@cache
def _kernels_on(device: torch.device) -> ModuleType | None:
    sampling, keys, table = Sampling(temperature=0.7), keys_at(0, torch.arange(12).view(4, 3)), table_on(CPU)
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    expected = draw(logits, noise_of(keys, torch.arange(5000), table), sampling).tokens

    def agrees(kernels: ModuleType) -> bool:
        given, ends = (each.to(device) for each in (logits, keys, table)), torch.empty(0, dtype=torch.int32)
        tokens, _ = kernels.draw(*given, temperature=sampling.temperature, ends=ends.to(device), least=0)
        return torch.equal(tokens.cpu(), expected)

    return triton_kernels("oppo.hf.kernels", device, agrees, "tokens are drawn")


def draw(
    logits: Tensor,
    noise: Tensor | Callable[[Tensor], Tensor] | None,
    sampling: Sampling,
    too_short: Sequence[int] = (),
) -> Drawn:
    """Return tokens sampled from ``logits`` [n, V], their log-probs and their support, in float32.

    ``noise``: float32 [n, V]; where ids are left out, it may be a function of the others, int64 [n, k].
    """
    # A log-prob is of the distribution that the token was sampled from: at the sampling temperature (1 when greedy),
    # then top_k, then top_p, as in transformers' generate(). Rows that are too short get no token of sampling.stop.
    logits = logits.float()
    if sampling.temperature == 0:
        noise = None
    elif noise is None:
        raise ValueError(f"sampling at temperature {sampling.temperature} needs noise; only greedy decoding has none")
    else:
        logits = logits / sampling.temperature
    barred = _barred(sampling, logits.shape, too_short)
    if sampling.barred:
        logits = _without(logits, range(len(logits)), sampling.barred)
    if too_short:
        logits = _without(logits, too_short, sampling.stop)
    kept, ids = _kept(logits, sampling), None
    if kept is None:
        tokens = (logits if noise is None else logits + cast("Tensor", noise)).argmax(-1, keepdim=True)
        normaliser = logits.logsumexp(-1, keepdim=True)
    else:
        best, ids, normaliser = kept
        of_ids = noise(ids) if callable(noise) else cast("Tensor", noise).gather(1, ids)
        tokens = ids.gather(1, (best + of_ids).argmax(-1, keepdim=True))
        ids = ids.where(best > -torch.inf, -1)
    logprobs = (logits.gather(1, tokens) - normaliser).clamp_(max=0)  # rounding can leave it above 0
    return Drawn(tokens.squeeze(1), logprobs.squeeze(1), ids, barred)


def _without(logits: Tensor, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
    allowed, known = logits.clone(), _known(ids, logits.shape[-1])
    for (some,) in runs(rows) if known else ():
        for (tokens,) in runs(known):
            allowed[some, tokens].fill_(-torch.inf)
    return allowed


def _barred(sampling: Sampling, shape: Sequence[int], too_short: Sequence[int]) -> Support:
    always = np.array(_known(sampling.barred, shape[1]), np.int32)
    if not too_short and not len(always):
        return Support()
    early = np.array(_known((*sampling.barred, *sampling.stop), shape[1]), np.int32)
    short = set(too_short)
    listed = [early if row in short else always for row in range(shape[0])]
    return Support(np.concatenate(listed), np.array([-len(ids) for ids in listed], np.int32))


def _known(ids: Sequence[int], vocabulary: int) -> list[int]:
    return sorted({token for token in ids if token < vocabulary})


def _truncates(sampling: Sampling, vocabulary: int) -> bool:
    return sampling.temperature > 0 and (0 < sampling.top_k < vocabulary or sampling.top_p < 1)


def _kept(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor] | None:
    # The largest logits of each row, minus infinity where truncation drops them; their ids; the logsumexp of the kept.
    if not _truncates(sampling, logits.shape[-1]):
        return None
    if not sampling.top_k:
        return _nucleus(logits, sampling.top_p)
    best, ids = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1)
    if sampling.top_p < 1:
        best = _until(best, best.softmax(-1), sampling.top_p)[0]
    return best, ids, best.logsumexp(-1, keepdim=True)


def _nucleus(logits: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    vocabulary, total = logits.shape[-1], logits.logsumexp(-1, keepdim=True)
    width = min(_NUCLEUS, vocabulary)
    best, ids = logits.topk(width, dim=-1)
    if width < vocabulary and bool(((best - total).exp().sum(-1) < top_p).any()):
        best, ids = logits.sort(-1, descending=True)
    best, mass = _until(best, (best - total).exp(), top_p)
    # No logsumexp of the best: its last bit would depend on their number, and so on the other rows.
    return best, ids, total + mass.log()


def _until(best: Tensor, probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    mass = probabilities.cumsum(-1)
    stays = mass - probabilities < top_p
    return best.masked_fill(~stays, -torch.inf), mass.gather(1, (stays.sum(-1, keepdim=True) - 1).clamp_(min=0))
