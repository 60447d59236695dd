from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from oppo.errors import ModelError, ModelRefused, ProtocolError
from oppo.hf.introspection import backbone, score_head
from oppo.hf.kv.attention import attend, kinds_of
from oppo.hf.kv.cache import KVRegion, KVView, Slab, SlabLayer
from oppo.hf.kv.graphs import Capture
from oppo.hf.kv.reader import Incremental
from tests.hf import tiny

CLASSES = (16, 32)
ROWS = 5
Operation = tuple[str, list[int], int]
operations = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "step", "last", "forget"]),
        st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True),
        st.integers(0, 2**16),
    ),
    min_size=4,
    max_size=14,
)


@functools.cache
def model_of(name: str, *, segmented: bool = True) -> PreTrainedModel:
    """Return a model that attends in segments or, if it cannot or shall not, to padded rows."""
    model = tiny.causal(name)
    attend(model, kinds_of(model)[0 if segmented else -1])
    return model


@functools.cache
def sequence(row: int, length: int = 200) -> Tensor:
    return torch.randint(3, tiny.VOCABULARY, (length,), generator=torch.Generator().manual_seed(row))


@functools.cache
def one_shot(name: str, row: int) -> Tensor:
    model = model_of(name)
    model.train(mode=False)
    with torch.no_grad():
        logits: Tensor = model(sequence(row)[None]).logits[0]
    return logits


def assert_close(got: Tensor, want: Tensor) -> None:
    worst = ((got - want).abs() / (1 + want.abs())).max()
    assert worst < 1e-5, f"differs by {worst:.1e}"


def reader_of(name: str, *, segmented: bool) -> Incremental:
    return Incremental(model_of(name, segmented=segmented), classes=CLASSES)


def run(reader: Incremental, name: str, work: list[Operation]) -> None:
    """Do the operations; every output must be that of the model's own forward pass over the whole sequence."""
    for kind, rows, seed in work:
        at = {row: reader.length(row) for row in rows}
        if kind == "forget":
            reader.forget(rows)
            assert all(reader.length(row) == 0 for row in rows)
            continue
        if kind == "step":
            out = reader.step(rows, torch.stack([sequence(row)[at[row]] for row in rows]))
            assert out.shape == (len(rows), tiny.VOCABULARY)
            for row, got in zip(rows, out, strict=True):
                assert_close(got, one_shot(name, row)[at[row]])
            continue
        dice = random.Random(seed)
        sizes = [min(dice.choice([1, 2, 7, 20, 40]), 190 - at[row]) for row in rows]
        if min(sizes) < 1:
            reader.forget(rows)
            continue
        pieces = [sequence(row)[at[row] : at[row] + n] for row, n in zip(rows, sizes, strict=True)]
        last = [dice.choice([1, n]) for n in sizes] if kind == "last" else None
        for row, n, k, got in zip(rows, sizes, last or sizes, reader.extend(rows, pieces, last=last), strict=True):
            assert len(got) == k
            assert_close(got, one_shot(name, row)[at[row] + n - len(got) : at[row] + n])


