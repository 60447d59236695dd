"""The KV cache: a slab for each length class, live sequences contiguous at its front, and transformers' view of it.

A slab is a pair of tensors ``[capacity, heads, columns, head_dim]`` for each layer; slot ``i`` holds one sequence.
Capacity and columns follow the sequences held. Tensors of many layers are one block in memory, so that a row moves, and
a slab is resized, in as many launches for 24 layers as for two. Three invariants make a slice of a slab safe to attend
to:

- slots ``0 .. len(slab)`` are live, in the order of :attr:`Slab.rows`; the last live row moves into a freed slot;
- positions that no live sequence has written are zero: a masked NaN of another sequence would still be a NaN;
- every slot begins on a multiple of 64 bytes, so that the bits a kernel computes do not depend on the slot.

:class:`SlabLayer` is a layer of a transformers ``Cache`` that writes to, and reads from, slabs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from oppo.errors import ModelError, ProtocolError
from oppo.hf.kv.attention import Segments, packed_rows, segment_overhead, segmented

ALIGNMENT = 8
"""Columns are a multiple of this: a slot then is a multiple of 64 bytes even with four two-byte numbers per column."""

SLACK = 8  # live rows per spare slot that a growing slab reserves, unless it is known to need fewer

HEADROOM = 5
"""A growing slab reserves ``1 / HEADROOM`` more columns than its sequences need, and so is copied less often."""

BLOCK_BYTES = 256 * 2**20
"""The most bytes of a block, or one tensor: a slab that is resized is in memory twice block by block."""

SPARE = 1.125  # a slab larger than its rows need by this factor gives memory back when a row leaves


@dataclass(slots=True)
class KVRegion:
    # Columns 0 .. end of `slots` are read: a slice as a view, int64 [n] as a copy. New tokens are written to `to_slots`
    # and `to_columns`, int64 [m]; `unpadded`: which of the n * q padded positions they are; None: all.

    slots: slice | Tensor
    end: int
    to_slots: Tensor
    to_columns: Tensor
    unpadded: Tensor | None
    _indices: dict[int, Tensor] = field(default_factory=dict)
    _columns: int = 0

    @property
    def rows(self) -> int:
        return self.slots.stop - self.slots.start if isinstance(self.slots, slice) else len(self.slots)

    def indices(self, heads: int, columns: int) -> Tensor:
        """Return the places of new tokens in a slab [capacity * heads * columns, ...], int64 [m * heads]; cached."""
        if columns != self._columns:  # the slab has been resized
            self._indices, self._columns = {}, columns
        if heads not in self._indices:
            first = self.to_slots * (heads * columns) + self.to_columns
            self._indices[heads] = (first[:, None] + torch.arange(heads, device=first.device) * columns).flatten()
        return self._indices[heads]

    def advance(self) -> None:
        self.end += 1
        self.to_columns += 1
        for indices in self._indices.values():
            indices.add_(1)


class Slots(ABC):
    """Tensors with a slot for each sequence, the live ones at the front; ``rows``: the sequence in each live slot."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._slots: dict[int, int] = {}
        self._capacity = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def capacity(self) -> int:
        return self._capacity

    def slot(self, row: int) -> int:
        return self._slots[row]

    def add(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._slots[row] = len(self.rows)
            self.rows.append(row)

    def remove(self, rows: Iterable[int]) -> None:
        # The last live rows move into the free slots.
        gone = {self._slots.pop(row) for row in rows}
        before, live = len(self.rows), len(self.rows) - len(gone)
        holes = sorted(slot for slot in gone if slot < live)
        movers = [slot for slot in range(live, before) if slot not in gone]
        self._copy(holes, movers)
        if freed := [store[live:before] for store in self._tensors()]:
            torch._foreach_zero_(freed)
        for hole, mover in zip(holes, movers, strict=True):
            self.rows[hole] = self.rows[mover]
            self._slots[self.rows[hole]] = hole
        del self.rows[live:]

    def bring_forward(self, rows: Sequence[int], *, ordered: bool) -> None:
        """Permute slots so that ``rows`` hold the first, if ``ordered`` in this order; copies only rows that move."""
        count, wanted = len(rows), set(rows)
        entering = iter([row for row in rows if self._slots[row] >= count])
        displaced = iter([row for row in self.rows[:count] if row not in wanted])
        front = list(rows) if ordered else [row if row in wanted else next(entering) for row in self.rows[:count]]
        target = front + [next(displaced) if row in wanted else row for row in self.rows[count:]]
        moved = [slot for slot, row in enumerate(target) if self.rows[slot] != row]
        self._copy(moved, [self._slots[target[slot]] for slot in moved])
        self.rows = target
        self._slots = {row: slot for slot, row in enumerate(target)}

    def bytes_allocated(self) -> int:
        return sum(store.nbytes for store in self._tensors())

    def _copy(self, to: Sequence[int], of: Sequence[int]) -> None:
        pairs = list(runs(to, of))
        if not (sources := [store[slots] for store in self._tensors() for _, slots in pairs]):
            return
        # Each of these operations is one launch for each run, where a copy through indices is two for each tensor.
        if not set(to).isdisjoint(of):
            held = list(map(torch.empty_like, sources))
            torch._foreach_copy_(held, sources)
            sources = held
        torch._foreach_copy_([store[slots] for store in self._tensors() for slots, _ in pairs], sources)

    def _spare(self) -> float:
        # On a GPU half of the memory must be free to be worth a copy, after which graphs are captured anew.
        return SPARE if all(store.device.type == "cpu" for store in self._tensors()) else 2.0

    @abstractmethod
    def _tensors(self) -> Iterable[Tensor]:
        """Return the tensors [capacity, ...]."""


class _Kind(NamedTuple):
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, news: Tensor) -> _Kind:
        return cls(news.shape[1], news.shape[3], news.dtype, news.device)


