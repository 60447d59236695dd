"""Where keys and values live: one slab for each length class, live sequences contiguous at its front.

A slab is one pair of tensors ``[capacity, heads, columns, head_dim]`` for each layer; slot ``i`` holds one sequence.
Both capacity and columns follow what is held. Three invariants make a slice of it safe to attend to:

- slots ``0 .. len(slab)`` are live, in the order of :attr:`Slab.rows`; a freed slot is filled with the last one;
- whatever no live sequence has written is zero: a masked NaN left behind by another sequence would still be a NaN;
- every slot begins on a multiple of 64 bytes, so that the bits a kernel computes cannot depend on the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGNMENT = 8
"""Columns come in multiples of this: 64 bytes even for two-byte numbers and four of them in all heads of a layer."""

SLACK = 8
"""A slab that more rows join gets one spare slot for every so many live ones; an empty one just has room for all."""

HEADROOM = 5
"""A slab that must grow gets room for sequences longer by one part in so many; it is copied once for all of them."""

SPARE = 1.125
"""A slab larger by this factor than one made for what it holds gives memory back when a row leaves."""


@dataclass(slots=True)
class KVRegion:
    """Where one forward pass reads and writes in a slab.

    Attributes:
        slots: the slots read, one per batch row: a run of them (a view) or int64 [n] (a copy).
        end: columns ``0 .. end`` are read.
        to_slots, to_columns: int64 [m], where each new token is written.
        chosen: int64 [m], which of the n * q padded positions are tokens; ``None`` when all are.
    """

    slots: slice | Tensor
    end: int
    to_slots: Tensor
    to_columns: Tensor
    chosen: Tensor | None
    _indices: dict[int, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many batch rows there are."""
        return self.slots.stop - self.slots.start if isinstance(self.slots, slice) else len(self.slots)

    def indices(self, heads: int, columns: int) -> Tensor:
        """Return where new tokens are in a slab [capacity * heads * columns, ...], int64 [m * heads]; made once."""
        indices = self._indices.get(heads)
        if indices is None:
            first = self.to_slots * (heads * columns) + self.to_columns
            indices = (first[:, None] + torch.arange(heads, device=first.device) * columns).flatten()
            self._indices[heads] = indices
        return indices

    def forget_indices(self) -> None:
        """Take note that the slab has been resized."""
        self._indices.clear()

    def advance(self) -> None:
        """Move on by one token: the same slots, one column further."""
        self.end += 1
        self.to_columns += 1
        for indices in self._indices.values():
            indices.add_(1)


