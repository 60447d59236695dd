"""The tokenizer of a reward model, with the length that the model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from oppo.hf.as_text.rendering import Rendered
from oppo.hf.tokenizer import HfTokenizer

OverLong: TypeAlias = Literal["error", "drop", "truncate"]
"""A rollout that is longer than the model reads ends the run, is dropped, or is cut as the tokenizer cuts."""


EMPTY: Final = "the reward model has nothing to read: the text has no token"
"""Reason of a drop for a rollout without text."""


class TooLong(Exception):  # noqa: N818 - it says what happened
    """A text has more tokens than the model reads."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The first tokens of a text that goes on.

    Attributes:
        ids: token ids.
        ends: where each ends in the text, in characters.
    """

    ids: Sequence[int]
    ends: Sequence[int]


class Reader:
    """Turns text into the tokens of one model.

    Args:
        tokenizer: the model's.
        limit: tokens that the model reads at most.
        over_long: with ``truncate``, longer texts are cut as the tokenizer cuts them: the longer segment of a pair, at
            its ``truncation_side``. Otherwise they are refused.
    """

    def __init__(self, tokenizer: HfTokenizer, limit: int, over_long: OverLong = "error") -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.over_long: OverLong = over_long

    @property
    def knows_offsets(self) -> bool:
        """Whether it says where in the text each token ends."""
        return bool(self.tokenizer.inner.is_fast)

    def features(self, rendered: Rendered) -> Mapping[str, list[int]]:
        """Return the model's inputs for a whole text, each one row.

        Raises:
            TooLong: it has more tokens than the model reads, and is not to be cut.
        """
        found = self.tokenizer.inner(
            rendered.text,
            rendered.pair,
            add_special_tokens=rendered.special,
            truncation=self.over_long == "truncate",
            max_length=self.limit if self.over_long == "truncate" else None,
            verbose=False,
        )
        features = {name: list(row) for name, row in found.items()}
        if (length := len(features["input_ids"])) > self.limit:
            raise TooLong(f"has {length} tokens as text, more than the {self.limit} that the reward model reads")
        return features

    def pieces(self, text: str, *, special: bool) -> Pieces:
        """Return the tokens of a text, without special tokens after it.

        Args:
            text: the beginning of one, or a part.
            special: add the special tokens before it.
        """
        found = self.tokenizer.inner(
            text,
            add_special_tokens=special,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        ids, offsets, added = found["input_ids"], found["offset_mapping"], found["special_tokens_mask"]
        count = len(ids)
        while count and added[count - 1]:
            count -= 1
        return Pieces(ids[:count], [end for _, end in offsets[:count]])