Places: TypeAlias = dict[tuple[int, str], list[tuple[_Kind, int]]]
"""The stores of each layer, by their kinds and their numbers among those of the kind; the slabs of a reader agree."""


class Slab(Slots):
    """The KV cache of one length class; its ``version`` changes when tensors move."""

    def __init__(self, longest: int, places: Places | None = None) -> None:
        super().__init__()
        self.longest = _aligned(longest)
        self.columns = self.version = 0
        self._stacks: dict[_Kind, list[Tensor]] = {}  # blocks [stores, capacity, heads, columns, head_dim] of a kind
        self._places: Places = {} if places is None else places
        self._layers: dict[tuple[int, str], tuple[Tensor, ...]] = {}  # views of them

    @property
    def layers(self) -> int:
        return len({layer for layer, _ in self._places})

    def store(self, layer: int, region: KVRegion, *news: Tensor, of: str = "attention") -> tuple[Tensor, ...]:
        """Write new keys and values, or an indexer's keys, [n, heads, q, size]; return all tokens'."""
        stores = self.write(layer, region, *news, of=of)
        return tuple(store[region.slots, :, : region.end] for store in stores)

    def write(self, layer: int, region: KVRegion, *news: Tensor, of: str = "attention") -> tuple[Tensor, ...]:
        """Write new keys and values, [n, heads, q, size] or, of packed rows, [1, heads, tokens, size]."""
        stores = self._layers.get((layer, of))
        if stores is None:
            if (layer, of) not in self._places:
                known, kinds = self._kinds(), [_Kind.of(new) for new in news]
                at = [known[kind] + kinds[:before].count(kind) for before, kind in enumerate(kinds)]
                self._places[layer, of] = list(zip(kinds, at, strict=True))
            self.allocate()
            stores = self._layers[layer, of]
        for store, new in zip(stores, news, strict=True):
            flat = new.transpose(1, 2)  # [n, q, heads, head_dim]
            if region.unpadded is not None:
                flat = flat.flatten(0, 1)[region.unpadded]
            size = new.shape[-1]
            store.view(-1, size).index_copy_(0, region.indices(new.shape[1], self.columns), flat.reshape(-1, size))
        return stores

    def reserve(self, count: int, columns: int, others: int = 0) -> None:
        """Make room for ``count`` more rows, of ``columns`` tokens, with one copy; ``others``: that may come later."""
        rows = len(self.rows) + count
        if rows > self._capacity or columns > self.columns:
            spare = min(rows // SLACK, others) if count and self.rows else 0
            capacity = rows + spare if rows > self._capacity else min(self._capacity, rows + spare)
            self._resize(capacity, self.columns if columns <= self.columns else self._with_headroom(columns))

    def trim(self, columns: int) -> None:
        """Give memory back if the slab is far too large (:data:`SPARE`); the longest row has ``columns`` tokens."""
        rows, needed = len(self.rows), self._with_headroom(columns)
        if self._capacity * self.columns > self._spare() * rows * needed:
            self._resize(rows, needed)

    def adopt(self, rows: Mapping[int, int], source: Slab) -> None:
        """Move ``rows`` and that many columns of each from ``source`` into reserved slots."""
        # An empty slab takes over the memory of a source that gives up all of its rows; nothing is copied then.
        if not self.rows and len(rows) == len(source):
            self._inherit(source)
            return
        self.add(rows)
        pairs, longest = list(runs([*map(self.slot, rows)], [*map(source.slot, rows)])), max(rows.values())
        self._places.update(source._places)
        self.allocate()
        for kind, blocks in source._stacks.items():
            others = list(blocks)
            for new, old in chain.from_iterable(_parts(block, others) for block in self._stacks[kind]):
                for to, of in pairs:
                    new[:, to, :, :longest] = old[:, of, :, :longest]
        source.remove(rows)

    def bytes_per_token(self) -> int:
        """Return the bytes of one position of one sequence over all layers; 0 before the first write."""
        return sum(count * kind.heads * kind.size * kind.dtype.itemsize for kind, count in self._kinds().items())

    def layer_bytes(self) -> Counter[int]:
        found = Counter[int]()
        for (layer, _), stores in self._layers.items():
            found[layer] += sum(store.nbytes for store in stores)
        return found

    def _inherit(self, source: Slab) -> None:
        capacity, columns = max(self._capacity, source._capacity), max(self.columns, source.columns)
        for name in ("rows", "_slots", "_stacks", "_layers", "_capacity", "columns"):
            setattr(self, name, getattr(source, name))
        source.rows, source._slots, source._stacks, source._layers = [], {}, {}, {}
        source._capacity = source.columns = 0
        self.version += 1
        source.version += 1
        self._resize(capacity, columns)

    def _tensors(self) -> Iterable[Tensor]:
        return [block.transpose(0, 1) for block in chain.from_iterable(self._stacks.values())]

    def _kinds(self) -> Counter[_Kind]:
        return Counter(kind for places in self._places.values() for kind, _ in places)

    def allocate(self) -> None:
        for kind, count in self._kinds().items():
            stack = self._stacks.setdefault(kind, [])
            stack += self._blocks(kind, count - sum(map(len, stack)))
        stores = {kind: [store for block in blocks for store in block] for kind, blocks in self._stacks.items()}
        self._layers = {layer: tuple(stores[kind][at] for kind, at in places) for layer, places in self._places.items()}

    def _blocks(self, kind: _Kind, count: int) -> Iterator[Tensor]:
        shape = self._capacity, kind.heads, self.columns, kind.size
        most = max(1, BLOCK_BYTES // max(1, math.prod(shape) * kind.dtype.itemsize))
        for at in range(0, count, most):
            yield torch.zeros(min(most, count - at), *shape, dtype=kind.dtype, device=kind.device)

    def _with_headroom(self, columns: int) -> int:
        return min(_aligned(columns + columns // HEADROOM), self.longest)

    def _resize(self, capacity: int, columns: int) -> None:
        if (capacity, columns) == (self._capacity, self.columns):
            return
        self._capacity, self.columns = capacity, columns
        self.version += 1
        self._layers.clear()  # or all would be in memory twice
        if not capacity:
            self._stacks.clear()
        live = len(self.rows)
        for kind, others in self._stacks.items():
            kept, self._stacks[kind] = min(columns, others[0].shape[3]), []
            for block in self._blocks(kind, sum(map(len, others))):
                for new, old in _parts(block, others):
                    new[:, :live, :, :kept] = old[:, :live, :, :kept]
                self._stacks[kind].append(block)
        if self._stacks:
            self.allocate()


def _parts(block: Tensor, others: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the stores of a block with the same ones of another stack, which lacks them afterwards."""
    at = 0
    while at < len(block):
        part, others[0] = others[0].tensor_split((len(block) - at,))
        yield block[at : at + len(part)], part
        at += len(part)
        if not len(others[0]):
            del others[0]


def _aligned(columns: int) -> int:
    return -(-columns // ALIGNMENT) * ALIGNMENT


def as_slice(slots: Sequence[int]) -> slice | None:
    return None if len(found := list(runs(slots))) > 1 else found[0][0]


def runs(*indices: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yield slices, one of each of the equally long ``indices``, that cover them: in each run all ascend by one."""
    start, count = 0, len(indices[0])
    for end in range(1, count + 1):
        if end == count or any(each[end] != each[end - 1] + 1 for each in indices):
            yield tuple(slice(each[start], each[end - 1] + 1) for each in indices)
            start = end


def take(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return ``tensor[rows]``, for which no index crosses to the device; a view if the rows are adjacent."""
    pieces = [tensor[run] for (run,) in runs(rows)]
    return pieces[0] if len(pieces) == 1 else torch.cat([tensor[:0], *pieces])


def sent(device: torch.device, *values: Sequence[int] | NDArray[np.int64] | Tensor) -> list[Tensor]:
    """Return int64 arrays on ``device``. They cross as one block, since the host waits for each that does."""
    arrays = [torch.as_tensor(each, dtype=torch.int64) for each in values]
    block = torch.cat([each.flatten() for each in arrays]).to(device)
    parts = block.split_with_sizes([each.numel() for each in arrays])
    return [part.view(each.shape) for part, each in zip(parts, arrays, strict=True)]


class Rows:
    """Rows by number; ``held``: the slab of each, by length class when read in chunks, by segment when they decode."""

    def __init__(self, classes: Sequence[int], longest: int, model: str) -> None:
        self.held: dict[int, Slab] = {}
        self._expected: Sequence[int] = ()
        self._more = 0  # rows that may come besides
        self._lengths: dict[int, int] = {}
        self._longest_row = longest
        self._model = model
        self._places: Places = {}
        self._class_slabs = [Slab(columns, self._places) for columns in _class_lengths(classes, longest)]
        self._decode_slabs: list[Slab] = []

    def __len__(self) -> int:
        return len(self._lengths)

    def length(self, row: int) -> int:
        return self._lengths.get(row, 0)

    def grow(self, row: int, tokens: int) -> None:
        self._lengths[row] = self.length(row) + tokens

    def cut(self, row: int, length: int) -> None:
        self._lengths[row] = length

    def forget(self, rows: Iterable[int]) -> list[int]:
        """Give back the memory of rows; return those that had some."""
        freed: dict[Slab, list[int]] = {}
        for row in rows:
            self._lengths.pop(row, None)
            if (slab := self.held.pop(row, None)) is not None:
                freed.setdefault(slab, []).append(row)
        for slab, gone in freed.items():
            slab.remove(gone)
            slab.trim(self._longest(slab))
        return [row for gone in freed.values() for row in gone]

    def memory(self) -> tuple[int, int]:
        needed = self._bytes_per_token() * sum(self._lengths.values())
        return sum(slab.bytes_allocated() for slab in self._slabs), needed

    def layer_bytes(self) -> Counter[int]:
        return sum((slab.layer_bytes() for slab in self._slabs), Counter())

    @property
    def _slabs(self) -> list[Slab]:
        return [*self._class_slabs, *self._decode_slabs]

    def _bytes_per_token(self) -> int:
        return max(slab.bytes_per_token() for slab in self._slabs)

    def by_class(self, rows: Sequence[int], added: Sequence[int]) -> dict[Slab, list[int]]:
        """Return ``rows``, with ``added`` tokens each, by the slab of their length class, where they have room now."""
        lengths = self._lengths_after(rows, added)
        by_slab: dict[Slab, list[int]] = {}
        for row, length in lengths.items():
            slab = self.held.get(row)
            if slab is None or length > slab.longest:
                slab = next(slab for slab in self._class_slabs if slab.longest >= length)
            by_slab.setdefault(slab, []).append(row)
        self._move(by_slab, lengths)
        return {slab: sorted(members, key=slab.slot) for slab, members in by_slab.items()}

    def expect(self, rows: Sequence[int]) -> None:
        """Let slabs that grow have slots to spare for these rows."""
        self._expected, few = rows, len(rows) <= len(self.held) // SLACK
        # Where a few join, as the requests of agents do, more may follow.
        self._more = len(self.held) if few and not self.held.keys() >= {*rows} else 0

    def hold(self, lengths: Mapping[int, int]) -> None:
        """Let rows be that long without a token; their memory is as if they had been read."""
        for slab in self.by_class([*lengths], [*lengths.values()]):
            slab.allocate()
        for row, length in lengths.items():
            self.grow(row, length)

    def by_segment(
        self, rows: Sequence[int], overhead: int | None, segmented_on: torch.device | None
    ) -> dict[Slab, list[int]]:
        """Return rows by the slab of their segment, with room for a token each; one segment, unless segmented."""
        # A segment costs `overhead` tokens; None: as on this device.
        lengths = self._lengths_after(rows, [1] * len(rows))
        segments = [list(range(len(rows)))]
        if segmented_on is not None and rows and (per_token := self._bytes_per_token()):
            layers = max(slab.layers for slab in self._slabs)
            own = segment_overhead(per_token / layers, segmented_on)
            segments = segmented(list(lengths.values()), own if overhead is None else overhead)
        by_slab: dict[Slab, list[int]] = {}
        for segment in segments:
            members = [rows[at] for at in segment]
            # it goes to the slab that holds most of it
            held = Counter(self.held[row] for row in members if row in self.held)
            free = [slab for slab in self._decode_slabs if slab not in by_slab]
            slab = max(free, key=held.__getitem__, default=None)
            if slab is None or not held[slab]:
                slab = next((slab for slab in free if not slab.rows), None) or Slab(self._longest_row, self._places)
            by_slab[slab] = members
        self._move(by_slab, lengths)
        for slab, members in by_slab.items():
            slab.trim(max([self._longest(slab), *(lengths[row] for row in members)]))
        self._decode_slabs = [slab for slab in dict.fromkeys([*self._decode_slabs, *by_slab]) if slab.rows]
        return by_slab

    def _move(self, by_slab: Mapping[Slab, Sequence[int]], lengths: Mapping[int, int]) -> None:
        known = len({*self._expected, *self.held, *lengths}) + self._more
        for slab, members in by_slab.items():
            incoming = [row for row in members if self.held.get(row) is not slab]
            others = known - len(slab) - len(incoming)
            slab.reserve(len(incoming), max(lengths[row] for row in members), others)
            for source in {self.held[row]: None for row in incoming if row in self.held}:
                slab.adopt({row: self.length(row) for row in incoming if self.held.get(row) is source}, source)
                if source not in by_slab:
                    source.trim(self._longest(source))
            slab.add(row for row in incoming if row not in self.held)
            self.held.update(dict.fromkeys(incoming, slab))

    def _longest(self, slab: Slab) -> int:
        return max(map(self.length, slab.rows), default=0)

    def _lengths_after(self, rows: Sequence[int], added: Sequence[int]) -> dict[int, int]:
        if len(set(rows)) != len(rows):
            raise ProtocolError(f"each row may be named once in a call, but rows are {list(rows)}")
        lengths = {row: self.length(row) + n for row, n in zip(rows, added, strict=True)}
        for row, length in lengths.items():
            if length > self._longest_row:
                raise ModelError(
                    f"row {row} would hold {length} tokens, but {self._model} reads at most "
                    f"{self._longest_row}: shorten the prompt or lower max_new_tokens"
                )
        return lengths


def _class_lengths(shortest: Sequence[int], longest: int) -> list[int]:
    lengths = sorted({min(length, longest) for length in shortest})
    while lengths[-1] < longest:
        lengths.append(min(lengths[-1] * 2, longest))
    return lengths


class KVView(NamedTuple):
    slab: Slab
    region: KVRegion


@dataclass(slots=True)
class DecodeBatch:
    """Rows that decode together; valid until other rows are stepped, or any row is extended or forgotten."""

    # members: the rows in the order of the batch, of the segments' views one after another and of positions, int64 [n].
    # picks: the index in `rows` of each, int64 [n]; None when the orders agree.

    rows: list[int]
    members: list[int]
    views: Sequence[KVView]
    positions: Tensor
    picks: Tensor | None
    rotary: Tensor | None = None  # int64 [n], where images have turned them apart from positions

    @property
    def end(self) -> int:
        return max(view.region.end for view in self.views)

    def continues(self, rows: Sequence[int], longest: int) -> bool:
        return self.rows == rows and self.end <= longest

    def make_room(self) -> None:
        for slab, region in self.views:
            slab.reserve(0, region.end)

    def advance(self) -> None:
        self.positions += 1
        if self.rotary is not None:
            self.rotary += 1
        for _, region in self.views:
            region.advance()


class SlabLayer(CacheLayerMixin):
    """The KV cache of one attention layer; several ``views`` of a pass are returned as ``Segments``."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        self.is_initialized = True
        self.views: Sequence[KVView] = ()
        self._number = number

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: a slab allocates its tensors at the first write."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        del args, kwargs
        if packed_rows() is not None:  # their first tokens: there are no earlier ones to attend to
            sizes = [len(region.to_slots) for _, region in self.views]
            parts = (each.split_with_sizes(sizes, dim=2) for each in (key_states, value_states))
            for (slab, region), *news in zip(self.views, *parts, strict=True):
                slab.write(self._number, region, *news)
            return key_states, value_states
        if len(self.views) == 1:
            slab, region = self.views[0]
            keys, values = slab.store(self._number, region, key_states, value_states)
            return keys, values
        sizes = [region.rows for _, region in self.views]
        written = zip(self.views, key_states.split_with_sizes(sizes), value_states.split_with_sizes(sizes), strict=True)
        stored = [slab.store(self._number, region, keys, values) for (slab, region), keys, values in written]
        all_keys, all_values = zip(*stored, strict=True)
        return cast("Tensor", Segments(all_keys)), cast("Tensor", Segments(all_values))  # models only pass them on

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        ((slab, region),) = self.views
        (keys,) = slab.store(self._number, region, indexer_key_states[:, None], of="indexer")
        return keys[:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return max(region.end for _, region in self.views), 0

    def get_seq_length(self) -> int:
        # Rows differ in length, so callers pass positions and masks explicitly.
        return 0

    def get_max_length(self) -> int:
        return max(slab.longest for slab, _ in self.views)

    get_max_cache_shape = get_max_length
    """Its name in transformers before 5.13."""
