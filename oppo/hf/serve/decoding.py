"""The decode loop: continuous batching in the model's thread, with the cut evaluated between two decode steps.

::

    live rows read the last token of each, in one forward pass
    rows whose keys and values are missing or stale read one portion of their prompts and tokens so far
    those read to their end join the live rows
    draw one token for each live row -> tell the cut who ended -> deliver -> again

So a long prompt is read between decode steps, and no row waits for it. In exact mode all rows enter together.

Everything here is synchronous, knows no event loop and runs in one thread, maybe of another process than the readers'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from oppo.errors import ModelError
from oppo.hf.kv.chunked_prefill import ChunkedPrefill
from oppo.hf.kv.incremental import Incremental
from oppo.hf.serve.noise import Noise
from oppo.hf.serve.sampling import DeviceSupport, draw
from oppo.hf.serve.signals import Counters, Signals
from oppo.hf.serve.stopping import Detokenize, StopCriteria
from oppo.support import Support

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oppo.events import FinishReason, FloatArray, IntArray, Prompt
    from oppo.models import Cut, Sampling


@dataclass(slots=True, eq=False)
class DecodeRow:
    """A rollout as the decode loop sees it.

    Attributes:
        key: names the row, in the cache and in decode steps.
        limit: a response of this many tokens ends with reason ``length``.
        tokens: the response so far; the last one has not been read by the model yet.
        reason: why the response has ended; ``None`` while it goes on.
        given_up: nobody wants it; the row leaves at the next decode step.
    """

    key: int
    prompt: Prompt
    limit: int
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    given_up: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """Place of the rollout in admission order."""
        return self.prompt.admission, self.prompt.sample

    def sequence(self) -> Tensor:
        """Return prompt and response so far, int64."""
        return torch.tensor([*self.prompt.tokens.tolist(), *self.tokens])


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """What one decode step made: one token for each live row, in admission order.

    Attributes:
        keys: of the rows.
        tokens: int32 [n].
        logprobs: float32 [n].
        version: version of the weights that made them.
        reasons: why a row ended with its token; ``None`` while it is live.
        support: of the n tokens: the ids that each was drawn from.
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
    """Decodes rows with one model, a token at a time, for as long as it is let.

    Args:
        model: a causal LM.
        exact: read prompts so that no row's bits depend on another row, and keep rows in admission order.
        prefill_tokens: how many tokens, padding included, are read between two decode steps.
        decode: gives the text of tokens, for stop texts.
        counters: what it counts in, from where they are.
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
        self.counters = counters or Counters()
        self.reader = Incremental(model, ordered=exact)
        self._sampling = sampling
        self._noise = Noise(sampling.seed)
        self._stopping = StopCriteria(sampling, decode)
        self._exact = exact
        self._budget = prefill_tokens

    @torch.inference_mode()
    def run(self, rows: Sequence[DecodeRow], cut: Cut, signals: Signals, deliver: Deliver) -> None:
        """Decode ``rows`` until each has ended, ``cut`` answers true or ``signals`` say stop; the others stay parked.

        Raises:
            ModelError: logits were not finite.
        """
        try:
            self._decode(rows, cut, signals, deliver)
        except BaseException:
            self.forget(row.key for row in rows)  # what they have read is unknown now
            raise

    def _decode(self, rows: Sequence[DecodeRow], cut: Cut, signals: Signals, deliver: Deliver) -> None:
        ordered = sorted(rows, key=lambda row: row.order)
        live = [row for row in ordered if self._is_parked(row)]
        tokens = torch.tensor([row.tokens[-1] for row in live], dtype=torch.int64)
        others = [row for row in ordered if not self._is_parked(row)]
        prefill = ChunkedPrefill(self.reader, others, budget=self._budget, exact=self._exact)
        while live or prefill:
            for at in signals.given_up():
                rows[at].given_up = True
            live, logits = self._advance(live, tokens, prefill, signals)
            if logits is not None:
                made, tokens = self._draw(live, logits)
                ended = [row.prompt.rollout for row in live if row.reason]
                cutting = bool(ended) and cut(ended)
                deliver(made)
                live, tokens = self._without_ended(live, tokens)
                if cutting:
                    return
            if signals.stopped:
                return

    def _is_parked(self, row: DecodeRow) -> bool:
        """Return whether only the last token of ``row`` has not been read yet."""
        return bool(row.tokens) and self.reader.length(row.key) == len(row.prompt.tokens) + len(row.tokens) - 1

    def _advance(
        self, live: list[DecodeRow], tokens: Tensor, prefill: ChunkedPrefill[DecodeRow], signals: Signals
    ) -> tuple[list[DecodeRow], Tensor | None]:
        """Read the last token of each live row and a portion of what waits; return who can go on, and the logits.

        Both in admission order; the logits [n, V] are ``None`` when nobody can.
        """
        if not prefill:
            return live, self.reader.step([row.key for row in live], tokens)
        before = prefill.tokens
        joining = prefill.read(signals)
        self.counters.prefilled += prefill.tokens - before
        if not joining:
            return live, self.reader.step([row.key for row in live], tokens) if live else None
        outputs = [last for _, last in joining]
        if live:
            outputs.insert(0, self.reader.step([row.key for row in live], tokens))
        together = [*live, *(row for row, _ in joining)]
        order = sorted(range(len(together)), key=lambda at: together[at].order)
        return [together[at] for at in order], torch.cat(outputs)[order]

    def forget(self, keys: Iterable[int]) -> None:
        """Free the memory of rows."""
        self.reader.forget(list(keys))

    def expire(self) -> None:
        """Free all keys and values: parked rows will read their tokens again, with the weights of that time."""
        self.reader.clear()

    def _draw(self, live: Sequence[DecodeRow], logits: Tensor) -> tuple[DecodeStep, Tensor]:
        """Append one token to each row; return the step and its tokens, int64 [n] on the model's device."""
        noise = None
        if self._sampling.temperature > 0:
            orders, positions = [row.order for row in live], [len(row.tokens) for row in live]
            noise = self._noise(orders, positions, logits.shape[-1], logits.device)
        tokens, logprobs, support = draw(logits, noise, self._sampling, self._young(live, logits.device))
        host = torch.stack((tokens.double(), logprobs.double())).cpu().numpy()  # both exact in float64: one transfer
        if not np.isfinite(host[1]).all():
            broken = [row.prompt.rollout for row, fine in zip(live, np.isfinite(host[1]), strict=True) if not fine]
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
        made = DecodeStep(
            tuple(row.key for row in live),
            ids,
            host[1].astype(np.float32),
            self.counters.version,
            tuple(row.reason for row in live),
            _on_host(support),
        )
        return made, tokens

    def _young(self, live: Sequence[DecodeRow], device: torch.device) -> Tensor | None:
        """Return which rows have fewer tokens than a response may end with, bool [n]; ``None`` if there is none."""
        young = [len(row.tokens) < self._sampling.min_new_tokens for row in live]
        return torch.tensor(young, device=device) if any(young) else None

    def _without_ended(self, live: list[DecodeRow], tokens: Tensor) -> tuple[list[DecodeRow], Tensor]:
        """Return the rows that go on and their tokens; the memory of the others is free."""
        stays = [row.reason is None and not row.given_up for row in live]
        if all(stays):
            return live, tokens
        self.forget(row.key for row, stay in zip(live, stays, strict=True) if not stay)
        kept = torch.tensor([at for at, stay in enumerate(stays) if stay], dtype=torch.int64, device=tokens.device)
        return [row for row, stay in zip(live, stays, strict=True) if stay], tokens[kept]


def _on_host(support: DeviceSupport | None) -> Support:
    return Support(*(tensor.cpu().numpy() for tensor in support)) if support is not None else Support()
