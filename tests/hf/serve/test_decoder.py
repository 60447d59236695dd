"""Prompts that are read a portion at a time while other rows decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from oppo.errors import ModelError
from oppo.events import Prompt
from oppo.hf.serve.decoder import Decoder, DecodeRow, Signals
from oppo.models import Sampling
from oppo.rollout_buffer import DecodeStep
from tests.hf import tiny
from tests.hf.stories import Story, assert_close, prompts, serving, told

torch.set_num_threads(1)

PORTION = 32
HUGE = 300
SAMPLING = Sampling(max_new_tokens=12, seed=11)


def row(number: int, length: int, *, limit: int = 12) -> DecodeRow:
    tokens = np.random.default_rng(number).integers(6, tiny.VOCABULARY, length).astype(np.int32)
    return DecodeRow(number, Prompt(number, number, tokens), limit)


def decoder(*, portion: int = PORTION, deterministic: bool = False) -> Decoder:
    return Decoder(tiny.causal(), sampling=SAMPLING, deterministic=deterministic, prefill_tokens=portion)


@dataclass
class Log:
    """Which rollouts made a token in each decode step, and how much had been read by then."""

    decoder: Decoder
    steps: list[list[int]] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    cut_after: int = 1_000
    signals: Signals = field(default_factory=lambda: Signals.of(10))
    then: Callable[[], None] = lambda: None

    def deliver(self, made: DecodeStep) -> None:
        self.steps.append(list(made.keys))
        self.read.append(self.decoder.counters.prefilled)
        self.then()

    def run(self, rows: Sequence[DecodeRow]) -> None:
        self.decoder.run(rows, lambda ended: self.cut_after <= len(self.steps) + 1, self.signals, self.deliver)


def test_short_prompts_make_tokens_before_a_huge_one_among_them_is_read() -> None:
    rows = [row(0, 9), row(1, HUGE), row(2, 5), row(3, 7)]
    log = Log(decoder())
    log.run(rows)
    portions = -(-HUGE // PORTION)
    assert log.steps[:portions] == [[0, 2, 3]] * portions
    assert log.read[: portions + 1] == [21 + min(PORTION * k, HUGE) for k in range(portions + 1)]
    assert log.steps[portions] == [0, 1, 2, 3], "in admission order"
    assert log.steps[-1] == [1]
    together = [row(0, 9), row(1, HUGE), row(2, 5), row(3, 7)]
    Log(decoder(portion=10_000)).run(together)
    assert [r.tokens for r in rows] == [r.tokens for r in together]


def shapes_of(reader: Decoder) -> list[tuple[int, ...]]:
    """Return what will hold the rows and columns of each forward pass."""
    shapes: list[tuple[int, ...]] = []
    reader.reader._model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def test_rows_of_one_portion_are_read_in_the_passes_that_cost_least() -> None:
    reader = decoder(portion=10_000)
    shapes = shapes_of(reader)
    rows = [row(k, length, limit=1) for k, length in enumerate([200, 8, HUGE, 9])]
    Log(reader).run(rows)
    assert shapes == [(1, 200 + 8 + HUGE + 9)], "they all join at once, end to end, and each ends with its first token"
    for each in rows:
        alone = row(each.key, len(each.prompt.tokens), limit=1)
        Log(decoder()).run([alone])
        assert each.tokens == alone.tokens


def test_no_portion_is_larger_than_the_budget_padding_included() -> None:
    reader = decoder()
    shapes = shapes_of(reader)
    Log(reader).run([row(k, length) for k, length in enumerate([3, 70, 31, 1, 12, 32, 12, 33])])
    assert max(count * width for count, width in shapes) == PORTION
    assert reader.counters.prefilled == 194


def test_a_deferred_row_decodes_while_a_huge_prompt_is_read() -> None:
    first, late = row(0, 9, limit=40), row(1, HUGE)
    log = Log(decoder())
    log.then = log.signals.stop
    log.run([first])
    assert len(first.tokens) == 1
    log.signals, log.then = Signals.of(10), lambda: None
    log.run([late, first])
    assert log.steps[1:11] == [[0]] * 9 + [[0, 1]]
    alone = row(0, 9, limit=40)
    Log(decoder()).run([alone])
    assert first.tokens == alone.tokens


@pytest.mark.parametrize("cut", [True, False])
def test_what_was_read_before_a_cut_or_a_stop_is_not_read_again(cut: bool) -> None:
    rows = [row(0, 9, limit=3), row(1, HUGE)]
    log = Log(decoder())
    if cut:
        log.cut_after = 3
    else:
        log.then = lambda: log.signals.stop() if len(log.steps) == 3 else None
    log.run(rows)
    assert log.steps == [[0], [0], [0]]
    assert (len(rows[0].tokens), len(rows[1].tokens)) == (3, 0)
    assert log.decoder.reader.length(1) == 2 * PORTION
    log.signals, log.then, log.cut_after = Signals.of(10), lambda: None, 1_000
    log.run(rows[1:])
    assert log.decoder.counters.prefilled == 9 + HUGE
    alone = row(1, HUGE)
    Log(decoder()).run([alone])
    assert rows[1].tokens == alone.tokens


def test_a_row_closed_while_it_is_read_is_read_no_further_and_frees_its_memory() -> None:
    rows = [row(0, 9), row(1, HUGE)]

    def close() -> None:
        if len(log.steps) >= 4:
            log.signals.close(1)

    log = Log(decoder(), then=close)
    log.run(rows)
    assert log.decoder.counters.prefilled == 9 + 3 * PORTION
    assert log.steps == [[0]] * 12
    assert log.decoder.reader.memory() == (0, 0)


def test_an_error_frees_what_was_read_and_what_was_half_read() -> None:
    reader = decoder()
    log = Log(reader)

    def break_down() -> None:
        if len(log.steps) == 2:
            with torch.no_grad():
                next(reader.reader._model.get_input_embeddings().parameters())[:] = torch.nan

    log.then = break_down
    with pytest.raises(ModelError, match=r"not finite for rollouts \[0\]"):
        log.run([row(0, 9), row(1, HUGE)])
    assert reader.reader.memory() == (0, 0)


def test_exact_rows_enter_together_and_stopped_ones_are_forgotten() -> None:
    log = Log(decoder(deterministic=True))
    log.run([row(0, 9), row(1, HUGE), row(2, 5)])
    assert log.steps == [[0, 1, 2]] * 12
    log.signals.stop()
    log.run([row(0, 9), row(1, HUGE)])
    assert log.steps == [[0, 1, 2]] * 12
    assert log.decoder.reader.memory() == (0, 0)


def test_the_order_of_reading_depends_on_the_rows_alone() -> None:
    logs = [Log(decoder()) for _ in range(2)]
    for log in logs:
        log.run([row(k, length) for k, length in enumerate([40, 3, 200, 17, 64, 64, 1])])
    assert logs[0].steps == logs[1].steps
    assert logs[0].read == logs[1].read


async def test_the_story_of_each_rollout_is_the_same_whatever_the_portion() -> None:
    asked = prompts(12, longest=90)
    with serving() as policy:
        whole = await told(policy, asked)
    for portion in (1, 16, 100):
        with serving(portion=portion) as policy:
            story = Story(await policy.open(asked), cut_after=4)
            await story.step(policy)
            story.cut_after = 1_000_000
            await story.step(policy)
            assert policy.counters.prefilled == sum(len(prompt.tokens) for prompt in asked)
        assert story.tokens() == whole.tokens()
        assert_close([x for one in story.logprobs() for x in one], [x for one in whole.logprobs() for x in one])
        assert story.states() == whole.states()