@pytest.mark.parametrize("name", tiny.CONFIGS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(work=operations, segmented=st.booleans())
def test_reading_in_pieces_equals_one_forward_pass(name: str, work: list[Operation], segmented: bool) -> None:
    run(reader_of(name, segmented=segmented), name, work)


@pytest.mark.deep
@pytest.mark.parametrize("name", tiny.CONFIGS)
@settings(max_examples=100, deadline=None)
@given(work=operations, segmented=st.booleans())
def test_reading_in_pieces_equals_one_forward_pass_at_length(name: str, work: list[Operation], segmented: bool) -> None:
    run(reader_of(name, segmented=segmented), name, work)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_rows_join_leave_and_move_between_classes_while_others_are_stepped(name: str) -> None:
    reader = reader_of(name, segmented=True)
    work: list[Operation] = [("extend", [0, 1], 1), ("step", [1, 0], 0), ("extend", [2], 2), ("step", [0, 2], 0)]
    work += [("step", [4, 2, 1, 0], 0)] * 20
    work += [("forget", [1], 0), ("extend", [3, 1], 3)]
    work += [("step", [1, 3, 0], 0)] * 30
    run(reader, name, work)
    assert reader.length(0) > 50


def test_rows_stepped_together_share_one_forward_pass_however_they_differ_in_length() -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    for segmented in (False, True):
        hook = model_of("llama", segmented=segmented).register_forward_pre_hook(count)
        reader = reader_of("llama", segmented=segmented)
        reader.extend(list(range(ROWS)), [sequence(row)[:n] for row, n in enumerate([5, 12, 20, 40, 90])])
        calls = 0
        run(reader, "llama", [("step", [3, 0, 4, 1, 2], 0)])
        assert calls == 1
        hook.remove()


def shapes_of(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Return what will hold the rows and columns of each forward pass but those of two short rows."""
    shapes: list[tuple[int, ...]] = []

    def note(_: object, args: object, kwargs: dict[str, Tensor]) -> None:
        if kwargs.get("use_cache"):
            shapes.append(tuple(kwargs["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return shapes


@pytest.mark.parametrize("name", ["llama", "qwen2-moe", "gemma3", "gpt2"])
def test_rows_are_read_end_to_end_where_that_costs_less_and_go_on_as_others_do(name: str) -> None:
    model = tiny.causal(name)
    attend(model, "segmented")
    reader, shapes = Incremental(model, classes=CLASSES), shapes_of(model)
    sizes = [40, 5, 12, 90] if name != "gemma3" else [tiny.WINDOW, 1, 2, tiny.WINDOW]
    pieces, last = [sequence(row)[:size] for row, size in enumerate(sizes)], [40, 1, 3, 2]
    last = [min(each) for each in zip(last, sizes, strict=True)]
    got = reader.extend([0, 1, 2, 3], pieces, last=last)
    assert shapes == [(1, sum(sizes))]
    for row, (size, kept, out) in enumerate(zip(sizes, last, got, strict=True)):
        assert_close(out, one_shot(name, row)[size - kept : size])
    run(reader, name, [("step", [2, 0, 3], 0), ("extend", [1, 0], 5), ("step", [0, 1, 2, 3], 0), ("extend", [3], 1)])


def test_new_rows_of_like_length_are_padded_and_what_goes_on_is_never_packed() -> None:
    model = tiny.causal("llama")
    attend(model, "segmented")
    reader, shapes = Incremental(model), shapes_of(model)
    reader.extend([0, 1], [sequence(0)[:30], sequence(1)[:28]])
    reader.extend([0, 2], [sequence(0)[30:31], sequence(2)[:60]])
    assert shapes == [(2, 30), (2, 60)]
    assert reader.groups([3, 0, 4, 5, 1], [200, 4, 100, 50, 5]) == [[0, 2, 3], [4, 1]]
    assert reader.groups([3, 0, 4, 5, 1], [200, 4, 100, 50, 5], 160) == [[0], [2, 3], [4, 1]]
    assert reader.groups([3, 4], [20, 21]) == [[1, 0]]


def test_eager_attention_gives_what_sdpa_gives() -> None:
    eager = tiny.causal("qwen2")
    eager.set_attn_implementation("eager")
    reader = Incremental(eager, classes=CLASSES)
    got = reader.extend([0, 1], [sequence(0)[:30], sequence(1)[:11]])
    assert_close(got[0], one_shot("qwen2", 0)[:30])
    assert_close(got[1], one_shot("qwen2", 1)[:11])


def test_an_attention_without_masks_for_each_row_is_refused() -> None:
    model = tiny.causal("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelRefused, match=r"flash_attention_2.*sdpa"):
        Incremental(model)


def test_a_head_is_applied_to_the_last_hidden_states_of_a_backbone() -> None:
    model = tiny.scalar("llama")
    body, score = backbone(model), score_head(model)
    got = Incremental(body, head=score).extend([0], [sequence(0)[:20]])[0]
    with torch.no_grad():
        assert_close(got, score(body(sequence(0)[None, :20]).last_hidden_state)[0])


def test_a_row_read_alone_has_the_same_bits_whatever_else_is_held() -> None:
    for name in ("llama", "gpt2", "gemma2"):
        blocks = [sequence(0)[at : at + 32] for at in range(0, 128, 32)]
        lonely = Incremental(model_of(name))
        want = torch.cat([lonely.extend([0], [block])[0] for block in blocks])
        for seed in range(8):
            dice = random.Random(seed)
            crowded = Incremental(model_of(name), classes=dice.choice([(16,), (64,), (48, 80), (256,)]))
            others = list(range(1, 8))
            got = []
            for block in blocks:
                some = dice.sample(others, 4)
                crowded.extend(some, [sequence(row, 400)[: dice.randint(1, 60)] for row in some])
                crowded.forget(dice.sample(others, 3))
                got.append(crowded.extend([0], [block])[0])
                crowded.step([0, *some][1:], torch.full((4,), 5))
                crowded.forget(dice.sample(others, 1))
            assert torch.equal(torch.cat(got), want)


def test_ordered_steps_have_the_same_bits_whatever_came_and_went_before() -> None:
    want: dict[int, Tensor] = {}
    for seed in range(6):
        dice = random.Random(seed)
        reader = Incremental(model_of("llama"), classes=CLASSES, ordered=True)
        for row in dice.sample(range(12), 12):
            reader.extend([row], [sequence(row)[:30]])
        gone = [7, 8, 9, 10, 11]
        dice.shuffle(gone)
        for row in gone:
            reader.forget([row])
            if seed % 2:
                reader.extend([row], [sequence(row)[:50]])
        for at, rows in enumerate(([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 4, 6], [4, 6, 0])):
            got = reader.step(rows, torch.full((len(rows),), 9))
            assert torch.equal(got, want.setdefault(at, got))


def test_dropout_in_the_config_has_no_effect() -> None:
    config = GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=96,
        resid_pdrop=0.9,
        embd_pdrop=0.9,
        attn_pdrop=0.9,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = GPT2LMHeadModel(config).train()
    first, second = (Incremental(model).extend([0], [sequence(0)[:20]])[0] for _ in range(2))
    assert torch.equal(first, second)


def test_bfloat16_keeps_its_type() -> None:
    reader = Incremental(tiny.causal("llama", dtype=torch.bfloat16))
    assert reader.extend([0, 1], [sequence(0)[:9], sequence(1)[:4]])[0].dtype == torch.bfloat16


def test_memory_stays_near_what_live_tokens_need() -> None:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=2048,
    )
    reader = Incremental(LlamaForCausalLM(config))
    dice = random.Random(0)
    lengths = {row: min(2000, max(8, round(dice.lognormvariate(5.0, 1.0)))) for row in range(128)}
    for row, length in lengths.items():
        reader.extend([row], [sequence(0, 2000)[:length]], last=[1])
    allocated, needed = reader.memory()
    assert allocated <= 1.6 * needed
    reader.forget(dice.sample(list(lengths), 90))
    allocated, needed = reader.memory()
    assert allocated <= 2.0 * needed
    reader.clear()
    assert reader.memory() == (0, 0)


def narrow() -> Incremental:
    """Return a reader of which a token takes little to read."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2048,
    )
    return Incremental(LlamaForCausalLM(config))


def occupancies(reader: Incremental, lengths: dict[int, int]) -> list[float]:
    """Read prompts, step all rows while one after the other leaves; return bytes taken for each that is needed."""
    reader.extend(list(lengths), [sequence(0, 2000)[:n] for n in lengths.values()], last=[1] * len(lengths))
    live, seen = list(lengths), []
    for at in range(90):
        reader.step(live, torch.full((len(live),), 5))
        allocated, needed = reader.memory()
        seen.append(allocated / needed)
        if at % 3 == 2:
            reader.forget([live.pop(7 * at % len(live))])
    return seen


def test_fresh_rows_beside_deferred_ones_do_not_take_the_memory_of_those() -> None:
    carried, fresh = {0: 900, 1: 640, 2: 300, 3: 290}, {row: 20 + row % 7 for row in range(4, 40)}
    assert max(occupancies(narrow(), carried | fresh)) <= 1.6
    assert max(occupancies(narrow(), fresh)) <= 1.6


def test_a_sequence_that_is_too_long_is_refused_and_nothing_is_read() -> None:
    reader = Incremental(model_of("gpt2"))
    reader.extend([0], [sequence(0, 510)])
    with pytest.raises(ModelError, match="row 0 would hold 513 tokens, but GPT2LMHeadModel reads at most 512"):
        reader.extend([1, 0], [sequence(1)[:3], sequence(0)[:3]])
    assert (reader.length(0), reader.length(1)) == (510, 0)
    reader.step([0], torch.tensor([5]))
    reader.step([0], torch.tensor([5]))
    with pytest.raises(ModelError, match="513"):
        reader.step([0], torch.tensor([5]))


def test_a_row_named_twice_or_without_tokens_is_an_error() -> None:
    reader = Incremental(model_of("llama"))
    with pytest.raises(ProtocolError, match="once"):
        reader.step([1, 1], torch.tensor([5, 6]))
    with pytest.raises(ProtocolError, match="row 3 was extended by no tokens"):
        reader.extend([2, 3], [sequence(0)[:3], sequence(0)[:0]])


def test_unknown_rows_are_forgotten_without_complaint() -> None:
    reader = Incremental(model_of("llama"))
    reader.forget([4, 99])
    assert reader.length(4) == 0


def slab_with(rows: list[int]) -> Slab:
    slab = Slab(16)
    slab.reserve(len(rows) + 3, 1)
    slab.add(rows)
    everywhere = KVRegion(
        slice(0, len(rows)), 1, torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.int64), None
    )
    new = torch.tensor(rows, dtype=torch.float32)[:, None, None, None]
    slab.store(0, everywhere, new, -new)
    return slab


