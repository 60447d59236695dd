"""The review language, its readers and its tokenizer: what the demo's models are taught."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oppo.demo import language
from oppo.demo.assets import END, PAD, train_tokenizer
from oppo.demo.language import Review, sample_preferences, utility

TOPIC_NAMES = st.sampled_from([topic.name for topic in language.TOPICS])
SEEDS = st.integers(0, 2**32)
WARM = Review(" The cake was superb. The staff were kind. I loved the tea.")


def corpus() -> list[str]:
    rng = random.Random(0)
    return [ask.text + language.review(ask.topic, rng) for ask in language.training_prompts(1000, 0)]


TOKENIZER: PreTrainedTokenizerFast = train_tokenizer(corpus(), vocabulary=768, longest=512)


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_held_out_prompts_share_no_filling_with_training_prompts(seed: int) -> None:
    training, held_out = language.training_prompts(300, seed), language.held_out_prompts(300, seed)
    words = [{word for ask in asks for word in (ask.adjective, ask.noun, ask.place)} for asks in (training, held_out)]
    assert not words[0] & words[1]
    assert training == language.training_prompts(300, seed)


@given(TOPIC_NAMES, SEEDS)
@settings(deadline=None)
def test_every_clause_of_a_review_can_be_read(topic: str, seed: int) -> None:
    text = language.review(topic, random.Random(seed))
    assert (text[0], text[-1]) == (" ", ".")
    clauses = language.clauses(text)
    assert clauses
    assert all(language.read(clause) is not None for clause in clauses)


def test_reading_tells_sentiment_and_thing() -> None:
    text = " The cake was really superb, but the staff were rude. We came on a Monday."
    assert [language.read(clause) for clause in language.clauses(text)] == [
        language.Clause(1, "cake"),
        language.Clause(-1),
        language.Clause(0),
    ]


def test_reviews_have_a_heavy_tail_of_lengths() -> None:
    rng = random.Random(1)
    words = [len(language.review(ask.topic, rng).split()) for ask in language.training_prompts(3000, 1)]
    assert np.percentile(words, 99) >= 6 * np.percentile(words, 50)


def test_warm_specific_and_whole_reviews_are_preferred() -> None:
    cold = Review(" The cake was awful. The staff were rude. I regret the tea.")
    elsewhere = Review(" The helmet was superb. The staff were kind. I loved the saddle.")
    assert utility("coffee", WARM) > utility("coffee", elsewhere) > utility("coffee", cold)
    shuffled = Review(" " + " ".join(reversed(WARM.words.split())))
    repeated, unfinished = Review(WARM.words + " I loved the tea." * 4), Review(WARM.words + " The", ended=False)
    for spoiled in (shuffled, repeated, unfinished, Review("")):
        assert utility("coffee", WARM) > utility("coffee", spoiled)


def test_preferences_follow_utility_with_noise() -> None:
    pairs = sample_preferences(language.training_prompts(1500, 0), random.Random(0), texts=2)
    liked = [[utility(pair.ask.topic, text) for text in pair.texts] for pair in pairs]
    followed = [like[p.pairs[0][0]] > like[p.pairs[0][1]] for p, like in zip(pairs, liked, strict=True)]
    assert 0.9 < np.mean(followed) < 0.99


@given(st.text(max_size=80))
@settings(deadline=None)
def test_every_text_comes_back_from_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_a_tokenizer_is_as_large_as_asked_and_saved_as_it_is(tmp_path: Path) -> None:
    assert (len(TOKENIZER), TOKENIZER.eos_token, TOKENIZER.pad_token) == (768, END, PAD)
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "Review of the old hotel in Lima: The bed was lovely."
    assert again(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert (again.eos_token_id, again.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)
    with pytest.raises(ValueError, match="more than 258"):
        train_tokenizer(["a"], vocabulary=258, longest=16)
