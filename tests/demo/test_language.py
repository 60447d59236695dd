"""The review language: what it promises to those who train on it."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings, strategies as st

from oppo.demo import language

TOPIC_NAMES = st.sampled_from([topic.name for topic in language.TOPICS])
SEEDS = st.integers(0, 2**32)


def _words(asks: list[language.Ask]) -> set[str]:
    return {word for ask in asks for word in (ask.adjective, ask.noun, ask.place)}


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_held_out_prompts_share_no_filling_with_training_prompts(seed: int) -> None:
    training, held_out = language.training_prompts(300, seed), language.held_out_prompts(300, seed)
    assert not _words(training) & _words(held_out)
    assert not {ask.text for ask in training} & {ask.text for ask in held_out}


def test_the_tables_of_fillings_are_disjoint() -> None:
    training = {
        *language.TRAINING.adjectives,
        *language.TRAINING.places,
        *(n for t in language.TOPICS for n in t.nouns),
    }
    held_out = {*language.HELD_OUT.adjectives, *language.HELD_OUT.places}
    held_out |= {n for t in language.TOPICS for n in t.held_out}
    assert not training & held_out


def test_no_thing_belongs_to_two_topics() -> None:
    things = [thing for topic in language.TOPICS for thing in topic.things]
    assert len(things) == len(set(things))


@given(SEEDS)
@settings(deadline=None)
def test_a_seed_names_its_prompts(seed: int) -> None:
    assert language.training_prompts(5, seed) == language.training_prompts(5, seed)
    assert language.held_out_prompts(5, seed) == language.held_out_prompts(5, seed)


@given(TOPIC_NAMES, SEEDS)
@settings(deadline=None)
def test_every_clause_of_a_review_can_be_read(topic: str, seed: int) -> None:
    text = language.review(topic, random.Random(seed))
    assert text.startswith(" ")
    assert text.endswith(".")
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


@given(st.text(max_size=40))
@settings(deadline=None)
def test_any_text_can_be_taken_apart(text: str) -> None:
    for clause in language.clauses(text):
        assert clause == clause.strip().lower()


def test_reviews_have_a_heavy_tail_of_lengths() -> None:
    rng = random.Random(1)
    asks = language.training_prompts(3000, 1)
    words = np.array([len(language.review(ask.topic, rng).replace(".", " .").split()) for ask in asks])
    assert 14 <= np.percentile(words, 50) <= 26
    assert np.percentile(words, 99) >= 6 * np.percentile(words, 50)


def test_reviews_are_no_more_kind_than_unkind() -> None:
    rng = random.Random(2)
    said = [
        meaning.sentiment
        for ask in language.training_prompts(1000, 2)
        for clause in language.clauses(language.review(ask.topic, rng))
        if (meaning := language.read(clause)) is not None
    ]
    assert abs(np.mean(said)) < 0.1
