"""Chunked prefill: rows are read a portion at a time, so that others decode meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from oppo.hf.kv.length_bucketing import cheapest_groups, overhead_on
from oppo.hf.kv.reader import EXACT_BLOCK, Incremental
from oppo.hf.serve.decoder import Signals


class Readable(Protocol):
    """A row that can be prefilled."""

    @property
    def key(self) -> int:
        """The row's name in the cache."""

    @property
    def given_up(self) -> bool:
        """Whether its readers have gone."""

    def sequence(self) -> Tensor:
        """Return all tokens, int64."""


R = TypeVar("R", bound=Readable)


class ChunkedPrefill(Generic[R]):
    """Rows to be prefilled, the shortest remainder first; tokens that ``reader`` holds are not read again.

    A portion is a rectangle of at most ``budget`` tokens: as many whole rows of similar length as fit, or a piece of
    one that does not fit. It is read in the passes that cost least. With ``exact`` a portion holds all rows, and each
    is read alone, in blocks on an absolute grid.

    Attributes:
        tokens: read so far.
    """

    def __init__(self, reader: Incremental, rows: Iterable[R], *, budget: int, exact: bool) -> None:
        self.tokens = 0
        self._reader = reader
        self._budget = budget
        self._exact = exact
        unread = [(row, row.sequence()[reader.length(row.key) :]) for row in rows]
        self._waiting = unread if exact else sorted(unread, key=lambda pair: len(pair[1]))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def read(self, signals: Signals) -> list[tuple[R, Tensor]]:
        """Read one portion; return each row that is complete, with the logits [1, V] at its last position.

        Rows given up meanwhile are forgotten. Once ``signals`` are stopped nothing is read, and with ``exact`` all
        waiting rows are forgotten.
        """
        gone = [row.key for row, _ in self._waiting if row.given_up]
        if gone:
            self._reader.forget(gone)
            self._waiting = [pair for pair in self._waiting if not pair[0].given_up]
        if self._exact:
            return self._read_all(signals)
        portion = [] if signals.stopped else self._portion()
        logits = self._pass(portion) if portion else []
        incomplete = self._waiting[0][0] if self._waiting else None
        return [(row, last) for (row, _), last in zip(portion, logits, strict=True) if row is not incomplete]

    def _read_all(self, signals: Signals) -> list[tuple[R, Tensor]]:
        complete: list[tuple[R, Tensor]] = []
        for row, tokens in self._waiting:
            for block in tokens.split(EXACT_BLOCK):
                if signals.stopped:
                    self._reader.forget([row.key for row, _ in self._waiting])
                    return []
                (last,) = self._pass([(row, block)])
            complete.append((row, last))
        self._waiting = []
        return complete

    def _portion(self) -> list[tuple[R, Tensor]]:
        if self._waiting and len(self._waiting[0][1]) > self._budget:
            row, tokens = self._waiting[0]
            self._waiting[0] = row, tokens[self._budget :]
            return [(row, tokens[: self._budget])]
        count = 0
        while count < len(self._waiting) and (count + 1) * len(self._waiting[count][1]) <= self._budget:
            count += 1
        portion, self._waiting = self._waiting[:count], self._waiting[count:]
        return portion

    def _pass(self, portion: Sequence[tuple[R, Tensor]]) -> list[Tensor]:
        """Read a portion in the passes that cost least; return the logits [1, V] at the end of each row."""
        lengths = [len(tokens) for _, tokens in portion]
        self.tokens += sum(lengths)
        logits: dict[int, Tensor] = {}
        for group in cheapest_groups(lengths, range(len(portion)), overhead=overhead_on(self._reader.device)):
            rows, tokens = [portion[at][0].key for at in group], [portion[at][1] for at in group]
            logits.update(zip(group, self._reader.extend(rows, tokens, last=[1] * len(group)), strict=True))
        return [logits[at] for at in range(len(portion))]
