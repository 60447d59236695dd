"""The rows of a reader: how many tokens each has, and which slab holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from oppo.errors import ModelError, ProtocolError
from oppo.hf.kv.attention import overhead_of, segmented
from oppo.hf.kv.cache import Slab


class Rows:
    """Rows by number; ``held``: the slab of each, by length class when read in chunks, by segment when they decode."""

    def __init__(self, classes: Sequence[int], longest: int, model: str) -> None:
        self.held: dict[int, Slab] = {}
        self._lengths: dict[int, int] = {}
        self._longest_row = longest
        self._model = model
        self._class_slabs = [Slab(columns) for columns in _class_lengths(classes, longest)]
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

    @property
    def _slabs(self) -> list[Slab]:
        return [*self._class_slabs, *self._decode_slabs]

    def _bytes_per_token(self) -> int:
        return max(slab.bytes_per_token() for slab in self._slabs)

    def by_class(self, rows: Sequence[int], added: Sequence[int]) -> dict[Slab, list[int]]:
        """Return rows that get so many tokens by the slab of their length class, where they have room now."""
        lengths = self._lengths_after(rows, added)
        by_slab: dict[Slab, list[int]] = {}
        for row, length in lengths.items():
            slab = self.held.get(row)
            if slab is None or length > slab.longest:
                slab = next(slab for slab in self._class_slabs if slab.longest >= length)
            by_slab.setdefault(slab, []).append(row)
        self._move(by_slab, lengths)
        return {slab: sorted(members, key=slab.slot) for slab, members in by_slab.items()}

    def by_segment(
        self, rows: Sequence[int], overhead: int | None, segmented_on: torch.device | None
    ) -> dict[Slab, list[int]]:
        """Return rows by the slab of their segment, with room for a token each; one segment, unless segmented."""
        # A segment costs `overhead` tokens; None: as on this device.
        lengths = self._lengths_after(rows, [1] * len(rows))
        segments = [list(range(len(rows)))]
        if segmented_on is not None and rows and (per_token := self._bytes_per_token()):
            layers = max(slab.layers for slab in self._slabs)
            own = overhead_of(per_token / layers, segmented_on)
            segments = segmented(list(lengths.values()), own if overhead is None else overhead)
        by_slab: dict[Slab, list[int]] = {}
        for segment in segments:
            members = [rows[at] for at in segment]
            # it goes to the slab that holds most of it
            held = Counter(self.held[row] for row in members if row in self.held)
            free = [slab for slab in self._decode_slabs if slab not in by_slab]
            slab = max(free, key=held.__getitem__, default=None)
            if slab is None or not held[slab]:
                slab = next((slab for slab in free if not slab.rows), None) or Slab(self._longest_row)
            by_slab[slab] = members
        self._move(by_slab, lengths)
        for slab, members in by_slab.items():
            slab.trim(max([self._longest(slab), *(lengths[row] for row in members)]))
        self._decode_slabs = [slab for slab in dict.fromkeys([*self._decode_slabs, *by_slab]) if slab.rows]
        return by_slab

    def _move(self, by_slab: Mapping[Slab, Sequence[int]], lengths: Mapping[int, int]) -> None:
        for slab, members in by_slab.items():
            incoming = [row for row in members if self.held.get(row) is not slab]
            slab.reserve(len(incoming), max(lengths[row] for row in members))
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
