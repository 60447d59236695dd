"""The decode loop: continuous batching in the model's thread, which evaluates the cut between two decode steps.

::

    each live row reads its last token, all of them in one forward pass
    rows whose keys and values are missing or stale prefill one portion of their tokens; fully read, they become live
    draw one token for each live row -> call the cut with the rollouts that ended -> deliver the step -> again

A long prompt is prefilled between decode steps, so live rows do not wait for it. In exact mode all rows enter together.

Everything here is synchronous and runs in one thread, possibly of another process than the readers'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ModelError
from oppo.events import FinishReason, FloatArray, IntArray, Prompt
from oppo.hf.kv.reader import Incremental
from oppo.hf.serve.decoder import ChunkedPrefill
from oppo.hf.serve.sampling import Noise
from oppo.hf.serve.sampling import draw
from oppo.hf.serve.decoder import Counters, Signals
from oppo.hf.shared_memory import SharedModel
from oppo.models import Cut, Sampling
from oppo.stopping import Detokenize, StopCriteria
from oppo.support import Support


@dataclass(slots=True, eq=False)
class DecodeRow:
    """A rollout in the decode loop.

    Attributes:
        key: the row's name in the cache and in decode steps.
        limit: length in tokens at which the response ends with reason ``length``.
        tokens: the response so far; the model has yet to read the last one.
        turns: whether a token that would end the response ends a turn.
        reason: why the response, or a turn of it, has ended; ``None`` while it continues.
        given_up: its reader has closed it; the row leaves at the next decode step.
    """

    key: int
    prompt: Prompt
    limit: int
    tokens: list[int] = field(default_factory=list)
    turns: bool = False
    reason: FinishReason | None = None
    given_up: bool = False

    @property
    def waits(self) -> bool:
        """Whether a turn has ended, so that the row is kept."""
        return self.turns and self.reason in ("eos", "stop")

    def proceed(self, given: Sequence[int]) -> None:
        """Go on, after a turn with tokens to read."""
        self.tokens.extend(given)
        self.reason = None

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of admission order: admission number and sample."""
        return self.prompt.admission, self.prompt.sample

    def sequence(self) -> Tensor:
        """Return prompt and response so far, int64."""
        return torch.tensor([*self.prompt.tokens.tolist(), *self.tokens])


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """The tokens of one decode step: one for each live row, in admission order.

    Attributes:
        keys: of the n rows.
        tokens: int32 [n].
        logprobs: float32 [n], natural logarithm.
        version: of the weights that made the tokens.
        reasons: why a row ended with its token; ``None`` while it is live.
        support: the ids that each of the n tokens was drawn from.
    """

    keys: tuple[int, ...]
    tokens: IntArray
    logprobs: FloatArray
    version: int
    reasons: tuple[FinishReason | None, ...]
    support: Support = field(default_factory=Support)


Deliver: TypeAlias = Callable[[DecodeStep], None]
"""Makes a decode step's tokens visible to readers."""