class Slab:
    """The keys and values of all sequences of one length class.

    Args:
        longest: the longest sequence of the class.

    Attributes:
        longest: the same, rounded up to whole :data:`ALIGNMENT`.
        columns: the longest sequence that a slot has room for now.
        rows: the sequence in each live slot.
    """

    def __init__(self, longest: int) -> None:
        self.longest = _aligned(longest)
        self.columns = 0
        self.rows: list[int] = []
        self._slots: dict[int, int] = {}
        self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def slot(self, row: int) -> int:
        """Return the slot that holds ``row``."""
        return self._slots[row]

    def store(self, layer: int, keys: Tensor, values: Tensor, region: KVRegion) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values [n, heads, q, head_dim]; return all that the rows attend to."""
        stores = self._layers.get(layer)
        if stores is None:
            stores = self._layers[layer] = self._empty(keys), self._empty(values)
        for store, new in zip(stores, (keys, values), strict=True):
            flat = new.transpose(1, 2)  # [n, q, heads, head_dim]
            if region.chosen is not None:
                flat = flat.flatten(0, 1)[region.chosen]
            size = new.shape[-1]
            store.view(-1, size).index_copy_(0, region.indices(new.shape[1], self.columns), flat.reshape(-1, size))
        return stores[0][region.slots, :, : region.end], stores[1][region.slots, :, : region.end]

    def reserve(self, count: int, columns: int) -> None:
        """Make room for ``count`` more rows, and for sequences of ``columns`` tokens, at once."""
        rows = len(self.rows) + count
        if rows > self._capacity or columns > self.columns:
            spare = rows // SLACK if count and self.rows else 0
            capacity = rows + spare if rows > self._capacity else min(self._capacity, rows + spare)
            self._resize(capacity, self.columns if columns <= self.columns else self._roomy(columns))

    def trim(self, columns: int) -> None:
        """Give memory back if much is spare, now that the longest sequence has ``columns`` tokens."""
        rows, roomy = len(self.rows), self._roomy(columns)
        if self._capacity * self.columns > SPARE * rows * roomy:
            self._resize(rows, roomy)

    def add(self, rows: Iterable[int]) -> None:
        """Give each of ``rows`` a slot behind the live ones; room has been reserved."""
        for row in rows:
            self._slots[row] = len(self.rows)
            self.rows.append(row)

    def adopt(self, rows: Mapping[int, int], source: Slab) -> None:
        """Take over ``rows``, and so many columns of each, from ``source``; room has been reserved.

        All rows of ``source`` come to an empty slab without being copied.
        """
        if not self.rows and len(rows) == len(source):
            self._inherit(source)
            return
        self.add(rows)
        for layer, olds in source._layers.items():
            if layer not in self._layers:
                self._layers[layer] = self._empty(olds[0]), self._empty(olds[1])
            for store, old in zip(self._layers[layer], olds, strict=True):
                for row, length in rows.items():
                    store[self._slots[row], :, :length] = old[source._slots[row], :, :length]
        source.remove(rows)

    def remove(self, rows: Iterable[int]) -> None:
        """Free the slots of ``rows``: the last live sequences move into them."""
        gone = {self._slots.pop(row) for row in rows}
        before, live = len(self.rows), len(self.rows) - len(gone)
        holes = sorted(slot for slot in gone if slot < live)
        movers = [slot for slot in range(live, before) if slot not in gone]
        for store in self._tensors():
            if holes:
                store[holes] = store[movers]
            store[live:before].zero_()
        for hole, mover in zip(holes, movers, strict=True):
            self.rows[hole] = self.rows[mover]
            self._slots[self.rows[hole]] = hole
        del self.rows[live:]

    def bring_forward(self, rows: Sequence[int], *, ordered: bool) -> None:
        """Permute so that ``rows`` hold the first slots, if ``ordered`` in this order; free when they do already."""
        count, wanted = len(rows), set(rows)
        strays = iter([row for row in rows if self._slots[row] >= count])
        displaced = iter([row for row in self.rows[:count] if row not in wanted])
        front = list(rows) if ordered else [row if row in wanted else next(strays) for row in self.rows[:count]]
        target = front + [next(displaced) if row in wanted else row for row in self.rows[count:]]
        moved = [slot for slot, row in enumerate(target) if self.rows[slot] != row]
        if not moved:
            return
        sources = [self._slots[target[slot]] for slot in moved]
        for store in self._tensors():
            store[moved] = store[sources]
        self.rows = target
        self._slots = {row: slot for slot, row in enumerate(target)}

    def bytes_allocated(self) -> int:
        """Return the bytes that this slab holds."""
        return sum(store.nbytes for store in self._tensors())

    def bytes_per_token(self) -> int:
        """Return the bytes that one position of one sequence takes over all layers; 0 before the first write."""
        return sum(store.shape[1] * store.shape[3] * store.element_size() for store in self._tensors())

    def _inherit(self, source: Slab) -> None:
        """Take over everything that ``source`` has, which is empty afterwards; keep the room that there is here."""
        capacity, columns = max(self._capacity, source._capacity), max(self.columns, source.columns)
        for name in ("rows", "_slots", "_layers", "_capacity", "columns"):
            setattr(self, name, getattr(source, name))
        source.rows, source._slots, source._layers = [], {}, {}
        source._capacity = source.columns = 0
        self._resize(capacity, columns)

    def _tensors(self) -> Iterator[Tensor]:
        for keys, values in self._layers.values():
            yield keys
            yield values

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._capacity, like.shape[1], self.columns, like.shape[3])

    def _roomy(self, columns: int) -> int:
        return min(_aligned(columns + columns // HEADROOM), self.longest)

    def _resize(self, capacity: int, columns: int) -> None:
        if (capacity, columns) == (self._capacity, self.columns):
            return
        self._capacity, self.columns = capacity, columns
        live = len(self.rows)
        for layer in self._layers:  # one after the other, so that little is held twice
            keys, values = self._layers[layer]
            self._layers[layer] = self._resized(keys, live), self._resized(values, live)

    def _resized(self, store: Tensor, live: int) -> Tensor:
        kept = min(self.columns, store.shape[2])
        new = store.new_empty(self._capacity, store.shape[1], self.columns, store.shape[3])
        new[:live, :, :kept] = store[:live, :, :kept]
        new[:live, :, kept:].zero_()
        new[live:].zero_()
        return new


def _aligned(columns: int) -> int:
    return -(-columns // ALIGNMENT) * ALIGNMENT


def run_of(slots: Sequence[int]) -> slice | None:
    """Return ``slots`` as a slice if they are adjacent and ascending, else ``None``."""
    first = slots[0]
    return slice(first, first + len(slots)) if list(slots) == list(range(first, first + len(slots))) else None


def index(values: Sequence[int], device: torch.device) -> Tensor:
    """Return int64 [len(values)] on ``device``."""
    return torch.tensor(values, dtype=torch.int64, device=device)