def first_keys(slab: Slab) -> list[float]:
    nothing, nowhere = torch.zeros(0, 1, 0, 1), torch.zeros(0, dtype=torch.int64)
    first = KVRegion(slice(0, len(slab)), 1, nowhere, nowhere, None)
    keys, _ = slab.store(0, first, nothing, nothing)
    return keys[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("name", ["get_max_length", "get_max_cache_shape"])
def test_a_layer_tells_what_it_can_hold_under_either_name_that_transformers_has_for_it(name: str) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    everywhere = KVRegion(slice(0, 0), 0, nothing, nothing, None)
    layer = SlabLayer(0)
    layer.views = [KVView(slab, everywhere) for slab in (Slab(16), Slab(64))]
    assert getattr(layer, name)() == 64


def test_live_rows_stay_at_the_front_of_a_slab() -> None:
    slab = slab_with([1, 2, 3, 4, 5])
    slab.remove([2])
    assert (slab.rows, first_keys(slab)) == ([1, 5, 3, 4], [1, 5, 3, 4])
    slab.bring_forward([4, 3], ordered=False)
    assert set(slab.rows[:2]) == {3, 4}
    assert first_keys(slab) == slab.rows
    slab.bring_forward([5, 1, 3], ordered=True)
    assert (slab.rows, first_keys(slab)) == ([5, 1, 3, 4], [5, 1, 3, 4])
    assert all(slab.rows[slab.slot(row)] == row for row in slab.rows)


def test_a_row_that_outgrows_its_slab_takes_its_tokens_along() -> None:
    small, large = slab_with([1, 2, 3]), slab_with([7, 8])
    large.adopt({2: 1}, small)
    assert (small.rows, first_keys(small)) == ([1, 3], [1, 3])
    assert (large.rows, first_keys(large)) == ([7, 8, 2], [7, 8, 2])


def test_all_rows_of_a_slab_move_into_an_empty_one_without_being_copied() -> None:
    small, large = slab_with([1, 2, 3]), Slab(64)
    stores = small._layers[0, "attention"]
    large.reserve(3, 2)
    large.adopt({1: 1, 2: 1, 3: 1}, small)
    assert (large.rows, first_keys(large)) == ([1, 2, 3], [1, 2, 3])
    assert large._layers[0, "attention"] is stores
    assert (small.rows, small.bytes_allocated()) == ([], 0)


def test_a_nan_does_not_outlive_its_row() -> None:
    slab = slab_with([1, 2, 3])
    (keys, values) = slab._layers[0, "attention"]
    keys[2], values[2] = torch.nan, torch.nan
    slab.remove([3])
    slab.add([4])
    assert first_keys(slab) == [1, 2, 0]
    assert slab._layers[0, "attention"][1].isfinite().all()


Call = tuple[object, ...]
WHOLE = [name for name in tiny.CONFIGS if Incremental(model_of(name))._states is None]


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


@pytest.mark.parametrize("name", WHOLE)
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
    monkeypatch.setattr("oppo.hf.kv.graphs.ROWS", 2)
    monkeypatch.setattr("oppo.hf.kv.graphs.COLUMNS", 64)
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
    monkeypatch.setattr("oppo.hf.kv.graphs.MOST", 1)
    monkeypatch.setattr("oppo.hf.kv.graphs.ROWS", 1)
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


def counts_of(messages: list[str], part: str) -> int:
    return sum(part in each for each in messages)
