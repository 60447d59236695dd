"""The imagined readers: what they like, and how noisily they say so."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
from hypothesis import given, settings, strategies as st

from oppo.demo import language
from oppo.demo.language import Review, fluency, sample_preferences, utility

WARM = Review(" The cake was superb. The staff were kind. I loved the tea.")


def test_warm_and_specific_reviews_are_preferred() -> None:
    cold = Review(" The cake was awful. The staff were rude. I regret the tea.")
    elsewhere = Review(" The helmet was superb. The staff were kind. I loved the saddle.")
    assert utility("coffee", WARM) > utility("coffee", elsewhere) > utility("coffee", cold)


def test_spoiling_a_review_costs_utility() -> None:
    words = WARM.words.split()
    shuffled = Review(" " + " ".join(reversed(words)))
    repeated = Review(WARM.words + " I loved the tea." * 4)
    unfinished = Review(WARM.words + " The", ended=False)
    for spoiled in (shuffled, repeated, unfinished, Review("")):
        assert utility("coffee", WARM) > utility("coffee", spoiled)


def test_length_explains_little_of_what_is_liked() -> None:
    rng = random.Random(0)
    asks = language.training_prompts(2000, 0)
    texts = [language.review(ask.topic, rng) for ask in asks]
    liked = [utility(ask.topic, Review(text)) for ask, text in zip(asks, texts, strict=True)]
    assert abs(np.corrcoef(liked, [len(text.split()) for text in texts])[0, 1]) < 0.25


def test_preferences_follow_utility_with_noise() -> None:
    pairs = sample_preferences(language.training_prompts(1500, 0), random.Random(0), texts=2)
    liked = [[utility(pair.ask.topic, text) for text in pair.texts] for pair in pairs]
    followed = [like[p.pairs[0][0]] > like[p.pairs[0][1]] for p, like in zip(pairs, liked, strict=True)]
    assert 0.9 < np.mean(followed) < 0.99


def test_every_two_texts_are_compared_once() -> None:
    (comparison,) = sample_preferences(language.held_out_prompts(1, 0), random.Random(0), texts=4)
    assert len(comparison.texts) == 4
    assert {frozenset(pair) for pair in comparison.pairs} == {frozenset(two) for two in combinations(range(4), 2)}


@given(st.sampled_from([topic.name for topic in language.TOPICS]), st.text(max_size=60), st.booleans())
@settings(deadline=None)
def test_every_text_has_a_finite_utility(topic: str, words: str, ended: bool) -> None:
    assert np.isfinite(utility(topic, Review(words, ended)))


def test_fluency_counts_the_clauses_of_complete_texts() -> None:
    assert fluency([WARM, Review(" Gibberish the of.", ended=False)]) == 1
    assert fluency([Review(" The cake was superb. Cake the was.")]) == 0.5
    assert fluency([]) == 0
