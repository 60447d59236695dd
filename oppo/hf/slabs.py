"""Where keys and values live: one slab for each length class, live sequences contiguous at its front.

A slab is one pair of tensors ``[capacity, heads, columns, head_dim]`` for each layer; slot ``i`` holds one sequence.
Three invariants make a slice of it safe to attend to:

- slots ``0 .. len(slab)`` are live, in the order of :attr:`Slab.rows`; a freed slot is filled with the last one;
- whatever no live sequence has written is zero: a masked NaN left behind by another sequence would still be a NaN;
- every slot begins on a multiple of 64 bytes, so that the bits a kernel computes cannot depend on the slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16
"""Columns come in multiples of this: 64 bytes even for two-byte numbers and two of them in a head."""

SLACK = 8
"""A slab that must grow gets one spare slot for every so many live ones; one a quarter empty shrinks to that."""


@dataclass(frozen=True, slots=True)
class Site:
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


class Slab:
    """The keys and values of all sequences of one length class.

    Attributes:
        columns: the longest sequence a slot can hold.
        rows: the sequence in each live slot.
    """

    def __init__(self, columns: int) -> None:
        self.columns = -(-columns // ALIGNMENT) * ALIGNMENT
        self.rows: list[int] = []
        self._slots: dict[int, int] = {}
        self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def slot(self, row: int) -> int:
        """Return the slot that holds ``row``."""
        return self._slots[row]

    def store(self, layer: int, keys: Tensor, values: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values [n, heads, q, head_dim]; return all that the rows attend to."""
        if layer not in self._layers:
            self._layers[layer] = self._empty(keys), self._empty(values)
        stores = self._layers[layer]
        for store, new in zip(stores, (keys, values), strict=True):
            flat = new.transpose(1, 2).flatten(0, 1)
            store[site.to_slots, :, site.to_columns] = flat if site.chosen is None else flat[site.chosen]
        return stores[0][site.slots, :, : site.end], stores[1][site.slots, :, : site.end]

    def add(self, rows: Sequence[int]) -> None:
        """Give each of ``rows`` a slot behind the live ones."""
        self.reserve(len(rows))
        for row in rows:
            self._slots[row] = len(self.rows)
            self.rows.append(row)

    def reserve(self, count: int) -> None:
        """Make room for ``count`` more rows at once, so that they can be added without growing again."""
        needed = len(self.rows) + count
        if needed > self._capacity:
            self._resize(needed + needed // SLACK)

    def adopt(self, row: int, source: Slab, length: int) -> None:
        """Take over the first ``length`` columns of ``row`` from ``source``, where it has outgrown its class."""
        self.add([row])
        theirs, ours = source.slot(row), self.slot(row)
        for layer, (keys, values) in source._layers.items():
            if layer not in self._layers:
                self._layers[layer] = self._empty(keys), self._empty(values)
            for store, old in zip(self._layers[layer], (keys, values), strict=True):
                store[ours, :, :length] = old[theirs, :, :length]
        source.remove(row)

    def remove(self, row: int) -> None:
        """Free the slot of ``row``: the last live sequence moves into it."""
        slot, last = self._slots.pop(row), len(self.rows) - 1
        mover = self.rows.pop()
        if slot != last:
            self.rows[slot], self._slots[mover] = mover, slot
        for store in self._tensors():
            if slot != last:
                store[slot] = store[last]
            store[last].zero_()
        if 4 * len(self.rows) <= 3 * self._capacity:
            self._resize(len(self.rows) + len(self.rows) // SLACK)

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

    def _tensors(self) -> Iterator[Tensor]:
        for keys, values in self._layers.values():
            yield keys
            yield values

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._capacity, like.shape[1], self.columns, like.shape[3])

    def _resize(self, capacity: int) -> None:
        self._capacity = capacity
        live = min(len(self.rows), capacity)
        for layer, stores in list(self._layers.items()):
            grown = [self._empty(store) for store in stores]
            for new, old in zip(grown, stores, strict=True):
                new[:live] = old[:live]
            self._layers[layer] = grown[0], grown[1]


def run_of(slots: Sequence[int]) -> slice | None:
    """Return ``slots`` as a slice if they are adjacent and ascending, else ``None``."""
    first = slots[0]
    return slice(first, first + len(slots)) if list(slots) == list(range(first, first + len(slots))) else None


def index(values: Sequence[int], device: torch.device) -> Tensor:
    """Return int64 [len(values)] on ``device``."""
    return torch.tensor(values, dtype=torch.int64, device=device)
