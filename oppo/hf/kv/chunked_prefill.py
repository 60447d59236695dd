"""Reading what rows hold before they can be decoded: a portion at a time, so that others decode meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from oppo.hf.kv.incremental import Incremental
from oppo.hf.kv.length_bucketing import cheapest_groups, overhead_on
from oppo.hf.serve.signals import Signals

GRID = 32
"""In exact mode a row is read alone, in blocks that begin at multiples of this: bits then depend on that row only."""


class Readable(Protocol):
    """What can be prefilled: a sequence with a name in the cache, which somebody may give up."""

    @property
    def key(self) -> int:
        """Names the row in the cache."""

    @property
    def given_up(self) -> bool:
        """Whether nobody wants it any more."""

    def sequence(self) -> Tensor:
        """Return all tokens, int64."""


R = TypeVar("R", bound=Readable)


class ChunkedPrefill(Generic[R]):
    """Rows that wait to be read: the shortest first, what has been read of them already is not read again.

    A portion has at most ``budget`` tokens, as one rectangle: as many whole rows of like length as fit, or a piece of
    one that does not. It is read in one forward pass, or in several where those cost less together. With ``exact`` all
    rows are read at once, each alone on a grid.

    Args:
        reader: reads them.
        rows: those that wait, in admission order.

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
        """Read one portion; return the rows that have been read to their end, with the logits [1, V] after it.

        Rows that were given up meanwhile are forgotten instead. When ``signals`` say stop nothing is read, and with
        ``exact`` all that wait are forgotten.
        """
        gone = [row.key for row, _ in self._waiting if row.given_up]
        if gone:
            self._reader.forget(gone)
            self._waiting = [pair for pair in self._waiting if not pair[0].given_up]
        if self._exact:
            return self._read_all(signals)
        portion = [] if signals.stopped else self._portion()
        logits = self._pass(portion) if portion else []
        return [(row, last) for (row, _), last in zip(portion, logits, strict=True) if not self._is_first_waiting(row)]

    def _read_all(self, signals: Signals) -> list[tuple[R, Tensor]]:
        read: list[tuple[R, Tensor]] = []
        for row, tokens in self._waiting:
            for block in tokens.split(GRID):
                if signals.stopped:
                    self._reader.forget([row.key for row, _ in self._waiting])
                    return []
                (last,) = self._pass([(row, block)])
            read.append((row, last))
        self._waiting = []
        return read

    def _portion(self) -> list[tuple[R, Tensor]]:
        """Take what the next forward pass reads from what waits."""
        if self._waiting and len(self._waiting[0][1]) > self._budget:
            row, tokens = self._waiting[0]
            self._waiting[0] = row, tokens[self._budget :]
            return [(row, tokens[: self._budget])]
        count = 0
        while count < len(self._waiting) and (count + 1) * len(self._waiting[count][1]) <= self._budget:
            count += 1
        portion, self._waiting = self._waiting[:count], self._waiting[count:]
        return portion

    def _is_first_waiting(self, row: R) -> bool:
        """Return whether there is more to read of a row of which a piece was read."""
        return bool(self._waiting) and self._waiting[0][0] is row

    def _pass(self, portion: Sequence[tuple[R, Tensor]]) -> list[Tensor]:
        """Read a portion in the passes that together cost least; return the logits [1, V] after each row."""
        lengths = [len(tokens) for _, tokens in portion]
        self.tokens += sum(lengths)
        logits: dict[int, Tensor] = {}
        for group in cheapest_groups(lengths, range(len(portion)), overhead=overhead_on(self._reader.device)):
            rows, tokens = [portion[at][0].key for at in group], [portion[at][1] for at in group]
            logits.update(zip(group, self._reader.extend(rows, tokens, last=[1] * len(group)), strict=True))
        return [logits[at] for at in range(len(portion))]
