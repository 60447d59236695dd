"""A model that reads many sequences a few tokens at a time, each at its own position.

::

    extend(rows, ragged tokens)  ->  one forward pass over chunks; the rows of each length class attend as one segment
    step(rows, one token each)   ->  one forward pass; rows of similar length attend as one segment, if that saves more
                                     than it costs; their KV cache is sliced, never gathered

A model that cannot attend in segments (:mod:`oppo.hf.kv.attention`) reads each length class in a pass of its own, and
steps rows as one rectangle. Chunks are padded on the left: the last token of every row is in the last column, and a
causal LM computes logits there only. The keys and values of padding are never stored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from oppo.errors import ModelError, ModelRefused, ProtocolError, counted
from oppo.events import IntArray
from oppo.hf.expert_routing import RouteRecords
from oppo.hf.head import widen_head
from oppo.hf.kv.attention import (
    Masks,
    Packed,
    attend_in_segments,
    cheapest_groups,
    expand_in_segments,
    filled,
    packed_mask,
    packed_row_on,
    packed_rows,
    packs,
    pass_overhead,
    reads_packed,
    rows_apart,
)
from oppo.hf.kv.cache import DecodeBatch, KVRegion, KVView, Rows, Slab, as_slice, sent
from oppo.hf.kv.cuda_graphs import Capture, StepGraphs
from oppo.hf.kv.states import Gates, RowCache
from oppo.hf.model_parts import cache_argument, keeps_logits, longest, only_whole, require_pieces, takes
from oppo.hf.vision import BLIND, UNSEEN, Eyes, Seen, Sight, seen_in_pieces
from oppo.images import ImageRef

SHORTEST_CLASS = 64  # length of the first length class, in tokens; each next class is twice as long


class Incremental:
    """A causal model with a cache in which every row has its own length; one thread makes all calls."""

    # model: a causal LM (the outputs are logits) or a backbone (last hidden states). classes: the shortest length
    # classes of rows read in chunks; longer ones follow by doubling. head: applied to the outputs [n, q, D]. ordered:
    # keep the rows of a step in the order of the call. Kernels treat the last rows of an odd batch differently, so
    # without it the bits of a step depend on which rows came and went before. With it they depend on the rows of the
    # step, and on the lengths at which these rows were first stepped together; rows are copied when one leaves.

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
        self._rows = Rows(classes, self.max_length, type(model).__name__)
        self._cache = RowCache(model.config)
        self._decode_batch: DecodeBatch | None = None
        self._states = self._cache.states
        self._gates = Gates(model)
        self._has_made_states = False
        self._pads = True  # whether rows of a pass may be padded: not before states whose gates are unknown
        self.routes: RouteRecords | None = None
        self._graphs: StepGraphs | None = None
        self.eyes: Eyes | None = None
        self._sights: dict[int, Sight] = {}
        if self.device.type == "cuda" and not ordered:
            self.capture_steps(Capture(self.device))

    def capture_steps(self, capture: Capture) -> None:
        """Launch decode steps of one segment as graphs from now on, if the model can be captured."""

        def forward(view: KVView, ids: Tensor, positions: Tensor, rotary: Tensor | None) -> Tensor:
            return self._forward([view], (), ids, positions, keep=1, seen=_turned(rotary))[:, 0]

        self._graphs = StepGraphs(forward, capture)

    @property
    def device(self) -> torch.device:
        return torch.device(self._model.device)

    @property
    def has_states(self) -> bool:
        return self._states is not None

    def length(self, row: int) -> int:
        return self._rows.length(row)

    def expect(self, rows: Iterable[int]) -> None:
        """Let slots be reserved for these rows, which are about to be read, some of them later than others."""
        self._rows.expect([*rows])

    def show(self, row: int, prompt: IntArray, images: tuple[ImageRef, ...]) -> None:
        """Let a row see the images of its prompt, before its first token is read; forgotten with the row."""
        self.eyes = self.eyes or Eyes(self._model)
        self._sights[row] = self.eyes.sight(prompt, images)

    def cut(self, row: int, start: int, limit: int) -> int:
        """Return how many tokens to read from ``start`` on: ``limit``, or a multiple of it that cuts no image."""
        return self._sight(row).cut(start, limit)

    @torch.inference_mode()
    def extend(
        self, rows: Sequence[int], tokens: Sequence[Tensor], *, last: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Append ``tokens[i]``, int64 [n_i], n_i >= 1, to ``rows[i]``; return the outputs [k_i, D] at the last k_i."""
        # A row extended alone gives the same bits for the same length and tokens, whatever other rows the cache holds.
        self._make_states()
        self._decode_batch = None
        sizes = [len(piece) for piece in tokens]
        if min(sizes, default=1) < 1:
            raise ProtocolError(f"row {rows[sizes.index(0)]} was extended by no tokens; expected at least one")
        outputs: dict[int, Tensor] = {}
        pieces = dict(zip(rows, tokens, strict=True))
        if self._sights:
            self._check_features(pieces)
        wanted = dict(zip(rows, sizes if last is None else last, strict=True))
        by_slab = self._rows.by_class(rows, sizes)
        if self._states is not None:
            self._states.admit(rows)
        alone = [{slab: members} for slab, members in by_slab.items()]
        if rows and self._packs(rows, sizes):
            return self._read_packed(by_slab, pieces, wanted)
        passes = [by_slab] if by_slab and self._segmented else alone
        if not self._pads:
            passes = _of_equal_sizes(passes, dict(zip(rows, sizes, strict=True)))
        for shared in passes:
            members = [row for held in shared.values() for row in held]
            ragged = [pieces[row] for row in members]
            outs = self._read(shared, ragged, keep=max(wanted[row] for row in members))
            for row, piece, out in zip(members, ragged, outs, strict=True):
                outputs[row] = out[-wanted[row] :]
                self._rows.grow(row, len(piece))
        return [outputs[row] for row in rows]

    @torch.inference_mode()
    def hold(self, lengths: Mapping[int, int]) -> None:
        # For counts of memory: as long as if they had been read.
        self._make_states()
        self._decode_batch = None
        self._rows.hold(lengths)
        if self._states is not None:
            self._states.admit([*lengths])

    @torch.inference_mode()
    def step(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Append one token to each row, ``tokens`` int64 [n]; return [n, D] in the order of ``rows``."""
        # The rows of a segment are at the front of their slab, so that their KV cache is read as a view. Rows are
        # segmented anew when other rows are stepped, or after extend() or forget(); in between rows grow alike, and
        # padding shrinks.
        self._make_states()
        if self._sights and any(self.length(row) < self._sight(row).length for row in rows):
            return torch.cat(self.extend(rows, tokens.split(1)))
        batch, self._decode_batch = self._decode_batch, None
        if batch is None or not batch.continues(rows, self.max_length):
            batch = self._batched(rows)
        batch.make_room()
        ids, picks = tokens.to(batch.positions.device), batch.picks
        ids = ids if picks is None else ids[picks]
        if self._graphs is not None and self._states is not None:
            self._graphs.refuse("the model has recurrent states, whose slots change with the rows")
        elif self._graphs is not None and self.routes is not None:
            self._graphs.refuse("the experts of each token are recorded, which the host reads back")
        out = None if self._graphs is None else self._graphs.step(batch, ids)
        if out is None:
            given = ids[:, None], batch.positions[:, None]
            out = self._forward(batch.views, batch.members, *given, keep=1, seen=_turned(batch.rotary))[:, 0]
        out = out if picks is None else out.index_copy(0, picks, out)
        for row in rows:
            self._rows.grow(row, 1)
        batch.advance()
        self._decode_batch = batch
        return out

    @torch.inference_mode()
    def segment_by_length(self, rows: Sequence[int]) -> None:
        # Whatever it costs: for the probe, whose rows are short.
        self._decode_batch = self._batched(rows, overhead=0)

    def rewind(self, row: int, length: int) -> int:
        """Keep the first ``length`` tokens of a row, which holds at least ``length``; return how many stay."""
        # The KV cache of the others stays, behind the mask, until others are written over it. States are kept whole or
        # not.
        if length >= self.length(row):
            return self.length(row)
        if self._states is not None:
            self.forget([row])
            return 0
        self._decode_batch = None
        self._rows.cut(row, length)
        return length

    @torch.inference_mode()
    def forget(self, rows: Iterable[int]) -> None:
        rows = list(rows)
        for row in rows:
            self._sights.pop(row, None)
        if self.routes is not None:
            for row in rows:
                self.routes.pop(row)
        if gone := self._rows.forget(rows):
            self._decode_batch = None
        if self._states is not None:
            self._states.dismiss(gone)

    def clear(self) -> None:
        self.forget(list(self._rows.held))

    def memory(self) -> tuple[int, int]:
        allocated, needed = self._rows.memory()
        if self._states is None:
            return allocated, needed
        states = self._states.bytes_per_row() * len(self._rows)
        return allocated + self._states.bytes_allocated(), needed + states

    def layer_bytes(self) -> Mapping[int, int]:
        return self._rows.layer_bytes() + (Counter() if self._states is None else self._states.layer_bytes())

    def groups(self, rows: Sequence[int], lengths: Sequence[int], budget: float = math.inf) -> list[list[int]]:
        # Rows without a token so far are packed where the model reads packed rows, if that costs less. A group has at
        # most `budget` tokens, padding included, or one row.
        overhead = pass_overhead(self.device)
        new = [at for at, row in enumerate(rows) if not self.length(row) and row not in self._sights]

        def padded(chosen: Iterable[int]) -> list[list[int]]:
            return cheapest_groups(lengths, chosen, overhead=overhead, budget=budget)

        def cost(groups: Sequence[Sequence[int]]) -> int:
            return sum(overhead + self._cost([lengths[at] for at in group]) for group in groups)

        packed = [[new[at] for at in group] for group in filled([lengths[at] for at in new], budget)]
        if len(set(lengths)) < 2 or not self._can_pack(max(lengths)) or cost(packed) >= cost(padded(new)):
            return padded(range(len(rows)))
        return [*packed, *padded({*range(len(rows))}.difference(new))]

    def _cost(self, sizes: Sequence[int]) -> int:
        return min(self._cost_packed(sizes), len(sizes) * max(sizes))

    def _cost_packed(self, sizes: Sequence[int]) -> int:
        return sum(sizes) + packed_row_on(self.device) * len(sizes)

    def _packs(self, rows: Sequence[int], sizes: Sequence[int]) -> bool:
        return (
            not any(map(self.length, rows))
            and self._sights.keys().isdisjoint(rows)
            and self._cost_packed(sizes) < len(sizes) * max(sizes)
            and self._can_pack(max(sizes))
        )

    @cached_property
    def _reads_packed(self) -> bool:
        return self._states is None and reads_packed(self._model)

    def _can_pack(self, longest_: int) -> bool:
        return self._reads_packed and self.routes is None and packs(self._model, longest_)

    def _read_packed(
        self, by_slab: Mapping[Slab, Sequence[int]], pieces: Mapping[int, Tensor], wanted: Mapping[int, int]
    ) -> list[Tensor]:
        members = [row for rows in by_slab.values() for row in rows]
        sizes = np.array([len(pieces[row]) for row in members])
        kept = [np.arange(end - wanted[row], end) for row, end in zip(members, sizes.cumsum(), strict=True)]
        arrays = list[NDArray[np.int64]]()
        for slab, rows in by_slab.items():
            counts = [len(pieces[row]) for row in rows]
            arrays += [np.repeat([*map(slab.slot, rows)], counts), np.concatenate([*map(np.arange, counts)])]
        ids = torch.cat([pieces[row].cpu() for row in members])
        ids, keep, *places = sent(self.device, ids, np.concatenate(kept), *arrays)
        views = [
            KVView(slab, KVRegion(slice(0, len(rows)), max(len(pieces[row]) for row in rows), slots, columns, None))
            for (slab, rows), slots, columns in zip(by_slab.items(), places[::2], places[1::2], strict=True)
        ]
        with rows_apart(Packed(sizes.tolist())):
            outputs = self._forward(views, members, ids[None], torch.cat(places[1::2])[None], keep=keep)[0]
        for row in members:
            self._rows.grow(row, len(pieces[row]))
        found = dict(zip(members, outputs.split_with_sizes([wanted[row] for row in members]), strict=True))
        return [found[row] for row in pieces]

    def _read(self, by_slab: Mapping[Slab, Sequence[int]], ragged: Sequence[Tensor], *, keep: int) -> Tensor:
        ids = pad_sequence([piece.cpu() for piece in ragged], batch_first=True, padding_side="left")
        sizes = np.array([len(piece) for piece in ragged])
        views, positions, ids = self._views(by_slab, sizes, ids)
        members, pads = [row for rows in by_slab.values() for row in rows], sizes.max() - sizes
        seen = UNSEEN if self._sights.keys().isdisjoint(members) else self._seen(members, sizes, views)
        return self._forward(views, members, ids, positions, keep=keep, pads=pads if pads.any() else None, seen=seen)

    def _sight(self, row: int) -> Sight:
        return self._sights.get(row, BLIND)

    def _check_features(self, pieces: Mapping[int, Tensor]) -> None:
        for row, piece in pieces.items():
            start = self.length(row)
            expected = self._sight(row).count(start, start + len(piece))
            if self.eyes is not None and (found := int((piece == self.eyes.pad).sum())) != expected:
                raise ModelError(
                    f"row {row} has {counted(found, 'image token')} among its tokens {start} to "
                    f"{start + len(piece) - 1}, and its prompt shows {expected} there: such a token comes from images "
                    "only, and is never sampled or given"
                )

    def _seen(self, rows: Sequence[int], sizes: NDArray[np.int64], views: Sequence[KVView]) -> Seen:
        sights, end = [*map(self._sight, rows)], max(view.region.end for view in views)
        return seen_in_pieces(sights, [*map(self.length, rows)], sizes.tolist(), end, self.device)

    def _batched(self, rows: Sequence[int], overhead: int | None = None) -> DecodeBatch:
        by_slab = self._rows.by_segment(rows, overhead, self.device if self._segmented else None)
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
        made = DecodeBatch(list(rows), batch, views, positions[:, 0], picks if batch != list(rows) else None)
        offsets = [self._sight(row).offset for row in batch] if self._sights else []
        if any(offsets):
            made.rotary = made.positions + sent(self.device, offsets)[0]
        return made

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

    def _make_states(self) -> None:
        # Reads a token of no row, so that the states of every row exist, and are zero, before its first token.
        if self._states is None or self._has_made_states:
            return
        none = -1
        self._has_made_states = True
        try:
            self.extend([none], [torch.zeros(1, dtype=torch.int64)])
        except BaseException:
            self._has_made_states = False
            raise
        finally:
            self.forget([none])
        self._pads = self._gates.layers >= self._states.recurrent_layers

    @contextmanager
    def _losing(self, rows: Sequence[int]) -> Iterator[None]:
        # States of rows may have moved on when a pass fails.
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
        keep: int | Tensor,
        pads: NDArray[np.int64] | None = None,
        seen: Seen = UNSEEN,
    ) -> Tensor:
        options: dict[str, object] = {self._cache_argument: self._cache, "position_ids": positions, **seen.arguments}
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
                    attention_mask=self._mask(views, positions, seen.blocks),
                    use_cache=True,
                    **options,
                )
            outputs: Tensor = output.logits if "logits" in output else output.last_hidden_state
            if isinstance(keep, int):
                outputs = outputs[:, -keep:]
            elif not self._keeps_logits:
                outputs = outputs[:, keep]
            return outputs if self._head is None else self._head(outputs)

    def _mask(
        self, views: Sequence[KVView], positions: Tensor, blocks: Tensor | None
    ) -> Tensor | Mapping[str, Tensor | None] | None:
        if packed_rows() is not None:
            return packed_mask(self._model)
        return self._masks(positions, max(region.end for _, region in views), blocks)


def _turned(rotary: Tensor | None) -> Seen:
    return UNSEEN if rotary is None else Seen({"position_ids": rotary[:, None]})


def _of_equal_sizes(
    passes: Iterable[Mapping[Slab, Sequence[int]]], sizes: Mapping[int, int]
) -> list[dict[Slab, list[int]]]:
    # None is padded.
    found = []
    for by_slab in passes:
        for size in dict.fromkeys(sizes[row] for members in by_slab.values() for row in members):
            alike = {slab: [row for row in members if sizes[row] == size] for slab, members in by_slab.items()}
            found.append({slab: members for slab, members in alike.items() if members})
    return found


class WholeRows:
    """A causal model that reads each row once and whole, since it cannot continue a sequence; it keeps nothing."""

    # Rows are padded on the right, without a mask: no token attends to those behind it.

    def __init__(self, model: PreTrainedModel, *, head: Callable[[Tensor], Tensor] | None = None) -> None:
        self.max_length = longest(model)
        self._model = model.train(False)
        widen_head(model)
        self._head = head

    @property
    def device(self) -> torch.device:
        return torch.device(self._model.device)

    @torch.inference_mode()
    def extend(
        self, rows: Sequence[int], tokens: Sequence[Tensor], *, last: Sequence[int] | None = None
    ) -> list[Tensor]:
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

    def expect(self, rows: Iterable[int]) -> None:
        """Do nothing, as :meth:`forget`."""

    def show(self, row: int, prompt: IntArray, images: tuple[ImageRef, ...]) -> None:
        del row, prompt, images
        raise ModelRefused(
            f"{type(self._model).__name__} reads whole sequences only, and images are shown to models that read pieces "
            f"of them: {only_whole(self._model)}"
        )

    def groups(self, rows: Sequence[int], lengths: Sequence[int], budget: float = math.inf) -> list[list[int]]:
        return cheapest_groups(lengths, range(len(rows)), overhead=pass_overhead(self.device), budget=budget)

    def rewind(self, row: int, length: int) -> int:
        del row, length
        return 0

    def forget(self, rows: Iterable[int]) -> None:
        """Do nothing: no row is kept."""

    def memory(self) -> tuple[int, int]:
        return 0, 0

    def layer_bytes(self) -> Mapping[int, int]:
        return {}


Reader: TypeAlias = Incremental | WholeRows


def reader_of(model: PreTrainedModel, *, head: Callable[[Tensor], Tensor] | None = None) -> Reader:
    return WholeRows(model, head=head) if only_whole(model) else Incremental(model, head=head)
