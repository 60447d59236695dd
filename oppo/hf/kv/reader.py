"""A model that reads many sequences a few tokens at a time, each at its own position.

::

    extend(rows, ragged tokens)  ->  one forward pass over chunks; the rows of each length class attend as one segment
    step(rows, one token each)   ->  one forward pass; rows of similar length attend as one segment, if that saves more
                                     than it costs; their KV cache is sliced, never gathered

A model that cannot attend in segments (:mod:`oppo.hf.kv.attention`) reads each length class in a pass of its own, and
steps rows as one rectangle. Chunks are padded on the left: the last token of every row is in the last column, and a
causal LM computes logits there only. The keys and values of padding are never stored.

:class:`IncrementalPrefill` makes such calls from the events of growing rollouts::

    Prompt | Chunk | ToolTokens  ->  ReadState.unread  ->  spans, batched  ->  keep(span, outputs)

Tokens are read on arrival, in ragged batches; by a model that cannot continue a sequence (:class:`WholeRows`), when the
rollout has ended. With ``deterministic`` each rollout is read alone, in blocks on an
absolute grid of its sequence: neither the arrival pattern nor other rollouts can change a bit of the outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from oppo.errors import ModelError, ProtocolError
from oppo.events import Chunk, Prompt, Support, ToolTokens
from oppo.hf.head import widen_head
from oppo.hf.introspection import cache_argument, keeps_logits, longest, only_whole, require_pieces, takes
from oppo.hf.kv.attention import Masks, attend_in_segments, expand_in_segments, overhead_of, segmented
from oppo.hf.kv.cache import DecodeBatch, KVRegion, KVView, Slab, as_slice, sent
from oppo.hf.kv.length_bucketing import cheapest_groups, overhead_on
from oppo.hf.kv.states import Gates, RowCache, StateSlots
from oppo.hf.routers import RouteRecords
from oppo.scorers import RolloutSession, RolloutSessions

EXACT_BLOCK = 32
"""In deterministic mode rows are read alone, in blocks from multiples of this: bits then depend on that row only."""

SHORTEST_CLASS = 64
"""Length of the first length class, in tokens; each next class is twice as long."""


class Incremental:
    """A causal model with a cache in which every row has its own length; rows are named by ints.

    One thread makes all calls. The model is put into evaluation mode once, at construction.

    Args:
        model: a causal LM (the outputs are logits) or a backbone (last hidden states).
        classes: the shortest length classes of rows read in chunks; longer ones follow by doubling, up to
            ``max_length``. With one class of that length all rows share a slab.
        head: applied to the outputs [n, q, D], for example a reward model's score layer.
        ordered: keep the rows of a step in the order of the call. Kernels treat the last rows of an odd batch
            differently, so without it the bits of a step depend on which rows came and went before. With it they
            depend on the rows of the step, and on the lengths at which these rows were first stepped together; rows
            are copied when one leaves.

    Attributes:
        max_length: the longest sequence of a row, in tokens (:func:`~oppo.hf.introspection.longest`).
        routes: records the experts of each token read; ``None``, unless set: nothing does.

    Raises:
        ModelRefused: the model's attention cannot be served row by row, or the probe found that it cannot.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> reader = Incremental(LlamaForCausalLM(config))
        >>> [tuple(out.shape) for out in reader.extend([7, 9], [torch.tensor([1, 2, 3]), torch.tensor([4])])]
        [(3, 32), (1, 32)]
        >>> tuple(reader.step([9, 7], torch.tensor([5, 6])).shape), reader.length(9)
        ((2, 32), 2)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        classes: Sequence[int] = (SHORTEST_CLASS,),
        head: Callable[[Tensor], Tensor] | None = None,
        ordered: bool = False,
    ) -> None:
        require_pieces(model)
        self.max_length = longest(model)
        self._model = model.train(False)
        widen_head(model)
        self._head = head
        self._segmented = attend_in_segments(model)
        if self._segmented:
            expand_in_segments(model)
        self._ordered = ordered
        self._masks = Masks(model)
        self._keeps_logits = keeps_logits(model)
        self._cache_argument = cache_argument(model) or "cache"
        self._class_slabs = [Slab(columns) for columns in _class_lengths(classes, self.max_length)]
        self._decode_slabs: list[Slab] = []
        self._cache = RowCache(model.config)
        self._slab_of: dict[int, Slab] = {}
        self._lengths: dict[int, int] = {}
        self._decode_batch: DecodeBatch | None = None
        self._states = self._cache.states
        self._gates = Gates(model)
        self._pads: bool | None = None if self._states is not None else True
        self.routes: RouteRecords | None = None

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return torch.device(self._model.device)

    @property
    def has_states(self) -> bool:
        """Whether some layers have a recurrent or convolution state."""
        return self._states is not None

    def length(self, row: int) -> int:
        """Return the number of tokens of ``row`` read; 0 for an unknown row."""
        return self._lengths.get(row, 0)

    @torch.inference_mode()
    def extend(
        self, rows: Sequence[int], tokens: Sequence[Tensor], *, last: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Append ``tokens[i]``, int64 [n_i] with n_i >= 1, to ``rows[i]``; return the outputs at the new positions.

        A row extended alone gives the same bits for the same length and tokens, whatever other rows the cache holds.
        Keys and values of rows that are not adjacent in their slab are copied, at a small cost beside the chunk's own.

        Args:
            last: k_i of 1 .. n_i: return the outputs at the last k_i new positions; ``None``: at all.

        Returns:
            For each row [k_i, D].

        Raises:
            ModelError: a row would grow beyond ``max_length``; nothing has been read.
            ProtocolError: a row is named twice, or has no tokens.
        """
        if self._states is not None and self._pads is None:
            self._make_states(self._states)
        self._decode_batch = None
        sizes = [len(piece) for piece in tokens]
        if min(sizes, default=1) < 1:
            raise ProtocolError(f"row {rows[sizes.index(0)]} was extended by no tokens; expected at least one")
        outputs: dict[int, Tensor] = {}
        pieces = dict(zip(rows, tokens, strict=True))
        wanted = dict(zip(rows, sizes if last is None else last, strict=True))
        by_slab = self._placed_by_class(rows, sizes)
        if self._states is not None:
            self._states.admit(rows)
        alone = [{slab: members} for slab, members in by_slab.items()]
        passes = [by_slab] if by_slab and self._segmented else alone
        if not self._pads:
            passes = _of_equal_sizes(passes, dict(zip(rows, sizes, strict=True)))
        for shared in passes:
            members = [row for held in shared.values() for row in held]
            ragged = [pieces[row] for row in members]
            outs = self._read(shared, ragged, keep=max(wanted[row] for row in members))
            for row, piece, out in zip(members, ragged, outs, strict=True):
                outputs[row] = out[-wanted[row] :]
                self._lengths[row] = self.length(row) + len(piece)
        return [outputs[row] for row in rows]

    @torch.inference_mode()
    def step(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Append one token to each row, ``tokens`` int64 [n]; return [n, D] in the order of ``rows``.

        The rows of each segment move to the front of their slab, unless they are there already, so that keys and
        values are read as a view, up to the longest row of the segment. Rows are segmented anew when other rows are
        stepped, or after :meth:`extend` or :meth:`forget`; in between rows grow alike, and relative padding shrinks.

        Raises:
            ModelError: a row would grow beyond ``max_length``; nothing has been read.
            ProtocolError: a row is named twice.
        """
        if self._states is not None and self._pads is None:
            self._make_states(self._states)
        batch, self._decode_batch = self._decode_batch, None
        if batch is None or not batch.continues(rows, self.max_length):
            batch = self._batched(rows)
        batch.make_room()
        ids, picks = tokens.to(batch.positions.device), batch.picks
        ids = ids if picks is None else ids[picks]
        out = self._forward(batch.views, batch.members, ids[:, None], batch.positions[:, None], keep=1)[:, 0]
        out = out if picks is None else out.index_copy(0, picks, out)
        for row in rows:
            self._lengths[row] = self.length(row) + 1
        batch.advance()
        self._decode_batch = batch
        return out

    @torch.inference_mode()
    def segment_by_length(self, rows: Sequence[int]) -> None:
        """Let the next step over ``rows`` use one segment for each length, whatever it costs: for a probe.

        A model that does not attend in segments is not affected.

        Raises:
            ModelError: a row has no room for another token.
            ProtocolError: a row is named twice.
        """
        self._decode_batch = self._batched(rows, overhead=0)

    def rewind(self, row: int, length: int) -> int:
        """Keep the first ``length`` tokens of a row, which holds at least so many; return how many stay.

        Others may follow those that stay. Keys and values of what was taken back stay in memory, behind the mask, until
        others are written over them. A model with recurrent or convolution states keeps all tokens or none.
        """
        if length >= self.length(row):
            return self.length(row)
        if self._states is not None:
            self.forget([row])
            return 0
        self._decode_batch = None
        self._lengths[row] = length
        return length

    @torch.inference_mode()
    def forget(self, rows: Iterable[int]) -> None:
        """Free the memory of ``rows``; unknown rows are fine."""
        freed: dict[Slab, list[int]] = {}
        for row in rows:
            self._lengths.pop(row, None)
            if self.routes is not None:
                self.routes.pop(row)
            slab = self._slab_of.pop(row, None)
            if slab is not None:
                freed.setdefault(slab, []).append(row)
        for slab, gone in freed.items():
            self._decode_batch = None
            slab.remove(gone)
            slab.trim(self._longest(slab))
        if self._states is not None:
            self._states.dismiss(row for gone in freed.values() for row in gone)

    def clear(self) -> None:
        """Forget every row."""
        self.forget(list(self._slab_of))

    def memory(self) -> tuple[int, int]:
        """Return the bytes allocated for the KV cache, and the bytes that the tokens read so far need."""
        allocated = sum(slab.bytes_allocated() for slab in (*self._class_slabs, *self._decode_slabs))
        needed = self._bytes_per_token() * sum(self._lengths.values())
        if self._states is None:
            return allocated, needed
        states = self._states.bytes_per_row() * len(self._lengths)
        return allocated + self._states.bytes_allocated(), needed + states

    def _bytes_per_token(self) -> int:
        return max(slab.bytes_per_token() for slab in (*self._class_slabs, *self._decode_slabs))

    def _placed_by_class(self, rows: Sequence[int], added: Sequence[int]) -> dict[Slab, list[int]]:
        lengths = self._lengths_after(rows, added)
        by_slab: dict[Slab, list[int]] = {}
        for row, length in lengths.items():
            slab = self._slab_of.get(row)
            if slab is None or length > slab.longest:
                slab = next(slab for slab in self._class_slabs if slab.longest >= length)
            by_slab.setdefault(slab, []).append(row)
        self._move(by_slab, lengths)
        return {slab: sorted(members, key=slab.slot) for slab, members in by_slab.items()}

    def _placed_by_segment(self, rows: Sequence[int], overhead: int | None) -> dict[Slab, list[int]]:
        # A segment goes to the slab that holds most of it, with room for one more token per row. It costs ``overhead``
        # tokens; ``None``: the cost for this model.
        lengths = self._lengths_after(rows, [1] * len(rows))
        segments = [list(range(len(rows)))]
        if self._segmented and rows and (per_token := self._bytes_per_token()):
            layers = max(slab.layers for slab in (*self._class_slabs, *self._decode_slabs))
            own = overhead_of(per_token / layers, self.device)
            segments = segmented(list(lengths.values()), own if overhead is None else overhead)
        by_slab: dict[Slab, list[int]] = {}
        for segment in segments:
            members = [rows[at] for at in segment]
            held = Counter(self._slab_of[row] for row in members if row in self._slab_of)
            free = [slab for slab in self._decode_slabs if slab not in by_slab]
            slab = max(free, key=held.__getitem__, default=None)
            if slab is None or not held[slab]:
                slab = next((slab for slab in free if not slab.rows), None) or Slab(self.max_length)
            by_slab[slab] = members
        self._move(by_slab, lengths)
        for slab, members in by_slab.items():
            slab.trim(max([self._longest(slab), *(lengths[row] for row in members)]))
        self._decode_slabs = [slab for slab in dict.fromkeys([*self._decode_slabs, *by_slab]) if slab.rows]
        return by_slab

    def _move(self, by_slab: Mapping[Slab, Sequence[int]], lengths: Mapping[int, int]) -> None:
        for slab, members in by_slab.items():
            incoming = [row for row in members if self._slab_of.get(row) is not slab]
            slab.reserve(len(incoming), max(lengths[row] for row in members))
            for source in {self._slab_of[row]: None for row in incoming if row in self._slab_of}:
                slab.adopt({row: self.length(row) for row in incoming if self._slab_of.get(row) is source}, source)
                if source not in by_slab:
                    source.trim(self._longest(source))
            slab.add(row for row in incoming if row not in self._slab_of)
            self._slab_of.update(dict.fromkeys(incoming, slab))

    def _longest(self, slab: Slab) -> int:
        return max(map(self.length, slab.rows), default=0)

    def _lengths_after(self, rows: Sequence[int], added: Sequence[int]) -> dict[int, int]:
        if len(set(rows)) != len(rows):
            raise ProtocolError(f"each row may be named once in a call, but rows are {list(rows)}")
        lengths = {row: self.length(row) + n for row, n in zip(rows, added, strict=True)}
        for row, length in lengths.items():
            if length > self.max_length:
                raise ModelError(
                    f"row {row} would hold {length} tokens, but {type(self._model).__name__} reads at most "
                    f"{self.max_length}: shorten the prompt or lower max_new_tokens"
                )
        return lengths

    def _read(self, by_slab: Mapping[Slab, Sequence[int]], ragged: Sequence[Tensor], *, keep: int) -> Tensor:
        ids = pad_sequence([piece.cpu() for piece in ragged], batch_first=True, padding_side="left")
        sizes = np.array([len(piece) for piece in ragged])
        views, positions, ids = self._views(by_slab, sizes, ids)
        members, pads = [row for rows in by_slab.values() for row in rows], sizes.max() - sizes
        return self._forward(views, members, ids, positions, keep=keep, pads=pads if pads.any() else None)

    def _batched(self, rows: Sequence[int], overhead: int | None = None) -> DecodeBatch:
        by_slab = self._placed_by_segment(rows, overhead)
        for slab, members in by_slab.items():
            slab.bring_forward(members, ordered=self._ordered)
            by_slab[slab] = slab.rows[: len(members)]
        batch = [row for members in by_slab.values() for row in members]
        if self._states is not None:
            self._states.admit(batch)
            self._states.bring_forward(batch, ordered=True)
        position_of = {row: at for at, row in enumerate(rows)}
        picks = torch.tensor([position_of[row] for row in batch])
        views, positions, picks = self._views(by_slab, np.ones(len(batch), np.int64), picks)
        return DecodeBatch(list(rows), batch, views, positions[:, 0], picks if batch != list(rows) else None)

    def _views(
        self, by_slab: Mapping[Slab, Sequence[int]], sizes: NDArray[np.int64], others: Tensor
    ) -> tuple[list[KVView], Tensor, Tensor]:
        # Of the next tokens of each row, with their positions [n, q]; ``others`` cross to the device beside these.
        starts = np.array([self.length(row) for rows in by_slab.values() for row in rows])
        places = np.arange(sizes.max()) - (sizes.max() - sizes)[:, None]
        # Padding gets position 0: it then attends to a key that every row has, and its output is dropped.
        real, positions = places >= 0, np.where(places >= 0, starts[:, None] + places, 0)
        found, arrays, first = list[tuple[Slab, slice | None, int, bool]](), list[NDArray[np.int64]](), 0
        for slab, members in by_slab.items():
            rows = slice(first, first := first + len(members))
            slots, new = np.array(list(map(slab.slot, members))), real[rows]
            found.append((slab, as_slice(slots.tolist()), int((starts + sizes)[rows].max()), bool(new.all())))
            arrays += [slots, slots.repeat(sizes[rows]), positions[rows][new], np.flatnonzero(new)]
        others, at, *indices = sent(self.device, others, positions, *arrays)
        views = list[KVView]()
        for number, (slab, adjacent, end, full) in enumerate(found):
            read, to_slots, to_columns, kept = indices[4 * number : 4 * number + 4]
            views.append(KVView(slab, KVRegion(adjacent or read, end, to_slots, to_columns, None if full else kept)))
        return views, at, others

    def _make_states(self, states: StateSlots) -> None:
        """Read a token of no row, so that the states of every row exist, and are zero, before its first token."""
        none = -1
        try:
            self._pads = True
            self.extend([none], [torch.zeros(1, dtype=torch.int64)])
            self._pads = self._gates.layers >= states.recurrent_layers
        except BaseException:
            self._pads = None
            raise
        finally:
            self.forget([none])

    @contextmanager
    def _losing(self, rows: Sequence[int]) -> Iterator[None]:
        """Forget ``rows`` if the body fails and they have states, some of which may have moved on."""
        try:
            yield
        except BaseException:
            if self._states is not None:
                self.forget(rows)
            raise

    def _forward(
        self,
        views: Sequence[KVView],
        rows: Sequence[int],
        ids: Tensor,
        positions: Tensor,
        *,
        keep: int,
        pads: NDArray[np.int64] | None = None,
    ) -> Tensor:
        options: dict[str, object] = {self._cache_argument: self._cache}
        if self._keeps_logits:
            options["logits_to_keep"] = keep
        padding = real = None
        if pads is not None and self._states is not None:
            (padding,) = sent(self.device, pads)
            real = torch.arange(ids.shape[1], device=self.device) >= padding[:, None]
        with self._losing(rows):
            recorded = nullcontext() if self.routes is None else self.routes.of(rows, pads)
            with self._cache.reading(views, rows, padding), self._gates.neutral(real), recorded:
                output = self._model(
                    input_ids=ids,
                    attention_mask=self._masks(positions, max(region.end for _, region in views)),
                    position_ids=positions,
                    use_cache=True,
                    **options,
                )
            outputs: Tensor = output.logits if "logits" in output else output.last_hidden_state
            outputs = outputs[:, -keep:]
            return outputs if self._head is None else self._head(outputs)


def _of_equal_sizes(
    passes: Iterable[Mapping[Slab, Sequence[int]]], sizes: Mapping[int, int]
) -> list[dict[Slab, list[int]]]:
    """Return passes over the same rows in which none is padded, so that all have the same number of new tokens."""
    found = []
    for by_slab in passes:
        for size in dict.fromkeys(sizes[row] for members in by_slab.values() for row in members):
            alike = {slab: [row for row in members if sizes[row] == size] for slab, members in by_slab.items()}
            found.append({slab: members for slab, members in alike.items() if members})
    return found


def _class_lengths(shortest: Sequence[int], longest: int) -> list[int]:
    lengths = sorted({min(length, longest) for length in shortest})
    while lengths[-1] < longest:
        lengths.append(min(lengths[-1] * 2, longest))
    return lengths


class WholeRows:
    """A causal model that reads each row once and whole, since it cannot continue a sequence; it keeps nothing.

    Rows are padded on the right, without a mask: no token attends to those behind it. Arguments are those of
    :class:`Incremental`.
    """

    def __init__(self, model: PreTrainedModel, *, head: Callable[[Tensor], Tensor] | None = None) -> None:
        self.max_length = longest(model)
        self._model = model.train(False)
        widen_head(model)
        self._head = head

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return torch.device(self._model.device)

    @torch.inference_mode()
    def extend(
        self, rows: Sequence[int], tokens: Sequence[Tensor], *, last: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Return the outputs of ``tokens``, whole sequences, see :meth:`Incremental.extend`."""
        del rows
        sizes = [len(piece) for piece in tokens]
        wanted = sizes if last is None else last
        first = min(size - count for size, count in zip(sizes, wanted, strict=True))
        ids = pad_sequence(list(tokens), batch_first=True).to(self.device)
        columns = torch.arange(ids.shape[1], device=self.device)
        output = self._model(
            input_ids=ids,
            use_cache=False,
            **({"position_ids": columns.expand_as(ids)} if takes(self._model, "position_ids") else {}),
            **({"logits_to_keep": ids.shape[1] - first} if keeps_logits(self._model) else {}),
        )
        outputs: Tensor = output.logits if "logits" in output else output.last_hidden_state
        outputs = outputs[:, first - ids.shape[1] :]
        outputs = outputs if self._head is None else self._head(outputs)
        return [
            out[size - count - first : size - first] for out, size, count in zip(outputs, sizes, wanted, strict=True)
        ]

    def rewind(self, row: int, length: int) -> int:
        """Return 0: no token of a row is kept."""
        del row, length
        return 0

    def forget(self, rows: Iterable[int]) -> None:
        """Do nothing: no row is kept."""

    def memory(self) -> tuple[int, int]:
        """Return 0 and 0: there is no KV cache."""
        return 0, 0


Reader: TypeAlias = Incremental | WholeRows


def reader_of(model: PreTrainedModel, *, head: Callable[[Tensor], Tensor] | None = None) -> Reader:
    """Return what reads with ``model``: in pieces or, where the probe found that it cannot, whole sequences."""
    return WholeRows(model, head=head) if only_whole(model) else Incremental(model, head=head)


TOKENS_PER_PASS = 4096
"""Tokens of a forward pass, padding included: bounds the memory of activations and logits."""


@dataclass(slots=True, eq=False)
class ReadState(RolloutSession):
    """One rollout while it grows.

    Attributes:
        read: tokens that the model has read.
        unread: int64 [received - read].
        support: of the unread tokens, if outputs predict tokens: the ids that each was sampled from.
        kept: what the scorer kept of each span.
        steps: which of the tokens that were kept end a step, bool [n] on the CPU, for scorers of steps.
        tail: [1, D], the output at the last position read, for scorers that need it with the next token.
    """

    read: int = 0
    unread: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    support: Support = field(default_factory=Support)
    kept: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    tail: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenSpan:
    """Tokens ``start .. end`` of one rollout's sequence, int64 on the CPU, and their support."""

    state: ReadState
    start: int
    tokens: Tensor
    support: Support

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def in_prompt(self) -> bool:
        """Whether it holds no token of the response."""
        return self.end <= self.state.prompt

    @property
    def predictive(self) -> int:
        """Number of last positions that predict response tokens; at least 1, since the last may predict the next."""
        return max(1, self.end - max(self.state.prompt - 1, self.start))


class IncrementalPrefill:
    """Reads rollouts with one model and hands the outputs to a scorer.

    Args:
        reader: of the model; of :class:`WholeRows` each rollout is read when it is finished, in one span.
        name: of the model, for errors.
        vocabulary: upper bound of token ids.
        keep: called with the spans of a pass and the outputs of each, [k, D] at its last k positions: all of them, or,
            with ``predictive``, those that predict the response.
        deterministic: read each rollout alone, on the grid.
        predictive: outputs are asked for where they predict the response only; supports of tokens are kept.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        name: str,
        vocabulary: int,
        keep: Callable[[Sequence[TokenSpan], Sequence[Tensor]], None],
        deterministic: bool,
        predictive: bool = False,
    ) -> None:
        self._reader = reader
        self._whole = isinstance(reader, WholeRows)
        self._keep = keep
        self._deterministic = deterministic
        self._predictive = predictive
        self._states = RolloutSessions(
            name,
            lambda prompt: ReadState(prompt.rollout, len(prompt.tokens)),
            vocabulary=vocabulary,
            longest=reader.max_length,
        )

    def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        """Receive the tokens of ``events`` and read them; with ``deterministic``, the whole blocks.

        Raises:
            ModelError: a token is outside the vocabulary, or a sequence is longer than the model reads.
            ProtocolError: a rollout is opened twice, was never opened, or has a gap.
        """
        grown = {event.rollout: self._received(event) for event in events}
        self._advance(list(grown.values()), final=False)

    def finish(self, lengths: Mapping[int, int]) -> list[ReadState]:
        """Read the rest of finished rollouts and forget them; return their states, in order.

        Args:
            lengths: tokens of each response, by rollout.

        Raises:
            ProtocolError: the tokens received are not the whole response.
        """
        states = [self._states.whole(rollout, length) for rollout, length in lengths.items()]
        self._advance(states, final=True)
        self.forget([state.rollout for state in states])
        return states

    def rewind(self, rollout: int, length: int) -> int:
        """Take back tokens of a rollout from ``length`` on, prompt included; return how many tokens stay.

        With ``deterministic`` those are whole blocks, and fewer: a block is read in one pass or not at all. What a
        scorer kept of tokens that are gone is the scorer's to drop.

        Raises:
            ProtocolError: the rollout was never opened.
        """
        state = self._states[rollout]
        if length >= state.read:
            state.unread = state.unread[: length - state.read]
        else:
            length = length // EXACT_BLOCK * EXACT_BLOCK if self._deterministic else length
            length = self._reader.rewind(rollout, length)
            state.read, state.unread = length, state.unread[:0]
        state.support = state.support.slice(0, len(state.unread))
        state.received = min(length, state.received)
        return state.received

    def forget(self, rollouts: Iterable[int]) -> None:
        """Drop rollouts and their memory; unknown rollouts are fine."""
        rollouts = list(rollouts)
        self._states.forget(rollouts)
        self._reader.forget(rollouts)

    def memory(self) -> tuple[int, int]:
        """Return the bytes allocated for the KV cache, and the bytes that the tokens read so far need."""
        return self._reader.memory()

    def _received(self, event: Prompt | Chunk | ToolTokens) -> ReadState:
        support = event.support if self._predictive and isinstance(event, Chunk) else Support()
        state = self._states.receive(event, support)
        state.support = Support.concatenate([(state.support, len(state.unread)), (support, len(event.tokens))])
        state.unread = np.concatenate((state.unread, event.tokens.astype(np.int64)))
        return state

    def _advance(self, states: Sequence[ReadState], *, final: bool) -> None:
        if self._whole and not final:
            return
        for batch in self._blocks(states, final=final) if self._deterministic else self._batches(states):
            last = [span.predictive for span in batch] if self._predictive else None
            rows, tokens = [span.state.rollout for span in batch], [span.tokens for span in batch]
            self._keep(batch, self._reader.extend(rows, tokens, last=last))

    def _blocks(self, states: Sequence[ReadState], *, final: bool) -> Iterator[list[TokenSpan]]:
        for state in states:
            while len(state.unread) >= EXACT_BLOCK or (final and len(state.unread)):
                yield [self._next_span(state, len(state.unread) if self._whole else EXACT_BLOCK)]

    def _batches(self, states: Sequence[ReadState]) -> Iterator[list[TokenSpan]]:
        waiting, overhead = list(states), overhead_on(self._reader.device)
        while waiting := [state for state in waiting if len(state.unread)]:
            spans = [self._next_span(state, len(state.unread) if self._whole else TOKENS_PER_PASS) for state in waiting]
            lengths = [len(span.tokens) for span in spans]
            for group in cheapest_groups(lengths, range(len(spans)), overhead=overhead, budget=TOKENS_PER_PASS):
                yield [spans[at] for at in group]

    def _next_span(self, state: ReadState, limit: int) -> TokenSpan:
        tokens, state.unread = state.unread[:limit], state.unread[limit:]
        support = state.support.slice(0, limit)
        state.support = state.support.slice(limit, len(state.support.counts))
        span = TokenSpan(state, state.read, torch.from_numpy(tokens), support)
        state.read += len(tokens)
        return span
