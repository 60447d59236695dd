"""Decode steps launched as one: CUDA graphs of steps whose shapes and addresses stay.

A decode step is over a thousand kernels, which take less time than their launches. A graph launches all at once, with
the shapes and addresses of its capture. So rows are rounded up to a multiple of :data:`ROWS` and columns to one of
:data:`COLUMNS`, tokens and positions lie in buffers, and graphs go when the slab gets other memory. Rows that are none
read one token at position 0 of a free slot, where the first token of a later row is written over it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from oppo.hf.kv.cache import DecodeBatch, KVRegion, KVView, Slab
from oppo.log import logger

ROWS: Final = 8
COLUMNS: Final = 256

MOST: Final = 32  # graphs that are kept: each takes some memory of the device

Forward: TypeAlias = Callable[[KVView, Tensor, Tensor, Tensor | None], Tensor]
"""Returns the outputs [n, D] of tokens, int64 [n, 1], at positions, int64 [n, 1], for the rows of a view.

Rotary positions, int64 [n], may be others.
"""


class Capture:
    """Captures passes as CUDA graphs, which share their memory: one is replayed at a time."""

    # In a stream of its own, since the default stream cannot capture, with the priority of the thread's: by version of
    # PyTorch a graph has that of the stream that captured it or that launches it.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # torch exports no name for its type

    def once(self, work: Callable[[], Tensor]) -> Tensor:
        """Return the outputs of an eager pass, in which libraries also allocate their workspaces."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream := self._waiting()):
            result = work()
        current.wait_stream(stream)
        return result

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Return a function that launches the pass, and its outputs, which have values once it is launched."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._waiting()):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")  # other threads work in their streams
            try:
                output = work()
            finally:
                graph.capture_end()
        self._pool = graph.pool()
        return graph.replay, output

    def begin_anew(self) -> None:
        # Earlier graphs are gone.
        self._pool = None

    def _waiting(self) -> torch.cuda.Stream:
        current = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=current.priority)
        self._stream.wait_stream(current)
        return self._stream


class StepGraphs:
    """The graphs of one reader's decode steps; ``replayed``: steps that were launched as one."""

    def __init__(self, forward: Forward, capture: Capture) -> None:
        self.replayed = 0
        self._forward = forward
        self._capture: Capture | None = capture
        self._memory: tuple[Slab, int] | None = None
        self._graphs: dict[tuple[int, int, bool], tuple[Callable[[], None], Tensor] | None] = {}
        self._rotary: Tensor | None = None
        self._ids = self._positions = torch.empty(0, 1)

    def step(self, batch: DecodeBatch, ids: Tensor) -> Tensor | None:
        """Return the outputs [n, D] of the next token of each row, good until the next step; ``None``: no graph can."""
        if len(batch.views) > 1 or self._capture is None:
            return None
        ((slab, region),) = batch.views
        rows = len(batch.rows)
        most = slab.capacity if len(slab) == rows else rows  # slots of others are not free
        shape = min(_rounded(rows, ROWS), most), min(_rounded(region.end, COLUMNS), slab.columns)
        if self._memory != (slab, slab.version):
            self._memory = slab, slab.version
            self._graphs.clear()
            self._rotary = None
            self._ids, self._positions = ids.new_zeros(slab.capacity, 1), ids.new_zeros(slab.capacity, 1)
        self._ids[:rows, 0] = ids
        self._positions[:rows, 0] = batch.positions
        self._positions[rows : shape[0]].zero_()
        if batch.rotary is not None:
            self._rotary = self._positions.new_zeros(len(self._positions)) if self._rotary is None else self._rotary
            self._rotary[:rows] = batch.rotary
        return self._made(self._capture, slab, (*shape, batch.rotary is not None))[:rows]

    def refuse(self, why: str) -> None:
        if self._capture is not None:
            logger.info(f"decode steps are launched kernel by kernel: {why}")
        self._capture = None
        self._graphs.clear()

    def _made(self, capture: Capture, slab: Slab, shape: tuple[int, int, bool]) -> Tensor:
        work = partial(self._pass, slab, *shape)
        if shape not in self._graphs:
            if len(self._graphs) == MOST:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[shape] = None
            return capture.once(work)
        if (captured := self._graphs[shape]) is None:
            if not any(self._graphs.values()):
                capture.begin_anew()
            try:
                captured = self._graphs[shape] = capture(work)
            except RuntimeError as error:
                self.refuse(f"the model cannot be captured ({error})")
                return work()
        launch, output = captured
        launch()
        self.replayed += 1
        return output

    def _pass(self, slab: Slab, rows: int, end: int, turned: bool) -> Tensor:
        ids, positions = self._ids[:rows], self._positions[:rows]
        slots, rotary = torch.arange(rows, device=ids.device), self._rotary
        view = KVView(slab, KVRegion(slice(0, rows), end, slots, positions[:, 0], None))
        return self._forward(view, ids, positions, rotary[:rows] if turned and rotary is not None else None)


def _rounded(count: int, to: int) -> int:
    return -(-count // to) * to
