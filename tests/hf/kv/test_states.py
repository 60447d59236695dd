"""Recurrent and convolution states: in ragged chunks, beside one another, they are those of one pass over each row."""

from __future__ import annotations

import copy
import random
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oppo.hf.devices import CPU
from oppo.hf.introspection import backbone
from oppo.hf.kv import attention
from oppo.hf.kv.attention import NAME, Segments, attend_in_segments, attends_eagerly, overhead_of, segmented
from oppo.hf.kv.reader import Incremental
from oppo.hf.kv.states import Gates, StateSlots
from oppo.hf.probe import probe
from tests.hf import tiny

EXACT = 1e-12
"""By how much, relative to 1 + |x|, numbers may differ in float64."""


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float64, also where transformers' code asks for float32: a recurrence in chunks has errors of 1e-4."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def model_of(name: str) -> PreTrainedModel:
    model = tiny.of(tiny.STATEFUL[name](), dtype=torch.float64)
    model.set_experts_implementation("eager")  # other kernels know no float64
    model.train(mode=False)
    return model


def sequences(count: int, length: int) -> Tensor:
    return torch.randint(3, tiny.VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def one_shot(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the logits [rows, n, V] of rows that were read alone."""
    return torch.cat([model(row[None], use_cache=False).logits for row in tokens])


def difference(got: Tensor, want: Tensor) -> float:
    return float(((got - want).abs() / (1 + want.abs())).max())


class Reading:
    """Random calls of a reader over a few rows; each output is compared with that of one pass."""

    def __init__(self, model: PreTrainedModel, seed: int, *, ordered: bool = False) -> None:
        self.tokens = sequences(4, 90)
        self.want = one_shot(model, self.tokens)
        self.reader = Incremental(model, classes=(16, 32), ordered=ordered)
        self.worst = 0.0
        self._dice = random.Random(seed)

    def go(self, calls: int) -> None:
        for _ in range(calls):
            self._dice.choice((self.extend, self.extend, self.step, self.step, self.step, self.lose))()

    def extend(self) -> None:
        sizes = {row: self._dice.choice((1, 2, 3, 7, 19)) for row in self._some()}
        self.read(sizes)

    def read(self, sizes: dict[int, int]) -> None:
        """Read so many tokens of rows, as far as there are some."""
        starts = {row: self.reader.length(row) for row in sizes}
        pieces = {row: self.tokens[row, start : start + sizes[row]] for row, start in starts.items()}
        pieces = {row: piece for row, piece in pieces.items() if len(piece)}
        outputs = self.reader.extend(list(pieces), list(pieces.values()))
        for (row, piece), output in zip(pieces.items(), outputs, strict=True):
            self._compare(output, self.want[row, starts[row] : starts[row] + len(piece)])

    def step(self) -> None:
        rows = [row for row in self._some() if self.reader.length(row) < self.tokens.shape[1]]
        room = [self.tokens.shape[1] - self.reader.length(row) for row in rows]
        for _ in range(min([self._dice.randint(1, 3), *room]) if rows else 0):
            at = [self.reader.length(row) for row in rows]
            self._compare(self.reader.step(rows, self.tokens[rows, at]), self.want[rows, at])

    def lose(self) -> None:
        """Forget a row, or take back some of its tokens."""
        row = self._some()[0]
        if self._dice.random() < 0.5:
            self.reader.forget([row])
        else:
            length = self.reader.length(row)
            assert self.reader.rewind(row, length) == length
            assert self.reader.rewind(row, length // 2) == 0

    def _some(self) -> list[int]:
        return self._dice.sample(range(len(self.tokens)), self._dice.randint(1, len(self.tokens)))

    def _compare(self, got: Tensor, want: Tensor) -> None:
        self.worst = max(self.worst, difference(got, want))


@pytest.mark.parametrize("name", tiny.STATEFUL)
def test_rows_that_come_go_and_grow_at_random_have_the_states_of_one_pass(name: str) -> None:
    model = model_of(name)
    for seed in range(2):
        reading = Reading(model, seed, ordered=seed == 1)
        reading.go(20)
        assert reading.worst < EXACT


@pytest.mark.deep
@pytest.mark.parametrize("name", tiny.STATEFUL)
def test_rows_that_come_go_and_grow_for_long_have_the_states_of_one_pass(name: str) -> None:
    model = model_of(name)
    for seed in range(3, 30):
        reading = Reading(model, seed, ordered=seed % 2 == 0)
        reading.go(60)
        assert reading.worst < EXACT


RAGGED = ({0: 7, 1: 19, 2: 1}, {2: 17, 0: 2, 1: 5})


@pytest.mark.parametrize("name", ["qwen3.5", "bamba", "kimi-linear"])
def test_padding_would_change_a_state_if_gates_were_not_neutral(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.hf.kv.states.NEUTRAL", 0.0)
    reading = Reading(model_of(name), 0)
    for sizes in RAGGED:
        reading.read(sizes)
    assert reading.worst > 1e4 * EXACT


@pytest.mark.parametrize("name", ["qwen3.5", "bamba", "lfm2"])
def test_padding_would_change_a_window_that_did_not_move(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateSlots, "pads", property(lambda _slots: None, lambda _slots, _pads: None), raising=False)
    reading = Reading(model_of(name), 0)
    for sizes in RAGGED:
        reading.read(sizes)
    assert reading.worst > 1e4 * EXACT


@pytest.mark.parametrize("name", ["qwen3.5", "bamba"])
def test_rows_of_unknown_gates_are_read_in_passes_without_padding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(gates: Gates, _model: PreTrainedModel) -> None:
        gates.layers = 0

    monkeypatch.setattr(Gates, "__init__", unknown)
    reading = Reading(model_of(name), 1)
    reading.go(25)
    assert reading.worst < EXACT


@pytest.mark.parametrize("name", tiny.STATEFUL)
def test_a_model_with_states_passes_the_probe(name: str) -> None:
    probe(model_of(name))


@pytest.mark.parametrize("name", ["qwen3-next", "granite-hybrid"])
def test_padding_that_changes_the_states_of_a_mixture_is_found_by_the_probe(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.fill_(-3.0)  # it remembers
    probe(model)
    monkeypatch.setattr("oppo.hf.kv.states.NEUTRAL", 3.0)
    assert re.search(r"padding before a chunk changes the states|read in pieces", tiny.why_whole(model))


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "kimi-linear"])
def test_readers_in_threads_share_a_model_whose_other_passes_are_as_they_were(name: str) -> None:
    model, tokens = model_of(name), sequences(4, 60)
    want, errors = one_shot(model, tokens), list[float]()

    def read(offset: int) -> None:
        for _ in range(6):
            reader = Incremental(model, classes=(16, 32))
            for start, size in ((0, 20), (20, 40)):
                ends = {row: start + size - (row + offset) % 3 for row in range(4)}
                pieces = [tokens[row, reader.length(row) : end] for row, end in ends.items()]
                begins = [reader.length(row) for row in range(4)]
                for row, output in enumerate(reader.extend(range(4), pieces)):
                    errors.append(difference(output, want[row, begins[row] : ends[row]]))

    def forward() -> None:
        for _ in range(12):
            errors.append(difference(one_shot(model, tokens), want))

    threads = [threading.Thread(target=work, args=given) for work, given in ((read, (0,)), (read, (1,)), (forward, ()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2 * 6 * 2 * 4 + 12
    assert max(errors) < EXACT


def test_a_pass_that_fails_loses_its_rows_and_no_state_is_half_advanced() -> None:
    model, tokens = model_of("qwen3.5"), sequences(2, 30)
    want, fails = one_shot(model, tokens), [False]

    def head(outputs: Tensor) -> Tensor:
        if fails[0]:
            raise RuntimeError("out of memory")
        return outputs

    reader = Incremental(model, head=head)
    fails[0] = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            reader.extend([0, 1], [tokens[0, :9], tokens[1, :4]])
    fails[0] = False
    reader.extend([0, 1], [tokens[0, :9], tokens[1, :4]])
    fails[0] = True
    with pytest.raises(RuntimeError, match="out of memory"):
        reader.step([0], tokens[0, 9:10])
    fails[0] = False
    assert (reader.length(0), reader.length(1)) == (0, 4)
    outputs = reader.extend([1, 0], [tokens[1, 4:30], tokens[0]])
    assert difference(outputs[0], want[1, 4:]) < EXACT
    assert difference(outputs[1], want[0]) < EXACT
    reader.clear()
    assert reader.memory()[1] == 0


def test_a_time_step_that_is_clamped_in_chunks_only_is_found_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gates, "neutral", lambda _gates, _real: nullcontext())
    assert "read in pieces" in tiny.why_whole(model_of("nemotron-h"))


@pytest.mark.parametrize("name", ["qwen3.5", "falcon-h1", "lfm2"])
def test_the_bits_of_a_row_that_is_read_alone_depend_on_no_other(name: str) -> None:
    model, tokens = model_of(name), sequences(3, 40)

    def read(reader: Incremental, others: Sequence[int]) -> Tensor:
        reader.extend([8, 9], [tokens[1, :11], tokens[2, :3]])
        first = reader.extend([0], [tokens[0, :17]])[0]
        reader.forget(others)
        return torch.cat([first, reader.extend([0], [tokens[0, 17:]])[0]])

    alone = Incremental(model)
    want = torch.cat([alone.extend([0], [piece])[0] for piece in tokens[0].split([17, 23])])
    for others in ((), (8,), (9, 8)):
        assert torch.equal(read(Incremental(model), others), want)


def test_the_memory_of_states_is_fixed_for_a_row_and_given_back() -> None:
    reader, tokens = Incremental(model_of("bamba")), sequences(9, 64)
    reader.extend([0], [tokens[0, :1]])
    one = reader.memory()[1]
    reader.extend([0], [tokens[0, 1:2]])
    two = reader.memory()[1]
    states = 2 * one - two
    assert states > two - one > 0, "a state of a row, and a token of its KV cache"
    reader.extend(list(range(1, 9)), list(tokens[1:]))
    assert reader.memory()[0] >= 9 * states
    reader.clear()
    allocated, needed = reader.memory()
    assert allocated < 9 * states
    assert needed == 0


@given(lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=60), overhead=st.integers(0, 5000))
def test_every_row_is_in_one_segment_and_segments_are_of_similar_length(lengths: list[int], overhead: int) -> None:
    found = segmented(lengths, overhead)
    assert sorted(at for segment in found for at in segment) == list(range(len(lengths)))
    assert all(segment == sorted(segment) for segment in found)
    held = [[lengths[at] for at in segment] for segment in found]
    assert all(min(longer) > max(shorter) for longer, shorter in pairwise(held))
    assert sum(max(rows) * len(rows) + overhead for rows in held) <= max(lengths) * len(lengths) + overhead


def test_rows_of_similar_length_are_one_segment() -> None:
    assert segmented([60, 70, 65, 80], overhead=60) == [[0, 1, 2, 3]]


def test_deferred_rows_are_segmented_from_fresh_ones_if_that_saves_more_than_it_costs() -> None:
    assert segmented([20, 300, 22, 290, 25, 20], overhead=1000) == [[1, 3], [0, 2, 4, 5]]
    assert segmented([20, 300, 22, 290, 25, 20], overhead=1200) == [[0, 1, 2, 3, 4, 5]]


def test_the_more_bytes_a_token_has_the_fewer_tokens_pay_for_another_segment() -> None:
    assert overhead_of(2 * attention.SEGMENT_BYTES, CPU) == 1
    assert overhead_of(attention.SEGMENT_BYTES / 100, CPU) == 100


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


def test_a_rows_place_among_segments_does_not_show() -> None:
    model = tiny.causal("llama")
    lengths = [30, 150, 31, 140, 12, 29]
    tokens = [torch.randint(3, tiny.VOCABULARY, (n + 1,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    reader = Incremental(backbone(model))
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 0, 2]):
        reader.clear()
        reader.extend(order, [tokens[row][:-1] for row in order], last=[1] * len(order))
        got = reader.step(order, torch.stack([tokens[row][-1] for row in order]))
        for row, out in zip(order, got, strict=True):
            with torch.no_grad():
                want = backbone(model)(tokens[row][None]).last_hidden_state[0, -1]
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
