"""What a policy and its decode loop say to one another without a message: a few bytes of shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from oppo.placement.block import Block

_BYTES = 8
_SAID = b"\1"


class _Number:
    """One of the int64 of :class:`Counters`."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __get__(self, counters: Counters, kind: type[Counters]) -> int:
        return counters.numbers[self._at]

    def __set__(self, counters: Counters, value: int) -> None:
        counters.numbers[self._at] = value


class Counters:
    """What a decoder has done so far: written where it decodes, read anywhere while it does.

    Attributes:
        tokens: sampled.
        prefilled: tokens that were read before their rows could be decoded.
        version: of the weights in use.
        loads: how often weights were loaded.
    """

    decode_steps = _Number(0)
    tokens = _Number(1)
    prefilled = _Number(2)
    version = _Number(3)
    loads = _Number(4)

    def __init__(self, block: Block | None = None) -> None:
        self._block = block or Block.new(5 * _BYTES)
        self.numbers: memoryview[int] = memoryview(self._block).cast("q")

    def __reduce__(self) -> tuple[type[Counters], tuple[Block]]:
        return Counters, (self._block,)


class Signals:
    """What a decode loop is told while it runs, and looks at between two decode steps.

    Args:
        block: a byte that says whether to stop, then one for each row that says whether nobody wants it any more.
    """

    def __init__(self, block: Block) -> None:
        self._block = block

    def __reduce__(self) -> tuple[type[Signals], tuple[Block]]:
        return Signals, (self._block,)

    @classmethod
    def of(cls, rows: int) -> Signals:
        """Return the signals, none of them given yet, to a decode loop of so many rows."""
        return cls(Block.new(1 + rows))

    def stop(self) -> None:
        """Say that the loop is to stop."""
        self._block[:1] = _SAID

    @property
    def stopped(self) -> bool:
        """Whether the loop is to stop."""
        return self._block[:1] == _SAID

    def give_up(self, row: int) -> None:
        """Say that nobody wants the row at this index any more."""
        self._block[1 + row : 2 + row] = _SAID

    def given_up(self) -> Iterator[int]:
        """Return the indices of the rows that nobody wants any more."""
        at = self._block.find(_SAID, 1)
        while at > 0:
            yield at - 1
            at = self._block.find(_SAID, at + 1)
