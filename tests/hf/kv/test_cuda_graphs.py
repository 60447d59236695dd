"""Decode steps whose shapes and addresses stay, as a CUDA graph wants them: replayed here operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oppo.hf.devices import use_stream
from oppo.hf.expert_routing import RouteRecords, RouterReplay, record_routers
from oppo.hf.kv.cuda_graphs import Capture
from oppo.hf.kv.reader import Incremental
from tests.hf import tiny
from tests.hf.kv.test_reader import CLASSES, Operation, model_of, operations, reader_of, run, sequence

Call = tuple[object, ...]


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a segment cost as much as many megabytes of KV cache, and memory be given back when half of it is free."""
    monkeypatch.setattr("oppo.hf.kv.attention.SEGMENT_BYTES", 2**40)
    monkeypatch.setattr("oppo.hf.kv.cache.SPARE", 2.0)


class Trace(TorchDispatchMode):
    """Records operators with their numbers, the shapes of tensors and, of those that were there before, the places."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.calls: list[Call] = []
        self._made: dict[int, Tensor] = {}  # kept, so that no other lies where one was

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        del types
        if func is not torch.ops.aten.lift_fresh.default:
            self.calls.append((func, *map(self._seen, tree_leaves((args, kwargs or {})))))
        result = func(*args, **(kwargs or {}))
        known = {self._place(each) for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)}
        new = func is torch.ops.aten.lift_fresh.default  # a constant
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and (new or self._place(each) not in known):
                self._made[self._place(each)] = each
        return result

    def _place(self, tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def _seen(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return value if isinstance(value, int | float | bool | torch.dtype) else type(value)
        return tuple(value.shape), value.stride(), 0 if self._place(value) in self._made else value.data_ptr()


@dataclass(frozen=True)
class Stream:
    """What stands in for a stream of CUDA."""

    device: torch.device
    priority: int = 0

    def wait_stream(self, other: Stream) -> None:
        """Wait for nothing."""


class Cuda:
    """What stands in for CUDA's streams and graphs: which one is current, and which one captured."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = Stream(torch.device("cuda", 0))
        self.captured: Stream | None = None
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "stream", self.within)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: self)

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.captured = self.current

    def capture_end(self) -> None:
        assert self.captured is self.current

    def replay(self) -> None:
        """Launch nothing."""

    def pool(self) -> None:
        """Return none."""


