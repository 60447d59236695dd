"""Continuous batching where the model lives: decode steps, chunked prefill, and the cut between two decode steps.

::

    each live row reads its last token, all of them in one forward pass
    rows whose KV cache is missing or stale prefill one portion of their tokens; fully read, they become live
    draw one token for each live row -> call the cut with the rollouts that ended -> deliver the step -> again

A long prompt is prefilled between decode steps, so live rows do not wait for it. In deterministic mode all rows enter
together.

Everything here is synchronous and runs in one thread, possibly of another process than the readers'. :class:`Signals`
and :class:`Counters` are a few bytes of memory that both see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import c_int64
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ModelError
from oppo.events import FinishReason, Prompt, RoutedExperts, TokenColumns
from oppo.hf.devices import synchronised
from oppo.hf.expert_routing import RouteRecords, RouterReplay
from oppo.hf.kv.cache import take
from oppo.hf.kv.prefill import EXACT_BLOCK
from oppo.hf.kv.reader import Incremental
from oppo.hf.serve.sampling import Drawing
from oppo.hf.weights import adopt
from oppo.limits import UNLIMITED, TurnLimit
from oppo.models import Cut, Detokenize, Sampling
from oppo.placement.shared_memory import Counts, Gauge, Notice
from oppo.rollout_buffer import DecodeStep
from oppo.turns import StopCriteria


@dataclass(slots=True, eq=False)
class DecodeRow:
    key: int  # in the cache and in decode steps
    prompt: Prompt
    limit: int  # length in tokens at which the response ends
    tokens: list[int] = field(default_factory=list)  # the model has yet to read the last one
    turns: bool = False  # whether a token that would end the response ends a turn
    reason: FinishReason | None = None  # of the end of the response, or of a turn
    routed: int = 0  # number of first positions whose routed experts its tokens have
    closed: bool = False  # by its reader; the row leaves at the next decode step
    bounds: tuple[TurnLimit, int] = UNLIMITED, 0  # of the turn, and where that begins

    @property
    def waits(self) -> bool:
        return self.turns and self.reason in ("eos", "stop")

    def proceed(self, given: Sequence[int], bounds: tuple[TurnLimit, int]) -> None:
        self.tokens.extend(given)
        self.reason, self.bounds = None, bounds

    @property
    def bounded(self) -> FinishReason | None:
        limit, start = self.bounds
        return "stop" if self.turns and limit.reached(self.tokens, len(self.tokens) - start) else None

    @property
    def order(self) -> tuple[int, int]:
        return self.prompt.admission, self.prompt.stream

    def sequence(self) -> Tensor:
        return torch.tensor([*self.prompt.tokens.tolist(), *self.tokens])


Deliver: TypeAlias = Callable[[DecodeStep], None]  # makes a decode step's tokens visible to readers


class Decoder:
    """Decodes rows with one model, one token of each at a time; between two steps it prefills a portion."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sampling: Sampling,
        deterministic: bool,
        prefill_tokens: int,
        decode: Detokenize | None = None,
        counters: Counters | None = None,
        routed_experts: bool = False,
    ) -> None:
        self.model = model
        self.counters = counters or Counters.new()
        self.reader = Incremental(model, ordered=deterministic)
        self._routes = RouteRecords(RouterReplay.of(model)) if routed_experts else None
        self.reader.routes = self._routes
        self._sampling = sampling
        self._drawing = Drawing(sampling, self.reader.device)
        self._stopping = StopCriteria(sampling, decode)
        self._deterministic = deterministic
        self._prefill_tokens = prefill_tokens

    @torch.inference_mode()
    def run(self, rows: Sequence[DecodeRow], cut: Cut, signals: Signals, deliver: Deliver) -> None:
        """Decode ``rows`` until each has ended, ``cut`` is true or ``signals`` stop the loop; the rest is paused."""
        # A row whose turn has ended is paused too. In deterministic mode all are then, so that it joins the others
        # where it left.
        try:
            self._decode(rows, cut, signals, deliver)
        except BaseException:
            self.reader.forget([row.key for row in rows])  # a failed pass leaves their lengths unknown
            raise

    def _decode(self, rows: Sequence[DecodeRow], cut: Cut, signals: Signals, deliver: Deliver) -> None:
        ordered = sorted(rows, key=lambda row: row.order)
        live = [row for row in ordered if self._is_paused(row)]
        tokens = torch.tensor([row.tokens[-1] for row in live], dtype=torch.int64)
        others = [row for row in ordered if not self._is_paused(row)]
        self.reader.expect(row.key for row in others)
        for row in others:
            if row.prompt.images:
                self.reader.show(row.key, row.prompt.tokens, row.prompt.images)
        prefill = ChunkedPrefill(self.reader, others, budget=self._prefill_tokens, deterministic=self._deterministic)
        while live or prefill:
            for at in signals.closed():
                rows[at].closed = True
            live, logits = self._advance(live, tokens, prefill, signals)
            if logits is not None:
                step, tokens = self._draw(live, logits)
                ended = [row.prompt.rollout for row in live if row.reason and not row.waits]
                waiting = any(row.waits for row in live)
                cutting = bool(ended) and cut(ended)
                deliver(step)
                live, tokens = self._continuing(live, tokens)
                if cutting or (waiting and self._deterministic):
                    return
            if signals.stopped:
                return

    def _is_paused(self, row: DecodeRow) -> bool:
        return bool(row.tokens) and self.reader.length(row.key) == len(row.prompt.tokens) + len(row.tokens) - 1

    def _advance(
        self, live: list[DecodeRow], tokens: Tensor, prefill: ChunkedPrefill, signals: Signals
    ) -> tuple[list[DecodeRow], Tensor | None]:
        # The rows to draw for and their logits are in admission order; the logits [n, V] are ``None`` when no row is
        # fully read.
        prefilled = prefill.tokens
        joining = prefill.read(signals)
        self.counters.prefilled += prefill.tokens - prefilled
        outputs = [self.reader.step([row.key for row in live], tokens)] if live else []
        if not joining:
            return live, outputs[0] if outputs else None
        outputs += [last for _, last in joining]
        together = [*live, *(row for row, _ in joining)]
        order = sorted(range(len(together)), key=lambda at: together[at].order)
        return [together[at] for at in order], take(torch.cat(outputs), order)

    def _draw(self, live: Sequence[DecodeRow], logits: Tensor) -> tuple[DecodeStep, Tensor]:
        orders, lengths = [row.order for row in live], [len(row.tokens) for row in live]
        drawn = self._drawing(logits[:, self._sampling.ids], orders, lengths)
        ids, logprobs, support = drawn.read_back()
        finite = np.isfinite(logprobs)
        if not finite.all():
            broken = [row.prompt.rollout for row, fine in zip(live, finite, strict=True) if not fine]
            raise ModelError(
                f"the policy's logits at version {self.counters.version} are not finite for rollouts {broken}: "
                "the weights have diverged or overflow their dtype"
            )
        extra = TokenColumns(support, self._routed(live))
        for row, token in zip(live, ids.tolist(), strict=True):
            row.tokens.append(token)
            row.reason = self._stopping.reason(row.tokens, row.limit) or row.bounded
        self.counters.decode_steps += 1
        self.counters.tokens += len(live)
        keys, reasons = tuple(row.key for row in live), tuple(row.reason for row in live)
        return DecodeStep(keys, ids, logprobs, self.counters.version, reasons, extra), drawn.tokens

    def _routed(self, live: Sequence[DecodeRow]) -> RoutedExperts:
        # A position that is read again, under newer weights for example, keeps the experts of the first time.
        if self._routes is None:
            return RoutedExperts()
        lengths = [len(row.prompt.tokens) + len(row.tokens) for row in live]
        counts = [length - row.routed for row, length in zip(live, lengths, strict=True)]
        found = [self._routes.pop(row.key)[-count:] for row, count in zip(live, counts, strict=True)]
        for row, length in zip(live, lengths, strict=True):
            row.routed = length
        return RoutedExperts(np.concatenate(found), np.array(counts, np.int32))

    def _continuing(self, live: list[DecodeRow], tokens: Tensor) -> tuple[list[DecodeRow], Tensor]:
        stays = [row.reason is None and not row.closed for row in live]
        if all(stays):
            return live, tokens
        self.reader.forget(
            [row.key for row, stay in zip(live, stays, strict=True) if not stay and (row.closed or not row.waits)]
        )
        kept = [at for at, stay in enumerate(stays) if stay]
        return [live[at] for at in kept], take(tokens, kept)


