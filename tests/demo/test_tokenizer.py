"""The tokenizer: real merges, lossless bytes, and special tokens that survive a save."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oppo.demo import language
from oppo.demo.models import END, PAD, train_tokenizer


def _corpus() -> list[str]:
    rng = random.Random(0)
    return [ask.text + language.review(ask.topic, rng) for ask in language.training_prompts(1000, 0)]


TOKENIZER: PreTrainedTokenizerFast = train_tokenizer(_corpus(), vocabulary=768, longest=512)


def test_the_vocabulary_is_as_large_as_asked() -> None:
    assert len(TOKENIZER) == 768


def test_ending_and_padding_are_different_tokens() -> None:
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == (END, PAD)
    assert TOKENIZER.eos_token_id != TOKENIZER.pad_token_id


@given(st.text(max_size=80))
@settings(deadline=None)
def test_every_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


@given(st.integers(0, 1000))
@settings(deadline=None)
def test_a_review_tokenised_after_its_prompt_is_the_whole_tokenised(seed: int) -> None:
    (ask,) = language.training_prompts(1, seed)
    text = language.review(ask.topic, random.Random(seed))
    assert TOKENIZER(ask.text)["input_ids"] + TOKENIZER(text)["input_ids"] == TOKENIZER(ask.text + text)["input_ids"]


def test_common_words_are_single_tokens() -> None:
    assert len(TOKENIZER(" The cake was really superb.")["input_ids"]) <= 9


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "Review of the old hotel in Lima: The bed was lovely."
    assert again(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert (again.eos_token_id, again.pad_token_id) == (TOKENIZER.eos_token_id, TOKENIZER.pad_token_id)


def test_a_vocabulary_without_merges_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 258"):
        train_tokenizer(["a"], vocabulary=258, longest=16)
