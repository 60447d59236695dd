"""A model that reads many sequences a few tokens at a time, each at its own position.

::

    extend(rows, ragged tokens)  ->  one forward pass, chunks padded on the left; each length class of the rows
                                     attends to a rectangle of its own
    step(rows, one token each)   ->  the same with segments of similar length, and keys and values are sliced, never
                                     gathered

Chunks are padded on the left, so that the last token of every row stands in the last column and a causal LM computes
its logits there only. Padding is never stored: its keys and values are dropped before the slab is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ModelError, ProtocolError
from oppo.hf.introspection import keeps_logits, longest
from oppo.hf.kv.cache import KVView, SlabCache
from oppo.hf.kv.decode_batch import DecodeBatch
from oppo.hf.kv.masks import Masks
from oppo.hf.kv.segmented_attention import attend_in_segments, overhead_of, segmented
from oppo.hf.kv.slabs import KVRegion, Slab, index, run_of

SHORTEST_CLASS = 64
"""Sequences up to this length share a slab; the next class is twice as long, and so on."""

SlabRows: TypeAlias = tuple[Slab, list[int]]
"""Rows, and the slab that they live in."""


class Incremental:
    """A causal model with a cache in which every row has its own length; rows are named by ints.

    All calls belong in one thread. The model is put into evaluation mode once, here, and never toggled.

    Args:
        model: a causal LM (its outputs are then logits) or a backbone (last hidden states).
        classes: the shortest length classes of rows that are read in chunks; longer ones follow by doubling, up to
            ``max_length``. With one class as long as that, all of them share a slab.
        head: applied to the outputs [n, q, D], for example a reward model's score layer.
        segmented: let rows of very different length share a pass and attend in segments of similar length; in steps,
            where that saves more than it costs. Otherwise, and where a model cannot attend so
            (:mod:`oppo.hf.kv.attention`), rows that are stepped are one rectangle, and those of each length class are
            read in a pass of their own.
        ordered: keep rows that are stepped together in the order of the call. Kernels treat the last rows of an odd
            batch differently, so without it the bits of a step depend on which rows came and went before. With it
            they depend on the rows of the step, and on what lengths they had when these rows were first stepped
            together, at the price of copying when a row leaves.

    Attributes:
        max_length: the longest sequence a row can hold, see :func:`~oppo.hf.introspection.longest`.

    Raises:
        ModelRefused: the model attends in a way that cannot be served row by row.

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
        segmented: bool = True,
        ordered: bool = False,
    ) -> None:
        text = model.config.get_text_config()
        self.max_length = longest(model)
        self._model = model.train(False)
        self._head = head
        self._segmented = segmented and attend_in_segments(model)
        self._ordered = ordered
        self._masks = Masks(model)
        self._keeps = keeps_logits(model)
        self._shelves = [Slab(columns) for columns in _class_lengths(classes, self.max_length)]
        self._stepped: list[Slab] = []
        self._cache = SlabCache(int(text.num_hidden_layers))
        self._homes: dict[int, Slab] = {}
        self._lengths: dict[int, int] = {}
        self._decode_batch: DecodeBatch | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device(self._model.device)

    def length(self, row: int) -> int:
        """Return the number of tokens that ``row`` has read; 0 for an unknown row."""
        return self._lengths.get(row, 0)

    def open(self, row: int) -> None:
        """Name a row that has read nothing; :meth:`extend` does so for a row it does not know."""
        self._lengths.setdefault(row, 0)

    @torch.inference_mode()
    def extend(
        self, rows: Sequence[int], tokens: Sequence[Tensor], *, last: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Append ``tokens[i]``, int64 [n_i] with n_i >= 1, to ``rows[i]``; return the outputs at the new positions.

        A row extended alone from the same length by as many tokens gives the same bits whatever else is held here.
        Reading copies keys and values where the rows are not adjacent in their slab; that is small beside the work
        on the chunk itself.

        Args:
            last: k_i of 1 .. n_i: outputs are wanted at the last k_i of a row's new positions; ``None``: at all.

        Returns:
            For each row [k_i, D].

        Raises:
            ModelError: a row would grow beyond ``max_length``; nothing has been read then.
            ProtocolError: a row is named twice, or has no tokens.
        """
        self._decode_batch = None
        sizes = [len(piece) for piece in tokens]
        if min(sizes, default=1) < 1:
            raise ProtocolError(f"row {rows[sizes.index(0)]} was extended by no tokens; expected at least one")
        outputs: dict[int, Tensor] = {}
        pieces = dict(zip(rows, tokens, strict=True))
        wanted = dict(zip(rows, sizes if last is None else last, strict=True))
        by_slab = self._admitted(rows, sizes)
        for shared in [by_slab] if by_slab and self._segmented else [[seat] for seat in by_slab]:
            members = [row for _, held in shared for row in held]
            ragged = [pieces[row] for row in members]
            outs = self._read(shared, ragged, keep=max(wanted[row] for row in members))
            for row, piece, out in zip(members, ragged, outs, strict=True):
                outputs[row] = out[-wanted[row] :]
                self._lengths[row] = self.length(row) + len(piece)
        return [outputs[row] for row in rows]

    @torch.inference_mode()
    def step(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Append one token to each row, ``tokens`` int64 [n]; return [n, D] in the order of ``rows``.

        The rows of each segment are brought to the front of their slab (free if they were there in the last step), so
        that keys and values are read as a view, up to the longest of the segment. The segments are made anew when other
        rows are stepped, or some have been read or forgotten; between, rows grow alike, and a segment wastes less and
        less.

        Raises:
            ModelError: a row would grow beyond ``max_length``; nothing has been read then.
            ProtocolError: a row is named twice.
        """
        batch, self._decode_batch = self._decode_batch, None
        if batch is None or not batch.goes_on(rows, self.max_length):
            batch = self._in_step(rows)
        batch.make_room()
        out = self._pass(batch, tokens)
        for row in rows:
            self._lengths[row] = self.length(row) + 1
        batch.advance()
        self._decode_batch = batch
        return out

    @torch.inference_mode()
    def stand_apart(self, rows: Sequence[int]) -> None:
        """Let ``rows``, if they are stepped next, attend in one segment for each length: for a probe.

        Where a model does not attend in segments, nothing changes.

        Raises:
            ModelError: a row has no room for another token.
            ProtocolError: a row is named twice.
        """
        self._decode_batch = self._in_step(rows, overhead=0)

    @torch.inference_mode()
    def forget(self, rows: Iterable[int]) -> None:
        """Free the memory of ``rows``; unknown rows are fine."""
        freed: dict[Slab, list[int]] = {}
        for row in rows:
            self._lengths.pop(row, None)
            home = self._homes.pop(row, None)
            if home is not None:
                freed.setdefault(home, []).append(row)
        for slab, gone in freed.items():
            self._decode_batch = None
            slab.remove(gone)
            slab.trim(self._longest(slab))

    def clear(self) -> None:
        """Forget every row."""
        self.forget(list(self._lengths))

    def memory(self) -> tuple[int, int]:
        """Return the bytes allocated for keys and values, and the bytes that the tokens read so far need."""
        held = sum(slab.bytes_allocated() for slab in (*self._shelves, *self._stepped))
        return held, self._bytes_per_token() * sum(self._lengths.values())

    def _bytes_per_token(self) -> int:
        """Return what a token takes over all layers; 0 before anything was read."""
        return max(slab.bytes_per_token() for slab in (*self._shelves, *self._stepped))

    def _admitted(self, rows: Sequence[int], more: Sequence[int]) -> list[SlabRows]:
        """Give each row a slot in which it can grow by ``more[i]`` tokens; return the rows of each slab, by slot."""
        groups: dict[Slab, list[int]] = {}
        grown = self._grown(rows, more)
        for row, length in grown.items():
            home = self._homes.get(row)
            if home is None or length > home.longest:
                home = next(slab for slab in self._shelves if slab.longest >= length)
            groups.setdefault(home, []).append(row)
        for slab, members in groups.items():
            self._move(members, slab, max(grown[row] for row in members), spared=groups.keys())
        return [(slab, sorted(members, key=slab.slot)) for slab, members in groups.items()]

    def _move(self, rows: Iterable[int], slab: Slab, columns: int, *, spared: Container[Slab]) -> None:
        """Let ``rows`` live in ``slab``, in sequences of so many ``columns``.

        Slabs that they leave give memory back, but for those that have been given room for what they will hold, or
        will be: those among ``spared``.
        """
        incoming = [row for row in rows if self._homes.get(row) is not slab]
        slab.reserve(len(incoming), columns)
        for home in {self._homes[row]: None for row in incoming if row in self._homes}:
            moving = {row: self.length(row) for row in incoming if self._homes.get(row) is home}
            slab.adopt(moving, home)
            if home not in spared:
                home.trim(self._longest(home))
        slab.add(row for row in incoming if row not in self._homes)
        self._homes.update(dict.fromkeys(incoming, slab))

    def _step_slabs(self, rows: Sequence[int], overhead: int | None) -> list[SlabRows]:
        """Give each segment of ``rows`` a slab in which its rows can grow by a token: that which holds most of it.

        Another segment costs ``overhead`` tokens; unless given, what it takes for this model.
        """
        grown = self._grown(rows, [1] * len(rows))
        lengths = list(grown.values())
        segments = [list(range(len(rows)))]
        if self._segmented and rows and (per_token := self._bytes_per_token()):
            own = overhead_of(per_token / len(self._cache.layers))
            segments = segmented(lengths, own if overhead is None else overhead)
        by_slab = dict[Slab, list[int]]()
        for segment in segments:
            members = [rows[at] for at in segment]
            held = Counter(self._homes[row] for row in members if row in self._homes)
            free = [slab for slab in self._stepped if slab not in by_slab]
            slab = max(free, key=held.__getitem__, default=None)
            if slab is None or not held[slab]:
                slab = next((slab for slab in free if not slab.rows), None) or Slab(self.max_length)
            by_slab[slab] = members
        for slab, members in by_slab.items():
            self._move(members, slab, max(grown[row] for row in members), spared=by_slab.keys())
        for slab, members in by_slab.items():
            slab.trim(max([self._longest(slab), *(grown[row] for row in members)]))
        self._stepped = [slab for slab in dict.fromkeys([*self._stepped, *by_slab]) if slab.rows]
        return list(by_slab.items())

    def _longest(self, slab: Slab) -> int:
        return max(map(self.length, slab.rows), default=0)

    def _grown(self, rows: Sequence[int], more: Sequence[int]) -> dict[int, int]:
        """Return the length that each row will have, after checking that it may."""
        if len(set(rows)) != len(rows):
            raise ProtocolError(f"each row may be named once in a call, but rows are {list(rows)}")
        lengths = {row: self.length(row) + n for row, n in zip(rows, more, strict=True)}
        for row, length in lengths.items():
            if length > self.max_length:
                raise ModelError(
                    f"row {row} would hold {length} tokens, but {type(self._model).__name__} reads at most "
                    f"{self.max_length}: shorten the prompt or lower max_new_tokens"
                )
        return lengths

    def _read(self, by_slab: Sequence[SlabRows], ragged: Sequence[Tensor], *, keep: int) -> Tensor:
        """Read one chunk for each row, in the order of the by_slab; return the last ``keep`` outputs [n, keep, D]."""
        device = self._model.device
        sizes = [len(piece) for piece in ragged]
        width, starts = max(sizes), [self.length(row) for _, rows in by_slab for row in rows]
        pads = index([width - size for size in sizes], device)[:, None]
        columns = torch.arange(width, device=device)
        real = columns >= pads
        # Padding stands at position 0, which every row has: it attends to that and is thrown away.
        positions = (index(starts, device)[:, None] + columns - pads).where(real, 0)
        ids = positions.new_zeros(positions.shape)
        ids[real] = torch.cat([piece.to(device) for piece in ragged])
        views, first = list[KVView](), 0
        for slab, rows in by_slab:
            segment = slice(first, first + len(rows))
            slots = [slab.slot(row) for row in rows]
            where = index(slots, device)[:, None].expand(-1, width)
            region = KVRegion(
                slots=run_of(slots) or index(slots, device),
                end=max(start + size for start, size in zip(starts[segment], sizes[segment], strict=True)),
                to_slots=where[real[segment]],
                to_columns=positions[segment][real[segment]],
                chosen=None if min(sizes[segment]) == width else real[segment].flatten().nonzero()[:, 0],
            )
            views.append(KVView(slab, region))
            first = segment.stop
        return self._forward(views, ids, positions, keep=keep)

    def _in_step(self, rows: Sequence[int], overhead: int | None = None) -> DecodeBatch:
        """Bring ``rows``, segment by segment, to the front of slabs in which they can be stepped."""
        device, views, batch = self._model.device, list[KVView](), list[int]()
        for slab, members in self._step_slabs(rows, overhead):
            slab.bring_forward(members, ordered=self._ordered)
            front = slab.rows[: len(members)]
            lengths = [self.length(row) for row in front]
            slots = torch.arange(len(front), device=device)
            region = KVRegion(slice(0, len(front)), max(lengths) + 1, slots, index(lengths, device), None)
            views.append(KVView(slab, region))
            batch += front
        position_of = {row: at for at, row in enumerate(rows)}
        picks = index([position_of[row] for row in batch], device) if batch != list(rows) else None
        return DecodeBatch(list(rows), views, index([self.length(row) for row in batch], device), picks)

    def _pass(self, batch: DecodeBatch, tokens: Tensor) -> Tensor:
        """Read one token for each row; return the outputs [n, D]."""
        picks = batch.picks
        ids = tokens.to(batch.positions.device)
        ids = ids if picks is None else ids[picks]
        out = self._forward(batch.views, ids[:, None], batch.positions[:, None], keep=1)[:, 0]
        return out if picks is None else out.index_copy(0, picks, out)

    def _forward(self, views: Sequence[KVView], ids: Tensor, positions: Tensor, *, keep: int) -> Tensor:
        kept = {"logits_to_keep": keep} if self._keeps else {}
        output = self._model(
            input_ids=ids,
            attention_mask=self._masks(positions, max(region.end for _, region in views)),
            position_ids=positions,
            past_key_values=self._cache.at(views),
            use_cache=True,
            **kept,
        )
        seen: Tensor = output.logits if "logits" in output else output.last_hidden_state
        seen = seen[:, -keep:]
        return seen if self._head is None else self._head(seen)


def _class_lengths(shortest: Sequence[int], longest: int) -> list[int]:
    """Return ascending class lengths: those given, at most ``longest``, then doubled up to it."""
    lengths = sorted({min(length, longest) for length in shortest})
    while not lengths or lengths[-1] < longest:
        lengths.append(min(lengths[-1] * 2 if lengths else SHORTEST_CLASS, longest))
    return lengths
