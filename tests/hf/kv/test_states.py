"""Recurrent and convolution states: in ragged chunks, beside one another, they are those of one pass over each row."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.hf.kv.reader import Incremental
from oppo.hf.kv.states import Gates, StateSlots
from oppo.hf.servable import probe
from tests.hf import tiny
from tests.kit.known import deep

EXACT = 1e-12  # by how much, relative to 1 + |x|, numbers may differ in float64


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


@pytest.mark.parametrize(("seeds", "calls"), [(range(2), 20), *deep((range(3, 30), 60))])
@pytest.mark.parametrize("name", tiny.STATEFUL)
def test_rows_that_come_go_and_grow_at_random_have_the_states_of_one_pass(name: str, seeds: range, calls: int) -> None:
    model = model_of(name)
    for seed in seeds:
        reading = Reading(model, seed, ordered=seed % 2 == 1)
        reading.go(calls)
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
