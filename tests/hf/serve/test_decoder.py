"""Prompts that are read a portion at a time while other rows decode."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from oppo.errors import ModelError, ProtocolError
from oppo.events import Prompt
from oppo.hf.serve.decoder import Decoder, DecodeRow, Signals
from oppo.hf.serve.noise import AHEAD, Noise
from oppo.hf.serve.policy import HfDecode, HfPolicy
from oppo.hf.serve.sampling import draw
from oppo.models import Sampling, Weights
from oppo.rollout_buffer import DecodeStep
from tests.hf import tiny
from tests.hf.stories import Serving, Story, allowed, gumbel, prompts, serving, told
from tests.kit.known import assert_close

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


def test_rows_of_one_portion_are_read_in_the_passes_that_cost_least() -> None:
    reader = decoder(portion=10_000)
    shapes = tiny.shapes_of(reader.reader._model)
    rows = [row(k, length, limit=1) for k, length in enumerate([200, 8, HUGE, 9])]
    Log(reader).run(rows)
    assert shapes == [(1, 200 + 8 + HUGE + 9)], "they all join at once, end to end, and each ends with its first token"
    for each in rows:
        alone = row(each.key, len(each.prompt.tokens), limit=1)
        Log(decoder()).run([alone])
        assert each.tokens == alone.tokens


def test_no_portion_is_larger_than_the_budget_padding_included() -> None:
    reader = decoder()
    shapes = tiny.shapes_of(reader.reader._model)
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


async def test_a_task_that_is_cancelled_while_it_decodes_leaves_the_policy_usable(serving: Serving) -> None:
    """As Ctrl-C does: it cancels a task, not a scope."""
    with serving(sampling=Sampling(max_new_tokens=120)) as policy:
        decodes = await policy.open(prompts(3))
        begun = anyio.Event()

        async def decode_for_ever() -> None:
            async with policy.decoding(decodes, lambda _: False):
                await decodes[0].read(3)
                begun.set()
                await anyio.sleep_forever()

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(decode_for_ever())
            await begun.wait()
            task.cancel()
        assert task.cancelled()
        steps = policy.counters.decode_steps
        await policy.load(Weights(1))
        assert policy.counters.decode_steps == steps
        async with policy.decoding(decodes, lambda _: False):
            assert (await decodes[0].read(120)).state == "length"


async def test_an_error_of_the_body_is_told_with_the_error_of_the_decode_loop(serving: Serving) -> None:
    def failing(finished: Sequence[int]) -> bool:
        raise LookupError(f"no place for {finished}")

    async def fail_too(policy: HfPolicy, decode: HfDecode) -> None:
        async with policy.decoding([decode], failing):
            with suppress(LookupError):
                while True:
                    await decode.read(5)
            raise KeyError("the channel is gone")

    with serving() as policy:
        (decode,) = await policy.open(prompts(1))
        with pytest.raises(LookupError, match="no place") as caught:
            await fail_too(policy, decode)
        assert caught.value.__notes__ == ["while decoding rollouts [0]", "and then KeyError: 'the channel is gone'"]


async def test_an_error_of_the_decode_loop_reaches_every_reader_and_the_context(serving: Serving) -> None:
    asked = prompts(3)
    caught: list[BaseException] = []

    def failing(finished: Sequence[int]) -> bool:
        raise LookupError(f"no place for {finished}")

    async def read(decode: HfDecode) -> None:
        try:
            while (await decode.read(5)).state == "live":
                pass
        except LookupError as error:
            caught.append(error)

    async def decode_all(policy: HfPolicy, decodes: Sequence[HfDecode]) -> None:
        async with policy.decoding(decodes, failing), anyio.create_task_group() as readers:
            for decode in decodes:
                readers.start_soon(read, decode)

    with serving() as policy:
        decodes = await policy.open(asked)
        with pytest.raises(LookupError, match="no place") as raised:
            await decode_all(policy, decodes)
        assert caught == [raised.value] * 3
        assert "while decoding rollouts [0, 1, 2]" in raised.value.__notes__
        assert (await policy.memory())[1] == 0
        with pytest.raises(ProtocolError, match="failed"):
            async with policy.decoding(decodes, failing):
                pass
        assert (await told(policy, asked)).states(), "the policy itself goes on"


async def test_closing_frees_the_memory_of_deferred_and_of_live_rollouts(serving: Serving) -> None:
    asked = prompts(6)
    with serving(sampling=Sampling(max_new_tokens=300, seed=3)) as policy:
        decodes = await policy.open(asked)
        async with policy.decoding(decodes, lambda _: False):
            await decodes[0].read(3)
            await decodes[1].aclose()
            await decodes[1].aclose()
            with pytest.raises(ProtocolError, match="closed"):
                await decodes[1].read(1)
            await decodes[0].read(20)
        deferred = (await policy.memory())[1]
        assert deferred > 0
        await decodes[0].aclose()
        assert 0 < (await policy.memory())[1] < deferred
        with pytest.raises(ProtocolError, match="closed"):
            async with policy.decoding(decodes, lambda _: False):
                pass
        for decode in decodes:
            await decode.aclose()
        assert (await policy.memory())[1] == 0


async def test_a_rollout_closed_after_the_cut_is_freed_with_the_context(serving: Serving) -> None:
    asked = prompts(3)
    with serving() as policy:
        decodes = await policy.open(asked)
        async with policy.decoding(decodes, lambda _: True):
            while any(decode.live for decode in decodes):
                await anyio.lowlevel.checkpoint()
            for decode in decodes:
                await decode.aclose()
        assert (await policy.memory())[1] == 0


async def test_one_reader_one_context_and_decodes_of_this_policy(serving: Serving) -> None:
    asked = prompts(2)
    with serving() as policy, serving() as other:
        decodes = await policy.open(asked)
        with pytest.raises(ProtocolError, match="foreign"):
            async with other.decoding(decodes, lambda _: False):
                pass
        assert (await decodes[0].read(4)).state == "cut", "outside of decoding a read does not wait"
        with pytest.raises(ValueError, match="at least 1 token"):
            await decodes[0].read(0)
        async with policy.decoding(decodes, lambda _: False):
            with pytest.raises(ProtocolError, match="decoding already"):
                async with policy.decoding(decodes, lambda _: False):
                    pass
        async with policy.decoding([], lambda _: False):
            pass


async def test_two_reads_at_once_are_refused(serving: Serving) -> None:
    with serving(sampling=Sampling(max_new_tokens=200)) as policy:
        (decode,) = await policy.open(prompts(1))
        async with policy.decoding([decode], lambda _: False), anyio.create_task_group() as readers:
            readers.start_soon(decode.read, 200)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            with pytest.raises(ProtocolError, match="one reader"):
                await decode.read(1)


async def test_reading_beyond_the_end_is_refused(serving: Serving) -> None:
    with serving() as policy:
        story = await told(policy, prompts(1))
        with pytest.raises(ProtocolError, match="last chunk of rollout 0"):
            await story.decodes[0].read(1)


WORDS = st.integers(min_value=0, max_value=2**40)


def noise_at(
    admission: Tensor, *, sample: int = 0, position: Tensor | None = None, seed: int = 0, vocabulary: int
) -> Tensor:
    zeros = torch.zeros_like(admission)
    return gumbel(seed, admission, zeros + sample, zeros if position is None else position, vocabulary)


def noise_of(seed: int, places: Tensor, vocabulary: int) -> Tensor:
    """The noise at ``places``, rows of admission, sample and position."""
    return gumbel(seed, places[:, 0], places[:, 1], places[:, 2], vocabulary)


def frequencies(logits: Tensor, noise: Tensor, sampling: Sampling) -> Tensor:
    tokens = draw(logits.expand(len(noise), -1), noise, sampling).tokens
    return torch.bincount(tokens, minlength=len(logits)).double() / len(noise)


def chi_square(observed: Tensor, expected: Tensor, draws: int) -> float:
    """Pearson's statistic over its degrees of freedom: 1 on average when ``expected`` is true."""
    return float(draws * ((observed - expected) ** 2 / expected).sum() / (len(expected) - 1))