class ChunkedPrefill:
    """Rows to be prefilled, the shortest remainder first; tokens that ``reader`` holds are not read again."""

    # A portion is a rectangle of at most `budget` tokens: as many whole rows of similar length as fit, or a piece of
    # one that does not fit. If `deterministic`, a portion holds all rows, and each is read alone, in blocks on an
    # absolute grid, so that its bits depend on no other row.

    def __init__(self, reader: Incremental, rows: Iterable[DecodeRow], *, budget: int, deterministic: bool) -> None:
        self.tokens = 0
        self._reader = reader
        self._budget = budget
        self._deterministic = deterministic
        unread = [(row, row.sequence()[reader.length(row.key) :]) for row in rows]
        self._waiting = unread if deterministic else sorted(unread, key=lambda pair: len(pair[1]))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def read(self, signals: Signals) -> list[tuple[DecodeRow, Tensor]]:
        """Read one portion; return each row that is complete, with the logits [1, V] at its last position."""
        gone = [row.key for row, _ in self._waiting if row.closed]
        if gone:
            self._reader.forget(gone)
            self._waiting = [pair for pair in self._waiting if not pair[0].closed]
        if self._deterministic:
            return self._read_all(signals)
        portion = [] if signals.stopped else self._portion()
        logits = self._pass(portion) if portion else []
        incomplete = self._waiting[0][0] if self._waiting else None
        return [(row, last) for (row, _), last in zip(portion, logits, strict=True) if row is not incomplete]

    def _read_all(self, signals: Signals) -> list[tuple[DecodeRow, Tensor]]:
        complete: list[tuple[DecodeRow, Tensor]] = []
        for row, tokens in self._waiting:
            while len(tokens):
                size = self._reader.cut(row.key, self._reader.length(row.key), EXACT_BLOCK)
                block, tokens = tokens[:size], tokens[size:]  # noqa: PLW2901
                if signals.stopped:
                    self._reader.forget([row.key for row, _ in self._waiting])
                    return []
                (last,) = self._pass([(row, block)])
            complete.append((row, last))
        self._waiting = []
        return complete

    def _portion(self) -> list[tuple[DecodeRow, Tensor]]:
        if self._waiting and len(self._waiting[0][1]) > self._budget:
            row, tokens = self._waiting[0]
            size = self._reader.cut(row.key, self._reader.length(row.key), self._budget)
            if size < len(tokens):
                self._waiting[0] = row, tokens[size:]
                return [(row, tokens[:size])]
            return [self._waiting.pop(0)]
        count = 0
        while count < len(self._waiting) and (count + 1) * len(self._waiting[count][1]) <= self._budget:
            count += 1
        portion, self._waiting = self._waiting[:count], self._waiting[count:]
        return portion

    def _pass(self, portion: Sequence[tuple[DecodeRow, Tensor]]) -> list[Tensor]:
        lengths = [len(tokens) for _, tokens in portion]
        self.tokens += sum(lengths)
        logits: dict[int, Tensor] = {}
        keys = [row.key for row, _ in portion]
        for group in self._reader.groups(keys, lengths):
            rows, tokens = [keys[at] for at in group], [portion[at][1] for at in group]
            logits.update(zip(group, self._reader.extend(rows, tokens, last=[1] * len(group)), strict=True))
        return [logits[at] for at in range(len(portion))]


