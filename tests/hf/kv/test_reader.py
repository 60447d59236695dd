from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oppo.errors import ModelError, ModelRefused, ProtocolError
from oppo.hf.devices import CPU
from oppo.hf.kv import attention, cache
from oppo.hf.kv.attention import NAME, Segments, attend, attend_in_segments, attends_eagerly, kinds_of, segment_overhead
from oppo.hf.kv.cache import KVRegion, KVView, Places, Slab, SlabLayer
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


@pytest.mark.parametrize("name", ["llama", "qwen2-moe", "gemma3", "gpt2"])
def test_rows_are_read_end_to_end_where_that_costs_less_and_go_on_as_others_do(name: str) -> None:
    model = tiny.causal(name)
    attend(model, "segmented")
    reader, shapes = Incremental(model, classes=CLASSES), tiny.shapes_of(model)
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
    reader, shapes = Incremental(model), tiny.shapes_of(model)
    reader.extend([0, 1], [sequence(0)[:30], sequence(1)[:28]])
    reader.extend([0, 2], [sequence(0)[30:31], sequence(2)[:60]])
    assert shapes == [(2, 30), (2, 60)]
    assert reader.groups([3, 0, 4, 5, 1], [200, 4, 100, 50, 5]) == [[0, 2, 3], [4, 1]]
    assert reader.groups([3, 0, 4, 5, 1], [200, 4, 100, 50, 5], 160) == [[0], [2, 3], [4, 1]]
    assert reader.groups([3, 4], [20, 21]) == [[1, 0]]


def test_an_attention_without_masks_for_each_row_is_refused() -> None:
    model = tiny.causal("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelRefused, match=r"flash_attention_2.*sdpa"):
        Incremental(model)


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


def test_memory_stays_near_what_live_tokens_need() -> None:
    reader, dice = narrow(), random.Random(0)
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


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_were_expected_have_a_slot_each_in_the_end_and_few_copies_before(seed: int) -> None:
    dice, reader = random.Random(seed), narrow()
    rows, length = dice.sample(range(200), dice.randint(20, 120)), dice.choice([30, 64, 100])
    reader.expect(rows)
    waiting, portions, copies = rows, 0, 0
    while waiting:
        portion, waiting = waiting[: (size := dice.randint(1, 4))], waiting[size:]
        reader.extend(portion, [sequence(0)[:length]] * len(portion), last=[1] * len(portion))
        if seed % 2:
            live = rows[: len(rows) - len(waiting)]
            reader.segment_by_length(live)
        slabs = {*reader._rows.held.values()}
        assert sum(slab.capacity for slab in slabs) <= len(rows)
        portions, copies = portions + 1, max(slab.version for slab in slabs)
    (slab,) = {*reader._rows.held.values()}
    assert slab.capacity == len(rows)
    assert copies < 8 + math.log(len(rows), 9 / 8)


@pytest.mark.parametrize("stepped", [False, True])
def test_rows_that_join_one_by_one_are_copied_few_times(stepped: bool) -> None:
    reader = narrow()
    for row in range(100):
        reader.expect([row])
        reader.extend([row], [sequence(0)[:30]], last=[1])
        if stepped:
            reader.segment_by_length(range(row + 1))
    (slab,) = {*reader._rows.held.values()}
    assert slab.capacity <= 100 * 9 / 8
    assert slab.version < 8 + math.log(100, 9 / 8)


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


class Launches(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("block_bytes", [1, 1000, 2**28])
def test_a_row_joins_and_a_slab_grows_in_as_many_launches_for_any_number_of_layers(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "BLOCK_BYTES", block_bytes)
    launches = []
    for layers in (2, 24):
        places: Places = {}
        old, new = Slab(64, places), Slab(64, places)
        old.reserve(3, 1)
        old.add([1, 2, 3])
        nothing = torch.zeros(3, dtype=torch.int64)
        for layer in range(layers):
            keys = torch.tensor([1.0, 2, 3])[:, None, None, None].expand(3, 2 + layer % 2, 1, 4) + 10 * layer
            old.store(layer, KVRegion(slice(0, 3), 1, torch.arange(3), nothing, None), keys, -keys)
        old.reserve(1, 9)  # the stores of a first pass become blocks
        with Launches() as counted:  # type: ignore[no-untyped-call]
            new.reserve(1, 9)
            new.adopt({2: 1}, old)
            new.reserve(2, 40)
            new.adopt({3: 1}, old)
            old.trim(9)
            new.remove([2])
        launches.append(counted.count)
        for layer in range(layers):
            keys, values = new._layers[layer, "attention"]
            assert keys[0, :, 0].eq(3 + 10 * layer).all()
            assert torch.equal(keys, -values)
            assert not keys[0, :, 1:].any()
            assert not keys[1:].any()
            assert old._layers[layer, "attention"][0][0, :, 0].eq(1 + 10 * layer).all()
    assert block_bytes < 2**28 or launches[0] == launches[1] <= LAUNCHES_OF_MOVES


LAUNCHES_OF_MOVES = 24


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


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=60), overhead=st.integers(0, 5000))
def test_every_row_is_in_one_segment_and_segments_are_of_similar_length(lengths: list[int], overhead: int) -> None:
    found = attention.segmented(lengths, overhead)
    assert sorted(at for segment in found for at in segment) == list(range(len(lengths)))
    assert all(segment == sorted(segment) for segment in found)
    held = [[lengths[at] for at in segment] for segment in found]
    assert all(min(longer) > max(shorter) for longer, shorter in pairwise(held))
    assert sum(max(rows) * len(rows) + overhead for rows in held) <= max(lengths) * len(lengths) + overhead