@given(seed=st.integers(), admission=WORDS, sample=WORDS, position=WORDS, neighbours=st.integers(0, 5))
def test_noise_depends_on_its_place_only(
    seed: int, admission: int, sample: int, position: int, neighbours: int
) -> None:
    places = torch.tensor([[admission, sample, position], *([[7, 0, 9]] * neighbours)])
    alone = noise_of(seed, places[:1], 64)
    crowded = noise_of(seed, places.flip(0), 80)
    assert torch.equal(alone[0], crowded[-1, :64])
    assert alone.isfinite().all()


def noise_by_the_definition(seed: int, place: tuple[int, int, int], token: int) -> float:
    """The same with Python's integers, which neither overflow nor have a sign bit."""
    wide, narrow = 2**64 - 1, 2**32 - 1

    def splitmix64(state: int) -> int:
        word = (state + 0x9E3779B97F4A7C15) & wide
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & wide
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & wide
        return word ^ (word >> 31)

    key = seed & wide
    for value in place:
        key = splitmix64(key) ^ value
    key = splitmix64(key)
    word = (token * 0x9E3779B1 & narrow) ^ (key & narrow)
    word = ((word ^ (word >> 16)) * 0x7FEB352D + (key >> 32)) & narrow
    word = (word ^ (word >> 15)) * 0x846CA68B & narrow
    bits = (word ^ (word >> 16)) & 0x7FFFFFFF
    return -math.log(-math.log1p(-(bits + 0.5) / 2**31))


