"""The tokenizer of the review language: byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END: Final = "<|end|>"
"""Ends a response; also the beginning-of-sequence token, as in GPT-2."""
PAD: Final = "<|pad|>"


def train_tokenizer(corpus: Iterable[str], *, vocabulary: int, longest: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of at most ``vocabulary`` tokens that gives back every text it is given, byte for byte.

    Args:
        corpus: texts to learn merges from.
        vocabulary: tokens, the 256 bytes and two special ones included.
        longest: the positions of its models.

    Raises:
        ValueError: ``vocabulary`` leaves no room for a merge.
    """
    if vocabulary <= 258:
        raise ValueError(f"a byte-level vocabulary needs more than 258 tokens, not {vocabulary}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