class Decoder:
    """Decodes rows with one model, one token of each at a time.

    Pickled, it crosses to another process without its keys and values, over the same weights and counters.

    Args:
        model: a causal LM.
        sampling: how tokens are drawn.
        exact: prefill so that a row's bits depend on no other row, and keep rows in admission order.
        prefill_tokens: tokens, padding included, that are prefilled between two decode steps.
        decode: returns the text of tokens, for stop strings.
        counters: continued; new ones unless given.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sampling: Sampling,
        exact: bool,
        prefill_tokens: int,
        decode: Detokenize | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.model = model
        self.counters = counters or Counters.over()
        self.reader = Incremental(model, ordered=exact)
        self._sampling = sampling
        self._noise = Noise(sampling.seed)
        self._stopping = StopCriteria(sampling, decode)
        self._exact = exact
        self._prefill_tokens = prefill_tokens
        self._over = partial(
            Decoder,
            sampling=sampling,
            exact=exact,
            prefill_tokens=prefill_tokens,
            decode=decode if sampling.stop_strings else None,
            counters=self.counters,
        )

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self._over, (SharedModel(self.model),)

    @torch.inference_mode()
    def run(self, rows: Sequence[DecodeRow], cut: Cut, signals: Signals, deliver: Deliver) -> None:
        """Decode ``rows`` until each has ended, ``cut`` returns true or ``signals`` stop the loop; the rest is parked.

        A row whose turn has ended is parked too. In exact mode all are then, so that it joins the others where it left.

        Raises:
            ModelError: logits were not finite. The cache then holds none of ``rows``, as after any other error.
        """
        try:
            self._decode(rows, cut, signals, deliver)
        except BaseException:
            self.reader.forget([row.key for row in rows])  # a failed pass leaves their lengths unknown
            raise

    def _decode(self, rows: Sequence[DecodeRow], cut: Cut, signals: Signals, deliver: Deliver) -> None:
        ordered = sorted(rows, key=lambda row: row.order)
        live = [row for row in ordered if self._is_parked(row)]
        tokens = torch.tensor([row.tokens[-1] for row in live], dtype=torch.int64)
        others = [row for row in ordered if not self._is_parked(row)]
        prefill = ChunkedPrefill(self.reader, others, budget=self._prefill_tokens, exact=self._exact)
        while live or prefill:
            for at in signals.given_up():
                rows[at].given_up = True
            live, logits = self._advance(live, tokens, prefill, signals)
            if logits is not None:
                step, tokens = self._draw(live, logits)
                ended = [row.prompt.rollout for row in live if row.reason and not row.waits]
                waiting = any(row.waits for row in live)
                cutting = bool(ended) and cut(ended)
                deliver(step)
                live, tokens = self._continuing(live, tokens)
                if cutting or (waiting and self._exact):
                    return
            if signals.stopped:
                return

    def _is_parked(self, row: DecodeRow) -> bool:
        """Return whether the cache holds all of ``row`` but its last token."""
        return bool(row.tokens) and self.reader.length(row.key) == len(row.prompt.tokens) + len(row.tokens) - 1

    def _advance(
        self, live: list[DecodeRow], tokens: Tensor, prefill: ChunkedPrefill[DecodeRow], signals: Signals
    ) -> tuple[list[DecodeRow], Tensor | None]:
        """Prefill a portion and read the last token of each live row; return the rows to draw for and their logits.

        Both are in admission order; the logits [n, V] are ``None`` when no row is fully read.
        """
        prefilled = prefill.tokens
        joining = prefill.read(signals)
        self.counters.prefilled += prefill.tokens - prefilled
        outputs = [self.reader.step([row.key for row in live], tokens)] if live else []
        if not joining:
            return live, outputs[0] if outputs else None
        outputs += [last for _, last in joining]
        together = [*live, *(row for row, _ in joining)]
        order = sorted(range(len(together)), key=lambda at: together[at].order)
        return [together[at] for at in order], torch.cat(outputs)[order]

    def _draw(self, live: Sequence[DecodeRow], logits: Tensor) -> tuple[DecodeStep, Tensor]:
        """Append one token to each row; return the step and its tokens, int64 [n] on the model's device."""
        lengths, logits = [len(row.tokens) for row in live], logits[:, self._sampling.drawn]
        noise = None
        if self._sampling.temperature > 0:
            noise = self._noise([row.order for row in live], lengths, logits.shape[-1], logits.device)
        short = [length < self._sampling.min_new_tokens for length in lengths]
        too_short = torch.tensor(short, device=logits.device) if any(short) else None
        tokens, logprobs, support = draw(logits, noise, self._sampling, too_short)
        host = torch.stack((tokens.double(), logprobs.double())).cpu().numpy()  # both exact in float64: one transfer
        finite = np.isfinite(host[1])
        if not finite.all():
            broken = [row.prompt.rollout for row, fine in zip(live, finite, strict=True) if not fine]
            raise ModelError(
                f"the policy's logits at version {self.counters.version} are not finite for rollouts {broken}: "
                "the weights have diverged or overflow their dtype"
            )
        ids = host[0].astype(np.int32)
        for row, token in zip(live, ids.tolist(), strict=True):
            row.tokens.append(token)
            row.reason = self._stopping.reason(row.tokens, row.limit)
        self.counters.decode_steps += 1
        self.counters.tokens += len(live)
        step = DecodeStep(
            tuple(row.key for row in live),
            ids,
            host[1].astype(np.float32),
            self.counters.version,
            tuple(row.reason for row in live),
            Support() if support is None else Support(*(tensor.cpu().numpy() for tensor in support)),
        )
        return step, tokens

    def _continuing(self, live: list[DecodeRow], tokens: Tensor) -> tuple[list[DecodeRow], Tensor]:
        """Return the rows that continue and their tokens; free the memory of those that have ended."""
        stays = [row.reason is None and not row.given_up for row in live]
        if all(stays):
            return live, tokens
        self.reader.forget(
            [row.key for row, stay in zip(live, stays, strict=True) if not stay and (row.given_up or not row.waits)]
        )
        kept = torch.tensor([at for at, stay in enumerate(stays) if stay], dtype=torch.int64, device=tokens.device)
        return [row for row, stay in zip(live, stays, strict=True) if stay], tokens[kept]