@given(seed=st.integers(), place=st.tuples(WORDS, WORDS, WORDS), token=st.integers(0, 500))
def test_noise_is_what_its_definition_says(seed: int, place: tuple[int, int, int], token: int) -> None:
    noise = noise_of(seed, torch.tensor([place]), 501)
    assert float(noise[0, token]) == pytest.approx(noise_by_the_definition(seed, place, token), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tokens_follow_the_softmax_at_the_temperature(seed: int) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    draws = 100_000
    noise = noise_at(torch.arange(draws), seed=seed, vocabulary=64)
    for temperature in (0.7, 1.0, 1.5):
        seen = frequencies(logits, noise, Sampling(temperature=temperature))
        statistic = chi_square(seen, (logits / temperature).softmax(-1).double(), draws)
        assert statistic < 1.8  # 63 degrees of freedom: exceeded with a probability below 1e-4


def test_top_k_and_top_p_keep_what_they_say() -> None:
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()[torch.tensor([3, 0, 4, 1, 2])]  # at ids 1, 3, 4, 0, 2
    noise = noise_at(torch.arange(20_000), vocabulary=5)

    def kept(sampling: Sampling) -> set[int]:
        return set(frequencies(logits, noise, sampling).nonzero().flatten().tolist())

    assert kept(Sampling(top_k=2)) == {1, 3}
    assert kept(Sampling(top_k=9)) == {0, 1, 2, 3, 4}
    assert kept(Sampling(top_p=0.35)) == {1}
    assert kept(Sampling(top_p=0.8)) == {1, 3, 4}
    assert kept(Sampling(top_p=1e-9)) == {1}
    assert kept(Sampling(top_k=3, top_p=0.75)) == {1, 3}  # of 0.4, 0.3, 0.15 renormalised
    assert kept(Sampling(temperature=0.25, top_p=0.9)) == {1, 3}


@pytest.mark.parametrize("peak", [0.0, 12.0])
def test_top_p_of_a_large_vocabulary_needs_no_sorted_vocabulary(peak: float) -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1))
    logits[:, 17] += peak
    noise = noise_at(torch.arange(4), vocabulary=3000)
    ranked, ids = logits.sort(-1, descending=True)
    mass = ranked.softmax(-1)
    ranked = ranked.masked_fill(mass.cumsum(-1) - mass >= 0.9, -torch.inf)
    expected = ids.gather(1, (ranked + noise.gather(1, ids)).argmax(-1, keepdim=True))[:, 0]
    assert torch.equal(draw(logits, noise, Sampling(top_p=0.9)).tokens, expected)


@given(temperature=st.floats(0.05, 5), top_k=st.integers(0, 20), top_p=st.floats(0.05, 1))
def test_log_probs_are_those_of_the_ids_that_were_kept(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, stop=(3, 99))
    noise = noise_at(torch.arange(6), vocabulary=20)
    for drawn in (draw(logits, noise, sampling), draw(logits, noise, sampling, range(0, 6, 2))):
        inside = allowed(drawn.read_back()[2], 6, 20)
        expected = (logits.double() / temperature).masked_fill(~inside, -torch.inf).log_softmax(-1)
        expected = expected.gather(1, drawn.tokens[:, None])[:, 0]
        torch.testing.assert_close(drawn.logprobs.double(), expected, atol=1e-5, rtol=1e-5)
        assert inside.sum(-1).max() <= (top_k or 20)