@pytest.mark.parametrize(("first", "priority"), [(True, -1), (False, 0)])
def test_a_graph_has_the_priority_of_the_thread_s_stream(
    first: bool, priority: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, device = Cuda(monkeypatch), torch.device("cuda", 0)
    use_stream(device, first=first)
    of_thread, capture = cuda.current, Capture(device)
    for work in (capture.once, capture):
        work(lambda: torch.zeros(0))
        assert cuda.current is of_thread
    assert cuda.captured is not None
    assert cuda.captured is not of_thread
    assert cuda.captured.priority == of_thread.priority == priority


class Replayed(Capture):
    """Makes a captured pass again, and compares its operators with those of the capture: a graph would repeat these."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.captured = 0
        self.anew = 0

    def once(self, work: Callable[[], Tensor]) -> Tensor:
        return work()

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.captured += 1
        with Trace() as before:
            output = work()
        output = torch.empty_like(output)

        def replay() -> None:
            with Trace() as trace:
                made = work()
            differing = [pair for pair in zip(before.calls, trace.calls, strict=True) if pair[0] != pair[1]]
            assert not differing
            output.copy_(made)

        return replay, output

    def begin_anew(self) -> None:
        self.anew += 1


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt", "qwen3-moe"])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(work=operations)
def test_fixed_steps_give_what_a_forward_pass_gives(name: str, work: list[Operation]) -> None:
    reader = reader_of(name, segmented=True)
    reader.capture_steps(Replayed())
    run(reader, name, work)


def counts(reader: Incremental, capture: Replayed) -> tuple[int, int]:
    assert reader._graphs is not None
    return capture.captured, reader._graphs.replayed


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "neox"])
def test_a_graph_serves_steps_until_rows_columns_or_memory_outgrow_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oppo.hf.kv.cuda_graphs.ROWS", 2)
    monkeypatch.setattr("oppo.hf.kv.cuda_graphs.COLUMNS", 64)
    reader, capture = Incremental(model_of(name), classes=CLASSES), Replayed()
    reader.capture_steps(capture)
    prompts = [sequence(row)[:n] for row, n in enumerate([40, 12, 9, 20, 3])]
    reader.extend(range(5), prompts)
    run(reader, name, [("step", [0, 1, 2, 3], 0)])
    assert counts(reader, capture) == (0, 0)  # the first of each shape is made as it is
    run(reader, name, [("step", [0, 1, 2, 3], 0)] * 3)
    assert counts(reader, capture) == (1, 3)
    run(reader, name, [("forget", [1], 0), *[("step", [3, 0, 2], 0)] * 2])
    assert counts(reader, capture) == (1, 5)  # three rows and one that is none
    run(reader, name, [("step", [3, 4, 0, 2], 0)] * 2)  # where that was, another row follows
    run(reader, name, [("step", [0, 2], 0)] * 3)  # two others keep the slots behind
    captured, replayed = counts(reader, capture)
    run(reader, name, [("step", [3, 4, 0, 2], 0)] * 30)
    assert reader.length(0) > 64
    assert counts(reader, capture)[0] > captured
    assert counts(reader, capture)[1] > replayed + 20
    assert 1 < capture.anew < 6  # whenever no graph is left whose memory could be shared


def test_as_many_graphs_are_kept_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.hf.kv.cuda_graphs.MOST", 1)
    monkeypatch.setattr("oppo.hf.kv.cuda_graphs.ROWS", 1)
    reader, capture = Incremental(model_of("llama"), classes=CLASSES), Replayed()
    reader.capture_steps(capture)
    reader.extend(range(4), [sequence(row)[:30] for row in range(4)])
    for rows in ([0, 1, 2, 3], [1, 2], [0, 1, 2, 3]):
        run(reader, "llama", [("step", rows, 0)] * 3)
    assert reader._graphs is not None
    assert len(reader._graphs._graphs) == 1
    assert (capture.captured, capture.anew) == (3, 3)


def test_a_model_that_cannot_be_captured_is_stepped_as_it_is(messages: list[str]) -> None:
    class Failing(Replayed):
        def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            raise RuntimeError("operation not permitted when stream is capturing")

    reader = Incremental(model_of("llama"), classes=CLASSES)
    reader.capture_steps(Failing())
    run(reader, "llama", [("extend", [0, 1], 1), *[("step", [1, 0], 0)] * 5])
    assert counts_of(messages, "cannot be captured (operation not permitted") == 1
    assert reader._graphs is not None
    assert reader._graphs.replayed == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [("lfm2", "the model has recurrent states"), ("qwen3-moe", "the experts of each token are recorded")],
)
def test_what_no_graph_can_hold_is_refused_by_its_reason(name: str, why: str, messages: list[str]) -> None:
    model = tiny.of(tiny.STATEFUL[name]()) if name in tiny.STATEFUL else model_of(name)
    reader, capture = Incremental(model, classes=CLASSES), Replayed()
    reader.capture_steps(capture)
    if replay := RouterReplay.of(model) if name == "qwen3-moe" else None:
        record_routers(model)
        reader.routes = RouteRecords(replay)
    reader.extend([0, 1], [sequence(0)[:9], sequence(1)[:5]])
    for _ in range(5):
        reader.step([1, 0], torch.tensor([7, 8]))
    assert counts_of(messages, f"decode steps are launched kernel by kernel: {why}") == 1
    assert capture.captured == 0


def counts_of(messages: list[str], part: str) -> int:
    return sum(part in each for each in messages)
