"""A model that reads many sequences a few tokens at a time, each at its own position.

::

    extend(rows, ragged tokens)  ->  one forward pass for each length class, chunks padded on the left
    step(rows, one token each)   ->  one forward pass (or a few): keys and values are sliced, never gathered

Chunks are padded on the left, so that the last token of every row stands in the last column and a causal LM computes
its logits there only. Padding is never stored: its keys and values are dropped before the slab is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ModelError, ProtocolError
from oppo.hf.anatomy import longest
from oppo.hf.cache import Aim, SlabCache
from oppo.hf.masks import Masks
from oppo.hf.slabs import Site, Slab, index, run_of

SHORTEST_CLASS = 64
"""Sequences up to this length share a slab; the next class is twice as long, and so on."""


class Incremental:
    """A causal model with a cache in which every row has its own length; rows are named by ints.

    All calls belong in one thread. The model is put into evaluation mode once, here, and never toggled.

    Args:
        model: a causal LM (its outputs are then logits) or a backbone (last hidden states).
        classes: the shortest length classes; longer ones follow by doubling, up to ``max_length``.
        head: applied to the outputs [n, q, D], for example a reward model's score layer.
        passes: forward passes that a step may take, one for each class. A pass over few rows costs nearly what one
            over many does, since all weights are read for one token of each; so by default rows stepped together are
            moved to the class of the longest. More passes save memory where lengths differ widely.
        ordered: keep rows that are stepped together in the order of the call. Kernels treat the last rows of an odd
            batch differently, so without it the bits of a step depend on which rows came and went before. With it,
            and one pass, they depend on the rows of the step alone, at the price of copying when a row leaves.

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
        passes: int = 1,
        ordered: bool = False,
    ) -> None:
        text = model.config.get_text_config()
        self.max_length = longest(model)
        self._model = model.train(False)
        self._head = head
        self._passes = passes
        self._ordered = ordered
        self._masks = Masks(model)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._slabs = [Slab(columns) for columns in _class_lengths(classes, self.max_length)]
        nowhere = torch.empty(0, dtype=torch.int64, device=model.device)
        aim = Aim(self._slabs[0], Site(slice(0), 0, nowhere, nowhere, None))
        self._cache = SlabCache(int(text.num_hidden_layers), aim)
        self._homes: dict[int, Slab] = {}
        self._lengths: dict[int, int] = {}

    def length(self, row: int) -> int:
        """Return the number of tokens that ``row`` has read; 0 for an unknown row."""
        return self._lengths.get(row, 0)

    def open(self, row: int) -> None:
        """Name a row that has read nothing; :meth:`extend` does so for a row it does not know."""
        self._lengths.setdefault(row, 0)

    @torch.inference_mode()
    def extend(self, rows: Sequence[int], tokens: Sequence[Tensor], *, last_only: bool = False) -> list[Tensor]:
        """Append ``tokens[i]``, int64 [n_i] with n_i >= 1, to ``rows[i]``; return the outputs at the new positions.

        A row extended alone from the same length by as many tokens gives the same bits whatever else is held here.
        Reading copies keys and values where the rows are not adjacent in their slab; that is small beside the work
        on the chunk itself.

        Returns:
            For each row [n_i, D], or [1, D] with ``last_only``.

        Raises:
            ModelError: a row would grow beyond ``max_length``; nothing has been read then.
            ProtocolError: a row is named twice, or has no tokens.
        """
        sizes = [len(piece) for piece in tokens]
        if min(sizes, default=1) < 1:
            raise ProtocolError(f"row {rows[sizes.index(0)]} was extended by no tokens; expected at least one")
        outputs: dict[int, Tensor] = {}
        pieces = dict(zip(rows, tokens, strict=True))
        for slab, members in self._admitted(rows, sizes, len(self._slabs)):
            members.sort(key=slab.slot)
            ragged = [pieces[row] for row in members]
            width = max(map(len, ragged))
            outs = self._read(slab, members, ragged, keep=1 if last_only else width)
            for row, piece, out in zip(members, ragged, outs, strict=True):
                outputs[row] = out[-1:] if last_only else out[width - len(piece) :]
                self._lengths[row] = self.length(row) + len(piece)
        return [outputs[row] for row in rows]

    @torch.inference_mode()
    def step(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Append one token to each row, ``tokens`` int64 [n]; return [n, D] in the order of ``rows``.

        The rows are brought to the front of their slab (free if they were there in the last step), so that keys and
        values are read as a view, up to the longest of them.

        Raises:
            ModelError: a row would grow beyond ``max_length``; nothing has been read then.
            ProtocolError: a row is named twice.
        """
        groups = self._admitted(rows, [1] * len(rows), self._passes)
        place = {row: at for at, row in enumerate(rows)}
        order, outs = [], []
        for slab, members in groups:
            slab.bring_forward(sorted(members, key=place.__getitem__), ordered=self._ordered)
            front = slab.rows[: len(members)]
            picks = [place[row] for row in front]
            order += picks
            outs.append(self._step(slab, front, tokens if picks == list(range(len(tokens))) else tokens[picks]))
            for row in front:
                self._lengths[row] = self.length(row) + 1
        joined = torch.cat(outs) if len(outs) > 1 else outs[0]
        if order == list(range(len(rows))):
            return joined
        return joined[index(sorted(range(len(order)), key=order.__getitem__), joined.device)]

    @torch.inference_mode()
    def forget(self, rows: Iterable[int]) -> None:
        """Free the memory of ``rows``; unknown rows are fine."""
        for row in rows:
            self._lengths.pop(row, None)
            home = self._homes.pop(row, None)
            if home is not None:
                home.remove(row)

    def clear(self) -> None:
        """Forget every row."""
        self.forget(list(self._lengths))

    def memory(self) -> tuple[int, int]:
        """Return the bytes allocated for keys and values, and the bytes that the tokens read so far need."""
        per_token = max(slab.bytes_per_token() for slab in self._slabs)
        return sum(slab.bytes_allocated() for slab in self._slabs), per_token * sum(self._lengths.values())

    def _admitted(self, rows: Sequence[int], more: Sequence[int], passes: int) -> list[tuple[Slab, list[int]]]:
        """Give each row a slot in which it can grow by ``more[i]`` tokens; return the rows of each slab."""
        groups: dict[Slab, list[int]] = {}
        for row, length in self._grown(rows, more).items():
            home = self._homes.get(row)
            if home is None or length > home.columns:
                home = next(slab for slab in self._slabs if slab.columns >= length)
            groups.setdefault(home, []).append(row)
        groups = _merged(groups, passes)
        for slab, members in groups.items():
            incoming = [row for row in members if self._homes.get(row) is not slab]
            slab.reserve(len(incoming))
            for row in incoming:
                if row in self._homes:
                    slab.adopt(row, self._homes[row], self.length(row))
                else:
                    slab.add([row])
                self._homes[row] = slab
        return list(groups.items())

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

    def _read(self, slab: Slab, rows: Sequence[int], ragged: Sequence[Tensor], *, keep: int) -> Tensor:
        """Read one chunk for each row; return the outputs [n, keep, D] of the last ``keep`` columns."""
        device = self._model.device
        sizes = [len(piece) for piece in ragged]
        width, starts, slots = max(sizes), [self.length(row) for row in rows], [slab.slot(row) for row in rows]
        pads = index([width - size for size in sizes], device)[:, None]
        columns = torch.arange(width, device=device)
        real = columns >= pads
        # Padding stands at position 0, which every row has: it attends to that and is thrown away.
        positions = (index(starts, device)[:, None] + columns - pads).where(real, 0)
        ids = positions.new_zeros(positions.shape)
        ids[real] = torch.cat([piece.to(device) for piece in ragged])
        where = index(slots, device)[:, None].expand_as(positions)
        chosen = None if min(sizes) == width else real.flatten().nonzero()[:, 0]
        site = Site(
            slots=run_of(slots) or index(slots, device),
            end=max(start + size for start, size in zip(starts, sizes, strict=True)),
            to_slots=where[real],
            to_columns=positions[real],
            chosen=chosen,
        )
        return self._forward(slab, site, ids, positions, keep)

    def _step(self, slab: Slab, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Read one token for each of the first rows of a slab; return the outputs [n, D]."""
        lengths = [self.length(row) for row in rows]
        positions = index(lengths, self._model.device)
        slots = torch.arange(len(rows), device=positions.device)
        site = Site(slice(0, len(rows)), max(lengths) + 1, slots, positions, None)
        ids = tokens.to(positions.device)[:, None]
        return self._forward(slab, site, ids, positions[:, None], 1)[:, 0]

    def _forward(self, slab: Slab, site: Site, ids: Tensor, positions: Tensor, keep: int) -> Tensor:
        kept = {"logits_to_keep": keep} if self._keeps else {}
        output = self._model(
            input_ids=ids,
            attention_mask=self._masks(positions, site.end),
            position_ids=positions,
            past_key_values=self._cache.at(slab, site),
            use_cache=True,
            **kept,
        )
        seen: Tensor = output.logits if "logits" in output else output.last_hidden_state
        seen = seen[:, -keep:]
        return seen if self._head is None else self._head(seen)


def _merged(groups: dict[Slab, list[int]], most: int) -> dict[Slab, list[int]]:
    """Return at most ``most`` groups: again and again the rows that gain fewest columns join the next longer class."""
    merged = {slab: groups[slab] for slab in sorted(groups, key=lambda slab: slab.columns)}
    while len(merged) > max(most, 1):
        pairs = zip(merged, list(merged)[1:], strict=False)
        short, long = min(pairs, key=lambda pair: (pair[1].columns - pair[0].columns) * len(merged[pair[0]]))
        merged[long] = merged[long] + merged.pop(short)
    return merged


def _class_lengths(shortest: Sequence[int], longest: int) -> list[int]:
    """Return ascending class lengths: those given below ``longest``, then doubled up to it."""
    lengths = sorted(set(takewhile(lambda length: length < longest, sorted(shortest))))
    while not lengths or lengths[-1] < longest:
        lengths.append(min(lengths[-1] * 2 if lengths else SHORTEST_CLASS, longest))
    return lengths