def test_deferred_rows_are_segmented_from_fresh_ones_if_that_saves_more_than_it_costs() -> None:
    assert attention.segmented([20, 300, 22, 290, 25, 20], overhead=1000) == [[1, 3], [0, 2, 4, 5]]
    assert attention.segmented([20, 300, 22, 290, 25, 20], overhead=1200) == [[0, 1, 2, 3, 4, 5]]


def test_the_more_bytes_a_token_has_the_fewer_tokens_pay_for_another_segment() -> None:
    assert segment_overhead(2 * attention.SEGMENT_BYTES, CPU) == 1
    assert segment_overhead(attention.SEGMENT_BYTES / 100, CPU) == 100


def test_a_model_that_attends_in_segments_reads_and_generates_as_before(tmp_path: Path) -> None:
    model = tiny.causal("qwen2")
    before = copy.deepcopy(model)
    assert attend_in_segments(model)
    assert attend_in_segments(model), "a second time it does already"
    assert not attends_eagerly(model)
    ids = torch.randint(3, tiny.VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.no_grad():
        for given_mask in (None, mask):
            assert torch.equal(model(ids, given_mask).logits, before(ids, given_mask).logits)
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


class Layer(torch.nn.Module):
    """What transformers' attention asks of the layer that it is called for."""

    def __init__(self, num_key_value_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups


@pytest.mark.parametrize("unusual", ["nothing", "a mask for each head", "position_bias", "dropout", "several queries"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_whatever_it_is_asked_for_attention_is_that_of_transformers(groups: int, unusual: str) -> None:
    draw = torch.Generator().manual_seed(0)
    queries = 3 if unusual == "several queries" else 1
    query = torch.randn(5, 4, queries, 8, generator=draw)
    key, value = (torch.randn(5, groups, 9, 8, generator=draw) for _ in range(2))
    mask = torch.randn(5, 4 if unusual == "a mask for each head" else 1, queries, 9, generator=draw)
    bias = torch.randn(1, 4, queries, 9, generator=draw) if unusual == "position_bias" else None
    module = Layer(4 // groups).train(unusual == "dropout")
    seen = []
    for name in (NAME, "sdpa"):
        torch.manual_seed(0)
        options = {"scaling": 0.3, "dropout": 0.5 * module.training, "position_bias": bias}
        seen.append(ALL_ATTENTION_FUNCTIONS[name](module, query, key, value, mask, **options)[0])
    assert seen[0].shape == (5, queries, 4, 8)
    torch.testing.assert_close(*seen)  # to the bit where transformers, too, lets heads stand as queries; 5.10 does not


@pytest.mark.parametrize("queries", [1, 4])
def test_segments_attend_as_each_would_alone(queries: int) -> None:
    draw = torch.Generator().manual_seed(0)
    module = Layer(2).eval()
    query = torch.randn(5, 4, queries, 8, generator=draw)
    keys, values = (
        tuple(torch.randn(rows, 2, columns, 8, generator=draw) for rows, columns in ((2, 30), (3, 11)))
        for _ in range(2)
    )
    mask = torch.rand(5, 1, queries, 30, generator=draw) < 0.7
    attend = ALL_ATTENTION_FUNCTIONS[NAME]
    together = attend(module, query, Segments(keys), Segments(values), mask, scaling=0.3)[0]
    long = attend(module, query[:2], keys[0], values[0], mask[:2], scaling=0.3)[0]
    short = attend(module, query[2:], keys[1], values[1], mask[2:, ..., :11], scaling=0.3)[0]
    assert torch.equal(together, torch.cat((long, short)))


@pytest.mark.parametrize("make", [lambda: tiny.causal("gemma2"), tiny.own_attention], ids=["gemma2", "xglm"])
def test_a_model_whose_attention_is_its_own_is_stepped_as_one_rectangle(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    was = model.config._attn_implementation
    assert not attend_in_segments(model)
    assert model.config._attn_implementation == was


def test_rows_of_every_length_are_read_in_one_pass_and_attend_in_segments() -> None:
    model = tiny.causal("qwen2")
    passes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    reader, lengths = Incremental(model), [30, 100, 150, 7]
    tokens = [torch.randint(3, tiny.VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    for row, sequence in enumerate(tokens):
        reader.extend([row], [sequence[:-5]])
    passes.clear()
    sizes = [5, 3, 4, 5]
    starts = [n - 5 for n in lengths]
    pieces = [all_[start : start + n] for all_, start, n in zip(tokens, starts, sizes, strict=True)]
    got = reader.extend(range(4), pieces)
    assert passes == [(4, 5)]
    assert reader.extend([], []) == []
    for sequence, start, size, out in zip(tokens, starts, sizes, got, strict=True):
        with torch.no_grad():
            want = model(input_ids=sequence[None]).logits[0, start : start + size]
        assert ((out - want).abs() / (1 + want.abs())).max() < 1e-5


@pytest.mark.parametrize("heads", [2, 4])
def test_the_kernel_for_rows_of_any_length_is_asked_for_what_rows_one_by_one_say(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(*given: Any, window_size: tuple[int, int], scale: float) -> Tensor:
        query, key, value, starts, ends, longest, most = given
        assert (window_size, scale, longest, most) == ((-1, 0), 0.3, 6, 6)
        assert starts is ends
        assert starts.dtype == torch.int32
        parts = []
        for first, last in pairwise(starts.tolist()):
            queries, keys, values = (each[first:last].transpose(0, 1) for each in (query, key, value))
            parts.append(scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=0.3).transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    generator, packed = torch.Generator().manual_seed(0), attention.Packed([4, 1, 6])
    query, key, value = (torch.randn(1, each, 11, 8, generator=generator) for each in (4, heads, heads))
    module = torch.nn.Module()
    setattr(module, "num_key_value_groups", 4 // heads)  # noqa: B010 - a number, where torch declares modules
    module.train(mode=False)
    with attention.rows_apart(packed):
        expected, _ = ALL_ATTENTION_FUNCTIONS[NAME](module, query, key, value, None, scaling=0.3)
    torch.testing.assert_close(attention._packed_attention(packed, query, key, value, 0.3), expected)
