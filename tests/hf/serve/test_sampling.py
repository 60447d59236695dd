"""The noise is keyed and Gumbel; the drawing follows temperature, top-k and top-p."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from oppo.hf.serve.sampling import AHEAD, Noise, draw, gumbel
from oppo.models import Sampling
from tests.hf.stories import allowed

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


@pytest.mark.parametrize("word", ["seed", "admission", "sample", "position"])
def test_each_word_of_the_key_changes_all_the_noise(word: str) -> None:
    key = dict.fromkeys(("seed", "admission", "sample", "position"), 5)
    one, other = (
        noise_of(k["seed"], torch.tensor([[k["admission"], k["sample"], k["position"]]]), 4096)[0].double()
        for k in (key, key | {word: 6})
    )
    assert not (one == other).any() or (one == other).sum() < 3
    assert abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 4 / 4096**0.5


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    noise = noise_at(torch.arange(256), vocabulary=4096).double()
    draws = noise.numel()
    assert abs(float(noise.mean()) - np.euler_gamma) < 5 * (np.pi / 6**0.5) / draws**0.5
    assert float(noise.var()) == pytest.approx(np.pi**2 / 6, rel=0.01)
    assert noise.max() > 12


@pytest.mark.parametrize("along", ["admission", "position", "vocabulary"])
def test_neighbouring_noise_is_independent(along: str) -> None:
    count = 512
    if along == "position":
        noise = noise_at(torch.zeros(count, dtype=torch.int64), position=torch.arange(count), vocabulary=count)
    else:
        noise = noise_at(torch.arange(count), vocabulary=count)
    rows = (noise if along != "vocabulary" else noise.T).double()
    for staleness in (1, 2, 16):
        pair = torch.stack((rows[staleness:].flatten(), rows[:-staleness].flatten()))
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / count


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tokens_follow_the_softmax_at_the_temperature(seed: int) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    draws = 100_000
    noise = noise_at(torch.arange(draws), seed=seed, vocabulary=64)
    for temperature in (0.7, 1.0, 1.5):
        seen = frequencies(logits, noise, Sampling(temperature=temperature))
        statistic = chi_square(seen, (logits / temperature).softmax(-1).double(), draws)
        assert statistic < 1.8  # 63 degrees of freedom: exceeded with a probability below 1e-4


def test_pairs_of_successive_tokens_are_independent() -> None:
    draws = 40_000
    positions = torch.arange(draws)
    noise = noise_at(torch.zeros(draws, dtype=torch.int64), position=positions, vocabulary=8)
    tokens = draw(torch.zeros(draws, 8), noise, Sampling()).tokens
    pairs = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64).double() / (draws - 1)
    assert chi_square(pairs, torch.full((64,), 1 / 64, dtype=torch.float64), draws) < 1.8


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
        assert draw(torch.zeros(6, 20), noise, sampling).read_back()[2].whole


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
    assert barred.whole
    assert tokens.tolist() == [1]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1)[:, 1])


def test_sampling_without_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="needs noise"):
        draw(torch.zeros(1, 3), None, Sampling())


def test_a_small_error_in_the_logits_changes_no_token() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 512, generator=generator)
    noise = noise_at(torch.arange(2000), vocabulary=512)
    wrong = logits + 1e-6 * torch.randn(2000, 512, generator=generator)
    assert torch.equal(draw(logits, noise, Sampling()).tokens, draw(wrong, noise, Sampling()).tokens)


CPU = torch.device("cpu")

SEED = 7


def wanted(rows: list[tuple[int, int]], positions: list[int], vocabulary: int) -> Tensor:
    admission, sample = torch.tensor(rows).unbind(1)
    return gumbel(SEED, admission, sample, torch.tensor(positions), vocabulary)


@pytest.mark.parametrize("vocabulary", [17, 640, 70_000])
def test_rows_that_draw_together_join_and_leave_get_the_noise_of_their_places_to_the_last_bit(vocabulary: int) -> None:
    dice, noise = random.Random(3), Noise(SEED)
    drawn = {(k, k % 2): dice.randrange(5) for k in range(6)}
    live = list(drawn)[:4]
    for step in range(2 * AHEAD):
        positions = [drawn[row] for row in live]
        assert torch.equal(noise(live, positions, vocabulary, CPU), wanted(live, positions, vocabulary))
        for row in live:
            drawn[row] += 1
        if step == 9:
            live = sorted([*live[1:], (4, 0), (5, 1)])
        if step % 6 == 5 and len(live) > 1:
            live.pop(dice.randrange(len(live)))


def test_another_vocabulary_is_not_given_what_was_made_for_the_first() -> None:
    noise = Noise(SEED)
    noise([(1, 0)], [0], 50, CPU)
    assert torch.equal(noise([(1, 0)], [1], 60, CPU), wanted([(1, 0)], [1], 60))


def test_a_row_that_goes_back_is_given_its_place_again() -> None:
    noise = Noise(SEED)
    for position in (3, 4, 3, 2, 40):
        assert torch.equal(noise([(1, 0)], [position], 50, CPU), wanted([(1, 0)], [position], 50))