def test_where_nothing_is_left_out_no_support_is_kept() -> None:
    noise = noise_at(torch.arange(6), vocabulary=20)
    for sampling in (Sampling(), Sampling(top_k=20), Sampling(temperature=0.5, stop=(3,))):
        assert draw(torch.zeros(6, 20), noise, sampling).read_back()[2].empty


def test_of_a_response_that_may_not_end_yet_only_the_ends_are_listed() -> None:
    noise = noise_at(torch.arange(3), vocabulary=50_000)
    _, _, support = draw(torch.zeros(3, 50_000), noise, Sampling(stop=(7, 3, 7, 60_000)), [0, 2]).read_back()
    assert support.ids.tolist() == [3, 7, 3, 7]
    assert support.counts.tolist() == [-2, 0, -2]


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_p=0.9, temperature=0.3), Sampling(top_k=7)])
def test_a_log_prob_does_not_depend_on_the_other_rows_to_the_bit(sampling: Sampling) -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.01, 9, 40)[:, None]
    noise = noise_at(torch.arange(40), vocabulary=3000)
    tokens, logprobs, support = draw(logits, noise, sampling).read_back()
    alone = [draw(logits[n : n + 1], noise[n : n + 1], sampling).read_back() for n in range(40)]
    assert np.array_equal(tokens, np.concatenate([drawn for drawn, _, _ in alone]))
    assert np.array_equal(logprobs, np.concatenate([drawn for _, drawn, _ in alone]))
    assert np.array_equal(support.ids, np.concatenate([drawn.ids for _, _, drawn in alone]))


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=3), Sampling(top_k=3, top_p=0.9)])
def test_logits_that_are_no_numbers_have_a_log_prob_that_is_none(sampling: Sampling) -> None:
    logits = torch.zeros(2, 9)
    logits[1] = torch.nan
    logprobs = draw(logits, noise_at(torch.arange(2), vocabulary=9), sampling).logprobs
    assert logprobs.isfinite().tolist() == [True, False]


def test_greedy_takes_the_best_token_and_its_log_prob_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.bfloat16)
    tokens, logprobs, kept, barred = draw(logits, None, Sampling(temperature=0, top_k=1, top_p=0.1))
    assert kept is None
    assert barred.empty
    assert tokens.tolist() == [1]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1)[:, 1])


def test_sampling_without_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="needs noise"):
        draw(torch.zeros(1, 3), None, Sampling())


CPU = torch.device("cpu")
SEED = 7


def wanted(rows: list[tuple[int, int]], positions: list[int], vocabulary: int) -> Tensor:
    admission, sample = torch.tensor(rows).unbind(1)
    return gumbel(SEED, admission, sample, torch.tensor(positions), vocabulary)


@pytest.mark.parametrize("vocabulary", [17, 640, 70_000])
def test_rows_that_draw_together_join_and_leave_get_the_noise_of_their_places_to_the_last_bit(vocabulary: int) -> None:
    dice, noise = random.Random(3), Noise(SEED, CPU)
    drawn = {(k, k % 2): dice.randrange(5) for k in range(6)}
    live = list(drawn)[:4]
    for step in range(2 * AHEAD):
        positions = [drawn[row] for row in live]
        assert torch.equal(noise(live, positions, vocabulary), wanted(live, positions, vocabulary))
        for row in live:
            drawn[row] += 1
        if step == 9:
            live = sorted([*live[1:], (4, 0), (5, 1)])
        if step % 6 == 5 and len(live) > 1:
            live.pop(dice.randrange(len(live)))


def test_another_vocabulary_is_not_given_what_was_made_for_the_first() -> None:
    noise = Noise(SEED, CPU)
    noise([(1, 0)], [0], 50)
    assert torch.equal(noise([(1, 0)], [1], 60), wanted([(1, 0)], [1], 60))


def test_a_row_that_goes_back_is_given_its_place_again() -> None:
    noise = Noise(SEED, CPU)
    for position in (3, 4, 3, 2, 40):
        assert torch.equal(noise([(1, 0)], [position], 50), wanted([(1, 0)], [position], 50))
