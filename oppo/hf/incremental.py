"""A model that reads many sequences a few tokens at a time, each at its own position.

::

    extend(rows, ragged tokens)  ->  one forward pass, chunks padded on the left; each length class of the rows
                                     attends to a rectangle of its own
    step(rows, one token each)   ->  the same with parts of similar length, and keys and values are sliced, never
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
from oppo.hf.anatomy import keeps_logits, longest
from oppo.hf.cache import Place, SlabCache
from oppo.hf.lockstep import Lockstep
from oppo.hf.masks import Masks
from oppo.hf.parts import attend_in_parts, overhead_of, parted
from oppo.hf.slabs import Site, Slab, index, run_of

SHORTEST_CLASS = 64
"""Sequences up to this length share a slab; the next class is twice as long, and so on."""

Seat: TypeAlias = tuple[Slab, list[int]]
"""Rows, and the slab that they live in."""


class Incremental:
    """A causal model with a cache in which every row has its own length; rows are named by ints.

    All calls belong in one thread. The model is put into evaluation mode once, here, and never toggled.

    Args:
        model: a causal LM (its outputs are then logits) or a backbone (last hidden states).
        classes: the shortest length classes of rows that are read in chunks; longer ones follow by doubling, up to
            ``max_length``. With one class as long as that, all of them share a slab.
        head: applied to the outputs [n, q, D], for example a reward model's score layer.
        parts: let rows of very different length share a pass and attend in parts of similar length; in steps, where
            that saves more than it costs. Otherwise, and where a model cannot attend so (:mod:`oppo.hf.ways`), rows
            that are stepped are one rectangle, and those of each length class are read in a pass of their own.
        ordered: keep rows that are stepped together in the order of the call. Kernels treat the last rows of an odd
            batch differently, so without it the bits of a step depend on which rows came and went before. With it
            they depend on the rows of the step, and on what lengths they had when these rows were first stepped
            together, at the price of copying when a row leaves.

    Attributes:
        max_length: the longest sequence a row can hold, see :func:`~oppo.hf.anatomy.longest`.

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
        parts: bool = True,
        ordered: bool = False,
    ) -> None:
        text = model.config.get_text_config()
        self.max_length = longest(model)
        self._model = model.train(False)
        self._head = head
        self._in_parts = parts and attend_in_parts(model)
        self._ordered = ordered
        self._masks = Masks(model)
        self._keeps = keeps_logits(model)
        self._shelves = [Slab(columns) for columns in _class_lengths(classes, self.max_length)]
        self._stepped: list[Slab] = []
        self._cache = SlabCache(int(text.num_hidden_layers))
        self._homes: dict[int, Slab] = {}
        self._lengths: dict[int, int] = {}
        self._lockstep: Lockstep | None = None

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
        self._lockstep = None
        sizes = [len(piece) for piece in tokens]
        if min(sizes, default=1) < 1:
            raise ProtocolError(f"row {rows[sizes.index(0)]} was extended by no tokens; expected at least one")
        outputs: dict[int, Tensor] = {}
        pieces = dict(zip(rows, tokens, strict=True))
        wanted = dict(zip(rows, sizes if last is None else last, strict=True))
        seats = self._admitted(rows, sizes)
        for shared in [seats] if seats and self._in_parts else [[seat] for seat in seats]:
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

        The rows of each part are brought to the front of their slab (free if they were there in the last step), so
        that keys and values are read as a view, up to the longest of the part. The parts are made anew when other rows
        are stepped, or some have been read or forgotten; between, rows grow alike, and a part wastes less and less.

        Raises:
            ModelError: a row would grow beyond ``max_length``; nothing has been read then.
            ProtocolError: a row is named twice.
        """
        lockstep, self._lockstep = self._lockstep, None
        if lockstep is None or not lockstep.goes_on(rows, self.max_length):
            lockstep = self._in_step(rows)
        lockstep.make_room()
        out = self._pass(lockstep, tokens)
        for row in rows:
            self._lengths[row] = self.length(row) + 1
        lockstep.advance()
        self._lockstep = lockstep
        return out

    @torch.inference_mode()
    def stand_apart(self, rows: Sequence[int]) -> None:
        """Let ``rows``, if they are stepped next, attend in a part for each length, whatever that costs: for a probe.

        Where a model does not attend in parts, nothing changes.

        Raises:
            ModelError: a row has no room for another token.
            ProtocolError: a row is named twice.
        """
        self._lockstep = self._in_step(rows, overhead=0)

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
            self._lockstep = None
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

    def _admitted(self, rows: Sequence[int], more: Sequence[int]) -> list[Seat]:
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

    def _seat(self, rows: Sequence[int], overhead: int | None) -> list[Seat]:
        """Give each part of ``rows`` a slab in which its rows can grow by a token: that which holds most of it.

        Another part costs ``overhead`` tokens; unless given, what it takes for this model.
        """
        grown = self._grown(rows, [1] * len(rows))
        lengths = list(grown.values())
        parts = [list(range(len(rows)))]
        if self._in_parts and rows and (per_token := self._bytes_per_token()):
            own = overhead_of(per_token / len(self._cache.layers))
            parts = parted(lengths, own if overhead is None else overhead)
        seats = dict[Slab, list[int]]()
        for part in parts:
            members = [rows[at] for at in part]
            held = Counter(self._homes[row] for row in members if row in self._homes)
            free = [slab for slab in self._stepped if slab not in seats]
            slab = max(free, key=held.__getitem__, default=None)
            if slab is None or not held[slab]:
                slab = next((slab for slab in free if not slab.rows), None) or Slab(self.max_length)
            seats[slab] = members
        for slab, members in seats.items():
            self._move(members, slab, max(grown[row] for row in members), spared=seats.keys())
        for slab, members in seats.items():
            slab.trim(max([self._longest(slab), *(grown[row] for row in members)]))
        self._stepped = [slab for slab in dict.fromkeys([*self._stepped, *seats]) if slab.rows]
        return list(seats.items())

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

    def _read(self, seats: Sequence[Seat], ragged: Sequence[Tensor], *, keep: int) -> Tensor:
        """Read one chunk for each row, in the order of the seats; return the last ``keep`` outputs [n, keep, D]."""
        device = self._model.device
        sizes = [len(piece) for piece in ragged]
        width, starts = max(sizes), [self.length(row) for _, rows in seats for row in rows]
        pads = index([width - size for size in sizes], device)[:, None]
        columns = torch.arange(width, device=device)
        real = columns >= pads
        # Padding stands at position 0, which every row has: it attends to that and is thrown away.
        positions = (index(starts, device)[:, None] + columns - pads).where(real, 0)
        ids = positions.new_zeros(positions.shape)
        ids[real] = torch.cat([piece.to(device) for piece in ragged])
        places, first = list[Place](), 0
        for slab, rows in seats:
            part = slice(first, first + len(rows))
            slots = [slab.slot(row) for row in rows]
            where = index(slots, device)[:, None].expand(-1, width)
            site = Site(
                slots=run_of(slots) or index(slots, device),
                end=max(start + size for start, size in zip(starts[part], sizes[part], strict=True)),
                to_slots=where[real[part]],
                to_columns=positions[part][real[part]],
                chosen=None if min(sizes[part]) == width else real[part].flatten().nonzero()[:, 0],
            )
            places.append(Place(slab, site))
            first = part.stop
        return self._forward(places, ids, positions, keep=keep)

    def _in_step(self, rows: Sequence[int], overhead: int | None = None) -> Lockstep:
        """Bring ``rows``, part by part, to the front of slabs in which they can be stepped."""
        device, places, batch = self._model.device, list[Place](), list[int]()
        for slab, members in self._seat(rows, overhead):
            slab.bring_forward(members, ordered=self._ordered)
            front = slab.rows[: len(members)]
            lengths = [self.length(row) for row in front]
            slots = torch.arange(len(front), device=device)
            site = Site(slice(0, len(front)), max(lengths) + 1, slots, index(lengths, device), None)
            places.append(Place(slab, site))
            batch += front
        place = {row: at for at, row in enumerate(rows)}
        picks = index([place[row] for row in batch], device) if batch != list(rows) else None
        return Lockstep(list(rows), places, index([self.length(row) for row in batch], device), picks)

    def _pass(self, lockstep: Lockstep, tokens: Tensor) -> Tensor:
        """Read one token for each row; return the outputs [n, D]."""
        picks = lockstep.picks
        ids = tokens.to(lockstep.positions.device)
        ids = ids if picks is None else ids[picks]
        out = self._forward(lockstep.places, ids[:, None], lockstep.positions[:, None], keep=1)[:, 0]
        return out if picks is None else out.index_copy(0, picks, out)

    def _forward(self, places: Sequence[Place], ids: Tensor, positions: Tensor, *, keep: int) -> Tensor:
        kept = {"logits_to_keep": keep} if self._keeps else {}
        output = self._model(
            input_ids=ids,
            attention_mask=self._masks(positions, max(site.end for _, site in places)),
            position_ids=positions,
            past_key_values=self._cache.at(places),
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
