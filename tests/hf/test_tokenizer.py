from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer as Words, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oppo.errors import ConfigError
from oppo.hf.tokenizer import HfTokenizer

VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}


def tokenizer(vocabulary: dict[str, int] | None = None, *, end: str | None = "</s>") -> HfTokenizer:
    words = Words(models.WordLevel(vocabulary or VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return HfTokenizer(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token=end))


def test_text_goes_to_tokens_and_back_without_special_tokens() -> None:
    assert tokenizer().encode("a b a") == [3, 4, 3]
    assert tokenizer().decode([3, 2, 4]) == "a b"


def test_a_response_ends_at_the_tokenizers_and_the_models_end_of_sequence() -> None:
    assert tokenizer().stop((), (4, 2)) == (2, 4)
    assert tokenizer(end=None).stop((), (4,)) == (4,)


def test_stops_may_be_ids_and_texts_of_one_token() -> None:
    assert tokenizer().stop(("b", 3), (2,)) == (4, 3)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (("a b",), "'a b' is 2 tokens of the policy's tokenizer, expected one"),
        ((5,), "5 is no token id; there are 5 tokens"),
    ],
)
def test_a_stop_that_is_no_token_is_refused(wanted: tuple[int | str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tokenizer().stop(wanted, ())


def test_a_stop_text_with_a_special_token_is_refused_because_decoded_text_has_none() -> None:
    told = tokenizer()
    assert told.stop_strings(("a b", "\n")) == ("a b", "\n")
    with pytest.raises(ConfigError, match=r"'b </s>' contains the special token '</s>'.* id 2, into sampling\.stop"):
        told.stop_strings(("a", "b </s>"))
    told.inner.add_tokens([AddedToken("<|turn|>", special=True), AddedToken("<|note|>", special=False)])
    assert told.decode([3, 5, 6]) == "a <|note|>"
    assert told.stop_strings(("<|note|>",)) == ("<|note|>",)
    with pytest.raises(ConfigError, match=r"special token '<\|turn\|>'.* id 5, into sampling\.stop"):
        told.stop_strings(("<|turn|>",))


def test_without_any_end_of_sequence_a_stop_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"has no end-of-sequence token: set sampling\.stop"):
        tokenizer(end=None).stop((), ())


def test_tokenizers_differ_where_a_token_has_another_number() -> None:
    assert tokenizer().differs(tokenizer()) is None
    assert tokenizer().differs(tokenizer({**VOCABULARY, "a": 4, "b": 3})) == "token 'a' is 3 here and 4 there"
    assert tokenizer().differs(tokenizer({**VOCABULARY, "c": 5})) == "it has 6 tokens instead of 5"
