"""Drawing tokens: the argmax of logits plus Gumbel noise, over the ids that truncation keeps.

``argmax(logits + g)`` with independent standard Gumbel ``g`` is a sample from ``softmax(logits)`` (Gumbel, 1954;
Maddison et al., 2014, "A* sampling"). Unlike inverting a cumulative sum it is robust: an error of 1e-6 in one logit
changes the token only where the two best perturbed logits nearly tie, so the same noise gives the same tokens under
another batch shape, chunking or device. The noise is a function of the seed and of a token's admission number, sample
and position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo.events import Support
from oppo.hf.kv.cache import runs, take
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


def draw(logits: Tensor, noise: Tensor | None, sampling: Sampling, too_short: Sequence[int] = ()) -> Drawn:
    """Return tokens sampled from ``logits`` [n, V] with ``noise``, their log-probs and their support, in float32."""
    # A log-prob is of the distribution that the token was sampled from: at the sampling temperature (1 when greedy),
    # then top_k, then top_p, as in transformers' generate(). Rows that are too short get no token of sampling.stop.
    logits = logits.float()
    if sampling.temperature == 0:
        noise = None
    elif noise is None:
        raise ValueError(f"sampling at temperature {sampling.temperature} needs noise; only greedy decoding has none")
    else:
        logits = logits / sampling.temperature
    logits, barred = _without_stop(logits, too_short, sampling.stop) if too_short else (logits, Support())
    kept, ids = _kept(logits, sampling), None
    if noise is None or kept is None:
        tokens = (logits if noise is None else logits + noise).argmax(-1, keepdim=True)
        normaliser = logits.logsumexp(-1, keepdim=True)
    else:
        best, ids, normaliser = kept
        tokens = ids.gather(1, (best + noise.gather(1, ids)).argmax(-1, keepdim=True))
        ids = ids.where(best > -torch.inf, -1)
    logprobs = (logits.gather(1, tokens) - normaliser).clamp_(max=0)  # rounding can leave it above 0
    return Drawn(tokens.squeeze(1), logprobs.squeeze(1), ids, barred)


def _without_stop(logits: Tensor, too_short: Sequence[int], stop: Sequence[int]) -> tuple[Tensor, Support]:
    ends, allowed = sorted({token for token in stop if token < logits.shape[-1]}), logits.clone()
    for (rows,) in runs(too_short):
        for (tokens,) in runs(ends):
            allowed[rows, tokens].fill_(-torch.inf)
    counts = np.zeros(len(logits), np.int32)
    counts[list(too_short)] = -len(ends)
    return allowed, Support(np.tile(np.array(ends, np.int32), len(too_short)), counts)


def _kept(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor] | None:
    # The largest logits of each row, minus infinity where truncation drops them; their ids; the logsumexp of the kept.
    if sampling.temperature == 0 or (not 0 < sampling.top_k < logits.shape[-1] and sampling.top_p == 1):
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


AHEAD = 16  # positions of a row for which noise is made at once, at most: noise beyond the end of a response is wasted

ENTRIES = 2**18
"""About how many numbers are made at once, one position's at least: for fewer, calling torch dominates the cost."""


def _signed(word: int, bits: int) -> int:
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


_GOLDEN64 = _signed(0x9E3779B97F4A7C15, 64)

_MIX64 = (_signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64))

_GOLDEN32 = _signed(0x9E3779B1, 32)

_MIX32 = (_signed(0x7FEB352D, 32), _signed(0x846CA68B, 32))


def gumbel(seed: int, admission: Tensor, sample: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Return standard Gumbel noise, float32 [n, vocabulary], that depends only on the arguments of its row."""
    # Integer arithmetic up to the last two logarithms: the 31 random bits of an entry are the same on every device. A
    # longer row begins with the shorter one; of the seed the low 64 bits count.
    key = torch.full_like(admission, _signed(seed, 64))
    for word in (admission, sample, position):
        key = _splitmix64(key) ^ word
    key = _splitmix64(key)
    low, high = _signed_halves(key)
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=key.device) * _GOLDEN32
    bits = _hash32(tokens.unsqueeze(0) ^ low.unsqueeze(1), high.unsqueeze(1))
    # u in (0, 1) is finest near 0, so g = -log(-log(1 - u)) is finest in its upper tail, which decides an argmax.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


class Noise:
    """Returns the noise of :func:`gumbel`, bit for bit, made for several positions ahead."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._columns: dict[tuple[int, int], int] = {}  # where each row is in the block
        self._starts: list[int] = []  # the position of each row at which the block begins
        self._places = torch.empty(0, 3)  # [rows, 3]: admission number, sample and that position
        self._block = torch.empty(0, 0, 0)  # [positions, rows, V]

    def __call__(
        self, rows: Sequence[tuple[int, int]], positions: Sequence[int], vocabulary: int, device: torch.device
    ) -> Tensor:
        """The noise of the next token of each row (admission number, sample): float32, not to be written to."""
        columns = [self._columns.get(row, -1) for row in rows]
        offsets = {at - self._starts[column] for at, column in zip(positions, columns, strict=True) if column >= 0}
        if -1 in columns or len(offsets) > 1 or self._places.device != device:
            self._places = torch.tensor([(*row, at) for row, at in zip(rows, positions, strict=True)], device=device)
        else:
            (offset,) = offsets
            if 0 <= offset < len(self._block) and self._block.shape[2] == vocabulary:
                return take(self._block[offset], columns)
            self._places = take(self._places, columns).clone()  # nothing crosses to the device
            self._places[:, 2] += offset
        count = max(1, min(AHEAD, ENTRIES // (len(rows) * vocabulary)))
        admission, sample, start = self._places.repeat(count, 1).unbind(1)
        ahead = torch.arange(count, device=device).repeat_interleave(len(rows))
        self._block = gumbel(self._seed, admission, sample, start + ahead, vocabulary).view(count, -1, vocabulary)
        self._columns, self._starts = {row: at for at, row in enumerate(rows)}, list(positions)
        return self._block[0]


def _shifted(word: Tensor, by: int, bits: int) -> Tensor:
    # ``word >>> by``: torch's shift of a signed integer copies the sign instead.
    return (word >> by).bitwise_and_((1 << (bits - by)) - 1)


def _splitmix64(state: Tensor) -> Tensor:
    # Steele, Lea, Flood, 2014.
    word = state + _GOLDEN64
    word = (word ^ _shifted(word, 30, 64)) * _MIX64[0]
    word = (word ^ _shifted(word, 27, 64)) * _MIX64[1]
    return word ^ _shifted(word, 31, 64)


def _signed_halves(word: Tensor) -> tuple[Tensor, Tensor]:
    low = (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
    return low.to(torch.int32), (word >> 32).to(torch.int32)


def _hash32(word: Tensor, key: Tensor) -> Tensor:
    # 31 random bits for each word, which is overwritten: lowbias32 (Wellons, 2018), keyed half-way.
    word ^= _shifted(word, 16, 32)
    word *= _MIX32[0]
    word += key
    word ^= _shifted(word, 15, 32)
    word *= _MIX32[1]
    word ^= _shifted(word, 16, 32)
    return word.bitwise_and_(0x7FFFFFFF)