class PolicyCore:
    def __init__(self, decoder: Decoder, recompute: bool) -> None:
        self.counters = decoder.counters
        self._decoder = decoder
        self._recompute = recompute
        self._loads = self.counters.loads
        self._rows: dict[int, DecodeRow] = {}

    def run(
        self,
        new: Sequence[DecodeRow],
        given: Mapping[int, tuple[Sequence[int], tuple[TurnLimit, int]]],
        cut: Cut,
        signals: Signals,
        deliver: Deliver,
    ) -> None:
        # New rows are unknown here so far. given: by the keys of the rows to decode, which the signals number in this
        # order, the tokens that a row reads before it goes on after a turn, and the limit of that. Each step is
        # delivered after the cut.
        self.refresh()
        self._rows.update({row.key: row for row in new})
        rows = [self._rows.pop(key) for key in given]
        for row in rows:
            row.proceed(*given[row.key])
        self._decoder.run(rows, cut, signals, deliver)
        self._rows.update({row.key: row for row in rows if row.reason is None or row.waits})

    def forget(self, keys: Iterable[int]) -> None:
        keys = list(keys)
        for key in keys:
            self._rows.pop(key, None)
        self._decoder.reader.forget(keys)

    def load(self, weights: Mapping[str, object], version: int) -> None:
        # Every core over the same memory serves them. Where a tensor does not fit, the old weights are still served.
        if weights:
            adopt(self._decoder.model, weights)
            synchronised(self._decoder.model.device)  # the trainer's tensors may change now
        self.counters.version = version
        self.counters.loads += 1

    def refresh(self) -> None:
        # The KV cache of replaced weights, if it is to be recomputed.
        if self._recompute and self._loads != self.counters.loads:
            self._decoder.reader.clear()
        self._loads = self.counters.loads

    def memory(self) -> tuple[int, int]:
        return self._decoder.reader.memory()


def policy_core(model: PreTrainedModel, decoder: Callable[[PreTrainedModel], Decoder], recompute: bool) -> PolicyCore:
    return PolicyCore(decoder(model), recompute)


_RAISED = b"\1"


class Counters(Counts):
    """Counts of a decoder's work so far: written where it decodes, readable anywhere while it does."""

    memory: ClassVar = Gauge
    decode_steps: int
    tokens: int
    prefilled: int
    version: int
    loads: int
    _fields_: ClassVar = [(name, c_int64) for name in ("decode_steps", "tokens", "prefilled", "version", "loads")]


class Signals:
    """Flags that a decode loop looks at between two steps: a byte that stops it, and one that drops each row."""

    def __init__(self, block: Notice) -> None:
        self._block = block

    def __reduce__(self) -> tuple[type[Signals], tuple[Notice]]:
        return Signals, (self._block,)

    @classmethod
    def of(cls, rows: int) -> Signals:
        return cls(Notice.new(1 + rows))

    def stop(self) -> None:
        self._block.write_at(0, _RAISED)

    @property
    def stopped(self) -> bool:
        return self._block[:1] == _RAISED

    def close(self, row: int) -> None:
        self._block.write_at(1 + row, _RAISED)

    def closed(self) -> Iterator[int]:
        at = self._block.find(_RAISED, 1)
        while at > 0:
            yield at - 1
            at = self._block.find(_RAISED, at + 1)
