"""Signals between a policy and its decode loop while that runs: a few bytes of memory that both see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import Structure, c_int64, sizeof
from typing import ClassVar

from oppo.placement.block import Block
from oppo.placement.mirrored import Gauge, Notice

_RAISED = b"\1"


class Counters(Structure):
    """Counts of a decoder's work so far: written where it decodes, readable anywhere while it does.

    Attributes:
        decode_steps: made.
        tokens: sampled.
        prefilled: tokens read before their rows could be decoded.
        version: of the weights in use.
        loads: how often weights were loaded.
        block: the memory.
    """

    decode_steps: int
    tokens: int
    prefilled: int
    version: int
    loads: int
    _fields_: ClassVar = [(name, c_int64) for name in ("decode_steps", "tokens", "prefilled", "version", "loads")]
    block: Block

    @classmethod
    def over(cls, block: Block | None = None) -> Counters:
        """Return the counters that lie in ``block``; new ones, all 0, without a block."""
        block = block or Gauge.new(sizeof(cls))
        counters = cls.from_buffer(block)
        counters.block = block
        return counters

    def __reduce__(self) -> tuple[Callable[[Block], Counters], tuple[Block]]:
        return Counters.over, (self.block,)


class Signals:
    """Flags that a decode loop looks at between two decode steps.

    Args:
        block: one byte that stops the loop, then one for each row that makes the loop drop the row.
    """

    def __init__(self, block: Notice) -> None:
        self._block = block

    def __reduce__(self) -> tuple[type[Signals], tuple[Notice]]:
        return Signals, (self._block,)

    @classmethod
    def of(cls, rows: int) -> Signals:
        """Return the signals to a decode loop of ``rows`` rows, none of them raised."""
        return cls(Notice.new(1 + rows))

    def stop(self) -> None:
        """Stop the loop after the decode step in progress."""
        self._block.write_at(0, _RAISED)

    @property
    def stopped(self) -> bool:
        """Whether the loop is to stop."""
        return self._block[:1] == _RAISED

    def give_up(self, row: int) -> None:
        """Have the loop drop the row at this index."""
        self._block.write_at(1 + row, _RAISED)

    def given_up(self) -> Iterator[int]:
        """Return the indices of the rows to drop."""
        at = self._block.find(_RAISED, 1)
        while at > 0:
            yield at - 1
            at = self._block.find(_RAISED, at + 1)
